"""Select the implementation of each collective: the library, hierarchies, trees or shared memory.

Predicted time decides; the library is kept unless another implementation saves more than `WORTH` of
its time. Where all ranks and links are equal nothing can be gained, and nothing is solved. The
selection depends on the arguments alone, so ranks that plan independently agree.

Groups that communicate at the same time get equal parts of the links they share. Factors measured
for the library are assumed to hold for solved messages as well: both run on the same processes.
Shared memory is used where it was measured (`shardwise profile`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shardwise.arrays import Ints
from shardwise.cluster import Cluster, Link
from shardwise.cluster.links import factor_of
from shardwise.collectives.classical import best_ring, hierarchical
from shardwise.collectives.derive import forest_of, lowered
from shardwise.collectives.network import Network, find_symmetry
from shardwise.collectives.solve import solve
from shardwise.collectives.spec import cut_bound, demand_of
from shardwise.cost.collectives import CollectiveModel, Line, collective_model
from shardwise.messages.choice import OPERATIONS, REFERENCE_BYTES, Chooser, CollectiveChoice
from shardwise.messages.trees import Forest

WORTH = 0.1  # of the library's time: what another way must save
MOST_RANKS = 16  # of a group that is solved while plans are searched; larger ones on request
ITEM_BYTES = 4
SMALL_BYTES, LARGE_BYTES = 256 << 10, 64 << 20  # sizes that make the line of a way
CLOSE = 0.01  # of the time: hierarchical is simpler, and taken if it is no slower than this
CHUNK_BYTES = 128 * 1024  # where the solver has not tuned it
SIZES = tuple(1 << n for n in range(16, 31))  # smaller data are a matter of latency: the library's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way of all groups: its line of the wires' times, and the trees of each group; or the
    line that was measured.
    """

    name: str
    latency_s: float
    s_per_byte: float
    chunk_bytes: int = 0
    forests: tuple[Forest, ...] = ()


def may_gain(cluster: Cluster) -> bool:
    """Whether some collective could be faster than the library's, from a look at the cluster.

    Not where all ranks are alike and a ring in their order uses every card as well as can be:
    devices of one node, or equal nodes of one device behind one switch. Of equal nodes of GPUs,
    NCCL knows as much as the cluster's file.
    """
    if cluster.num_ranks < 2:
        return False
    if any(node.link is not None and node.link.shared for node in cluster.nodes):
        return True
    if cluster.num_nodes == 1:
        return False
    alike = {(node.link, node.nic, node.count) for node in cluster.nodes}
    network = cluster.network
    if len(alike) > 1 or network.trunks:
        return True
    plain = cluster.nodes[0].count == 1 and not (network.switches or network.domains)
    return not plain and cluster.nodes[0].device.kind == "cpu"


def chooser(cluster: Cluster, most_ranks: int = MOST_RANKS, use: str = "") -> Chooser | None:
    """What chooses for a cluster, each operation and set of groups once; None if it never would.

    `use` is a way that is taken wherever it is possible, whatever the times say.
    """
    if use == "library" or not (use or may_gain(cluster)):
        return None
    known: dict[tuple[str, bytes, int], CollectiveChoice | None] = {}

    def choose(operation: str, groups: Ints) -> CollectiveChoice | None:
        rows = np.ascontiguousarray(groups, dtype=np.int64)
        key = (operation, rows.tobytes(), rows.shape[-1])
        if key not in known:
            known[key] = select(cluster, operation, rows, most_ranks=most_ranks, use=use)
        return known[key]

    return choose


def select(
    cluster: Cluster,
    operation: str,
    groups: Ints | Sequence[Sequence[int]],
    *,
    most_ranks: int = MOST_RANKS,
    use: str = "",
) -> CollectiveChoice | None:
    """The choice of one operation; None where there is none: one rank, or another operation.

    `use` is as for `chooser`.

    >>> fast = Cluster.preset("cpu", nodes=4, devices_per_node=1)
    >>> select(fast, "all_reduce", [range(4)]).uses
    'library'
    """
    rows = np.asarray(groups, dtype=np.int64)
    if operation not in OPERATIONS or rows.shape[-1] < 2:
        return None
    library = collective_model(cluster, operation, rows)
    kept = CollectiveChoice(
        operation=operation,
        groups=tuple(tuple(row) for row in rows.tolist()),
        predicted_s={"library": library.seconds(REFERENCE_BYTES)},
    )
    if not (use or may_gain(cluster)) or rows.shape[-1] > most_ranks:
        return kept
    ways = [_shared(cluster, operation, rows)]
    networks = contended(cluster, rows)
    if use or not _out_of_reach(library, networks, operation):
        ways += [_hierarchical(networks, operation), _solved(networks, operation)]
    found = [way for way in ways if way is not None and use in ("", way.name)]
    return _decided(kept, library, found, forced=bool(use))


