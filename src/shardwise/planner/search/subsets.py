"""Which devices to leave out: those that would make the step longer.

Enters: a cluster and how fast its ranks are at this model. Leaves: smaller clusters to try.

Devices of about the same speed, with about the same links, form a class. The slowest class is left
out first, then the next: a few nested clusters, not all subsets. A cluster of equal devices has one
class and is always used whole, as the user asked for so many ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError
from shardwise.messages.ranks import format_ranks

ALIKE = 1.25  # ratio of speeds up to which devices are of one class: measured ones differ a little
MOST_CLASSES = 4  # of more, only the slowest are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """A part of a cluster: its devices as a cluster, and their ranks in the whole one."""

    cluster: Cluster
    ranks: tuple[int, ...]


def subsets(cluster: Cluster, rates: Sequence[float]) -> Iterator[Subset]:
    """Yield the cluster without its slowest devices, then without the next slowest, and so on."""
    classes: list[tuple[tuple[float, ...], list[int]]] = []
    for rank in sorted(range(cluster.num_ranks), key=lambda r: (_speeds(cluster, rates, r), r)):
        speeds = _speeds(cluster, rates, rank)
        if not classes or not _alike(classes[-1][0], speeds):
            classes.append((speeds, []))
        classes[-1][1].append(rank)
    slowest_first = [members for _, members in classes]
    for number in range(1, min(len(slowest_first), MOST_CLASSES)):
        ranks = tuple(sorted(r for members in slowest_first[number:] for r in members))
        try:
            yield Subset(cluster=cluster.subset(ranks), ranks=ranks)
        except ClusterError:  # the network is described in groups that cannot be taken apart
            return


def _speeds(cluster: Cluster, rates: Sequence[float], rank: int) -> tuple[float, ...]:
    """How fast a rank computes, and how fast it talks to other nodes and within its own."""
    node = cluster.node_of(rank)
    card = node.nic.bandwidth_bytes_per_s * node.nic.count if node.nic else 0.0
    link = node.link.bandwidth_bytes_per_s if node.link else 0.0
    return rates[rank], card, link


def _alike(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(max(a, b) <= ALIKE * min(a, b) for a, b in pairs)


def left_out(cluster: Cluster, subset: Subset, seconds: float | None) -> Mapping[str, Any]:
    """Return what a plan records of the devices that it leaves out.

    `seconds` is the step on all devices, None where no plan fits on them.
    """
    idle = sorted(set(range(cluster.num_ranks)) - set(subset.ranks))
    kinds = Counter((str(cluster.device(r)), cluster.node_of(r).name) for r in idle)
    return {
        "cluster": cluster.name,
        "fingerprint": cluster.fingerprint,
        "num_ranks": cluster.num_ranks,
        "used": format_ranks(subset.ranks),
        "idle": format_ranks(tuple(idle)),
        "devices": ", ".join(f"{n} x {device} on {node}" for (device, node), n in kinds.items()),
        "step_time_s": seconds,
    }
