"""Subsets of the devices of a cluster."""

from __future__ import annotations

import pytest

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError

FILE = """
version: 2
name: racks
devices:
  gpu: {kind: cuda, memory_gib: 8, matmul_flops_per_s: {float32: 4.0e+10},
        memory_bytes_per_s: 8.0e+9, overhead_s: 5.0e-6}
nodes:
  - {name: "new[0-2]", devices: {gpu: 4}, link: {bandwidth_gb_per_s: 5, latency_us: 20},
     nic: {count: 1, bandwidth_gbit_per_s: 10, latency_us: 50}}
  - {name: old, devices: {gpu: 2}, link: {bandwidth_gb_per_s: 5, latency_us: 20},
     nic: {count: 1, bandwidth_gbit_per_s: 10, latency_us: 50}}
network:
  latency_us: 30
  switches: [{name: leaf, nodes: ["new[0-2]", old], oversubscription: 2}]
"""


def test_a_subset_without_some_nodes() -> None:
    cluster = Cluster.from_yaml(FILE)
    part = cluster.subset(range(12))
    assert part.num_ranks == 12
    assert [node.name for node in part.nodes] == ["new[0-2]"]
    assert part.network.switches[0].nodes == ("new0", "new1", "new2")
    assert part.link_between(0, 4) == cluster.link_between(0, 4)
    assert part.fingerprint != cluster.fingerprint
    assert Cluster.from_yaml(part.to_yaml()) == part


def test_a_subset_of_the_devices_of_a_node() -> None:
    cluster = Cluster.from_yaml(FILE)
    part = cluster.subset([0, 1, 2, 3, 5, 7, 13])
    assert [(n.name, n.count) for n in part.machines()] == [("new0", 4), ("new1", 2), ("old", 1)]
    environments = [dict(node.start.environment) for node in part.machines()]
    assert environments == [{}, {"CUDA_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    again = part.subset([4, 5])  # the second device of new1, and old
    assert [n.name for n in again.machines()] == ["new1"] or again.num_ranks == 2
    assert dict(part.subset([5]).nodes[0].start.environment) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_all_ranks_return_the_cluster_itself_and_invalid_ranks_raise() -> None:
    cluster = Cluster.from_yaml(FILE)
    assert cluster.subset(range(14)) is cluster
    with pytest.raises(ClusterError, match=r"ranks \[14\] .* 14"):
        cluster.subset([0, 14])
    with pytest.raises(ClusterError):
        cluster.subset([])
