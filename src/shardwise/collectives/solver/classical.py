"""Classical algorithms, which compete with the synthesized ones.

Rings, binomial trees and the two-level algorithm are trees; recursive doubling, and halving with
doubling, are rounds of messages. A function returns None if the algorithm does not apply, or needs
an edge that the network does not have.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.arrays import Ints
from shardwise.collectives.messages import Chunk
from shardwise.collectives.messages.choice import Tree
from shardwise.collectives.solver.lower import Lowered, Message, Occupation
from shardwise.collectives.solver.network import Network
from shardwise.collectives.solver.spec import Demand
from shardwise.collectives.solver.trees import INWARD, OUTWARD, edges_of, load_time

ALL_ORDERS = 6  # with at most this many ranks, try all rings


# ------------------------------------------------------------ trees
def ring(network: Network, demand: Demand, order: Sequence[int]) -> tuple[Tree, ...] | None:
    """Return the ring over `order`, which data pass once to be summed and once to be copied."""
    count, ranks = len(order), np.array(order)
    after, before = np.empty_like(ranks), np.empty_like(ranks)
    after[ranks], before[ranks] = np.roll(ranks, -1), np.roll(ranks, 1)
    if (network.edge[np.arange(count), after] < 0).any():
        return None
    return tuple(
        Tree(
            weight=share,
            root=root,
            inward=_rooted(after, root) if demand.inward else (),
            outward=_rooted(before, root) if demand.outward else (),
        )
        for root, share in enumerate(demand.shares or (1 / count,) * count)
        if share > 0
    )


def _rooted(parents: Ints, root: int) -> tuple[int, ...]:
    return tuple(-1 if rank == root else parent for rank, parent in enumerate(parents.tolist()))


def best_ring(network: Network, demand: Demand) -> tuple[Tree, ...] | None:
    """Return the fastest ring over all orders of few ranks, or the ring in rank order for many."""
    ranks = range(1, network.num_ranks)
    orders: Iterable[tuple[int, ...]] = (
        itertools.permutations(ranks) if network.num_ranks <= ALL_ORDERS else [tuple(ranks)]
    )
    rings = [ring(network, demand, (0, *order)) for order in orders]
    possible = [trees for trees in rings if trees is not None]
    return min(possible, key=lambda trees: load_time(network, trees), default=None)


def binomial(network: Network, demand: Demand) -> tuple[Tree, ...] | None:
    """Return one binomial tree of log2 n steps from the root or rank 0: the fewest messages."""
    if demand.shares is not None and demand.root is None:
        return None
    count, root = network.num_ranks, demand.root or 0
    parents = [-1] * count
    for position in range(1, count):
        lowest_bit = position & -position
        parents[(position + root) % count] = (position - lowest_bit + root) % count
    inward, outward = (tuple(parents) if used else () for used in (demand.inward, demand.outward))
    return _possible_trees(network, [Tree(weight=1.0, root=root, inward=inward, outward=outward)])


def hierarchical(network: Network, demand: Demand) -> tuple[Tree, ...] | None:
    """Return the two-level algorithm: reduce in each node, exchange between nodes, distribute.

    Each rank is the root of its share. Inside a node, every rank gives that share to one local
    rank; these form a ring over the nodes, and results return along the same path.
    """
    nodes = [group for group in network.groups if group]
    if len(nodes) < 2 or max(map(len, nodes)) < 2 or demand.root is not None:
        return None
    count = network.num_ranks
    shares = demand.shares or (1 / count,) * count
    trees = [
        Tree(
            weight=shares[root],
            root=root,
            inward=_over_nodes(nodes, home, place, count, 1) if demand.inward else (),
            outward=_over_nodes(nodes, home, place, count, -1) if demand.outward else (),
        )
        for home, node in enumerate(nodes)
        for place, root in enumerate(node)
        if shares[root] > 0
    ]
    return _possible_trees(network, trees)


def _over_nodes(
    nodes: list[tuple[int, ...]], home: int, place: int, count: int, step: int
) -> tuple[int, ...]:
    """Return parents: a rank's is its node's rank at `place`, whose parent is in the next node."""
    heads = [node[place % len(node)] for node in nodes]
    parents = [-1] * count
    for number, node in enumerate(nodes):
        for rank in node:
            parents[rank] = heads[number]
        parents[heads[number]] = -1 if number == home else heads[(number + step) % len(nodes)]
    return tuple(parents)


def _possible_trees(network: Network, trees: Sequence[Tree]) -> tuple[Tree, ...] | None:
    for tree in trees:
        for direction, parents in ((INWARD, tree.inward), (OUTWARD, tree.outward)):
            if (edges_of(network, parents, direction) < 0).any():
                return None
    return tuple(trees)


# ------------------------------------------------------------ rounds
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Messages in rounds; all messages of a round leave before any of them is used."""

    demand: Demand
    chunks: tuple[Chunk, ...]
    rounds: tuple[tuple[Message, ...], ...]

    def lowered(self, network: Network, item_bytes: int) -> Lowered:
        """Return the messages in order; within a round a rank sends before it receives."""
        events: list[int] = []
        for messages in self.rounds:
            first, stop = len(events), len(events) + 2 * len(messages)
            events += [*range(first, stop, 2), *range(first + 1, stop, 2)]
        return Lowered(
            demand=self.demand,
            num_ranks=network.num_ranks,
            chunks=self.chunks,
            messages=tuple(message for messages in self.rounds for message in messages),
            events=tuple(events),
            seconds=self._seconds(network, item_bytes),
        )

    def _seconds(self, network: Network, item_bytes: int) -> float:
        """Simulate the rounds; return the seconds until the last message has arrived.

        A message starts when its chunks are available; its sender and every resource on its path
        process their messages in the order of the rounds, never idling while one waits. Summation
        is free compared to messages.
        """
        occupation, edge = Occupation(network), network.edge.tolist()
        arrived: dict[tuple[int, int], float] = {}  # by rank and chunk
        ends = list(itertools.accumulate((chunk.size for chunk in self.chunks), initial=0))
        last = 0.0
        for messages in self.rounds:
            ready = [
                max(arrived.get((a, chunk), 0.0) for chunk in range(first, stop))
                for a, _, _, first, stop in messages
            ]
            for begin, (a, b, _, first, stop) in zip(ready, messages, strict=True):
                num_bytes = (ends[stop] - ends[first]) * item_bytes
                done = occupation.send(begin, a, b, edge[a][b], num_bytes)
                for chunk in range(first, stop):
                    arrived[b, chunk] = max(arrived.get((b, chunk), 0.0), done)
                last = max(last, done)
        return last

    def load_time(self, network: Network) -> float:
        """Return the seconds per byte of the busiest resource."""
        load = np.zeros(len(network.resources))
        for messages in self.rounds:
            for a, b, _, first, stop in messages:
                elements = sum(chunk.size for chunk in self.chunks[first:stop])
                load += elements * network.loads(network.edge[[a], [b]])
        return float((load / network.capacity).max(initial=0.0)) / max(self.chunks[-1].stop, 1)


