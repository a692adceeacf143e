"""The devices that a plan uses: groups of ranks and their shares of the batch, or fewer devices.

Equal devices have one grouping, with ranks in order. Unequal ones are also grouped by kind, so that
the devices of a group are equal, and in groups of unequal size; shares along "dp" follow speeds.

Devices of about the same speed, with about the same links, form a class. `subsets` leaves out the
slowest class first, then the next; then it takes single nodes, whose devices need no network, and
half, a quarter, … of the fastest class down to one device: a few clusters, not all subsets.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd

from shardwise.cluster import Cluster, Mesh
from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import ClusterError, InfeasiblePlan
from shardwise.plans.search_result import LeftOutDevices
from shardwise.shares import Shares
from shardwise.simulation.costs import Group

RESOLUTION = 24  # the largest integer share, that of the fastest rank
SAME_SPEED = 1.25  # maximum ratio of speeds within a class, since measured speeds differ a little
MAX_CLASSES = 4  # if there are more, only the slowest can be left out


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Ranks of every group, in mesh order, and the relative speed of each rank."""

    ranks: tuple[tuple[int, ...], ...]
    rates: tuple[tuple[float, ...], ...]

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speed of every group, whose ranks share its batch according to their own speeds."""
        return tuple(sum(rates) for rates in self.rates)

    def groups(self, tp: int, axes: Sequence[tuple[str, int]]) -> tuple[Group, ...]:
        """Return the groups as meshes of dp x tp."""
        groups = []
        for ranks, rates in zip(self.ranks, self.rates, strict=True):
            dp, remainder = divmod(len(ranks), tp)
            if remainder or not dp:
                raise InfeasiblePlan(f"tp={tp} on a group of {len(ranks)} ranks")
            shares = weights([min(rates[i * tp : (i + 1) * tp]) for i in range(dp)])
            size = dp if len(set(shares)) == 1 else Shares(*shares)
            mesh = Mesh(axes=((("dp", size),) if dp > 1 else ()) + tuple(axes))
            groups.append(Group(mesh=mesh, ranks=ranks))
        return tuple(groups)


def weights(rates: Sequence[float]) -> tuple[int, ...]:
    """Return small integers in the ratio of the rates.

    >>> weights([1.0, 0.5])
    (2, 1)
    """
    parts = [max(1, round(RESOLUTION * rate / max(rates))) for rate in rates]
    return tuple(number // gcd(*parts) for number in parts)


def groupings(
    num_ranks: int, rates: Sequence[float], kinds: Sequence[int], pp: int
) -> list[Grouping]:
    """Return the groupings of `pp` groups to try, given the rate and the kind of every rank."""
    natural = list(range(num_ranks))
    orders = [_even(natural, pp)]
    if len(set(kinds)) > 1:
        by_kind = sorted(natural, key=lambda r: (-rates[r], kinds[r], r))
        orders += [_even(by_kind, pp), _even(by_kind[::-1], pp), _by_kind(by_kind, kinds, pp)]
    return [
        Grouping(ranks=ranks, rates=tuple(tuple(rates[r] for r in group) for group in ranks))
        for ranks in dict.fromkeys(order for order in orders if order is not None)
    ]


def _even(ranks: Sequence[int], pp: int) -> tuple[tuple[int, ...], ...] | None:
    size, remainder = divmod(len(ranks), pp)
    if remainder:
        return None
    return tuple(tuple(ranks[g * size : (g + 1) * size]) for g in range(pp))


def _by_kind(
    ranks: Sequence[int], kinds: Sequence[int], pp: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return groups of equal devices; a kind has groups in proportion to its ranks."""
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(kinds[rank], []).append(rank)
    if pp < len(members):
        return None
    counts = {kind: max(1, round(pp * len(same) / len(ranks))) for kind, same in members.items()}
    while sum(counts.values()) > pp:
        counts[max(counts, key=lambda k: (counts[k], k))] -= 1
    while sum(counts.values()) < pp:
        counts[max(counts, key=lambda k: (len(members[k]) / counts[k], k))] += 1
    groups: list[tuple[int, ...]] = []
    for kind, same in members.items():
        even = _even(same, counts[kind])
        if even is None:
            return None
        groups += even
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """Some devices of a cluster, as a cluster and by their ranks in the full one."""

    cluster: Cluster
    ranks: tuple[int, ...]


def subsets(cluster: Cluster, rates: Sequence[float]) -> Iterator[Subset]:
    """Yield the cluster without its slowest devices, …; its nodes; ever fewer fastest devices.

    Of equal nodes, only the first is yielded.
    """
    speeds = [_speeds(cluster, rates, rank) for rank in range(cluster.num_ranks)]
    classes: list[list[int]] = []
    for rank in sorted(range(cluster.num_ranks), key=lambda r: (speeds[r], r)):
        slowest = speeds[classes[-1][0]] if classes else (0.0,) * len(speeds[rank])
        pairs = list(zip(slowest, speeds[rank], strict=True))
        if not classes or any(max(a, b) > SAME_SPEED * min(a, b) for a, b in pairs):
            classes.append([])
        classes[-1].append(rank)
    choices = [
        tuple(sorted(r for members in classes[number:] for r in members))
        for number in range(1, min(len(classes), MAX_CLASSES))
    ]
    by_node: dict[str, list[int]] = {}
    for rank in range(cluster.num_ranks):
        by_node.setdefault(cluster.node_of(rank).name, []).append(rank)
    nodes = {tuple(speeds[r] for r in ranks): tuple(ranks) for ranks in reversed(by_node.values())}
    fastest_first = sorted(nodes, key=lambda key: -sum(rate for rate, *_ in key))
    choices += [nodes[key] for key in fastest_first[: MAX_CLASSES - 1]]
    fastest = sorted(classes[-1])
    choices += [tuple(fastest[: len(fastest) >> n]) for n in range(1, len(fastest).bit_length())]
    for ranks in dict.fromkeys(choices):
        if len(ranks) < cluster.num_ranks:
            # A network may be described in groups that cannot be divided.
            with suppress(ClusterError):
                yield Subset(cluster=cluster.subset(ranks), ranks=ranks)


def _speeds(cluster: Cluster, rates: Sequence[float], rank: int) -> tuple[float, ...]:
    """Return the speeds of a rank's device, of its NIC and of its links within the node."""
    node = cluster.node_of(rank)
    nic = node.nic.bandwidth_bytes_per_s * node.nic.count if node.nic else 0.0
    link = node.link.bandwidth_bytes_per_s if node.link else 0.0
    return rates[rank], nic, link


def left_out(cluster: Cluster, subset: Subset, seconds: float | None) -> LeftOutDevices:
    """Return a plan's record of the devices that it leaves out.

    `seconds` is the step time on all devices, or None if no plan fits on them.
    """
    idle = sorted(set(range(cluster.num_ranks)) - set(subset.ranks))
    kinds = Counter((str(cluster.device(r)), cluster.node_of(r).name) for r in idle)
    return LeftOutDevices(
        cluster=cluster.name,
        fingerprint=cluster.fingerprint,
        num_ranks=cluster.num_ranks,
        used=format_ranks(subset.ranks),
        idle=format_ranks(tuple(idle)),
        devices=", ".join(f"{n} x {device} on {node}" for (device, node), n in kinds.items()),
        step_time_s=seconds,
    )
