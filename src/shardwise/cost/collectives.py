"""Predict the time of collectives from the links they cross.

A `CollectiveModel` has, for every algorithm of the communication library, a line `latency + bytes ×
seconds per byte`; the fastest algorithm counts. All groups of ranks run the operation at the same
time.

    seconds per byte = max over resources r of  Σ over edges that cross r of share / capacity(r)

where an edge is a pair of ranks, and its share the fraction of the bytes that it moves: (n-1)/n for
each of the n edges of a ring, once for an all-gather, twice for an all-reduce. Groups that cross
the same card, bus, switch or trunk thus slow each other down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Floats, Ints
from shardwise.cluster import Cluster, Curve, Factor
from shardwise.cluster.links import ONE, OPERATIONS, factor_of
from shardwise.collectives.messages.choice import CollectiveChoice
from shardwise.errors import ClusterError, did_you_mean

# ------------------------------------------------------------ traffic
#
# An *island* is the set of ranks that one link connects; a *run*, the ranks of a group on one
# island. The library runs a ring for each rank of a run, which leaves the island at that rank, so
# that all NICs send equally much. Ranks are numbered node by node, so a sorted group visits its
# runs one after the other.


Crossings = list[tuple[Ints, Floats]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Concurrent traffic: resources (-1: none), and the bytes per byte that cross each."""

    crossings: Crossings
    latency_s: float


class RankGroups:
    """Sorted groups of ranks, divided into runs."""

    def __init__(self, cluster: Cluster, operation: str, ranks: Ints) -> None:
        self.topology, self.operation, self.ranks = cluster.topology, operation, ranks
        self.num_groups, self.size = ranks.shape
        self.flat = ranks.reshape(-1)
        self.device_kind = cluster.device(int(self.flat[0])).kind
        island = self.topology.island[self.flat]
        self.first = np.ones(self.flat.size, dtype=bool)
        self.first[1:] = island[1:] != island[:-1]
        self.first[:: self.size] = True
        self.start = np.flatnonzero(self.first)
        self.length = np.diff(np.append(self.start, self.flat.size))
        self.group = self.start // self.size
        self.runs = np.bincount(self.group, minlength=self.num_groups)  # of each group
        self.first_run = np.cumsum(self.runs) - self.runs

    @property
    def is_far(self) -> bool:
        """Whether a group spans several islands."""
        return bool(self.runs.max() > 1)

    @property
    def passes(self) -> int:
        """How often the bytes move: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.operation == "all_reduce" else 1

    def inner(self) -> tuple[Ints, Ints, Ints]:
        """Return each rank of a run of several, its successor around the run, and the run."""
        run = np.cumsum(self.first) - 1
        place = np.arange(self.flat.size)
        end = (self.start + self.length)[run]
        following = np.where(place + 1 == end, self.start[run], place + 1)
        keep = self.length[run] > 1
        return self.flat[keep], self.flat[following[keep]], run[keep]

    def outer(self) -> tuple[Ints, Ints]:
        """Return the runs of groups over several islands, and the run that follows each."""
        run = np.flatnonzero(self.runs[self.group] > 1)
        group = self.group[run]
        last = run == (self.first_run + self.runs)[group] - 1
        return run, np.where(last, self.first_run[group], run + 1)

    def between(self, run: Ints, other: Ints) -> tuple[Ints, Ints, Floats, Ints]:
        """Return pairs of ranks that send from `run[i]` to `other[i]`, their shares, and i."""
        length, other_length = self.length[run], self.length[other]
        pairs = np.where(length == other_length, length, length * other_length)
        index = np.repeat(np.arange(run.size), pairs)
        step = np.arange(index.size) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        ranks = length[index]
        same_length = ranks == other_length[index]
        a = self.start[run][index] + step % ranks
        b = self.start[other][index] + np.where(same_length, step % ranks, step // ranks)
        return self.flat[a], self.flat[b], 1.0 / pairs[index], index


def ring(groups: RankGroups) -> Iterator[Phase]:
    """Yield the phase of a ring: each rank sends shares, in a broadcast or reduce all bytes."""
    size = groups.size
    share = groups.passes * (size - 1) / size
    weight = 1.0 if groups.operation in ("broadcast", "reduce") else share
    topology = groups.topology
    a, b, run = groups.inner()
    length = groups.length[run]
    # The ring that leaves the island skips an edge of the run.
    uses = np.where(groups.runs[groups.group[run]] > 1, (length - 1) / length, 1.0)
    columns, latency = topology.crossed(a, b)
    crossings = [(column, uses * weight) for column in columns]
    total = np.bincount(groups.group[run], uses * latency, groups.num_groups)
    if groups.is_far:
        here, there = groups.outer()
        a, b, part, index = groups.between(here, there)
        columns, latency = topology.crossed(a, b)
        crossings += [(column, part * weight) for column in columns]
        total = total + np.bincount(groups.group[here[index]], part * latency, groups.num_groups)
    yield Phase(crossings=crossings, latency_s=float(total.max()) * share)


def tree(groups: RankGroups) -> Iterator[Phase]:
    """Yield the phase of NCCL's two binary trees over islands, each with half the bytes."""
    directions = {"broadcast": ("down",), "reduce": ("up",)}.get(groups.operation, ("up", "down"))
    topology = groups.topology
    a, b, run = groups.inner()
    share = (groups.length[run] - 1) / groups.length[run]
    crossings: Crossings = []
    steps_s = 0.0
    for direction in directions:
        columns, latency = topology.crossed(a, b) if direction == "up" else topology.crossed(b, a)
        crossings += [(column, share) for column in columns]
        steps_s += _steps(int(groups.length.max())) * _largest(latency)
    if groups.is_far:
        for child, parent in _trees(groups):
            up = groups.between(child, parent)
            for direction in directions:
                ends = (up[0], up[1]) if direction == "up" else (up[1], up[0])
                columns, latency = topology.crossed(*ends)
                crossings += [(column, up[2] / 2) for column in columns]
                steps_s += _steps(int(groups.runs.max())) * _largest(latency) / 2
    yield Phase(crossings=crossings, latency_s=steps_s)


