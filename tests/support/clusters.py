"""Clusters whose links differ."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Cluster, ClusterNode, Curve, Factor, Network, Nic, Trunk

MBIT = 125e3  # bytes per second


def cards(*mbit: float, devices: int = 1) -> Cluster:
    """A node for each card, with one CPU rank or several."""
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
    """One rank per node; the last card is slow, and a trunk lies between even and odd nodes."""
    plain = cards(*[800] * (ranks - 1), 200)
    sides = tuple(tuple(f"host{i}" for i in range(side, ranks, 2)) for side in (0, 1))
    trunk = Trunk(name="trunk", between=(sides[0], sides[1]), bandwidth_bytes_per_s=200 * MBIT)
    return replace(plain, network=replace(plain.network, trunks=(trunk,)))


def measured(ranks: int) -> Cluster:
    """One host whose shared memory was found to be twice as fast as its loopback."""
    local = Cluster.local(ranks)
    (node,) = local.nodes
    assert node.link is not None
    factor = Factor(bytes=Curve.constant(0.5))
    factors = tuple((op, (factor,)) for op in ("all_reduce", "reduce_scatter", "all_gather"))
    return replace(local, nodes=(replace(node, link=replace(node.link, shared=factors)),))