def recursive_doubling(network: Network, demand: Demand, numel: int) -> Rounds | None:
    """Return an all-reduce of log2 n steps in which pairs exchange everything they have.

    Ranks beyond a power of two first give their data to a partner, and get the result at the end.
    """
    if demand.operation != "all_reduce":
        return None
    core = 1 << (network.num_ranks.bit_length() - 1)
    extra = range(core, network.num_ranks)
    rounds = [[(r, r - core, "reduce", 0, 1) for r in extra]]
    rounds += [[(r, r ^ bit, "reduce", 0, 1) for r in range(core)] for bit in _bits(core)]
    rounds.append([(r - core, r, "receive", 0, 1) for r in extra])
    return _possible_rounds(network, demand, [Chunk(0, numel)], rounds)


def halving_doubling(network: Network, demand: Demand, numel: int) -> Rounds | None:
    """Return sums by recursive halving and copies by recursive doubling, log2 n steps each."""
    count = network.num_ranks
    core = 1 << (count.bit_length() - 1)
    sharded = demand.operation in ("reduce_scatter", "all_gather")
    if not (demand.operation == "all_reduce" or (sharded and core == count)):
        return None
    ends = [numel * i // core for i in range(core + 1)]
    if sharded:
        ends = np.cumsum([0, *demand.counts]).tolist()
    chunks = [Chunk(low, high) for low, high in itertools.pairwise(ends)]
    extra = range(core, count)
    rounds: list[list[Message]] = []
    if demand.inward:
        rounds.append([(r, r - core, "reduce", 0, core) for r in extra])
        for bit in reversed(_bits(core)):
            rounds.append([(r, r ^ bit, "reduce", *_run(r ^ bit, bit)) for r in range(core)])
    if demand.outward:
        for bit in _bits(core):
            rounds.append([(r, r ^ bit, "receive", *_run(r, bit)) for r in range(core)])
        rounds.append([(r - core, r, "receive", 0, core) for r in extra])
    return _possible_rounds(network, demand, chunks, rounds)


def _bits(core: int) -> list[int]:
    return [1 << i for i in range(core.bit_length() - 1)]


def _run(rank: int, width: int) -> tuple[int, int]:
    """Return the chunks of a rank and of those that differ from it only in bits below `width`."""
    first = rank // width * width
    return first, first + width


def _possible_rounds(
    network: Network, demand: Demand, chunks: list[Chunk], rounds: Sequence[Sequence[Message]]
) -> Rounds | None:
    if any(network.edge[a, b] < 0 for messages in rounds for a, b, *_ in messages):
        return None
    nonempty = tuple(tuple(messages) for messages in rounds if messages)
    return Rounds(demand=demand, chunks=tuple(chunks), rounds=nonempty)
