"""The time of collectives, from the links they cross.

A `CollectiveModel` has, for every algorithm of the communication library, a line `latency + bytes ×
seconds per byte`; the fastest counts. All groups of ranks run the operation at the same time.

    seconds per byte = max over resources r of  Σ over edges that cross r of share / capacity(r)

where an edge is a pair of ranks, and its share the part of the bytes that it moves: (n-1)/n for
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
from shardwise.cluster import Cluster, Curve, Factor, Topology
from shardwise.cluster.links import ONE, OPERATIONS, factor_of
from shardwise.errors import ClusterError, did_you_mean
from shardwise.messages.choice import CollectiveChoice

# The traffic of collectives: which pairs of ranks exchange what share of the bytes.
#
# An *island* is what one link connects; a *run*, the ranks of a group on one island. The library
# runs a ring for each rank of a run, which leaves the island at that rank, so that all cards carry
# the same. Ranks are numbered node by node: a sorted group visits its runs one after the other.


Crossings = list[tuple[Ints, Floats]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Traffic at one moment: resources (-1: none), and the bytes per byte that cross each."""

    crossings: Crossings
    latency_s: float


class RankGroups:
    """What the algorithms share: sorted groups, and their runs."""

    def __init__(
        self, topology: Topology, operation: str, ranks: Ints, peers_at_once: int = 1
    ) -> None:
        self.topology, self.operation, self.ranks = topology, operation, ranks
        self.peers_at_once = peers_at_once
        self.num_groups, self.size = ranks.shape
        self.flat = ranks.reshape(-1)
        island = topology.island[self.flat]
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
        """Whether a group reaches over several islands."""
        return bool(self.runs.max() > 1)

    @property
    def passes(self) -> int:
        """How often the bytes go around: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.operation == "all_reduce" else 1

    def inner(self) -> tuple[Ints, Ints, Ints]:
        """Each rank of a run of several, its successor around the run, and the run."""
        run = np.cumsum(self.first) - 1
        place = np.arange(self.flat.size)
        end = (self.start + self.length)[run]
        following = np.where(place + 1 == end, self.start[run], place + 1)
        keep = self.length[run] > 1
        return self.flat[keep], self.flat[following[keep]], run[keep]

    def outer(self) -> tuple[Ints, Ints]:
        """The runs of groups over several islands, and the next run of each around its group."""
        run = np.flatnonzero(self.runs[self.group] > 1)
        group = self.group[run]
        last = run == (self.first_run + self.runs)[group] - 1
        return run, np.where(last, self.first_run[group], run + 1)

    def between(self, run: Ints, other: Ints) -> tuple[Ints, Ints, Floats, Ints]:
        """Pairs of ranks that carry what goes from `run[i]` to `other[i]`: with shares, and i."""
        here, there = self.length[run], self.length[other]
        pairs = np.where(here == there, here, here * there)
        index = np.repeat(np.arange(run.size), pairs)
        step = np.arange(index.size) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        wide = here[index]
        a = self.start[run][index] + step % wide
        b = self.start[other][index] + np.where(wide == there[index], step % wide, step // wide)
        return self.flat[a], self.flat[b], 1.0 / pairs[index], index


def ring(setting: RankGroups) -> Iterator[Phase]:
    """Everyone passes shares on to the next; a broadcast or a reduction passes all of it."""
    size = setting.size
    share = setting.passes * (size - 1) / size
    weight = 1.0 if setting.operation in ("broadcast", "reduce") else share
    topology = setting.topology
    a, b, run = setting.inner()
    ways = _leaving(setting, run)
    columns, latency = topology.crossed(a, b)
    crossings = [(column, ways * weight) for column in columns]
    total = np.bincount(setting.group[run], ways * latency, setting.num_groups)
    if setting.is_far:
        here, there = setting.outer()
        a, b, part, index = setting.between(here, there)
        columns, latency = topology.crossed(a, b)
        crossings += [(column, part * weight) for column in columns]
        total = total + np.bincount(setting.group[here[index]], part * latency, setting.num_groups)
    yield Phase(crossings=crossings, latency_s=float(total.max()) * share)


def tree(setting: RankGroups) -> Iterator[Phase]:
    """Up and down two binary trees over the islands, each with half the bytes, as NCCL does."""
    ways = {"broadcast": ("down",), "reduce": ("up",)}.get(setting.operation, ("up", "down"))
    topology = setting.topology
    a, b, run = setting.inner()
    share = (setting.length[run] - 1) / setting.length[run]
    crossings: Crossings = []
    steps_s = 0.0
    for way in ways:
        columns, latency = topology.crossed(a, b) if way == "up" else topology.crossed(b, a)
        crossings += [(column, share) for column in columns]
        steps_s += _steps(int(setting.length.max())) * _largest(latency)
    if setting.is_far:
        for child, parent in _trees(setting):
            up = setting.between(child, parent)
            for way in ways:
                ends = (up[0], up[1]) if way == "up" else (up[1], up[0])
                columns, latency = topology.crossed(*ends)
                crossings += [(column, up[2] / 2) for column in columns]
                steps_s += _steps(int(setting.runs.max())) * _largest(latency) / 2
    yield Phase(crossings=crossings, latency_s=steps_s)


def hierarchical(setting: RankGroups) -> Iterator[Phase]:
    """Inside each island, across islands with a part for each rank, and inside again."""
    topology = setting.topology
    a, b, run = setting.inner()
    if a.size:
        columns, latency = topology.crossed(a, b)
        share = (setting.length[run] - 1) / setting.length[run] * setting.passes
        steps = _steps(int(setting.length.max())) * setting.passes
        yield Phase(
            crossings=[(column, share) for column in columns], latency_s=steps * _largest(latency)
        )
    if setting.is_far:
        here, there = setting.outer()
        a, b, part, index = setting.between(here, there)
        columns, latency = topology.crossed(a, b)
        runs = setting.runs[setting.group[here[index]]]
        share = part * setting.passes * (runs - 1) / runs
        total = np.bincount(setting.group[here[index]], part * latency, setting.num_groups)
        rounds = setting.passes * (setting.runs - 1) / setting.runs
        yield Phase(
            crossings=[(column, share) for column in columns],
            latency_s=float((total * rounds).max()),
        )


def direct(setting: RankGroups) -> Iterator[Phase]:
    """Everyone sends to everyone; what crosses a switch follows from how many are behind it."""
    if setting.operation == "send":
        columns, latency = setting.topology.crossed(setting.ranks[:, 0], setting.ranks[:, 1])
        ones = np.ones(setting.num_groups)
        crossings = [(column, ones) for column in columns]
        yield Phase(crossings=crossings, latency_s=_largest(latency))
        return
    topology, size = setting.topology, setting.size
    run = np.cumsum(setting.first) - 1
    near, far = (setting.length[run] - 1) / size, (size - setting.length[run]) / size
    flat = setting.flat
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
        switch, _, inside = _counts(group, level[node])
        both = inside * (size - inside) / size
        crossings += [(topology.first_switch + 2 * switch + way, both) for way in (0, 1)]
    for index, ends in enumerate(topology.trunks):
        end = ends[node]
        sides = [np.bincount(group, end == side, setting.num_groups) for side in (0, 1)]
        both = np.array([(sides[0] * sides[1]).sum() / size])
        crossings += [(np.array([topology.first_trunk + 2 * index + way]), both) for way in (0, 1)]
    rounds = math.ceil((size - 1) / setting.peers_at_once)
    yield Phase(crossings=crossings, latency_s=rounds * _farthest(setting))


PHASES: dict[str, Callable[[RankGroups], Iterator[Phase]]] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "direct": direct,
}


def _leaving(setting: RankGroups, run: Ints) -> Floats:
    """How often an edge around a run is used: not by the ring that leaves the island there."""
    length = setting.length[run]
    return np.where(setting.runs[setting.group[run]] > 1, (length - 1) / length, 1.0)


def _trees(setting: RankGroups) -> list[tuple[Ints, Ints]]:
    """Runs and their parents, in NCCL's two trees (`trees.cc`); the second is the first mirrored
    or shifted, so that no run has children in both.
    """
    far = np.flatnonzero(setting.runs[setting.group] > 1)
    base = setting.first_run[setting.group[far]]
    count = setting.runs[setting.group[far]]
    place = far - base
    mirrored = np.where(count % 2 == 0, count - 1 - place, (place - 1) % count)
    found = []
    for own in (place, mirrored):
        low = own & -own
        parent = (own ^ low) | (low << 1)
        parent = np.where(parent >= count, own ^ low, parent)
        if own is mirrored:
            parent = np.where(count % 2 == 0, count - 1 - parent, (parent + 1) % count)
        keep = own > 0
        found.append((far[keep], (base + parent)[keep]))
    return found


def _counts(group: Ints, where: Ints) -> tuple[Ints, Ints, Ints]:
    """Of every group: the places that its ranks are at, the group, and how many are at each."""
    inside = where >= 0
    width = int(where.max(initial=0)) + 1
    keys, number = np.unique(group[inside] * width + where[inside], return_counts=True)
    return keys % width, keys // width, number


def _farthest(setting: RankGroups) -> float:
    """The largest latency within a group, found from the first ranks of its runs."""
    heads = setting.flat[setting.start]
    origin = setting.flat[setting.start[setting.first_run[setting.group]]]
    ends = [(origin, heads), (heads, origin)]
    a, b, _ = setting.inner()
    ends.append((a, b))
    if setting.is_far:
        run, after = setting.outer()
        ends.append((heads[run], heads[after]))
    found = 0.0
    for a, b in ends:
        keep = a != b
        if keep.any():
            found = max(found, _largest(setting.topology.crossed(a[keep], b[keep])[1]))
    return found


def _steps(size: int) -> int:
    return math.ceil(math.log2(size)) if size > 1 else 0


def _largest(latency: Floats) -> float:
    return float(latency.max(initial=0.0))


PLAIN = Factor()

# The algorithms of NCCL (all-reduce: ring, double binary tree, and the two-level ones of its
# CollNet and NVLS; the others: rings, and PAT's logarithmic ones as two-level) and of our transport
# over gloo (`runtime/transport/process_group.py`: everyone exchanges with everyone; gloo's
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
    """One algorithm: its time, and the resource that limits it when there is much to move.

    `factor` is what was measured beyond the wires, by size; 1 where nothing was.
    """

    algorithm: str
    latency_s: float
    s_per_byte: float
    factor: Curve = ONE
    bottleneck: str = ""

    def seconds(self, num_bytes: float) -> float:
        """The time for `num_bytes`."""
        return self.latency_s + num_bytes * self.s_per_byte * self.factor.at(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """The time of one collective; `launch_s` is what issuing it costs, which is not in the time.

    `num_bytes` is the size of the whole value: of an all-gather's result, of a reduce-scatter's
    input, of what each rank holds before an all-to-all, of what is sent.
    """

    operation: str
    group_size: int
    lines: tuple[Line, ...]
    launch_s: float
    factor: Factor = PLAIN  # what was measured beyond the wires
    program: Line | None = None  # what a plan uses instead, from `program_bytes` on
    program_bytes: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        """From the moment that the last rank arrives until all are done."""
        return self._best(num_bytes).seconds(num_bytes)

    def line(self, algorithm: str, latency_s: float, s_per_byte: float) -> Line:
        """A line of the wires' times, with what was measured beyond them."""
        return Line(
            algorithm=algorithm,
            latency_s=latency_s * self.factor.latency,
            s_per_byte=s_per_byte,
            factor=self.factor.bytes,
        )

    def with_choice(self, choice: CollectiveChoice | None) -> CollectiveModel:
        """The model of an operation that a plan lets go another way than the library's."""
        if choice is None or choice.is_library:
            return self
        line = self.line(choice.uses, choice.latency_s, choice.s_per_byte)
        if not choice.has_trees:  # its times are measured, not those of wires
            line = replace(line, latency_s=choice.latency_s, factor=ONE)
        return replace(self, program=line, program_bytes=choice.min_bytes)

    def algorithm(self, num_bytes: float) -> str:
        """The name of the quickest algorithm."""
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
    """The model of `operation` on all `groups` at once: an array of ranks, a row for each group.

    >>> model = collective_model(Cluster.preset("h100"), "all_reduce", [range(8)])
    >>> round(model.seconds(2**30) * 1e3, 1)
    5.2
    """
    ranks = _checked(cluster, operation, groups)
    if ranks.shape[1] == 1:
        line = Line(algorithm="none", latency_s=0.0, s_per_byte=0.0)
        return CollectiveModel(operation=operation, group_size=1, lines=(line,), launch_s=0.0)
    kind = cluster.device(int(ranks[0, 0])).kind
    setting = RankGroups(cluster.topology, operation, ranks, PEERS_AT_ONCE[kind])
    factor = _factor(cluster, setting)
    lines = tuple(_line(setting, name, factor) for name in ALGORITHMS[kind][operation])
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
            f"groups of shape {ranks.shape}, need a row of ranks for each group",
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


