"""Resolve a plan's few decisions to a layout for every node, value and parameter.

Mesh axes are solved in mesh order, each given the layouts on earlier ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwise.errors import PlanError, RuleError
from shardwise.ir import Graph
from shardwise.layouts.beam import assign, shard_tables
from shardwise.layouts.microbatch_axis import MicrobatchAssignment
from shardwise.layouts.problem import Assignment, Task
from shardwise.plans.plan import Plan
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Layout, Placement, Shard, parse_placement
from shardwise.shares import AxisSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A graph with everything decided: one assignment per mesh axis."""

    graph: Graph
    plan: Plan
    facts: Facts
    assignments: tuple[Assignment, ...]
    timed: MicrobatchAssignment | None = None  # if the first assignment is that of micro-batches

    def is_time(self, axis: str) -> bool:
        """Return whether a mesh axis stands for micro-batches."""
        return self.plan.roles[axis] == "time"

    def parameter_layout(self, value: str) -> Layout:
        """Return the layout of a stored parameter, without the flat sharding of ZeRO."""
        return Layout(tuple((a.axis, a.parameters[value]) for a in self.assignments))

    def operand_layouts(self, node: str) -> tuple[Layout, ...]:
        """Return the layout in which a node needs each operand."""
        return tuple(
            Layout(tuple((a.axis, a.nodes[node].operands[i]) for a in self.assignments))
            for i in range(len(self.facts.rules[node].operands))
        )

    def result_layouts(self, node: str) -> tuple[Layout, ...]:
        """Return the layout of each result of a node."""
        return tuple(
            Layout(tuple((a.axis, a.nodes[node].results[i]) for a in self.assignments))
            for i in range(len(self.facts.rules[node].results))
        )


def resolve(graph: Graph, plan: Plan, facts: Facts | None = None) -> Resolved:
    """Solve every mesh axis of the plan."""
    plan.check(graph)
    return resolve_part(graph, plan, facts or analyze(graph))


def resolve_part(
    graph: Graph, plan: Plan, facts: Facts, timed: MicrobatchAssignment | None = None
) -> Resolved:
    """Solve every mesh axis for a part of a graph, given the solved axis of micro-batches."""
    solved: tuple[Assignment, ...] = (timed.assignment,) if timed is not None else ()
    for axis, ranks in plan.mesh.axes:
        if plan.roles[axis] != "time":
            task = axis_task(graph, plan, axis, ranks)
            solved = (*solved, assign(graph, facts, task, solved))
    solved = shard_tables(graph, facts, solved, plan.choices(graph))
    return Resolved(graph=graph, plan=plan, facts=facts, assignments=solved, timed=timed)


def axis_task(graph: Graph, plan: Plan, axis: str, ranks: AxisSize) -> Task:
    """Return the layout problem of one mesh axis."""
    role = plan.roles[axis]
    shards_parameters = role == "parameters"
    inputs = None if shards_parameters else input_shards(graph, plan, role)
    return Task(
        axis=axis,
        ranks=ranks,
        parameters=fixed_parameters(graph, plan, axis),
        shard_parameters=shards_parameters,
        inputs=inputs,
        begins_inside=role == "sequence" and not inputs,
        choices={n: c[axis] for n, c in plan.choices(graph).items() if axis in c},
        beam=96 if shards_parameters else 48,
    )


def fixed_parameters(graph: Graph, plan: Plan, axis: str) -> dict[str, Placement]:
    """Return the placements of parameters that the plan fixes on this axis."""
    fixed: dict[str, Placement] = {}
    for parameter in graph.parameters:
        placement = plan.entry(parameter.name).layout.get(axis)
        if placement is None:
            continue
        shape = graph.values[parameter.value].shape
        try:
            fixed[parameter.value] = parse_placement(placement, shape)
        except RuleError as error:
            raise PlanError(
                f"parameter {parameter.name}: {error.message}", where=error.where, hint=error.hint
            ) from None
    return fixed


def input_shards(graph: Graph, plan: Plan, role: str = "batch") -> Mapping[str, Placement] | None:
    """Return the placements of inputs on batch or sequence axes, or None if inputs are free.

    Inputs that sequence axes do not shard are replicated on them.
    """
    dims = plan.sequence if role == "sequence" else plan.inputs
    if not dims and role == "batch":
        return None
    shards: dict[str, Placement] = {}
    for source in graph.inputs:
        shape = graph.values[source.value].shape
        for glob, dim in dims.items():
            is_valid = dim is not None and -len(shape) <= dim < len(shape)
            if dim is not None and is_valid and fnmatchcase(source.name, glob):
                shards[source.value] = Shard(dim % len(shape), ((1, shape[dim], 1),))
    return shards