def hierarchical(groups: RankGroups) -> Iterator[Phase]:
    """Yield the phases inside each island, and across islands with a part for each rank."""
    topology = groups.topology
    a, b, run = groups.inner()
    if a.size:
        columns, latency = topology.crossed(a, b)
        share = (groups.length[run] - 1) / groups.length[run] * groups.passes
        steps = _steps(int(groups.length.max())) * groups.passes
        yield Phase(
            crossings=[(column, share) for column in columns], latency_s=steps * _largest(latency)
        )
    if groups.is_far:
        here, there = groups.outer()
        a, b, part, index = groups.between(here, there)
        columns, latency = topology.crossed(a, b)
        runs = groups.runs[groups.group[here[index]]]
        share = part * groups.passes * (runs - 1) / runs
        total = np.bincount(groups.group[here[index]], part * latency, groups.num_groups)
        rounds = groups.passes * (groups.runs - 1) / groups.runs
        yield Phase(
            crossings=[(column, share) for column in columns],
            latency_s=float((total * rounds).max()),
        )


def direct(groups: RankGroups) -> Iterator[Phase]:
    """Yield the phase in which every rank sends to every other one of its group."""
    if groups.operation == "send":
        columns, latency = groups.topology.crossed(groups.ranks[:, 0], groups.ranks[:, 1])
        ones = np.ones(groups.num_groups)
        crossings = [(column, ones) for column in columns]
        yield Phase(crossings=crossings, latency_s=_largest(latency))
        return
    topology, size = groups.topology, groups.size
    run = np.cumsum(groups.first) - 1
    near, far = (groups.length[run] - 1) / size, (size - groups.length[run]) / size
    flat = groups.flat
    crossings = [
        (flat, near),
        (flat + topology.num_ranks, near),
        (topology.bus[topology.island[flat]], near),
        (topology.out_card[flat], far),
        (topology.in_card[flat], far),
    ]
    group = np.arange(flat.size) // size
    node = topology.node[flat]
    for level in topology.levels:
        switch, inside = _counts(group, level[node])
        both = inside * (size - inside) / size
        crossings += [
            (topology.first_switch + 2 * switch + direction, both) for direction in (0, 1)
        ]
    for index, ends in enumerate(topology.trunks):
        end = ends[node]
        sides = [np.bincount(group, end == side, groups.num_groups) for side in (0, 1)]
        both = np.array([(sides[0] * sides[1]).sum() / size])
        crossings += [
            (np.array([topology.first_trunk + 2 * index + direction]), both) for direction in (0, 1)
        ]
    rounds = math.ceil((size - 1) / PEERS_AT_ONCE[groups.device_kind])
    yield Phase(crossings=crossings, latency_s=rounds * _farthest(groups))


