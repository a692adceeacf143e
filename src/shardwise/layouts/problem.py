"""Layout problems and their solutions, for both searches, and the candidates that both allow.

`Task` asks for one mesh axis and is answered by an `Assignment`: the choice of every node and the
storage of every parameter. `LayoutTask` asks for all mesh axes at once, with `Prices` in seconds,
and is answered by a `LayoutSolution`. `Allowed` decides which candidates of a node a `Task` admits,
and where a full value may first be sharded.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, Protocol

from shardwise.errors import PlanError
from shardwise.ir import Graph, Node
from shardwise.layouts.moves import work
from shardwise.sharding.candidates import Candidate, Pass, Same, ShardAxis, match_choice
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    REPLICATE,
    Placement,
    Replicate,
    Shard,
    compatible,
    format_placement,
)
from shardwise.shares import AxisSize, grain, num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The layout problem of one mesh axis.

    `parameters` fixes placements by value name. Other parameters are replicated, or chosen by the
    search if `shard_parameters` is set. `inputs` maps an input to the only shard of it that may be
    used; None leaves all inputs free. With `begins_inside` no input is sharded, but values computed
    from them may be. `choices` forces nodes to the candidate with this text.
    `weight` is the cost of storing one element of a parameter.
    """

    axis: str
    ranks: AxisSize
    parameters: Mapping[str, Placement] = field(default_factory=dict)
    shard_parameters: bool = False
    inputs: Mapping[str, Placement] | None = None
    begins_inside: bool = False
    choices: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1e4
    beam: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The choice of every node and the storage of every parameter on one mesh axis."""

    axis: str
    ranks: AxisSize
    nodes: Mapping[str, Candidate]
    parameters: Mapping[str, Placement]
    cost: float


Placements = tuple[Placement, ...]  # of one value: one per mesh axis, in mesh order
Choices = dict[str, dict[str, str]]  # node or parameter name -> mesh axis -> text of a plan


class Prices(Protocol):
    """Costs in seconds of one step on one rank, before they are multiplied by `LayoutTask.copies`.

    Placements are in mesh order. `move` prices a single step of `plan_moves`, so that a step which
    several uses share is paid once; its answer is reused for all values of the same type.
    """

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Return the seconds of forward and backward on local shapes, one candidate per axis."""

    def move(self, value: str, current: Placements, needed: Placements, grad: bool) -> float:
        """Return the seconds of forward, with `grad` also of backward; inf if impossible."""

    def store(self, parameter: str, stored: Placements) -> float:
        """Return the seconds per step of gradient synchronization and of the optimizer.

        On an axis with R~ every rank has one term of the gradient; with R all have the full one.
        """

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        """Return the bytes of a parameter with its gradient and optimizer state."""

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Return the bytes that a node saves for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAxis:
    """A mesh axis and its role.

    - "batch": parameters are replicated; inputs may be sharded as `inputs` says, and other values
      only as a consequence of that.
    - "sequence": the same, with `inputs` sharded along the sequence.
    - "parameters": anything may be sharded.

    `inputs` maps an input to the only shard of it that may be used; None leaves all inputs free.
    """

    name: str
    ranks: AxisSize
    role: Literal["batch", "parameters", "sequence"] = "parameters"
    inputs: Mapping[str, Placement] | None = None

    @property
    def follows_inputs(self) -> bool:
        """Whether values are sharded only as a consequence of sharded inputs."""
        return self.role != "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTask:
    """A joint problem over all mesh axes.

    `parameters` fixes placements by value name and mesh axis, `nodes` the text of choices by node
    name and mesh axis. `copies` is the number of layers for which a node or a parameter of a folded
    graph stands, by which its costs are multiplied; `moves` is the multiplier for moves of a value
    if it differs from that of the value's producer. `tied` maps a node to an earlier one that must
    make the same choice on every axis; parameters that tied nodes use at the same position are
    stored in the same layout. Memory counts as `memory_weight` seconds per byte.

    A parameter is stored in the layout that its use needs, or that one of several uses needs. With
    `move_parameters` it may also be stored in another layout and redistributed in every step.
    """

    axes: tuple[LayoutAxis, ...]
    parameters: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    memory_weight: float = 0.0
    move_parameters: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, AxisSize]:
        return {axis.name: axis.ranks for axis in self.axes}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSolution:
    """The cheapest layouts found, with a lower bound on the cost of any layouts.

    `cost_s` is the sum of time and weighted memory. If `restricted` is not empty, it describes the
    restriction of the problem for which the bound holds.
    """

    graph: Graph = field(repr=False, compare=False)
    assignments: tuple[Assignment, ...]
    cost_s: float
    bound_s: float
    restricted: str = ""

    @property
    def gap(self) -> float:
        """The largest possible saving of another solution, as a fraction of the cost."""
        if self.cost_s <= self.bound_s:
            return 0.0
        return (self.cost_s - self.bound_s) / max(abs(self.cost_s), 1e-30)

    def as_choices(self) -> tuple[Choices, Choices]:
        """Return entries for `Plan.nodes` and for the layouts of `Plan.parameters`.

        They name every node and parameter, so that a plan resolves to the same assignments.
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


# Partial sums may pass through these where parameters are sharded: residuals, casts, views.
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
        forced = self.task.choices.get(node.name)
        if forced is not None:
            matching = forced_candidates(node, self.facts, self.task.axis, forced)
            options = tuple(c for c in matching if self._fits(node, c))
            if not options:
                raise _no_such_choice(node, self.facts, self.task.axis, forced)
            return options
        options = self.facts.candidates(node.name)
        return tuple(c for c in options if self._fits(node, c) and self._suits(node, c))

    def _fits(self, node: Node, candidate: Candidate) -> bool:
        """Return whether the candidate is compatible with the choices on earlier mesh axes."""
        earlier = ((a.nodes[node.name], a.ranks) for a in self.earlier)
        return all(
            nest(node, self.facts, candidate, self.task.ranks, other, ranks)
            for other, ranks in earlier
        )

    def _suits(self, node: Node, candidate: Candidate) -> bool:
        """Return whether a candidate suits the purpose of this mesh axis.

        Where parameters are sharded, a node with parameters shards one of them or does the same
        work on every rank. Where the batch is sharded, a node that depends on the batch takes one
        of the operands that do in shards or as a partial sum. Sharding does not begin at nodes
        without operands, such as position tables.
        """
        operands = tuple(zip(node.inputs, candidate.operands, strict=True))
        if isinstance(candidate.choice, ShardAxis) and not node.inputs:
            return False
        if not self.task.shard_parameters and not isinstance(candidate.choice, Same):
            if self.facts.begins(node.name, candidate):
                return True
            varying = [placement for name, placement in operands if name in self.varying]
            return not varying or any(not isinstance(p, Replicate) for p in varying)
        if isinstance(candidate.choice, Pass):
            return node.op.split(".")[1] in DELAYED
        if not isinstance(candidate.choice, ShardAxis):
            return True
        if splits_heads(node, self.facts, candidate.choice, self.task.ranks):
            return False
        parameters = [placement for name, placement in operands if name in self.parameters]
        return not parameters or any(isinstance(p, Shard) for p in parameters)

    def may_begin(self, node: Node, name: str, current: Placement, needed: Placement) -> bool:
        """Return whether a full value may first be sharded at this node.

        Tables that depend on no input keep the placement of their producers until an activation
        needs a shard. Where parameters are sharded, only matrix products begin to shard an
        activation.
        """
        if not isinstance(needed, Shard) or current != REPLICATE or name in self.parameters:
            return True
        if name in self.tables:
            return node.outputs[0] not in self.tables
        return not self.task.shard_parameters or node.name in self.products


def forced_candidates(node: Node, facts: Facts, axis: str, text: str) -> tuple[Candidate, ...]:
    """Return the candidates that match the text of a plan; raise if there are none."""
    matching = match_choice(facts.rules[node.name], facts.candidates(node.name), text)
    if not matching:
        raise _no_such_choice(node, facts, axis, text)
    return matching


def _no_such_choice(node: Node, facts: Facts, axis: str, text: str) -> PlanError:
    return PlanError(
        f"node {node.name} ({node.op}) cannot '{text}' on mesh axis {axis}",
        where=node.origin,
        hint="one of " + ", ".join(f"'{c.choice}'" for c in facts.candidates(node.name)),
    )


def splits_heads(node: Node, facts: Facts, choice: ShardAxis, ranks: AxisSize) -> bool:
    """Return whether the innermost factor is sharded although an outer one is large enough."""
    structure = facts.structures[node.name][choice.axis]
    if len(structure) != 1 or len(structure[0]) < 2 or choice.pattern[0][2] != 1:
        return False
    return any(size >= num_ranks(ranks) for size in structure[0][:-1])


def nest(
    node: Node, facts: Facts, a: Candidate, a_ranks: AxisSize, b: Candidate, b_ranks: AxisSize
) -> bool:
    """Return whether a node may use two candidates on two mesh axes of these sizes."""
    if isinstance(a.choice, ShardAxis) and isinstance(b.choice, ShardAxis):
        axis = facts.rules[node.name].axes[a.choice.axis]
        twice = b.choice.axis == axis.name
        other = facts.rules[node.name].axes[b.choice.axis]
        if (twice and axis.once) or axis.name in other.joins or other.name in axis.joins:
            return False
        # The offset of a nested shard is known only if all shards are equally long.
        if twice and axis.outermost and axis.size % (grain(a_ranks) * grain(b_ranks)):
            return False
    pairs = (*zip(a.operands, b.operands, strict=True), *zip(a.results, b.results, strict=True))
    return all(
        not (isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim)
        or compatible(p.of, q.of)
        for p, q in pairs
    )


def constant_values(graph: Graph) -> frozenset[str]:
    """Return the values that depend on no input and no parameter: position tables, masks."""
    sources = {i.value for i in graph.inputs} | {p.value for p in graph.parameters}
    varying = dependents(graph, sources)
    return frozenset(n for node in graph.nodes for n in node.outputs if n not in varying)


def input_values(graph: Graph, replicated: Collection[str] = ()) -> frozenset[str]:
    """Return the values that depend on inputs other than the `replicated` ones."""
    return dependents(graph, {i.value for i in graph.inputs} - set(replicated))


def dependents(graph: Graph, sources: set[str]) -> frozenset[str]:
    """Return the sources and all values that depend on them."""
    dependents = set(sources)
    for node in graph.nodes:
        if any(name in dependents for name in node.inputs):
            dependents |= set(node.outputs)
    return frozenset(dependents)


def sharded_values(graph: Graph, task: Task) -> frozenset[str]:
    """Return the values that depend on inputs that the mesh axis may shard.

    Every rank can compute all other values: it has precomputed counts of the full batch, and all
    inputs that are not part of the batch.
    """
    replicated = {i.value for i in graph.inputs if i.kind == "precomputed"}
    if task.inputs is not None and not task.begins_inside:
        batch = {i.value for i in graph.inputs if i.kind == "batch"}
        replicated |= batch - set(task.inputs)
    return input_values(graph, replicated)


def products(graph: Graph, facts: Facts) -> frozenset[str]:
    """Return the nodes with many operations per element: matrix products, attention, …"""
    intensive = set()
    for node in graph.nodes:
        call = facts.calls[node.name]
        largest = max((prod(shape) for shape in (*call.operands, *call.results)), default=1)
        if work(call, facts.rules[node.name]) >= 4 * largest:
            intensive.add(node.name)
    return frozenset(intensive)
