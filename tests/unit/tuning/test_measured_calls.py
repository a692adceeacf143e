"""Measured calls reach other processes unchanged, and correct estimates of similar calls."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.cost import OpTable, call_seconds, cost_of
from shardwise.cost.table import UPDATE
from shardwise.cost.timing import decode_call, encode_call
from shardwise.simulation.estimate import plan_calls
from shardwise.tuning.measurement_server import measure_plan
from tests.support import training


@pytest.mark.parametrize("name", ["odd", "fused_gpt", "resnet"])
def test_calls_survive_encoding(name: str) -> None:
    model, batch = training.make(name)
    graph = sw.capture(model, batch)
    cluster = Cluster.local(2)
    for strategy in (sw.strategies.ddp, sw.strategies.tensor):
        for calls in plan_calls(graph, strategy(graph, cluster), cluster).values():
            for call in calls:
                written = encode_call(call)
                if written is not None:
                    decoded = decode_call(json.loads(json.dumps(written)))
                    assert decoded == call
                    assert str(decoded) == str(call)


def test_unmeasured_calls_are_corrected_by_their_operator() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    graph = sw.capture(model, (torch.randn(6, 8),), lambda out, batch: out.sum())
    cluster = Cluster.local(1)
    device = cluster.device(0)
    plan = sw.strategies.ddp(graph, cluster)
    (calls,) = plan_calls(graph, plan, cluster).values()
    first, second = [call for call in calls if call.op == "aten.linear.default"]
    table = OpTable()
    before = call_seconds(first, device)
    table.add(str(first), device.name, 3 * before.forward_s, 5 * before.backward_s)
    table.compare(str(first), device.name, before.forward_s, before.backward_s)
    table = OpTable.from_json(table.to_json())
    plain, corrected = call_seconds(second, device), call_seconds(second, device, table)
    assert corrected.forward_s == pytest.approx(3 * plain.forward_s)
    assert corrected.backward_s == pytest.approx(5 * plain.backward_s)
    assert corrected.source == "computed"
    assert cost_of(second).forward


def test_optimizer_time_follows_measured_sizes() -> None:
    table = OpTable()
    table.add(UPDATE.format(1000), "cpu", 1e-4, 0.0)
    table.add(UPDATE.format(100000), "cpu", 1e-3, 0.0)
    assert table.update_seconds("cpu", 5e3, 1000) == pytest.approx(5e-4)
    assert table.update_seconds("cpu", 1e6, 100000) == pytest.approx(1e-2)
    assert table.update_seconds("other", 1e6, 1000) is None


@pytest.mark.slow
def test_a_plan_is_measured_once_with_a_process_per_rank() -> None:
    model, batch = training.make("fused_gpt")
    graph = sw.capture(model, batch)
    cluster = Cluster.local(2)
    plan = sw.strategies.ddp(graph, cluster)
    table = measure_plan(graph, plan, cluster, budget_s=0.001)
    again = measure_plan(graph, plan, cluster, table=table, budget_s=0.001)
    assert again.entries == table.entries
    sw.simulate(graph, plan, cluster, table=table)
    assert table.hits > table.misses
