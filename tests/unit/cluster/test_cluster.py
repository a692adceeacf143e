from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from shardwise.cluster import (
    Cluster,
    ClusterNode,
    Curve,
    Device,
    Domain,
    Link,
    Network,
    Nic,
    Switch,
    Trunk,
)
from shardwise.errors import ClusterError
from tests.support.work import calls

FAST = Link(bandwidth_bytes_per_s=1e11, latency_s=1e-6)
CARD = Nic(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
GPU = Device(
    name="h200",
    kind="cuda",
    memory_bytes=141 * 10**9,
    matmul_flops_per_s=(("bfloat16", Curve(((256.0, 1e14), (4096.0, 9e14)))),),
    memory_bytes_per_s=Curve.constant(4e12),
)


def node(name: str, count: int = 2, **more: object) -> ClusterNode:
    given = {"devices": (GPU,) * count, "link": FAST, "nic": CARD} | more
    return ClusterNode(name=name, **given)  # type: ignore[arg-type]


TWO_NODES = Cluster(name="two", nodes=(node("a"), node("b", 1)), network=Network(latency_s=8e-5))


def test_local_has_the_requested_ranks() -> None:
    cluster = Cluster.local(4)
    assert cluster.num_ranks == 4
    assert cluster == Cluster.local(4)
    assert cluster.node_of(3).device.memory_bytes * 4 <= 2**50
    assert cluster.device(0).matmul_rate("float32", 64, 64, 64) > 0
    assert "4 ranks" in str(cluster)


def test_ranks_beyond_the_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    dedicated, shared = (Cluster.local(n).device(0).matmul_rate("float32", 9, 9, 9) for n in (2, 8))
    assert shared == dedicated / 4


@pytest.mark.parametrize("num_ranks", [0, -3, True, 1.5])
def test_fewer_than_one_rank_raises(num_ranks: int) -> None:
    with pytest.raises(ClusterError, match="at least 1 rank") as caught:
        Cluster.local(num_ranks)
    assert caught.value.hint == "Cluster.local(2)"


def test_paths_depend_on_the_nodes_they_cross() -> None:
    near, far = TWO_NODES.path(0, 1), TWO_NODES.path(1, 2)
    assert near.resources == ("device 0 out", "device 1 in")
    assert near.latency_s == 1e-6
    assert far.resources == ("nic a.0 out", "nic b.0 in")
    assert far.latency_s == pytest.approx(1e-4)
    assert TWO_NODES.link_between(0, 1) == FAST
    assert TWO_NODES.link_between(1, 2).bandwidth_bytes_per_s == 1e9
    assert TWO_NODES.path(2, 2).resources == ()
    assert TWO_NODES.node_of(2).name == "b"
    with pytest.raises(ClusterError, match="rank 3 is outside a cluster of 3 ranks"):
        TWO_NODES.node_of(3)


def test_every_resource_of_a_path_has_a_capacity() -> None:
    switch = Switch(name="leaf", nodes=("n[0-3]",), every=2, oversubscription=4)
    trunk = Trunk(name="wan", between=(("n[0-1]",), ("n[2-3]",)), bandwidth_bytes_per_s=3e8)
    cluster = Cluster(
        name="x",
        nodes=(node("n[0-3]", 4, nic=Nic(count=2, bandwidth_bytes_per_s=1e9, efficiency=0.5)),),
        network=Network(switches=(switch,), trunks=(trunk,)),
    )
    for a in range(cluster.num_ranks):
        for b in range(cluster.num_ranks):
            assert all(name in cluster.capacities for name in cluster.path(a, b).resources)
    assert cluster.path(3, 14).resources == (
        "nic n0.1 out",
        "switch leaf.0 up",
        "switch leaf.1 down",
        "trunk wan there",
        "nic n3.1 in",
    )
    assert cluster.path(14, 3).resources[3] == "trunk wan back"
    assert "switch leaf.0 up" not in cluster.path(0, 4).resources
    assert cluster.capacities["switch leaf.0 up"] == 2 * 2 * 0.5e9 / 4
    assert cluster.capacities["nic n0.0 out"] == 0.5e9


def test_nested_switches_are_both_crossed() -> None:
    switches = (
        Switch(name="leaf", nodes=("n[0-7]",), every=2),
        Switch(name="spine", nodes=("n[0-7]",), every=4, uplink_bytes_per_s=7.0),
    )
    cluster = Cluster(name="x", nodes=(node("n[0-7]", 1),), network=Network(switches=switches))
    assert [r for r in cluster.path(0, 2).resources if "switch" in r] == [
        "switch leaf.0 up",
        "switch leaf.1 down",
    ]
    assert {"switch spine.0 up", "switch spine.1 down"} < set(cluster.path(0, 7).resources)
    assert cluster.capacities["switch spine.0 up"] == 7.0


def test_a_domain_spans_nodes() -> None:
    cluster = Cluster.preset("gb200", nodes=36)
    assert cluster.num_ranks == 144
    assert cluster.path(0, 71).resources == ("device 0 out", "device 71 in")
    assert cluster.path(0, 72).resources == ("nic node0.0 out", "nic node18.0 in")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": (node("a"), node("a"))}, "2 nodes are named 'a'"),
        ({"nodes": (node("a", nic=None), node("b"))}, r"nic(.|\n)*node a"),
        ({"nodes": (node("a", link=None),)}, r"2 devices(.|\n)*node a"),
        ({"nodes": ()}, "has no nodes"),
        ({"port": 0}, "port is 0"),
        ({"network": Network(domains=(Domain(nodes=("a",), link=FAST),))}, r"link(.|\n)*node a"),
        ({"network": Network(switches=(Switch(name="s", nodes=("c",)),))}, "no node 'c'"),
        (
            {
                "nodes": (node("n[0-3]", link=None),),
                "network": Network(
                    domains=(Domain(nodes=("n[0-3]",), link=FAST),),
                    switches=(Switch(name="s", nodes=("n[0-1]",)),),
                ),
            },
            "2 of the 4 nodes of a domain",
        ),
        (
            {
                "nodes": (node("n[0-3]"),),
                "network": Network(
                    switches=(
                        Switch(name="l", nodes=("n[0-2]",), every=2),
                        Switch(name="m", nodes=("n[1-3]",)),
                    )
                ),
            },
            "switches m and l share n1, but n2 and n0 are behind only one of them",
        ),
        (
            {"nodes": (node("a", link=Link(bandwidth_bytes_per_s=math.inf, latency_s=0.0)),)},
            "bandwidth_bytes_per_s is inf, must be a finite number",
        ),
        (
            {
                "nodes": (node("n[0-3]", link=None),),
                "network": Network(
                    domains=(Domain(nodes=("n[0-3]",), link=FAST),),
                    trunks=(
                        Trunk(name="t", between=(("n0",), ("n1",)), bandwidth_bytes_per_s=1.0),
                    ),
                ),
            },
            "node n1 is in a domain with nodes of the other end",
        ),
    ],
)
def test_inconsistent_parts_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster(**({"name": "x", "nodes": TWO_NODES.nodes} | change))  # type: ignore[arg-type]


