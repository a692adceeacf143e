"""Slow devices are left out, and of plans that take as long the simplest is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardwise as sw
import shardwise.planner.plan as planner
from shardwise.cli import app
from shardwise.errors import PlanError
from shardwise.planner.device_groups import subsets
from shardwise.planner.search import SIMPLER_SLACK, simplicity
from shardwise.plans import used_devices
from shardwise.plans.search_result import ParallelConfig
from shardwise.plans.text import format_plan, plan_text
from tests.support import zoo


def mixed(speed: float, new: int = 2, old: int = 2) -> sw.Cluster:
    """Return a cluster of some H100s, and some A100s that run at a fraction of their speed."""
    first = sw.Cluster.preset("h100", devices_per_node=new)
    second = sw.Cluster.preset("a100", devices_per_node=old).nodes[0]
    slow = tuple(replace(device, speed=speed) for device in second.devices)
    nodes = (replace(second, name="old", devices=slow), replace(first.nodes[0], name="new"))
    return sw.Cluster(name="mixed", nodes=nodes, network=first.network)


def captured(rows: int) -> sw.Graph:
    with torch.device("meta"):
        model = zoo.FusedGPT(vocab=512, dim=512, heads=8, layers=2, length=128)
        ids = torch.empty(rows, 128, dtype=torch.long)
    return sw.capture(model, {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    return captured(rows=16)


def test_devices_that_slow_the_step_are_left_out(graph: sw.Graph, tmp_path: Path) -> None:
    cluster = mixed(speed=0.1)
    everything = sw.plan(graph, cluster, progress=False, all_devices=True)
    assert everything.num_ranks == 4
    assert everything.search.left_out is None
    plan = sw.plan(graph, cluster, progress=False)
    left = plan.search.left_out
    assert plan.num_ranks == 2
    assert (left.used, left.idle, left.num_ranks) == ("2-3", "0-1", 4)
    assert left.step_time_s == everything.search.best.step_time_s
    assert plan.search.best.step_time_s < left.step_time_s * (1 + SIMPLER_SLACK)
    fast_only = sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=2), progress=False)
    assert plan.search.best.step_time_s == fast_only.search.best.step_time_s
    text = " ".join(plan_text(plan, 100).split())
    assert "2 of 4 devices of mixed are left idle: 2 x a100-80" in text
    assert "using all would take" in text
    assert str(plan) == plan_text(plan)
    assert "uses ranks 2-3 of the 4 of mixed" in format_plan(plan)
    assert any("left idle" in note for note in sw.report(plan).verdict.notes)

    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    used = used_devices(again, cluster)
    assert [node.name for node in used.nodes] == ["new"]
    estimate = sw.simulate(graph, again, cluster)  # on the devices that it uses
    assert estimate.step_time_s == pytest.approx(plan.search.best.step_time_s)
    with pytest.raises(PlanError, match="2 ranks"):
        sw.simulate(graph, again, mixed(speed=0.2))

    cluster.save(tmp_path / "cluster.yaml")
    words = ["launch", "--cluster", str(tmp_path / "cluster.yaml"), "--dry-run"]
    words += ["--plan", str(tmp_path / "plan.json"), "--", "train.py"]
    shown = CliRunner().invoke(app, words).output
    assert shown.startswith("ssh ")
    assert "--nnodes 1 --nproc-per-node 2" in shown
    assert " old " not in shown


@pytest.mark.slow
def test_devices_that_help_are_used() -> None:
    graph = captured(rows=256)
    assert sw.plan(graph, mixed(speed=1.0), progress=False).num_ranks == 4


def test_options_of_the_user_may_require_all_devices(graph: sw.Graph) -> None:
    assert sw.plan(graph, mixed(speed=0.1), progress=False, dp=4).num_ranks == 4


def test_a_tiny_model_uses_one_of_several_equal_devices() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    graph = sw.capture(model, (torch.randn(8, 16),), lambda output, _: output.square().mean())
    cluster = sw.Cluster.local(4)
    plan = sw.plan(graph, cluster, progress=False)
    left = plan.search.left_out
    assert (plan.num_ranks, left.used, left.idle) == (1, "0", "1-3")
    assert plan.search.best.step_time_s <= left.step_time_s
    assert "3 of 4 devices of local are left idle" in " ".join(str(plan).split())
    assert sw.plan(graph, cluster, progress=False, all_devices=True).num_ranks == 4
    assert sw.plan(graph, cluster, progress=False, dp=2, pp=2).num_ranks == 4


def test_fewer_equal_devices_are_searched_only_if_they_may_be_faster(
    graph: sw.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    prepare = planner._prepare
    monkeypatch.setattr(
        planner, "_prepare", lambda *args: searched.append(args[1].num_ranks) or prepare(*args)
    )
    assert sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=8), progress=False)
    assert set(searched) == {8}


def test_the_slowest_devices_are_left_out_first_then_nodes_then_halves() -> None:
    cluster = mixed(speed=0.1, new=2, old=3)
    rates = [0.1, 0.1, 0.3, 1.0, 1.0]
    chosen = [subset.ranks for subset in subsets(cluster, rates)]
    assert chosen == [(2, 3, 4), (3, 4), (0, 1, 2), (3,)]
    slow_nic = replace(cluster.nodes[1], name="far", nic=replace(cluster.nodes[1].nic, count=1))
    far = replace(cluster, nodes=(slow_nic, replace(cluster.nodes[1], name="near")))
    assert [subset.ranks for subset in subsets(far, [1.0] * 4)] == [(2, 3), (0, 1), (2,)]
    equal = sw.Cluster.preset("h100", nodes=3, devices_per_node=2)
    assert [subset.ranks for subset in subsets(equal, [1.0] * 6)] == [(0, 1), (0, 1, 2), (0,)]
    node = sw.Cluster.preset("h100", devices_per_node=4)
    one_slow, similar = [1.0, 0.2, 1.0, 1.0], [1.0, 0.9, 1.0, 0.95]  # as measured
    assert [s.ranks for s in subsets(node, one_slow)] == [(0, 2, 3), (0,)]
    assert [s.ranks for s in subsets(node, similar)] == [(0, 1), (0,)]


@pytest.mark.slow
def test_a_slow_network_leaves_one_node(graph: sw.Graph) -> None:
    four = sw.Cluster.preset("a100", devices_per_node=4, nic_gbit_per_s=1)
    one = sw.Cluster.preset("h100", devices_per_node=1, nic_gbit_per_s=1).nodes[0]
    nodes = (replace(one, name="single", link=None), replace(four.nodes[0], name="four"))
    plan = sw.plan(graph, sw.Cluster(name="slow", nodes=nodes), progress=False)
    assert plan.search.left_out.used == "1-4"
    one_node_s = sw.plan(graph, four, progress=False).search.best.step_time_s
    assert plan.search.best.step_time_s == pytest.approx(one_node_s)
    assert 2 * one_node_s < plan.search.left_out.step_time_s


def test_an_axis_that_only_shards_the_batch_is_data_parallel(graph: sw.Graph) -> None:
    plan = sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=2), progress=False)
    assert all(cut == "replicate" for e in plan.parameters.values() for cut in e.layout.values())
    assert dict(plan.roles) == {"dp": "batch"}


def test_simpler_configurations_come_first() -> None:
    order = [
        ParallelConfig(dp=4, tp=1, pp=1),
        ParallelConfig(dp=4, tp=1, pp=1, zero=2),
        ParallelConfig(dp=4, tp=1, pp=1, layout=2),
        ParallelConfig(dp=4, tp=1, pp=1, recompute="selective"),
        ParallelConfig(dp=4, tp=1, pp=1, num_microbatches=2),
        ParallelConfig(dp=1, tp=4, pp=1),
        ParallelConfig(dp=2, tp=2, pp=1),
        ParallelConfig(dp=1, tp=1, pp=4, schedule="1f1b", num_microbatches=4),
        ParallelConfig(dp=2, tp=1, pp=2, schedule="1f1b", num_microbatches=2),
        ParallelConfig(dp=2, tp=1, pp=2, schedule="zb_h1", num_microbatches=2),
        ParallelConfig(dp=4, tp=1, pp=1, offload=("optimizer",)),
    ]
    assert all(simplicity(one) < simplicity(other) for one, other in pairwise(order))