def _decided(
    kept: CollectiveChoice, library: CollectiveModel, ways: Sequence[_Way], *, forced: bool
) -> CollectiveChoice:
    """The best way with the times of all; the library unless it saves enough."""
    lines = {way.name: _line(library, way) for way in ways}
    seconds = {name: line.seconds(REFERENCE_BYTES) for name, line in lines.items()}
    told = replace(kept, predicted_s={**kept.predicted_s, **seconds})
    if not ways:
        return told
    least = min(seconds.values())
    best = next(way for way in ways if seconds[way.name] <= (1 + CLOSE) * least)
    start = 0 if forced else _from_bytes(library, lines[best.name])
    if start is None:
        return told
    return replace(
        told,
        uses=best.name,
        min_bytes=start,
        latency_s=best.latency_s,
        s_per_byte=best.s_per_byte,
        chunk_bytes=best.chunk_bytes,
        forests=best.forests,
    )


def _line(library: CollectiveModel, way: _Way) -> Line:
    if way.forests:
        return library.line(way.name, way.latency_s, way.s_per_byte)
    return Line(algorithm=way.name, latency_s=way.latency_s, s_per_byte=way.s_per_byte)


def saves_enough(library_s: float, other_s: float) -> bool:
    """The rule: more than a tenth of the library's time."""
    return other_s < (1 - WORTH) * library_s


def _from_bytes(library: CollectiveModel, line: Line) -> int | None:
    """The size from which on a way always saves enough; None if only for what no step sends."""
    start = None
    for size in reversed(SIZES):
        if not saves_enough(library.seconds(size), line.seconds(size)):
            break
        start = size
    return start if start is not None and start <= LARGE_BYTES else None


def _out_of_reach(library: CollectiveModel, networks: Sequence[Network], operation: str) -> bool:
    """Whether no program saves enough, by what must cross the cuts around ranks and nodes."""
    least = 0.0
    for network in _distinct(networks):
        demand = demand_of(network, operation)
        symmetry = find_symmetry(network, demand.colors(network.num_ranks))
        least = max(least, cut_bound(network, demand, symmetry))
    line = library.line("bound", 0.0, least)
    return not saves_enough(library.seconds(LARGE_BYTES), line.seconds(LARGE_BYTES))


# ------------------------------------------------------------ ways


def contended(cluster: Cluster, groups: Ints) -> list[Network]:
    """The network of each group, with its part of what several groups use."""
    found = [Network.of_cluster(cluster, row) for row in groups.tolist()]
    users: dict[str, int] = {}
    for network in found:
        for name in network.resources:
            users[name] = users.get(name, 0) + 1
    shares = [np.array([users[name] for name in n.resources], dtype=np.float64) for n in found]
    return [
        replace(network, capacity=network.capacity / share)
        for network, share in zip(found, shares, strict=True)
    ]


