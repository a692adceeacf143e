"""A part of a cluster: some of its devices, as a cluster of their own.

Enters: a `Cluster` and ranks of it. Leaves: a `Cluster` whose ranks are numbered from 0, with the
links that its devices have in the whole one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.cluster.links import Network
from shardwise.cluster.names import expand, expand_all
from shardwise.errors import ClusterError

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster, ClusterNode

VISIBLE = "CUDA_VISIBLE_DEVICES"


def subset(cluster: Cluster, ranks: Collection[int]) -> Cluster:
    """Return the cluster of these ranks, in its order.

    On a node of which only some devices are left, `CUDA_VISIBLE_DEVICES` says which. Raises a
    `ClusterError` where the network is described in groups of nodes that this would change.
    """
    from shardwise.cluster.cluster import Ssh

    wanted = set(ranks)
    outside = sorted(rank for rank in wanted if not 0 <= rank < cluster.num_ranks)
    if not wanted or outside:
        raise ClusterError(f"ranks {outside} of {cluster.num_ranks} of cluster {cluster.name}")
    if len(wanted) == cluster.num_ranks:
        return cluster
    nodes = tuple(_nodes(cluster, wanted))
    if len(nodes) == nodes[0].copies == 1 < cluster.num_nodes:
        # A lone node of which nothing is said would be started on this machine.
        nodes = (replace(nodes[0], ssh=nodes[0].ssh or Ssh()),)
    names = set(expand_all(node.name for node in nodes))
    return replace(
        cluster,
        name=f"{len(wanted)} of {cluster.num_ranks} ranks of {cluster.name}",
        nodes=nodes,
        network=_network(cluster.network, names),
    )


def _nodes(cluster: Cluster, wanted: set[int]) -> Iterator[ClusterNode]:
    first = 0
    for node in cluster.nodes:
        machines = []
        for _ in range(node.copies):
            machines.append([i for i in range(node.count) if first + i in wanted])
            first += node.count
        if all(local == machines[0] for local in machines):
            if machines[0]:
                yield _with_devices(node, machines[0])
            continue
        for index, local in enumerate(machines):
            if local:
                yield _with_devices(node.machine(index), local)


def _with_devices(node: ClusterNode, local: list[int]) -> ClusterNode:
    if len(local) == node.count:
        return node
    start = node.start
    if node.device.kind != "cpu":
        before = dict(start.environment).get(VISIBLE)
        visible = before.split(",") if before else [str(i) for i in range(node.count)]
        given = {**dict(start.environment), VISIBLE: ",".join(visible[i] for i in local)}
        start = replace(start, environment=tuple(given.items()))
    return replace(node, devices=tuple(node.devices[i] for i in local), start=start)


def _network(network: Network, names: set[str]) -> Network:
    """Return the network without nodes that are left out."""

    def rest(patterns: tuple[str, ...], every: int) -> tuple[str, ...]:
        known = [name for pattern in patterns for name in expand(pattern)]
        kept = tuple(name for name in known if name in names)
        if every and kept and len(kept) < len(known):
            raise ClusterError(f"nodes of which every {every} form a group cannot be left out")
        return patterns if len(kept) == len(known) else kept

    domains = [replace(d, nodes=rest(d.nodes, d.every)) for d in network.domains]
    switches = [replace(s, nodes=rest(s.nodes, s.every)) for s in network.switches]
    trunks = [
        replace(t, between=(rest(t.between[0], 0), rest(t.between[1], 0))) for t in network.trunks
    ]
    return replace(
        network,
        domains=tuple(d for d in domains if d.nodes),
        switches=tuple(s for s in switches if s.nodes),
        trunks=tuple(t for t in trunks if all(t.between)),
    )
