"""Select the implementation of each collective: the library, hierarchies, trees or shared memory.

Predicted time decides; another implementation must save more than `WORTH` of the library's time. If
all ranks and links are equal, nothing can be gained and nothing is solved. The selection depends on
the arguments alone, so ranks that plan independently agree.

Groups that communicate at the same time get equal parts of the links they share. Factors measured
for the library are assumed to hold for solved messages as well: both run in the same processes.
Shared memory is considered if it was measured (`shardwise profile`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise, takewhile

import numpy as np

from shardwise.arrays import Ints
from shardwise.cluster import Cluster, Link
from shardwise.cluster.links import factor_of
from shardwise.collectives.messages.choice import (
    OPERATIONS,
    REFERENCE_BYTES,
    Chooser,
    CollectiveChoice,
    Forest,
)
from shardwise.collectives.solver.classical import best_ring, hierarchical
from shardwise.collectives.solver.derive import forest_of, lowered
from shardwise.collectives.solver.network import Network, find_symmetry
from shardwise.collectives.solver.solve import solve
from shardwise.collectives.solver.spec import cut_bound, demand_of
from shardwise.cost.collectives import CollectiveModel, Line, collective_model

WORTH = 0.1  # fraction of the library's time that another implementation must save
MAX_RANKS = 16  # of a group that is solved while plans are searched; larger ones on request
ITEM_BYTES = 4
SMALL_BYTES, LARGE_BYTES = 256 << 10, 64 << 20  # sizes through which a candidate's line goes
CLOSE = 0.01  # fraction of the time by which a simpler implementation may be slower
CHUNK_BYTES = 128 * 1024  # unless the solver has tuned it
SIZES = tuple(1 << n for n in range(16, 31))  # latency dominates below: leave it to the library


def may_gain(cluster: Cluster) -> bool:
    """Return whether some collective could be faster than the library's on this cluster.

    Nothing can be gained if ranks are equal and a ring in their order uses every NIC fully: devices
    of one node, or equal nodes of one device behind one switch. About equal nodes of GPUs, NCCL
    knows as much as the cluster file.
    """
    if cluster.num_ranks < 2:
        return False
    if any(node.link is not None and node.link.shared for node in cluster.nodes):
        return True
    if cluster.num_nodes == 1:
        return False
    kinds = {(node.link, node.nic, node.count) for node in cluster.nodes}
    network = cluster.network
    if len(kinds) > 1 or network.trunks:
        return True
    plain = cluster.nodes[0].count == 1 and not (network.switches or network.domains)
    return not plain and cluster.nodes[0].device.kind == "cpu"


def chooser(cluster: Cluster, max_ranks: int = MAX_RANKS, use: str = "") -> Chooser | None:
    """Return a selector for this cluster, or None if no alternative can win.

    `use` forces an implementation if it is possible, whatever the predicted times.
    """
    if use == "library" or not (use or may_gain(cluster)):
        return None
    return partial(select, cluster, max_ranks=max_ranks, use=use)


def select(
    cluster: Cluster,
    operation: str,
    groups: Ints | Sequence[Sequence[int]],
    *,
    max_ranks: int = MAX_RANKS,
    use: str = "",
) -> CollectiveChoice | None:
    """Return the choice for one operation; None for one rank or an operation without alternatives.

    `use` is as in `chooser`.

    >>> fast = Cluster.preset("cpu", nodes=4, devices_per_node=1)
    >>> select(fast, "all_reduce", [range(4)]).uses
    'library'
    """
    rows = np.asarray(groups, dtype=np.int64)
    if operation not in OPERATIONS or rows.shape[-1] < 2:
        return None
    library = collective_model(cluster, operation, rows)
    choice = CollectiveChoice(
        operation=operation,
        groups=tuple(tuple(row) for row in rows.tolist()),
        predicted_s={"library": library.seconds(REFERENCE_BYTES)},
    )
    if not (use or may_gain(cluster)) or rows.shape[-1] > max_ranks:
        return choice
    candidates = [_shared(cluster, choice)]
    networks = contended(cluster, rows)
    if use or not _out_of_reach(library, networks, operation):
        candidates += [_hierarchical(networks, choice), _solved(networks, choice)]
    allowed = [c for c in candidates if c is not None and use in ("", c.uses)]
    return _choose(choice, library, allowed, forced=bool(use))


def _choose(
    choice: CollectiveChoice,
    library: CollectiveModel,
    candidates: Sequence[CollectiveChoice],
    *,
    forced: bool,
) -> CollectiveChoice:
    """Return the best candidate if it saves enough, else the library; with the times of all."""
    lines = {candidate.uses: library.line_of(candidate) for candidate in candidates}
    seconds = {name: line.seconds(REFERENCE_BYTES) for name, line in lines.items()}
    choice = replace(choice, predicted_s={**choice.predicted_s, **seconds})
    if not candidates:
        return choice
    shortest = min(seconds.values())
    best = next(c for c in candidates if seconds[c.uses] <= (1 + CLOSE) * shortest)
    start = 0 if forced else _min_bytes(library, lines[best.uses])
    if start is None:
        return choice
    return replace(best, min_bytes=start, predicted_s=choice.predicted_s)


def saves_enough(library_s: float, other_s: float) -> bool:
    """Return whether an implementation saves more than `WORTH` of the library's time."""
    return other_s < (1 - WORTH) * library_s


