"""Clusters with unequal links."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Cluster, ClusterNode, Curve, Factor, Network, Nic, Trunk

MBIT = 125e3  # bytes per second


def cards(*mbit: float, devices: int = 1) -> Cluster:
    """Return a cluster with a node for each network card, with one or several CPU ranks."""
    base = Cluster.local(max(devices, 2)).nodes[0]
    return Cluster(
        name="cards",
        nodes=tuple(
            ClusterNode(
                name=f"host{i}",
                devices=base.devices[:1] * devices,
                link=base.link if devices > 1 else None,
                nic=Nic(bandwidth_bytes_per_s=rate * MBIT, latency_s=25e-6),
            )
            for i, rate in enumerate(mbit)
        ),
        network=Network(latency_s=50e-6),
    )


def uneven(ranks: int) -> Cluster:
    """Return a cluster with a slow last card and a trunk between even and odd nodes."""
    plain = cards(*[800] * (ranks - 1), 200)
    sides = tuple(tuple(f"host{i}" for i in range(side, ranks, 2)) for side in (0, 1))
    trunk = Trunk(name="trunk", between=(sides[0], sides[1]), bandwidth_bytes_per_s=200 * MBIT)
    return replace(plain, network=replace(plain.network, trunks=(trunk,)))


def measured(ranks: int) -> Cluster:
    """Return a host whose shared memory is twice as fast as its loopback interface."""
    local = Cluster.local(ranks)
    (node,) = local.nodes
    assert node.link is not None
    factor = Factor(bytes=Curve.constant(0.5))
    factors = tuple((op, (factor,)) for op in ("all_reduce", "reduce_scatter", "all_gather"))
    return replace(local, nodes=(replace(node, link=replace(node.link, shared=factors)),))
