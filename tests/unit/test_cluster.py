from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cluster import Cluster, ClusterNode, Device, Link
from shardwise.errors import ClusterError

FAST = Link(bandwidth_bytes_per_s=1e11, latency_s=1e-6)
SLOW = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
GPU = Device(kind="h200", memory_bytes=141 * 10**9, flops_per_s=(("bfloat16", 9e14),))
TWO_NODES = Cluster(
    name="two",
    nodes=(
        ClusterNode(name="a", device=GPU, count=2, link=FAST),
        ClusterNode(name="b", device=GPU, count=1, link=FAST),
    ),
    network=SLOW,
)


def test_local_has_the_ranks_asked_for() -> None:
    cluster = Cluster.local(4)
    assert cluster.num_ranks == 4
    assert cluster == Cluster.local(4)
    assert cluster.node_of(3).device.memory_bytes * 4 <= 2**50
    assert cluster.node_of(0).device.rate("float32") > 0
    assert "4 ranks" in str(cluster)


def test_ranks_beyond_the_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    alone, shared = (Cluster.local(n).node_of(0).device.rate("float32") for n in (2, 8))
    assert shared == alone / 4


@pytest.mark.parametrize("num_ranks", [0, -3, True, 1.5])
def test_fewer_than_one_rank_is_refused(num_ranks: int) -> None:
    with pytest.raises(ClusterError, match="at least 1 rank") as caught:
        Cluster.local(num_ranks)
    assert caught.value.hint == "Cluster.local(2)"


def test_links_depend_on_the_nodes_they_cross() -> None:
    assert TWO_NODES.link_between(0, 1) == FAST
    assert TWO_NODES.link_between(1, 2) == SLOW
    assert TWO_NODES.node_of(2).name == "b"
    with pytest.raises(ClusterError, match="rank 3 is outside a cluster of 3 ranks"):
        TWO_NODES.node_of(3)


def test_saved_clusters_load(tmp_path: Path) -> None:
    TWO_NODES.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == TWO_NODES
    assert TWO_NODES.fingerprint != Cluster.local(3).fingerprint


def edit(change: Any) -> str:
    document = json.loads(TWO_NODES.to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(netwrk={}), "unknown field 'netwrk'; did you mean 'network'"),
        (lambda d: d.pop("network"), "field 'network' is missing"),
        (lambda d: d.update(version=9), "version 9, this is 1"),
        (lambda d: d.update(nodes=[]), "has no nodes"),
        (lambda d: d.update(nodes={}), "nodes is not a list"),
        (lambda d: d.update(network=3), "expected an object with bandwidth_bytes_per_s"),
        (lambda d: d["nodes"][1].update(count=0), "count is 0"),
        (lambda d: d["nodes"][0]["device"].update(memory_bytes="8"), "memory_bytes is '8'"),
        (lambda d: d["nodes"][0]["device"].update(flops_per_s=[]), "flops_per_s is not an object"),
        (lambda d: d["nodes"][0]["link"].update(latency_s=-1), "latency_s is -1"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(change: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(edit(change))


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(ClusterError, match="not JSON"):
        Cluster.from_json("{")


def test_a_missing_rate_is_an_error() -> None:
    with pytest.raises(ClusterError, match="h200 has no rate for float32, only for bfloat16"):
        GPU.rate("float32")
