"""Decide which candidates of a node a task allows, and where a full value may first be sharded.

Both searches ask here: the beam for one mesh axis, and the joint problem for each of its axes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from shardwise.errors import PlanError
from shardwise.ir import Graph, Node
from shardwise.layouts.costs import work
from shardwise.layouts.problem import Assignment, Task
from shardwise.sharding.candidates import Candidate, Cut, Pass, Same, candidates, written
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import REPLICATE, Placement, Replicate, Shard, compatible
from shardwise.shares import grain

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
        self.varying = cut_values(graph, task)
        self.products = products(graph, facts)

    def options(self, node: Node) -> tuple[Candidate, ...]:
        """Return the node's candidates that the task and earlier mesh axes allow."""
        rule = self.facts.rules[node.name]
        found = candidates(rule, self.facts.structures[node.name])
        allowed = tuple(c for c in found if self._fits(node, c) and self._holds(node, c))
        forced = self.task.choices.get(node.name)
        if forced is None:
            return allowed
        chosen = tuple(c for c in written(rule, found, forced) if self._fits(node, c))
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
        if isinstance(candidate.choice, Cut) and not node.inputs:
            return False
        if not self.task.split and not isinstance(candidate.choice, Same):
            mine = [placement for name, placement in operands if name in self.varying]
            return not mine or any(not isinstance(p, Replicate) for p in mine)
        if isinstance(candidate.choice, Pass):
            return node.op.split(".")[1] in DELAYED
        if not isinstance(candidate.choice, Cut):
            return True
        if self._splinters(node, candidate.choice):
            return False
        mine = [placement for name, placement in operands if name in self.parameters]
        return not mine or any(isinstance(p, Shard) for p in mine)

    def _splinters(self, node: Node, choice: Cut) -> bool:
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
        if isinstance(candidate.choice, Cut) and isinstance(theirs.choice, Cut):
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


def cut_values(graph: Graph, task: Task) -> frozenset[str]:
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