PHASES: dict[str, Callable[[RankGroups], Iterator[Phase]]] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "direct": direct,
}


def _trees(groups: RankGroups) -> list[tuple[Ints, Ints]]:
    """Return runs and their parents in NCCL's two trees (`trees.cc`).

    The second tree is the first one mirrored or shifted, so that no run has children in both.
    """
    far = np.flatnonzero(groups.runs[groups.group] > 1)
    base = groups.first_run[groups.group[far]]
    count = groups.runs[groups.group[far]]
    place = far - base
    mirrored = np.where(count % 2 == 0, count - 1 - place, (place - 1) % count)
    trees = []
    for own in (place, mirrored):
        low = own & -own
        parent = (own ^ low) | (low << 1)
        parent = np.where(parent >= count, own ^ low, parent)
        if own is mirrored:
            parent = np.where(count % 2 == 0, count - 1 - parent, (parent + 1) % count)
        keep = own > 0
        trees.append((far[keep], (base + parent)[keep]))
    return trees


def _counts(group: Ints, switch: Ints) -> tuple[Ints, Ints]:
    """Return, for each switch and group behind it, the switch and its ranks of the group."""
    inside = switch >= 0
    width = int(switch.max(initial=0)) + 1
    keys, number = np.unique(group[inside] * width + switch[inside], return_counts=True)
    return keys % width, number


def _farthest(groups: RankGroups) -> float:
    """Return the largest latency within a group, estimated from the first ranks of its runs."""
    heads = groups.flat[groups.start]
    origin = groups.flat[groups.start[groups.first_run[groups.group]]]
    run, after = groups.outer()
    ends = [(origin, heads), (heads, origin), groups.inner()[:2], (heads[run], heads[after])]
    a, b = (np.concatenate(side) for side in zip(*ends, strict=True))
    return _largest(groups.topology.crossed(a[a != b], b[a != b])[1])


def _steps(size: int) -> int:
    return math.ceil(math.log2(size)) if size > 1 else 0


def _largest(latency: Floats) -> float:
    return float(latency.max(initial=0.0))


PLAIN = Factor()
MAX_BUCKET_LOG2 = 7  # 128 MiB: the runtime has 256 MiB of messages on the way

