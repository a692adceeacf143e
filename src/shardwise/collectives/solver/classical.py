"""Classical algorithms, which compete with the synthesized ones.

Rings and binomial trees are given as parts; recursive doubling, and halving with doubling, as
rounds of messages. An algorithm that needs a send which the network lacks is omitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.arrays import Ints
from shardwise.collectives.messages import Chunk
from shardwise.collectives.solver.lower import Lowered, Message, rounds_s
from shardwise.collectives.solver.network import Network
from shardwise.collectives.solver.spec import Demand
from shardwise.collectives.solver.trees import Part, load_time

ALL_ORDERS = 6  # with at most this many ranks, try all rings


def ring(network: Network, demand: Demand, order: Sequence[int]) -> tuple[Part, ...] | None:
    """Return the ring over `order`: each part travels around once to be summed and once to be
    copied.
    """
    count = len(order)
    following = np.roll(np.array(order), -1)
    if (network.edge[np.array(order), following] < 0).any():
        return None
    after = np.empty(count, dtype=np.int64)
    after[np.array(order)] = following
    before = np.empty(count, dtype=np.int64)
    before[after] = np.arange(count)
    shares = demand.shares or (1 / count,) * count
    return tuple(
        Part(
            weight=share,
            root=root,
            inward=_rooted(after, root) if demand.inward else None,
            outward=_rooted(before, root) if demand.outward else None,
        )
        for root, share in enumerate(shares)
        if share > 0
    )


def best_ring(network: Network, demand: Demand) -> tuple[Part, ...] | None:
    """Return the fastest ring over all orders of few ranks, or the ring in rank order for many."""
    rest = range(1, network.num_ranks)
    orders: Iterator[tuple[int, ...]] = (
        itertools.permutations(rest) if network.num_ranks <= ALL_ORDERS else iter([tuple(rest)])
    )
    rings = [ring(network, demand, (0, *order)) for order in orders]
    known = [parts for parts in rings if parts is not None]
    return min(known, key=lambda parts: load_time(network, parts), default=None)


def binomial(network: Network, demand: Demand) -> tuple[Part, ...] | None:
    """Return one binomial tree of log2 n steps from the root or rank 0: the fewest messages."""
    if demand.shares is not None and demand.root is None:
        return None
    count, root = network.num_ranks, demand.root or 0
    parent = np.full(count, -1, dtype=np.int64)
    for place in range(1, count):
        lowest = place & -place
        parent[(place + root) % count] = (place - lowest + root) % count
    rank = np.flatnonzero(parent >= 0)
    inward = demand.inward and (network.edge[rank, parent[rank]] >= 0).all()
    outward = demand.outward and (network.edge[parent[rank], rank] >= 0).all()
    if (inward, outward) != (demand.inward, demand.outward):
        return None
    part = Part(
        weight=1.0,
        root=root,
        inward=parent if inward else None,
        outward=parent if outward else None,
    )
    return (part,)


def _rooted(towards: Ints, root: int) -> Ints:
    parent = towards.copy()
    parent[root] = -1
    return parent


# ------------------------------------------------------------ rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Messages in rounds; all messages of a round leave before any of them is used."""

    demand: Demand
    counts: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    rounds: tuple[tuple[Message, ...], ...]

    def lowered(self, network: Network, item_bytes: int) -> Lowered:
        """Return the messages in order; within a round a rank sends before it receives."""
        order: list[int] = []
        first = 0
        for messages in self.rounds:
            numbers = range(first, first + len(messages))
            order += [2 * i for i in numbers]
            order += [2 * i + 1 for i in numbers]
            first += len(messages)
        return Lowered(
            demand=self.demand,
            num_ranks=network.num_ranks,
            counts=self.counts,
            chunks=self.chunks,
            messages=tuple(message for messages in self.rounds for message in messages),
            order=tuple(order),
            seconds=rounds_s(network, self.rounds, self.chunks, item_bytes),
        )

    def load_time(self, network: Network) -> float:
        """Return the seconds per byte of the busiest resource."""
        load = np.zeros(len(network.resources))
        for messages in self.rounds:
            for a, b, _, first, stop in messages:
                elements = sum(chunk.size for chunk in self.chunks[first:stop])
                load += elements * network.loads(network.edge[[a], [b]])
        if not len(load):
            return 0.0
        return float((load / network.capacity).max()) / max(self.chunks[-1].stop, 1)