def _shared(cluster: Cluster, operation: str, groups: Ints) -> _Way | None:
    """Memory that the ranks of every group share, if all links say what it takes."""
    topology = cluster.topology
    nodes = topology.node[groups]
    if (nodes != nodes[:, :1]).any():
        return None
    per_node = np.repeat(np.arange(len(cluster.nodes)), [n.copies for n in cluster.nodes])
    links = {cluster.nodes[per_node[node]].link for node in np.unique(nodes)}
    known = [link for link in links if link is not None and operation in dict(link.shared)]
    if len(known) < len(links):
        return None
    sizes = (SMALL_BYTES, REFERENCE_BYTES, LARGE_BYTES)
    took = [max(_shared_s(cluster, operation, groups, link, n) for link in known) for n in sizes]
    pairs = pairwise(zip(sizes, took, strict=True))
    # The line is nowhere below the curve: what does not fit in caches takes longer for each byte.
    s_per_byte = max(0.0, *((t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairs))
    latency_s = max(0.0, took[0] - s_per_byte * SMALL_BYTES)
    return _Way(name="shared", latency_s=latency_s, s_per_byte=s_per_byte)


def _shared_s(cluster: Cluster, operation: str, groups: Ints, link: Link, num_bytes: int) -> float:
    """What was measured, as a multiple of the time of the wires."""
    model = collective_model(cluster, operation, groups)
    factor = factor_of(link.shared, operation, groups.shape[-1])
    wires = model.lines[0]
    start = wires.latency_s / model.factor.latency * factor.latency
    return start + num_bytes * wires.s_per_byte * factor.bytes.at(num_bytes)


def _solved(networks: Sequence[Network], operation: str) -> _Way | None:
    found = [_solution(_Key(network), operation) for network in networks]
    solved = [each for each in found if each is not None]
    return _way("solved", solved, operation) if len(solved) == len(networks) else None


def _hierarchical(networks: Sequence[Network], operation: str) -> _Way | None:
    found = []
    for network in networks:
        parts = hierarchical(network, demand_of(network, operation))
        if parts is None:
            return None
        found.append((forest_of(network, parts), CHUNK_BYTES))
    return _way("hierarchical", found, operation)


def _way(name: str, found: Sequence[tuple[Forest, int]], operation: str) -> _Way:
    """The line through two sizes, of the slowest group; equal forests once."""
    chunk = min(chunk for _, chunk in found)
    small, large = (
        max(_lowered_s(forest, operation, size, chunk) for forest in {f for f, _ in found})
        for size in (SMALL_BYTES, LARGE_BYTES)
    )
    s_per_byte = (large - small) / (LARGE_BYTES - SMALL_BYTES)
    forests = [forest for forest, _ in found]
    return _Way(
        name=name,
        latency_s=max(0.0, small - s_per_byte * SMALL_BYTES),
        s_per_byte=s_per_byte,
        chunk_bytes=chunk,
        forests=tuple(forests if len(set(forests)) > 1 else forests[:1]),
    )


@lru_cache(maxsize=1024)
def _lowered_s(forest: Forest, operation: str, num_bytes: int, chunk_bytes: int) -> float:
    numel, count = num_bytes // ITEM_BYTES, forest.num_ranks
    counts = [numel * (i + 1) // count - numel * i // count for i in range(count)]
    return lowered(
        forest,
        operation,
        numel,
        item_bytes=ITEM_BYTES,
        chunk_bytes=chunk_bytes,
        counts=() if operation == "all_reduce" else counts,
    ).seconds


class _Key:
    """A network, equal to others of the same figures, whoever their ranks are."""

    def __init__(self, network: Network) -> None:
        self.network = network
        arrays = (network.capacity, network.source, network.target, network.uses, network.latency_s)
        figures = tuple(array.tobytes() for array in arrays)
        self.figures = (*figures, network.uses.shape, network.message_s, network.groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.figures == other.figures

    def __hash__(self) -> int:
        return hash(self.figures)


def _distinct(networks: Sequence[Network]) -> list[Network]:
    return [key.network for key in dict.fromkeys(map(_Key, networks))]


@lru_cache(maxsize=1024)
def _solution(key: _Key, operation: str) -> tuple[Forest, int] | None:
    """The trees of a large transfer, and the size of their chunks; None where it has none.

    Where rounds of messages are as fast, as between two ranks, plans still hold trees: a ring's.
    """
    network = key.network
    solution = solve(
        network,
        operation,
        LARGE_BYTES // ITEM_BYTES,
        item_bytes=ITEM_BYTES,
        limit_s=math.inf,  # rounds end it: a clock would be another one on another rank
    )
    if solution.parts:
        largest = max(chunk.size for chunk in solution.program.chunks)
        return forest_of(network, solution.parts), largest * ITEM_BYTES
    ring = best_ring(network, demand_of(network, operation))
    return None if ring is None else (forest_of(network, ring), CHUNK_BYTES)
