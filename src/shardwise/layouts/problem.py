"""x"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, Node
from shardwise.layouts.moves import work
from shardwise.sharding.candidates import Candidate, Pass, Same, ShardAxis, candidates, match_choice
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    REPLICATE,
    Placement,
    Replicate,
    Shard,
    compatible,
    format_placement,
)
from shardwise.shares import grain


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked of one mesh axis.

    `parameters` fixes placements by value name; others are whole, or chosen when `split` is set.
    `inputs` fixes which cut of an input may be taken; None leaves all inputs free. `choices` forces
    nodes to a candidate, by its text. `weight` is the cost of holding one element of a parameter.
    """

    axis: str
    ranks: int
    parameters: Mapping[str, Placement] = field(default_factory=dict)
    split: bool = False
    inputs: Mapping[str, Placement] | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1e4
    beam: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The choice of every node and the storage of every parameter on one mesh axis."""

    axis: str
    ranks: int
    nodes: Mapping[str, Candidate]
    parameters: Mapping[str, Placement]
    cost: float


Placements = tuple[Placement, ...]  # of one value: one per mesh axis, in mesh order
Choices = dict[str, dict[str, str]]  # node or parameter name -> mesh axis -> text of a plan

AXIS_ROLES = ("batch", "parameters", "sequence")


class Prices(Protocol):
    """Costs in seconds of one step on one rank; a whole value counts once, `copies` multiply.

    `held` and `needed` are placements in mesh order. `move` is asked for one move of
    `program.moves.plan_moves` at a time, so that moves which several uses share are paid once; it
    is asked once for all values of a type.
    """

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Forward and backward of a node on its local shapes, one candidate per mesh axis."""

    def move(self, value: str, held: Placements, needed: Placements, grad: bool) -> float:
        """Forward communication, with `grad` that of backward too; inf where it is impossible."""

    def hold(self, parameter: str, stored: Placements) -> float:
        """Return what storing a parameter so costs per step: gradient synchronization, optimizer.

        On an axis with R~ every rank has a term of the gradient; with R all have the same one.
        """

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        """Memory of a parameter stored so, with its gradient and optimizer state."""

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Memory of what a node keeps for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAxis:
    """A mesh axis and what it is for.

    - "batch": parameters are whole; inputs may be cut as `inputs` says, and other values only as
      follows from that.
    - "sequence": the same, where `inputs` cut along the sequence.
    - "parameters": anything may be cut.

    `inputs` maps a value to the one cut that may be taken of it; None leaves all inputs free.
    """

    name: str
    ranks: int
    role: str = "parameters"
    inputs: Mapping[str, Placement] | None = None

    def __post_init__(self) -> None:
        if self.role not in AXIS_ROLES:
            raise PlanError(
                f"role {self.role!r} of axis {self.name!r}{did_you_mean(self.role, AXIS_ROLES)}",
                hint=" or ".join(AXIS_ROLES),
            )

    @property
    def follows_inputs(self) -> bool:
        """Whether cuts begin at inputs only."""
        return self.role != "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTask:
    """A joint problem over all mesh axes.

    `parameters` fixes placements by value name and mesh axis, `nodes` choices (their text) by node
    name and mesh axis. `copies` says how many layers a node or a parameter of a folded graph stands
    for: its costs count so often; `moves` how often what moves a value counts, where that is not
    as its producer does. `alike` maps a node to an earlier one with which it must agree on every
    axis; the parameters that they use in the same place are stored alike. Memory counts as
    `memory_weight` seconds per byte; `memory_limit_bytes` bounds it.

    A parameter is stored as its use needs it, or as one of its several uses does. With
    `move_parameters` it may be stored otherwise and moved in every step.
    """

    axes: tuple[LayoutAxis, ...]
    parameters: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    memory_weight: float = 0.0
    memory_limit_bytes: float | None = None
    move_parameters: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.ranks for axis in self.axes}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSolution:
    """The cheapest layouts found, with the bound that says how far they may be from the best.

    `cost_s` counts time and weighted memory; `seconds` is how long the search took. `restricted`
    says what was left out of the problem that was solved; then the bound holds for that alone.
    """

    graph: Graph = field(repr=False, compare=False)
    assignments: tuple[Assignment, ...]
    cost_s: float
    bound_s: float
    memory_bytes: float
    num_variables: int
    restricted: str = ""
    seconds: float = field(compare=False)

    @property
    def gap(self) -> float:
        """How much cheaper, as a part of the cost, another solution could be at most."""
        if self.cost_s <= self.bound_s:
            return 0.0
        return (self.cost_s - self.bound_s) / max(abs(self.cost_s), 1e-30)

    def as_choices(self) -> tuple[Choices, Choices]:
        """Entries for `Plan.nodes` and for the layouts of `Plan.parameters`.

        A plan with these resolves to the same assignments: every node and parameter is named.
        """
        nodes: Choices = {
            node.name: {a.axis: str(a.nodes[node.name].choice) for a in self.assignments}
            for node in self.graph.nodes
        }
        parameters: Choices = {}
        for parameter in self.graph.parameters:
            parameters[parameter.name] = {
                a.axis: format_placement(a.parameters.get(parameter.value, REPLICATE))
                for a in self.assignments
            }
        return nodes, parameters


