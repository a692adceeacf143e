"""No simulated step is faster than its bound, or needs less memory."""

from __future__ import annotations

import random

import pytest
import torch

import shardwise as sw
from benchmarks.models import GPT
from shardwise.cluster import Cluster
from shardwise.planner.plan import _limits, _prepare
from shardwise.planner.search_space import UserOptions, configs
from shardwise.plans import Precision

CLUSTERS = {
    "fast links": Cluster.preset("h100", nodes=2, devices_per_node=4),
    "slow links": Cluster.preset("a100", nodes=4, devices_per_node=2, nic_gbit_per_s=10),
}


@pytest.mark.parametrize("name", ["slow links", pytest.param("fast links", marks=pytest.mark.slow)])
def test_bounds_are_below_simulated_figures(name: str) -> None:
    cluster = CLUSTERS[name]
    with torch.device("meta"):
        model = GPT(layers=8, width=256, heads=8, length=64, vocab=512)
    ids = torch.zeros(16, 64, dtype=torch.long, device="meta")
    graph = sw.capture(model, {"input_ids": ids, "labels": ids})
    search = _prepare(graph, cluster, {}, None, Precision.of("bf16"), None, lambda _: None)
    fixed = UserOptions()
    space = list(configs(_limits(search, graph, cluster, fixed), fixed))
    num_checked = 0
    for config in random.Random(0).sample(space, 150):
        if search.bounds.core(config) is not None:
            bound, estimate = search.bounds.bound(config), search.simulate(config).estimate
            assert bound.seconds <= estimate.step_time_s * (1 + 1e-9), str(config)
            peak = estimate.peak
            assert bound.memory <= peak.peak_bytes / peak.limit_bytes * (1 + 1e-9), str(config)
            num_checked += 1
    assert num_checked > 100
