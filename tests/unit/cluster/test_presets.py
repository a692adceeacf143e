from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, preset_names
from shardwise.errors import ClusterError

FACTS = Path(__file__).parents[4] / "shared" / "data" / "hardware_facts.csv"
LABELS = {
    "v100": "V100-SXM-32GB",
    "a100-40": "A100-SXM-40GB",
    "a100-80": "A100-SXM-80GB",
    "h100": "H100-SXM-80GB",
    "h200": "H200-SXM",
    "b200": "B200-SXM",
    "b300": "B300-SXM",
    "gb200": "GB200",
    "mi300x": "MI300X",
}


@pytest.mark.parametrize("kind", preset_names())
def test_presets_make_clusters(kind: str) -> None:
    cluster = Cluster.preset(kind, nodes=3, devices_per_node=4)
    assert cluster.num_ranks == 12
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    device = cluster.device(0)
    assert device.usable_bytes > 0
    rates = [device.matmul_rate("float32", n, n, n) for n in (64, 512, 4096)]
    assert rates == sorted(rates)
    assert device.matmul_rate("bfloat16", 64, 64, 64) > 0


@pytest.mark.parametrize("kind", LABELS)
def test_presets_equal_the_published_facts(kind: str) -> None:
    if not FACTS.is_file():
        pytest.skip(f"{FACTS} is not on this machine")
    with FACTS.open() as file:
        facts = next(row for row in csv.DictReader(file) if row["gpu"] == LABELS[kind])
    cluster = Cluster.preset(kind)
    device, link = cluster.device(0), cluster.nodes[0].link
    assert device.memory_bytes <= float(facts["memory_gb"]) * 2**30
    assert device.memory_bytes >= float(facts["memory_gb"]) * 1e9 * 0.95
    assert link is not None
    assert link.bandwidth_bytes_per_s == float(facts["scale_up_gb_per_s_per_gpu_one_way"]) * 1e9
    best = facts["max_achieved_matmul_bf16_tflops"]
    if best:
        assert device.matmul_rate("bfloat16", 2e4, 2e4, 2e4) == pytest.approx(
            float(best) * 1e12, rel=0.15
        )
    assert device.memory_rate(1e9) <= float(facts["memory_bandwidth_tb_per_s"]) * 1e12
    domain = int(re.findall(r"\d+", facts["scale_up_domain"])[0])
    count = cluster.num_ranks
    reach = Cluster.preset(kind, nodes=-(-domain // count))
    assert all(r.startswith("device") for r in reach.path(0, domain - 1).resources)


def test_overrides() -> None:
    cluster = Cluster.preset("a100", nodes=2, nic_gbit_per_s=400, network_latency_us=7)
    assert sum(v for k, v in cluster.capacities.items() if k.startswith("nic node0") and "out" in k)
    outs = [v for k, v in cluster.capacities.items() if re.match(r"nic node0\.\d out", k)]
    assert sum(outs) == pytest.approx(400 * 125e6 * 0.9)
    assert cluster.network.latency_s == pytest.approx(7e-6)
    thin = Cluster.preset("a100", nodes=2, oversubscription=4)
    assert thin.capacities["switch leaf.0 up"] == pytest.approx(sum(outs) * 4 / 4)


def test_unknown_kinds_raise() -> None:
    with pytest.raises(ClusterError, match="no preset 'h10'; did you mean 'h100'"):
        Cluster.preset("h10")
    with pytest.raises(ClusterError, match="nodes is 0"):
        Cluster.preset("h100", nodes=0)