# Through these a partial sum of a parameter split may pass: residuals, casts, renamed positions.
DELAYED = {
    "_to_copy", "add", "alias", "clone", "contiguous", "div", "dropout", "flatten", "mean",
    "permute", "reshape", "squeeze", "sub", "sum", "to", "transpose", "unflatten", "unsqueeze",
    "view",
}  # fmt: skip


class Allowed:
    """The candidates that may be used on one mesh axis."""

    def __init__(
        self, graph: Graph, facts: Facts, task: Task, earlier: tuple[Assignment, ...]
    ) -> None:
        self.facts, self.task, self.earlier = facts, task, earlier
        self.parameters = {p.value for p in graph.parameters}
        self.tables = constant_values(graph)
        self.varying = sharded_values(graph, task)
        self.products = products(graph, facts)

    def options(self, node: Node) -> tuple[Candidate, ...]:
        """Return the node's candidates that the task and earlier mesh axes allow."""
        rule = self.facts.rules[node.name]
        found = candidates(rule, self.facts.structures[node.name])
        allowed = tuple(c for c in found if self._fits(node, c) and self._holds(node, c))
        forced = self.task.choices.get(node.name)
        if forced is None:
            return allowed
        chosen = tuple(c for c in match_choice(rule, found, forced) if self._fits(node, c))
        if not chosen:
            known = ", ".join(f"'{c.choice}'" for c in found)
            raise PlanError(
                f"node {node.name} ({node.op}) cannot '{forced}' on mesh axis {self.task.axis}",
                where=node.origin,
                hint=f"one of {known}",
            )
        return chosen

    def _fits(self, node: Node, candidate: Candidate) -> bool:
        """Return whether the cuts of earlier mesh axes leave room for this one."""
        return leaves_room(node, candidate, self.task.ranks, self.facts, self.earlier)

    def _holds(self, node: Node, candidate: Candidate) -> bool:
        """Return whether a cut is of the kind this axis is for.

        In a parameter split, a node with parameters cuts one of them or does the same work. Where
        the batch is cut, a node that depends on it takes an operand that does in parts, or as a
        partial sum. Tables made of nothing (positions) are not where a cut begins.
        """
        operands = tuple(zip(node.inputs, candidate.operands, strict=True))
        if isinstance(candidate.choice, ShardAxis) and not node.inputs:
            return False
        if not self.task.split and not isinstance(candidate.choice, Same):
            mine = [placement for name, placement in operands if name in self.varying]
            return not mine or any(not isinstance(p, Replicate) for p in mine)
        if isinstance(candidate.choice, Pass):
            return node.op.split(".")[1] in DELAYED
        if not isinstance(candidate.choice, ShardAxis):
            return True
        if self._splinters(node, candidate.choice):
            return False
        mine = [placement for name, placement in operands if name in self.parameters]
        return not mine or any(isinstance(p, Shard) for p in mine)

    def _splinters(self, node: Node, choice: ShardAxis) -> bool:
        """Whether the innermost factor is cut (inside a head) although an outer one would do."""
        structure = self.facts.structures[node.name][choice.axis]
        if len(structure) != 1 or len(structure[0]) < 2 or choice.pattern[0][2] != 1:
            return False
        return any(size >= self.task.ranks for size in structure[0][:-1])

    def may_begin(self, node: Node, name: str, held: Placement, needed: Placement) -> bool:
        """Return whether a whole value may be cut here.

        Tables that depend on no input stay as their producers left them until an activation needs a
        part; in a parameter split, only products of matrices begin to cut an activation.
        """
        if not isinstance(needed, Shard) or held != REPLICATE or name in self.parameters:
            return True
        if name in self.tables:
            return node.outputs[0] not in self.tables
        return not self.task.split or node.name in self.products