def _min_bytes(library: CollectiveModel, line: Line) -> int | None:
    """Return the size from which a line always saves enough; None if steps send less than that."""
    worth = takewhile(lambda n: saves_enough(library.seconds(n), line.seconds(n)), reversed(SIZES))
    start = min(worth, default=math.inf)
    return int(start) if start <= LARGE_BYTES else None


def _out_of_reach(library: CollectiveModel, networks: Sequence[Network], operation: str) -> bool:
    """Return whether no program can save enough, by the bound on bytes that cross the network."""
    bound = 0.0
    for network in (key.network for key in dict.fromkeys(map(_Key, networks))):
        demand = demand_of(network, operation)
        symmetry = find_symmetry(network, demand.colors(network.num_ranks))
        bound = max(bound, cut_bound(network, demand, symmetry))
    line = library.line("bound", 0.0, bound)
    return not saves_enough(library.seconds(LARGE_BYTES), line.seconds(LARGE_BYTES))


# ------------------------------------------------------------ candidates
def contended(cluster: Cluster, groups: Ints) -> list[Network]:
    """Return the network of each group, with its part of the links that several groups use."""
    networks = [Network.of_cluster(cluster, row) for row in groups.tolist()]
    users = Counter(name for network in networks for name in network.resources)
    return [
        replace(n, capacity=n.capacity / np.array([float(users[name]) for name in n.resources]))
        for n in networks
    ]


