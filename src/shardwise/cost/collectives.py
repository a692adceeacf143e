"""The time of collectives, from the links they cross.

Enters: a cluster, an operation, and the groups of ranks that do it at the same moment. Leaves:
`CollectiveModel`: for every algorithm that the communication library has for the operation, a line
`latency + bytes × seconds per byte`; the smallest counts.

    seconds per byte = max over resources r of  Σ over edges that cross r of share / capacity(r)

where an edge is a pair of ranks, and its share the part of the bytes that it moves: (n-1)/n for
each of the n edges of a ring, once for an all-gather, twice for an all-reduce. Groups that cross
the same card, bus, switch or trunk thus slow each other down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Ints
from shardwise.cluster import Cluster, Curve, Factor
from shardwise.cluster.links import ONE, OPERATIONS, factor_of
from shardwise.cost.traffic import PHASES, Phase, RankGroups
from shardwise.errors import ClusterError, did_you_mean
from shardwise.messages.choice import CollectiveChoice

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