# The algorithms of NCCL (all-reduce: ring, double binary tree, and the two-level ones of CollNet
# and NVLS; all-gather and reduce-scatter: rings, and PAT's logarithmic ones as two-level) and of
# our transport over gloo (`runtime/transport/process_group.py`: all ranks exchange directly; gloo's
# all-reduce is a ring, its broadcast and reduce are trees).
ALGORITHMS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "all_reduce": ("ring", "tree", "hierarchical"),
        "all_gather": ("ring", "hierarchical"),
        "reduce_scatter": ("ring", "hierarchical"),
        "all_to_all": ("direct",),
        "broadcast": ("ring", "tree"),
        "reduce": ("ring", "tree"),
        "send": ("direct",),
    },
    "cpu": {
        "all_reduce": ("ring",),
        "all_gather": ("direct",),
        "reduce_scatter": ("direct",),
        "all_to_all": ("direct",),
        "broadcast": ("tree",),
        "reduce": ("tree",),
        "send": ("direct",),
    },
}
# NCCL: NCCL_MAX_DEV_WORK_P2P_PER_BATCH of its device.h; gloo handles messages one after the other.
PEERS_AT_ONCE = {"cuda": 8, "cpu": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The time of one algorithm, and the resource that limits large transfers.

    `factor` is the measured slowdown relative to the links, by size; 1 if nothing was measured.
    """

    algorithm: str
    latency_s: float
    s_per_byte: float
    factor: Curve = ONE
    bottleneck: str = ""

    def seconds(self, num_bytes: float) -> float:
        """Return the time for `num_bytes`."""
        return self.latency_s + num_bytes * self.s_per_byte * self.factor.at(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """The time of one collective; `launch_s` is the cost of issuing it, which comes on top.

    `num_bytes` is the size of the full value: the result of an all-gather, the input of a
    reduce-scatter, the input of each rank of an all-to-all, the data of a send.
    """

    operation: str
    group_size: int
    lines: tuple[Line, ...]
    launch_s: float
    factor: Factor = PLAIN  # measured slowdown relative to the links
    program: Line | None = None  # the plan's own implementation, from `program_bytes` on
    program_bytes: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        """Return the time from the arrival of the last rank until all ranks are done."""
        return self._best(num_bytes).seconds(num_bytes)

    def bucket_mib(self, num_bytes: float) -> int:
        """Return the size of the messages in which these bytes are best sent, a power of two.

        Gradients are sent while backward makes more of them, but nothing hides the last message,
        and each costs a latency. Messages of size b thus take `b × s_per_byte + num_bytes / b ×
        latency` in addition, least where both terms are equal. The result is 0 for up to a MiB.
        """
        latency = self.seconds(0.0) + self.launch_s
        s_per_byte = (self.seconds(num_bytes) - self.seconds(0.0)) / max(num_bytes, 1.0)
        if num_bytes <= 1 << 20 or s_per_byte <= 0:
            return 0
        best = math.sqrt(num_bytes * latency / s_per_byte) / (1 << 20)
        return int(2 ** min(max(round(math.log2(best)), 0), MAX_BUCKET_LOG2))

    def line(self, algorithm: str, latency_s: float, s_per_byte: float) -> Line:
        """Return a line for these link times, corrected by the measured factors."""
        return Line(
            algorithm=algorithm,
            latency_s=latency_s * self.factor.latency,
            s_per_byte=s_per_byte,
            factor=self.factor.bytes,
        )

    def line_of(self, choice: CollectiveChoice) -> Line:
        """Return the line of another implementation; without trees, its times were measured."""
        if choice.has_trees:
            return self.line(choice.uses, choice.latency_s, choice.s_per_byte)
        return Line(algorithm=choice.uses, latency_s=choice.latency_s, s_per_byte=choice.s_per_byte)

    def with_choice(self, choice: CollectiveChoice | None) -> CollectiveModel:
        """Return the model of an operation for which a plan chose another implementation."""
        if choice is None or choice.is_library:
            return self
        return replace(self, program=self.line_of(choice), program_bytes=choice.min_bytes)

    def algorithm(self, num_bytes: float) -> str:
        """Return the name of the fastest algorithm."""
        return self._best(num_bytes).algorithm

    @property
    def bottleneck(self) -> str:
        """The resource that limits large transfers; empty for groups of one."""
        return self._best(math.inf).bottleneck

    def _best(self, num_bytes: float) -> Line:
        if self.program is not None and num_bytes >= self.program_bytes:
            return self.program
        if num_bytes == math.inf:
            return min(self.lines, key=lambda line: (line.s_per_byte, line.latency_s))
        return min(self.lines, key=lambda line: line.seconds(num_bytes))


def collective_model(
    cluster: Cluster, operation: str, groups: NDArray[np.integer] | Sequence[Sequence[int]]
) -> CollectiveModel:
    """Return the model of `operation` on all `groups` at once: an array with a row per group.

    >>> model = collective_model(Cluster.preset("h100"), "all_reduce", [range(8)])
    >>> round(model.seconds(2**30) * 1e3, 1)
    5.2
    """
    ranks = _checked(cluster, operation, groups)
    if ranks.shape[1] == 1:
        line = Line(algorithm="none", latency_s=0.0, s_per_byte=0.0)
        return CollectiveModel(operation=operation, group_size=1, lines=(line,), launch_s=0.0)
    rank_groups = RankGroups(cluster, operation, ranks)
    factor = _factor(cluster, rank_groups)
    names = ALGORITHMS[rank_groups.device_kind][operation]
    lines = tuple(_line(rank_groups, name, factor) for name in names)
    return CollectiveModel(
        operation=operation,
        group_size=ranks.shape[1],
        lines=lines,
        launch_s=max(device.overhead_s for node in cluster.nodes for device in node.devices),
        factor=factor,
    )


def _checked(cluster: Cluster, operation: str, groups: object) -> Ints:
    if operation not in OPERATIONS:
        raise ClusterError(
            f"no collective {operation!r}{did_you_mean(operation, OPERATIONS)}",
            hint=", ".join(OPERATIONS),
        )
    ranks = np.asarray(groups, dtype=np.int64)
    if ranks.ndim != 2 or not ranks.size:
        raise ClusterError(
            f"groups have shape {ranks.shape}, must be a matrix with a row for each group",
            hint="np.arange(8).reshape(2, 4)",
        )
    if ranks.min() < 0 or ranks.max() >= cluster.num_ranks:
        raise ClusterError(
            f"ranks {ranks.min()} to {ranks.max()} in a cluster of {cluster.num_ranks} ranks"
        )
    if operation == "send":
        if ranks.shape[1] != 2:
            raise ClusterError(f"send is between 2 ranks, not {ranks.shape[1]}", hint="[[0, 1]]")
        return ranks
    return np.sort(ranks, axis=1)


def _line(groups: RankGroups, name: str, factor: Factor) -> Line:
    """Return the line of one algorithm: the sum of its phases, corrected by measured factors."""
    topology, phases = groups.topology, list(PHASES[name](groups))
    loads = [_used(phase, topology.capacity.size) / topology.capacity for phase in phases]
    slowest = max(loads, key=lambda load: float(load.max()))
    return Line(
        algorithm=name,
        latency_s=sum(phase.latency_s for phase in phases) * factor.latency,
        s_per_byte=sum(float(load.max()) for load in loads),
        factor=factor.bytes,
        bottleneck=topology.label(int(slowest.argmax())) if slowest.any() else "",
    )


def _used(phase: Phase, resources: int) -> Floats:
    """Return the bytes over every resource per byte of the collective's value."""
    used = np.zeros(resources + 1)
    for ids, weights in phase.crossings:
        used += np.bincount(ids + 1, weights=weights, minlength=used.size)
    return used[1:]  # the first entry is for "no resource"


def crossing_bytes(
    cluster: Cluster, operation: str, groups: NDArray[np.integer], algorithm: str
) -> Floats:
    """Return the bytes over every resource of the topology per byte of the collective's value."""
    rank_groups = RankGroups(cluster, operation, _checked(cluster, operation, groups))
    resources = cluster.topology.capacity.size
    used = [_used(phase, resources) for phase in PHASES[algorithm](rank_groups)]
    total: Floats = np.sum(used, axis=0)
    return total


def _factor(cluster: Cluster, groups: RankGroups) -> Factor:
    """Return the network's factor if groups span several islands, else that of the slowest link."""
    operation, size = groups.operation, groups.size
    if groups.is_far:
        return factor_of(cluster.network.collectives, operation, size)
    islands = np.unique(groups.topology.island[groups.ranks[:, 0]])
    kinds = dict.fromkeys(groups.topology.factors[island] for island in islands)
    factors = [factor_of(of_link, operation, size) for of_link in kinds]
    return max(factors, key=lambda factor: (factor.bytes.best, factor.latency))