def leaves_room(
    node: Node,
    candidate: Candidate,
    ranks: int,
    facts: Facts,
    others: tuple[Assignment, ...],
) -> bool:
    """Whether what other mesh axes cut of a node leaves room for a candidate on `ranks` more."""
    for other in others:
        theirs = other.nodes[node.name]
        if isinstance(candidate.choice, ShardAxis) and isinstance(theirs.choice, ShardAxis):
            axis = facts.rules[node.name].axes[candidate.choice.axis]
            twice = theirs.choice.axis == axis.name
            if twice and axis.once:
                return False
            if twice and axis.outermost and axis.size % (grain(ranks) * grain(other.ranks)):
                return False  # offsets of nested uneven parts
        pairs = (
            *zip(candidate.operands, theirs.operands, strict=True),
            *zip(candidate.results, theirs.results, strict=True),
        )
        for mine, its in pairs:
            if not (isinstance(mine, Shard) and isinstance(its, Shard)):
                continue
            if mine.dim == its.dim and not compatible(mine.of, its.of):
                return False
    return True


def constant_values(graph: Graph) -> frozenset[str]:
    """Values computed from no input and no parameter: position tables, masks."""
    varying = {i.value for i in graph.inputs} | {p.value for p in graph.parameters}
    constant: set[str] = set()
    for node in graph.nodes:
        if any(name in varying for name in node.inputs):
            varying |= set(node.outputs)
        else:
            constant |= set(node.outputs)
    return frozenset(constant)


def input_values(graph: Graph, whole: Collection[str] = ()) -> frozenset[str]:
    """Values that depend on inputs other than those that every rank has `whole`."""
    varying = {i.value for i in graph.inputs} - set(whole)
    for node in graph.nodes:
        if any(name in varying for name in node.inputs):
            varying |= set(node.outputs)
    return frozenset(varying)


def sharded_values(graph: Graph, task: Task) -> frozenset[str]:
    """Values that depend on what a mesh axis may cut of the inputs; all others each rank can make.

    Counts of the whole batch are at hand everywhere, as are inputs that are not of the batch.
    """
    whole = {i.value for i in graph.inputs if i.kind == "precomputed"}
    if task.inputs is not None:
        whole |= {i.value for i in graph.inputs if i.kind == "batch" and i.value not in task.inputs}
    return input_values(graph, whole)


def products(graph: Graph, facts: Facts) -> frozenset[str]:
    """Nodes that do many operations per element: matrix products, attention, convolutions."""
    found = set()
    for node in graph.nodes:
        call = facts.calls[node.name]
        largest = max((prod(shape) for shape in (*call.operands, *call.results)), default=1)
        if work(call, facts.rules[node.name]) >= 4 * largest:
            found.add(node.name)
    return frozenset(found)