def recursive_doubling(network: Network, demand: Demand, numel: int) -> Rounds | None:
    """Return an all-reduce of log2 n steps in which pairs exchange everything they have.

    Ranks beyond a power of two first give their data to a partner, and get the result at the end.
    """
    if demand.operation != "all_reduce":
        return None
    core = 1 << (network.num_ranks.bit_length() - 1)
    extra = range(core, network.num_ranks)
    rounds = [[(r, r - core, "reduce", 0, 1) for r in extra]]
    for bit in _bits(core):
        rounds.append([(r, r ^ bit, "reduce", 0, 1) for r in range(core)])
    rounds.append([(r - core, r, "receive", 0, 1) for r in extra])
    return _possible(network, demand, (), [Chunk(0, numel)], rounds)


def halving_doubling(
    network: Network, demand: Demand, numel: int, counts: tuple[int, ...]
) -> Rounds | None:
    """Return sums by recursive halving and copies by recursive doubling, log2 n steps each."""
    count = network.num_ranks
    core = 1 << (count.bit_length() - 1)
    cut = demand.operation in ("reduce_scatter", "all_gather")
    if demand.operation not in ("all_reduce", "reduce_scatter", "all_gather"):
        return None
    if cut and core != count:
        return None
    ends = np.cumsum([0, *counts]).tolist() if cut else [numel * i // core for i in range(core + 1)]
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
    return _possible(network, demand, counts, chunks, rounds)


def _bits(core: int) -> list[int]:
    return [1 << i for i in range(core.bit_length() - 1)]


def _run(rank: int, width: int) -> tuple[int, int]:
    """Return the chunks of a rank and of those that differ from it only in bits below `width`."""
    first = rank // width * width
    return first, first + width


def _possible(
    network: Network,
    demand: Demand,
    counts: tuple[int, ...],
    chunks: list[Chunk],
    rounds: Sequence[Sequence[Message]],
) -> Rounds | None:
    if any(network.edge[a, b] < 0 for messages in rounds for a, b, *_ in messages):
        return None
    nonempty = tuple(tuple(messages) for messages in rounds if messages)
    return Rounds(demand=demand, counts=counts, chunks=tuple(chunks), rounds=nonempty)


# The two-level algorithm: reduce inside each node, exchange between nodes, and distribute inside
# again.
#
# Each rank is the root of its share. Inside a node, every rank gives that share to one local rank;
# these form a ring over the nodes, and results return along the same path.


def hierarchical(network: Network, demand: Demand) -> tuple[Part, ...] | None:
    """Return the parts of all roots, or None without two levels or if a required send is
    impossible.
    """
    nodes = [group for group in network.groups if group]
    if len(nodes) < 2 or max(map(len, nodes)) < 2 or demand.root is not None:
        return None
    count = network.num_ranks
    shares = demand.shares or (1 / count,) * count
    parts = []
    for home, node in enumerate(nodes):
        for place, root in enumerate(node):
            if shares[root] <= 0:
                continue
            inward = _towards(nodes, home, place, count, 1) if demand.inward else None
            outward = _towards(nodes, home, place, count, -1) if demand.outward else None
            if not _edges_exist(network, inward, outward):
                return None
            parts.append(Part(weight=shares[root], root=root, inward=inward, outward=outward))
    return tuple(parts)


def _towards(nodes: list[tuple[int, ...]], home: int, place: int, count: int, step: int) -> Ints:
    """Return parents: each rank's is the node's rank at this position, whose parent is in the next
    node.
    """
    heads = [node[place % len(node)] for node in nodes]
    parent = np.full(count, -1, dtype=np.int64)
    for number, node in enumerate(nodes):
        for rank in node:
            parent[rank] = heads[number]
        parent[heads[number]] = -1 if number == home else heads[(number + step) % len(nodes)]
    return parent


def _edges_exist(network: Network, inward: Ints | None, outward: Ints | None) -> bool:
    for half, up in ((inward, True), (outward, False)):
        if half is not None:
            rank = np.flatnonzero(half >= 0)
            ends = (rank, half[rank]) if up else (half[rank], rank)
            if (network.edge[ends] < 0).any():
                return False
    return True