def _shared(cluster: Cluster, library: CollectiveChoice) -> CollectiveChoice | None:
    """Return the candidate of shared memory, if it was measured on the links of all groups."""
    topology, operation, groups = cluster.topology, library.operation, np.array(library.groups)
    nodes = topology.node[groups]
    if (nodes != nodes[:, :1]).any():
        return None
    per_node = np.repeat(np.arange(len(cluster.nodes)), [n.copies for n in cluster.nodes])
    links = {cluster.nodes[per_node[node]].link for node in np.unique(nodes)}
    measured = [link for link in links if link is not None and operation in dict(link.shared)]
    if len(measured) < len(links):
        return None
    sizes = (SMALL_BYTES, REFERENCE_BYTES, LARGE_BYTES)
    times = [max(_shared_s(cluster, operation, groups, li, n) for li in measured) for n in sizes]
    pairs = pairwise(zip(sizes, times, strict=True))
    # The line is nowhere below the curve: data beyond the caches take longer per byte.
    s_per_byte = max(0.0, *((t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairs))
    latency_s = max(0.0, times[0] - s_per_byte * SMALL_BYTES)
    return replace(library, uses="shared", latency_s=latency_s, s_per_byte=s_per_byte)


def _shared_s(cluster: Cluster, operation: str, groups: Ints, link: Link, num_bytes: int) -> float:
    """Return the measured time of shared memory, stored as a multiple of the link's time."""
    model = collective_model(cluster, operation, groups)
    factor = factor_of(link.shared, operation, groups.shape[-1])
    line = model.lines[0]
    latency_s = line.latency_s / model.factor.latency * factor.latency
    return latency_s + num_bytes * line.s_per_byte * factor.bytes.at(num_bytes)


def _solved(networks: Sequence[Network], library: CollectiveChoice) -> CollectiveChoice | None:
    solutions = [_solution(_Key(network), library.operation) for network in networks]
    solved = [solution for solution in solutions if solution is not None]
    return _candidate("solved", solved, library) if len(solved) == len(networks) else None


def _hierarchical(
    networks: Sequence[Network], library: CollectiveChoice
) -> CollectiveChoice | None:
    forests = []
    for network in networks:
        trees = hierarchical(network, demand_of(network, library.operation))
        if trees is None:
            return None
        forests.append((forest_of(network, trees), CHUNK_BYTES))
    return _candidate("hierarchical", forests, library)


def _candidate(
    name: str, forests_and_chunks: Sequence[tuple[Forest, int]], library: CollectiveChoice
) -> CollectiveChoice:
    """Return the choice of trees whose line goes through two sizes, by the slowest group."""
    forests = [forest for forest, _ in forests_and_chunks]
    chunk = min(chunk for _, chunk in forests_and_chunks)
    small, large = (
        max(_lowered_s(forest, library.operation, size, chunk) for forest in set(forests))
        for size in (SMALL_BYTES, LARGE_BYTES)
    )
    s_per_byte = (large - small) / (LARGE_BYTES - SMALL_BYTES)
    return replace(
        library,
        uses=name,
        latency_s=max(0.0, small - s_per_byte * SMALL_BYTES),
        s_per_byte=s_per_byte,
        chunk_bytes=chunk,
        forests=tuple(forests if len(set(forests)) > 1 else forests[:1]),
    )


@lru_cache(maxsize=1024)
def _lowered_s(forest: Forest, operation: str, num_bytes: int, chunk_bytes: int) -> float:
    numel, count = num_bytes // ITEM_BYTES, forest.num_ranks
    parts = [numel * (i + 1) // count - numel * i // count for i in range(count)]
    counts = () if operation == "all_reduce" else parts
    sizes = {"item_bytes": ITEM_BYTES, "chunk_bytes": chunk_bytes}
    return lowered(forest, operation, numel, **sizes, counts=counts).seconds


class _Key:
    """A network that equals others with the same figures, whatever the names of their ranks."""

    def __init__(self, network: Network) -> None:
        self.network = network
        arrays = (network.capacity, network.source, network.target, network.uses, network.latency_s)
        figures = tuple(array.tobytes() for array in arrays)
        self.figures = (*figures, network.uses.shape, network.message_s, network.groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.figures == other.figures

    def __hash__(self) -> int:
        return hash(self.figures)


@lru_cache(maxsize=1024)
def _solution(key: _Key, operation: str) -> tuple[Forest, int] | None:
    """Return the trees of a large transfer and the size of their chunks, or None without trees.

    If rounds of messages are fastest, as between two ranks, use the trees of a ring instead.
    """
    network, numel = key.network, LARGE_BYTES // ITEM_BYTES
    # Rounds limit the search instead of time: clocks differ between ranks.
    solution = solve(network, operation, numel, item_bytes=ITEM_BYTES, limit_s=math.inf)
    if solution.trees:
        largest = max(chunk.size for chunk in solution.program.chunks)
        return forest_of(network, solution.trees), largest * ITEM_BYTES
    ring = best_ring(network, demand_of(network, operation))
    return None if ring is None else (forest_of(network, ring), CHUNK_BYTES)
