"""Checks of a whole cluster: what one field alone cannot show.

Enters: a `Cluster` as it is made. Leaves: nothing, or a `ClusterError` that says what to type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwise.cluster.names import expand, expand_all
from shardwise.errors import ClusterError, did_you_mean

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster


def check(cluster: Cluster) -> None:
    """Refuse a cluster whose parts do not fit together."""
    names = [name for node in cluster.nodes for name in expand(node.name)]
    for name, number in Counter(names).items():
        if number > 1:
            raise ClusterError(f"{number} nodes are named {name!r}", hint="name each differently")
    known = set(names)
    domain_of = _domains(cluster, known)
    _links(cluster, set(domain_of))
    for switch in cluster.network.switches:
        where = f"switch {switch.name}"
        _known(switch.nodes, known, where)
        for group in switch.groups():
            _whole_domains(group, domain_of, where)
    for trunk in cluster.network.trunks:
        where = f"trunk {trunk.name}"
        for side in trunk.between:
            _known(side, known, where)
        ends = [set(expand_all(side)) for side in trunk.between]
        if ends[0] & ends[1]:
            both = sorted(ends[0] & ends[1])[0]
            raise ClusterError(f"node {both} is at both ends", where=where)
        shared = {domain_of[n] for n in ends[0] if n in domain_of}
        for name in sorted(ends[1]):
            if domain_of.get(name) in shared:
                raise ClusterError(
                    f"node {name} is in a domain with nodes of the other end",
                    where=where,
                    hint="whole domains at each end",
                )
    for kind in ("switches", "trunks"):
        given = Counter(item.name for item in getattr(cluster.network, kind))
        for name, number in given.items():
            if number > 1:
                raise ClusterError(f"{number} {kind} are named {name!r}", where=f"network.{kind}")


def _domains(cluster: Cluster, known: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    index = 0
    for domain in cluster.network.domains:
        where = f"domain of {', '.join(domain.nodes)}"
        _known(domain.nodes, known, where)
        for group in domain.groups():
            for name in group:
                if name in found:
                    raise ClusterError(f"node {name} is in two domains", where=where)
                found[name] = index
            index += 1
    return found


def _links(cluster: Cluster, in_domains: set[str]) -> None:
    for node in cluster.nodes:
        where = f"node {node.name}"
        inside = [name in in_domains for name in expand(node.name)]
        if any(inside) and node.link is not None:
            raise ClusterError(
                "has a link of its own and is in a domain", where=where, hint="remove its link"
            )
        if not all(inside) and node.link is None and node.count > 1:
            raise ClusterError(
                f"{node.count} devices and no link between them",
                where=where,
                hint="link: {bandwidth_gb_per_s: 450, latency_us: 1}",
            )
        if node.nic is None and cluster.num_nodes > 1:
            raise ClusterError(
                "has no nic, and there are other nodes",
                where=where,
                hint="nic: {count: 8, bandwidth_gbit_per_s: 400, latency_us: 2}",
            )


def _whole_domains(group: tuple[str, ...], domain_of: dict[str, int], where: str) -> None:
    sizes = Counter(domain_of.values())
    for domain, number in Counter(domain_of[n] for n in group if n in domain_of).items():
        if number != sizes[domain]:
            raise ClusterError(
                f"holds {number} of the {sizes[domain]} nodes of a domain",
                where=where,
                hint="all of them, or none",
            )


def _known(patterns: Iterable[str], known: set[str], where: str) -> None:
    names = expand_all(patterns)
    for name in names:
        if name not in known:
            raise ClusterError(
                f"no node {name!r}{did_you_mean(name, sorted(known))}",
                where=where,
                hint=f"one of {len(known)} nodes, as {min(known)}",
            )
    if not names:
        raise ClusterError("names no node", where=where, hint=f"nodes: [{min(known)}]")
    if len(set(names)) != len(names):
        raise ClusterError("names a node twice", where=where)
