"""Resolve a plan's few decisions to a layout for every node, value and parameter.

Mesh axes are solved in mesh order, each given the layouts on earlier ones.
"""

from __future__ import annotations

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
from shardwise.sharding.placements import (
    Layout,
    Placement,
    Shard,
    parse_placement,
)
from shardwise.shares import AxisSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A graph with everything decided: one assignment per mesh axis."""

    graph: Graph
    plan: Plan
    facts: Facts
    assignments: tuple[Assignment, ...]
    timed: MicrobatchAssignment | None = (
        None  # of the first assignment, where that is of micro-batches
    )

    def is_time(self, axis: str) -> bool:
        """Return whether the mesh axis is that of micro-batches."""
        return self.plan.roles[axis] == "time"

    def parameter_layout(self, value: str) -> Layout:
        """Return the layout of a stored parameter, without the flat sharding of ZeRO."""
        return Layout(tuple((a.axis, a.parameters[value]) for a in self.assignments))

    def operand_layouts(self, node: str) -> tuple[Layout, ...]:
        """Return the layout in which a node needs each operand."""
        rows = [a.nodes[node].operands for a in self.assignments]
        count = len(self.facts.rules[node].operands)
        return tuple(
            Layout(tuple((a.axis, row[i]) for a, row in zip(self.assignments, rows, strict=True)))
            for i in range(count)
        )

    def result_layouts(self, node: str) -> tuple[Layout, ...]:
        """Return the layout of each result of a node."""
        rows = [a.nodes[node].results for a in self.assignments]
        count = len(self.facts.rules[node].results)
        return tuple(
            Layout(tuple((a.axis, row[i]) for a, row in zip(self.assignments, rows, strict=True)))
            for i in range(count)
        )


def resolve(graph: Graph, plan: Plan, facts: Facts | None = None) -> Resolved:
    """Solve every mesh axis of the plan."""
    plan.check(graph)
    return resolve_part(graph, plan, facts or analyze(graph))


def resolve_part(
    graph: Graph, plan: Plan, facts: Facts, timed: MicrobatchAssignment | None = None
) -> Resolved:
    """Solve every mesh axis for a part of a graph, whose axis of micro-batches is solved."""
    done: tuple[Assignment, ...] = (timed.assignment,) if timed is not None else ()
    for axis, ranks in plan.mesh.axes:
        if plan.roles[axis] != "time":
            task = axis_task(graph, plan, axis, ranks)
            done = (*done, assign(graph, facts, task, done))
    done = shard_tables(graph, facts, done, plan.choices(graph))
    return Resolved(graph=graph, plan=plan, facts=facts, assignments=done, timed=timed)


def axis_task(graph: Graph, plan: Plan, axis: str, ranks: AxisSize) -> Task:
    """Return the layout problem of one mesh axis."""
    batch = plan.roles[axis] == "batch"
    return Task(
        axis=axis,
        ranks=ranks,
        parameters=fixed_parameters(graph, plan, axis),
        shard_parameters=not batch,
        inputs=input_cuts(graph, plan) if batch else None,
        choices={n: c[axis] for n, c in plan.choices(graph).items() if axis in c},
        beam=48 if batch else 96,
    )


def fixed_parameters(graph: Graph, plan: Plan, axis: str) -> dict[str, Placement]:
    """Return the placements of parameters that the plan fixes on this axis."""
    fixed: dict[str, Placement] = {}
    for parameter in graph.parameters:
        cut = plan.entry(parameter.name).layout.get(axis)
        if cut is None:
            continue
        shape = graph.values[parameter.value].shape
        try:
            fixed[parameter.value] = parse_placement(cut, shape)
        except RuleError as error:
            raise PlanError(
                f"parameter {parameter.name}: {error.message}", where=error.where, hint=error.hint
            ) from None
    return fixed


def input_cuts(graph: Graph, plan: Plan) -> Mapping[str, Placement] | None:
    """Return how batch axes shard each input; None if the plan leaves inputs free."""
    if not plan.inputs:
        return None
    cuts: dict[str, Placement] = {}
    for source in graph.inputs:
        shape = graph.values[source.value].shape
        for glob, dim in plan.inputs.items():
            if (
                fnmatchcase(source.name, glob)
                and dim is not None
                and -len(shape) <= dim < len(shape)
            ):
                cuts[source.value] = Shard(dim % len(shape), ((1, shape[dim], 1),))
    return cuts