def test_switches_of_the_same_nodes_are_nested() -> None:
    nodes = node("n[0-7]")
    sizes = {"a": 2, "b": 8, "c": 4, "d": 2}
    switches = tuple(Switch(name=s, nodes=("n[0-7]",), every=n) for s, n in sizes.items())
    cluster = Cluster(name="x", nodes=(nodes,), network=Network(switches=switches))
    assert len(cluster.topology.levels) == len(sizes)


def test_a_folder_is_not_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="is a folder") as caught:
        Cluster.load(tmp_path)
    assert caught.value.hint == str(tmp_path / "cluster.yaml")


def test_saved_clusters_load(tmp_path: Path) -> None:
    TWO_NODES.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == TWO_NODES
    assert Cluster.load(tmp_path / "cluster.yaml").fingerprint == TWO_NODES.fingerprint
    assert TWO_NODES.fingerprint != Cluster.local(3).fingerprint
    with pytest.raises(ClusterError, match="there is no cluster file") as caught:
        Cluster.load(tmp_path / "none.yaml")
    assert "shardwise profile -o" in str(caught.value)


def test_rates_follow_sizes_and_speed() -> None:
    assert GPU.matmul_rate("bfloat16", 8, 8, 8) == 1e14
    assert GPU.matmul_rate("bfloat16", 1e5, 1e5, 1e5) == 9e14
    assert 1e14 < GPU.matmul_rate("bfloat16", 1024, 1024, 1024) < 9e14
    assert GPU.matmul_rate("bfloat16", 512, 512, 512, 8) == pytest.approx(
        GPU.matmul_rate("bfloat16", 1024, 1024, 1024)
    )
    assert GPU.attention_rate("bfloat16") == 9e14
    with pytest.raises(ClusterError, match="h200 has no rate for float32, only for bfloat16"):
        GPU.matmul_rate("float32", 1, 1, 1)


def test_a_large_cluster_is_built_quickly() -> None:
    def build() -> None:
        cluster = Cluster.preset("h100", nodes=2048, oversubscription=2)
        columns, _ = cluster.topology.crossed(np.arange(16383), np.arange(1, 16384))
        assert len(columns) == 5
        assert cluster.device(16383).name == "h100"

    assert calls(build) < 200_000  # some of each node, none of each device: 0.1 s