def _line(setting: RankGroups, name: str, factor: Factor) -> Line:
    """The line of one algorithm: the sum of its phases, times what was measured beyond them."""
    latency_s = s_per_byte = longest = 0.0
    bottleneck = ""
    topology = setting.topology
    for phase in PHASES[name](setting):
        load = _used(phase, topology.capacity.size) / topology.capacity
        worst = int(np.argmax(load))
        latency_s += phase.latency_s
        s_per_byte += float(load[worst])
        if load[worst] > longest:
            longest, bottleneck = float(load[worst]), topology.label(worst)
    return Line(
        algorithm=name,
        latency_s=latency_s * factor.latency,
        s_per_byte=s_per_byte,
        factor=factor.bytes,
        bottleneck=bottleneck,
    )


def _used(phase: Phase, resources: int) -> NDArray[np.float64]:
    """Bytes over every resource for each byte of the collective's value."""
    used = np.zeros(resources + 1)
    for ids, weights in phase.crossings:
        used += np.bincount(ids + 1, weights=weights, minlength=used.size)
    return used[1:]  # the first was for "no resource"


def crossing_bytes(
    cluster: Cluster, operation: str, groups: NDArray[np.integer], algorithm: str
) -> NDArray[np.float64]:
    """Bytes over every resource of the topology, for each byte of the collective's value."""
    ranks = _checked(cluster, operation, groups)
    kind = cluster.device(int(ranks[0, 0])).kind
    setting = RankGroups(cluster.topology, operation, ranks, PEERS_AT_ONCE[kind])
    resources = cluster.topology.capacity.size
    total = np.zeros(resources)
    for phase in PHASES[algorithm](setting):
        total += _used(phase, resources)
    return total


def _factor(cluster: Cluster, setting: RankGroups) -> Factor:
    """The network's factor for groups over several islands, else that of their slowest link."""
    operation, size = setting.operation, setting.size
    if setting.is_far:
        return factor_of(cluster.network.collectives, operation, size)
    islands = np.unique(setting.topology.island[setting.ranks[:, 0]])
    kinds = dict.fromkeys(setting.topology.factors[island] for island in islands)
    found = [factor_of(factors, operation, size) for factors in kinds]
    return max(found, key=lambda factor: (factor.bytes.best, factor.latency))
