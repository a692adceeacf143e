"""Treat micro-batches as a mesh axis in time: which part of each value one micro-batch has.

Nothing is communicated along this axis before backward. So placements follow from the inputs, node
by node, without a choice: a value is a Shard; or Partial, if it goes on linearly from there to the
loss; or full and used differently in each micro-batch (R~), its gradients added up like those of
parameters. Values of inputs alone (a count of tokens) are also available in full: they are computed
once per step from the full batch. An error names the node that couples the samples of different
micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph, Node
from shardwise.layouts.moves import same_placement
from shardwise.layouts.problem import Assignment, dependents
from shardwise.sharding.candidates import Candidate, ShardAxis, pass_candidate
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

SLICED, ONCE, PADDED, PRECOMPUTED = 1, 2, 3, 10  # relative costs of providing an operand


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchAssignment:
    """The assignment of the time axis and the placement of every value.

    `precomputed` maps a node to the positions of the operands that it uses for the full batch
    although a micro-batch has only a part of them: they are computed once per step.
    """

    assignment: Assignment
    values: Mapping[str, Placement]
    precomputed: Mapping[str, frozenset[int]]


def assign_microbatches(
    graph: Graph, facts: Facts, axis: str, count: int, input_shards: Mapping[str, Placement]
) -> MicrobatchAssignment:
    """Return the placements for `count` micro-batches of inputs that are split as given."""
    placements: dict[str, Placement] = dict.fromkeys(graph.values, PARTIAL_GRAD)
    placements |= input_shards
    batch_values = values_of_inputs(graph)
    nodes: dict[str, Candidate] = {}
    precomputed: dict[str, frozenset[int]] = {}
    for node in graph.nodes:
        best: tuple[int, Candidate, frozenset[int]] | None = None
        for candidate in _options(node, facts, batch_values):
            feed = _feed(node, candidate, placements, batch_values, count)
            if feed is not None and (best is None or feed[0] < best[0]):
                best = (feed[0], candidate, feed[1])
        if best is None:
            raise _coupled(graph, node, placements)
        _, nodes[node.name], full = best
        if full:
            precomputed[node.name] = full
        for name, placement in zip(node.outputs, nodes[node.name].results, strict=True):
            placements[name] = PARTIAL_GRAD if isinstance(placement, Replicate) else placement
    assignment = Assignment(
        axis=axis,
        ranks=count,
        nodes=nodes,
        parameters={p.value: REPLICATE for p in graph.parameters},
        cost=0.0,
    )
    return MicrobatchAssignment(assignment=assignment, values=placements, precomputed=precomputed)


def values_of_inputs(graph: Graph) -> frozenset[str]:
    """Return the values that depend on the batch, buffers and constants, but on no parameter."""
    return frozenset(graph.values) - dependents(graph, {p.value for p in graph.parameters})


def _options(node: Node, facts: Facts, batch_values: frozenset[str]) -> list[Candidate]:
    """Return the node's candidates that need no other micro-batch while they run."""
    rule = facts.rules[node.name]
    options = []
    possible = facts.candidates(node.name)
    if _is_cast(node, facts) and not rule.linear:
        # A cast rounds each term instead of their sum: not linear, but close enough.
        possible = (*possible, pass_candidate(rule, frozenset({0})))
    for candidate in possible:
        choice = candidate.choice
        if isinstance(choice, ShardAxis):
            axis = rule.axes[choice.axis]
            if axis.num_collectives or axis.reduce == "same":
                continue
        reduced = [p for p in candidate.results if isinstance(p, Partial) and p.op != "sum"]
        if reduced and not all(name in batch_values for name in node.outputs):
            continue
        options.append(candidate)
    return options


def _is_cast(node: Node, facts: Facts) -> bool:
    """Return whether the node only changes a floating-point dtype."""
    types = facts.calls[node.name].types
    if node.op.split(".")[1] not in ("to", "_to_copy") or len(node.inputs) != 1:
        return False
    return all(types[name].dtype.is_floating_point for name in (*node.inputs, *node.outputs))


def _feed(
    node: Node,
    candidate: Candidate,
    placements: Mapping[str, Placement],
    batch_values: frozenset[str],
    count: int,
) -> tuple[int, frozenset[int]] | None:
    """Return the cost of a candidate's operands and which of them are precomputed, or None."""
    total, full = 0, set()
    for index, (name, needed) in enumerate(zip(node.inputs, candidate.operands, strict=True)):
        price = _price(placements[name], needed, count)
        if price is None and name in batch_values:
            price = _price(PARTIAL_GRAD, needed, count)
            if price is not None:
                price += PRECOMPUTED
                full.add(index)
        if price is None:
            return None
        total += price
    return total, frozenset(full)


def _price(current: Placement, needed: Placement, count: int) -> int | None:
    if isinstance(current, Replicate):
        if isinstance(needed, Shard):
            return SLICED
        return 0 if isinstance(needed, Replicate) else ONCE if needed == PARTIAL else None
    if same_placement(current, needed, count):
        return 0
    return PADDED if isinstance(current, Shard) and needed == PARTIAL else None


def _summed_at(graph: Graph, node: Node, placements: Mapping[str, Placement]) -> Node | None:
    """Return the node that first summed over the batch, among the ancestors of an operand."""
    producers = graph.producers
    at: Node | None = None
    pending = [name for name in node.inputs if not isinstance(placements[name], Replicate | Shard)]
    while pending:
        producer = producers.get(pending.pop())
        if producer is not None:
            at = producer
            pending = [n for n in at.inputs if not isinstance(placements[n], Replicate | Shard)]
    return at


def _coupled(graph: Graph, node: Node, placements: Mapping[str, Placement]) -> InfeasiblePlan:
    operands = [
        f"{'all of' if isinstance(placements[name], Shard) else 'the complete sum'} %{name}"
        for name in dict.fromkeys(node.inputs)
        if not isinstance(placements[name], Replicate)
    ]
    summed = _summed_at(graph, node, placements)
    where = node.origin
    if summed is not None and summed.origin != node.origin:
        where += f"; the sum over the batch is at {summed.origin}"
    return InfeasiblePlan(
        f"{node.op} ({node.name}) couples the samples of a batch: it needs "
        f"{' and '.join(operands)}, so micro-batches cannot be computed one after the other",
        where=where,
        hint="num_microbatches=1, or per_microbatch=True: each micro-batch then counts as a batch "
        "of its own, as with gradient accumulation on one device",
    )
