"""Treat micro-batches as a mesh axis in time: which part of each value one micro-batch has.

Nothing is communicated along this axis before backward. So placements follow from the inputs, node
by node, without a choice: a value is a Shard; or Partial, if it goes on linearly from there to the
loss; or full and used differently in each micro-batch (R~), its gradients added up like those of
parameters. Values of inputs alone (a count of tokens) are also available in full: they are computed
once per step from the full batch. An error names the node that couples the samples of different
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph, Node
from shardwise.layouts.moves import same_placement
from shardwise.layouts.problem import Assignment
from shardwise.sharding.candidates import Candidate, ShardAxis, candidates, pass_candidate
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
)

SLICED, ONCE, PADDED, PRECOMPUTED = 1, 2, 3, 10  # what feeding an operand costs, to rank candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchAssignment:
    """The assignment of the time axis, every value's placement, and what is precomputed.

    `precomputed` maps a node to those of its operands that it takes whole, although a micro-batch
    holds a part of them.
    """

    assignment: Assignment
    values: Mapping[str, Placement]
    precomputed: Mapping[str, frozenset[int]]


def assign_microbatches(
    graph: Graph, facts: Facts, axis: str, count: int, cuts: Mapping[str, Placement]
) -> MicrobatchAssignment:
    """Placements for `count` micro-batches; `cuts` says how inputs are cut."""
    held: dict[str, Placement] = dict.fromkeys(graph.values, PARTIAL_GRAD)
    held |= cuts
    known = values_of_inputs(graph)
    nodes: dict[str, Candidate] = {}
    precomputed: dict[str, frozenset[int]] = {}
    for node in graph.nodes:
        best: tuple[int, Candidate, frozenset[int]] | None = None
        for candidate in _options(node, facts, known):
            fed = _feed(node, candidate, held, known, count)
            if fed is not None and (best is None or fed[0] < best[0]):
                best = (fed[0], candidate, fed[1])
        if best is None:
            raise _coupled(graph, node, held)
        _, nodes[node.name], whole = best
        if whole:
            precomputed[node.name] = whole
        for name, given in zip(node.outputs, nodes[node.name].results, strict=True):
            held[name] = PARTIAL_GRAD if isinstance(given, Replicate) else given
    assignment = Assignment(
        axis=axis,
        ranks=count,
        nodes=nodes,
        parameters={p.value: REPLICATE for p in graph.parameters},
        cost=0.0,
    )
    return MicrobatchAssignment(assignment=assignment, values=held, precomputed=precomputed)


def values_of_inputs(graph: Graph) -> frozenset[str]:
    """Values that depend on the batch, buffers and constants, but on no parameter."""
    trained = {p.value for p in graph.parameters}
    for node in graph.nodes:
        if any(name in trained for name in node.inputs):
            trained |= set(node.outputs)
    return frozenset(name for name in graph.values if name not in trained)


def _options(node: Node, facts: Facts, known: frozenset[str]) -> list[Candidate]:
    """Return the node's candidates that need no other micro-batch while they run."""
    rule = facts.rules[node.name]
    options = []
    found = candidates(rule, facts.structures[node.name])
    if _is_cast(node, facts) and not rule.linear:
        found = (*found, pass_candidate(rule, frozenset({0})))  # terms are rounded one by one
    for candidate in found:
        choice = candidate.choice
        if isinstance(choice, ShardAxis):
            axis = rule.axes[choice.axis]
            if axis.num_collectives or axis.reduce == "same":
                continue
        reduced = [p for p in candidate.results if isinstance(p, Partial) and p.op != "sum"]
        if reduced and not all(name in known for name in node.outputs):
            continue
        options.append(candidate)
    return options


def _is_cast(node: Node, facts: Facts) -> bool:
    """Return whether the node only changes a floating type."""
    types = facts.calls[node.name].types
    if node.op.split(".")[1] not in ("to", "_to_copy") or len(node.inputs) != 1:
        return False
    return all(types[name].dtype.is_floating_point for name in (*node.inputs, *node.outputs))


def _feed(
    node: Node,
    candidate: Candidate,
    held: Mapping[str, Placement],
    known: frozenset[str],
    count: int,
) -> tuple[int, frozenset[int]] | None:
    """Return the cost of a candidate's operands and which are precomputed, or None."""
    total, whole = 0, set()
    for index, (name, needed) in enumerate(zip(node.inputs, candidate.operands, strict=True)):
        price = _price(held[name], needed, count)
        if price is None and name in known:
            price = _price(PARTIAL_GRAD, needed, count)
            if price is not None:
                price += PRECOMPUTED
                whole.add(index)
        if price is None:
            return None
        total += price
    return total, frozenset(whole)


def _price(held: Placement, needed: Placement, count: int) -> int | None:
    if isinstance(held, Replicate):
        if isinstance(needed, Shard):
            return SLICED
        return 0 if isinstance(needed, Replicate) else ONCE if needed == PARTIAL else None
    if same_placement(held, needed, count):
        return 0
    return PADDED if isinstance(held, Shard) and needed == PARTIAL else None


def _summed_at(graph: Graph, node: Node, held: Mapping[str, Placement]) -> Node | None:
    """Return the node that first made a sum over the batch of which an operand is made."""
    producers = graph.producers
    at: Node | None = None
    pending = [name for name in node.inputs if not isinstance(held[name], Replicate | Shard)]
    while pending:
        maker = producers.get(pending.pop())
        if maker is not None:
            at = maker
            parts = [n for n in maker.inputs if not isinstance(held[n], Replicate | Shard)]
            pending = parts
    return at


def _coupled(graph: Graph, node: Node, held: Mapping[str, Placement]) -> InfeasiblePlan:
    parts = [
        f"%{name} {'of one micro-batch' if isinstance(held[name], Shard) else 'as a sum of all'}"
        for name in dict.fromkeys(node.inputs)
        if not isinstance(held[name], Replicate)
    ]
    summed = _summed_at(graph, node, held)
    where = node.origin
    if summed is not None and summed.origin != node.origin:
        where += f"; the sum over the batch is at {summed.origin}"
    return InfeasiblePlan(
        f"{node.op} ({node.name}) couples the samples of a batch: it would need "
        f"{' and '.join(parts)} whole, so micro-batches cannot be computed one after the other",
        where=where,
        hint="num_microbatches=1, or per_microbatch=True: each micro-batch is then a batch of its "
        "own, as one device accumulating gradients takes it",
    )
