"""Check that the parts of a cluster fit together, which no single field can show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.cluster.links import Link, Switch, Trunk
from shardwise.cluster.names import expand, expand_all
from shardwise.errors import ClusterError, did_you_mean

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster


def check(cluster: Cluster) -> None:
    """Refuse a cluster whose parts do not fit together."""
    known = _names(cluster)
    domain_of = _domains(cluster, known)
    _links(cluster, set(domain_of))
    _switches(cluster, known, domain_of)
    for index, trunk in enumerate(cluster.network.trunks):
        with _of(f"trunk {trunk.name}", "network", "trunks", index):
            _trunk(trunk, known, domain_of)
    for kind in ("switches", "trunks"):
        given = [item.name for item in getattr(cluster.network, kind)]
        for index, name in enumerate(given):
            if name in given[:index]:
                with _of(f"network.{kind}", "network", kind, index):
                    raise ClusterError(f"{given.count(name)} {kind} are named {name!r}")


@contextmanager
def _of(what: str, *part: str | int) -> Iterator[None]:
    """Attribute errors to this part of the cluster."""
    try:
        yield
    except ClusterError as error:
        raise ClusterError(error.message, where=what, hint=error.hint, part=part) from None


def _names(cluster: Cluster) -> set[str]:
    known = Counter(name for node in cluster.nodes for name in expand(node.name))
    twice = {name for name, number in known.items() if number > 1}
    for index, node in reversed(list(enumerate(cluster.nodes))):
        for name in sorted(twice.intersection(expand(node.name))):
            with _of(f"node {node.name}", "nodes", index):
                raise ClusterError(
                    f"{known[name]} nodes are named {name!r}", hint="name each differently"
                )
    return set(known)


def _domains(cluster: Cluster, known: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    groups = 0
    for index, domain in enumerate(cluster.network.domains):
        with _of(f"domain of {', '.join(domain.nodes)}", "network", "domains", index):
            _finite(domain.link)
            _known(domain.nodes, known)
            for group in domain.groups():
                for name in group:
                    if name in found:
                        raise ClusterError(f"node {name} is in two domains")
                    found[name] = groups
                groups += 1
    return found


def _links(cluster: Cluster, in_domains: set[str]) -> None:
    for index, node in enumerate(cluster.nodes):
        with _of(f"node {node.name}", "nodes", index):
            inside = [name in in_domains for name in expand(node.name)]
            if node.link is not None:
                _finite(node.link)
            if any(inside) and node.link is not None:
                raise ClusterError(
                    "has a link of its own and is in a domain", hint="remove its link"
                )
            if not all(inside) and node.link is None and node.count > 1:
                raise ClusterError(
                    f"{node.count} devices and no link between them",
                    hint="link: {bandwidth_gb_per_s: 450, latency_us: 1}",
                )
            if node.nic is None and cluster.num_nodes > 1:
                raise ClusterError(
                    "has no nic, and there are other nodes",
                    hint="nic: {count: 8, bandwidth_gbit_per_s: 400, latency_us: 2}",
                )


def _finite(link: Link) -> None:
    """Refuse infinite bandwidth, which only the link from a rank to itself may have."""
    if link.bandwidth_bytes_per_s == math.inf:
        raise ClusterError("bandwidth_bytes_per_s is inf, must be a finite number", where="link")


def _switches(cluster: Cluster, known: set[str], domain_of: Mapping[str, int]) -> None:
    groups = []
    for index, switch in enumerate(cluster.network.switches):
        with _of(f"switch {switch.name}", "network", "switches", index):
            _known(switch.nodes, known)
            for group in switch.groups():
                _whole_domains(group, domain_of)
                groups.append((index, frozenset(group)))
    _nested(cluster.network.switches, groups)


def _nested(switches: Sequence[Switch], found: Iterable[tuple[int, frozenset[str]]]) -> None:
    """Refuse groups, each with its switch's index, that share nodes but not all of one's."""
    groups = sorted(found, key=lambda each: -len(each[1]))
    around: dict[str, int] = {}  # the smallest group so far, by node
    for number, (index, group) in enumerate(groups):
        within = {around[name] for name in group if name in around}
        for other in sorted(within):
            outer = groups[other][1]
            if group <= outer:
                continue
            switch, before = switches[index], switches[groups[other][0]]
            with _of(f"switch {switch.name}", "network", "switches", index):
                raise ClusterError(
                    f"switches {before.name} and {switch.name} share {min(group & outer)}, but "
                    f"{min(outer - group)} and {min(group - outer)} are behind one of them alone",
                    hint="all nodes of the smaller switch behind the larger one, or none",
                )
        around.update(dict.fromkeys(group, number))


def _trunk(trunk: Trunk, known: set[str], domain_of: Mapping[str, int]) -> None:
    for side in trunk.between:
        _known(side, known)
    ends = [set(expand_all(side)) for side in trunk.between]
    if ends[0] & ends[1]:
        raise ClusterError(
            f"node {min(ends[0] & ends[1])} is at both ends", hint="each node at one end"
        )
    shared = {domain_of[n] for n in ends[0] if n in domain_of}
    for name in sorted(ends[1]):
        if domain_of.get(name) in shared:
            raise ClusterError(
                f"node {name} is in a domain with nodes of the other end",
                hint="whole domains at each end",
            )


def _whole_domains(group: tuple[str, ...], domain_of: Mapping[str, int]) -> None:
    sizes = Counter(domain_of.values())
    for domain, number in Counter(domain_of[n] for n in group if n in domain_of).items():
        if number != sizes[domain]:
            raise ClusterError(
                f"holds {number} of the {sizes[domain]} nodes of a domain",
                hint="all of them, or none",
            )


def _known(patterns: Iterable[str], known: set[str]) -> None:
    names = expand_all(patterns)
    for name in names:
        if name not in known:
            raise ClusterError(
                f"no node {name!r}{did_you_mean(name, sorted(known))}",
                hint=f"one of {len(known)} nodes, as {min(known)}",
            )
    if not names:
        raise ClusterError("names no node", hint=f"nodes: [{min(known)}]")
    if len(set(names)) != len(names):
        raise ClusterError("names a node twice")
