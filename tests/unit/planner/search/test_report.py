"""Search results of plans: stored steps, runners-up, relaxations and layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cluster import ClusterNode, Nic
from shardwise.errors import PlanError
from shardwise.ir import Graph
from shardwise.planner.figures import batch_size, merged
from shardwise.planner.what_if import faster_devices, faster_links
from shardwise.plans.search_result import BatchSize, LayerFigures
from shardwise.simulation import stored_estimate
from tests.support import zoo
from tests.support.tiers import thinned
from tests.unit.planner.search.tokens import Tokens

pytestmark = pytest.mark.usefixtures("short_local_search")
OPTIONS = [
    {},
    {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"},
    {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1", "zero": 1},
    {"pp": 2, "num_microbatches": 4, "virtual_stages": 2, "schedule": "interleaved"},
    {"pp": 2, "num_microbatches": 4, "schedule": "zb_v"},
    {"zero": 3, "pp": 1, "tp": 1, "recompute": "full"},
    {"offload": "optimizer", "tp": 2},
]


@pytest.fixture(scope="module")
def unequal() -> sw.Cluster:
    nic = Nic(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
    nodes = []
    for kind, number in (("h100", 2), ("a100-40", 2)):
        (node,) = sw.Cluster.preset(kind, devices_per_node=number).nodes
        nodes.append(ClusterNode(name=kind, devices=node.devices, link=node.link, nic=nic))
    return sw.Cluster(name="two", nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        *thinned((("h100", o) for o in OPTIONS), lambda i, _: i in (0, 4, 5)),
        *(("unequal", options) for options in OPTIONS[:1]),
        *(pytest.param("unequal", o, marks=pytest.mark.slow) for o in OPTIONS[1:3]),
        *(pytest.param("cpu", o, marks=pytest.mark.slow) for o in (OPTIONS[0], OPTIONS[5])),
    ],
    ids=str,
)
def test_a_step_can_be_restored_from_the_plan_file(
    graph: Graph, unequal: sw.Cluster, devices: str, options: dict[str, object], tmp_path: Path
) -> None:
    cluster = unequal if devices == "unequal" else sw.Cluster.preset(devices, devices_per_node=4)
    plan = sw.plan(graph, cluster, progress=False, all_devices=True, **options)
    plan.save(tmp_path / "plan.json")
    again = stored_estimate(sw.Plan.load(tmp_path / "plan.json"))
    best = plan.search.best
    assert again.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)
    assert dict(again.timeline.causes) == pytest.approx(best.causes, rel=1e-9, abs=1e-15)
    assert again.peak.peak_bytes == best.memory.peak_bytes
    assert again.num_ranks == cluster.num_ranks
    assert again.rows == 16


def test_the_restored_timeline_equals_a_simulation(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=4)
    plan = sw.plan(graph, cluster, progress=False, pp=2, num_microbatches=4, zero=1)
    again, anew = stored_estimate(plan).timeline, sw.simulate(graph, plan, cluster).timeline
    assert len(again.spans) == len(anew.spans) > 16
    for one, other in zip(again.spans, anew.spans, strict=True):
        assert (one.group, one.lane, one.name, one.kind) == (
            other.group, other.lane, other.name, other.kind,
        )  # fmt: skip
        assert one.start == pytest.approx(other.start, rel=1e-9, abs=1e-12)
        assert one.end == pytest.approx(other.end, rel=1e-9, abs=1e-12)


def test_equal_units_are_written_once() -> None:
    ids = torch.randint(0, 128, (8, 16))
    sizes = []
    for layers in (4, 12):
        graph = sw.capture(Tokens(layers=layers), {"ids": ids, "labels": ids})
        cluster = sw.Cluster.preset("h100", devices_per_node=2)
        plan = sw.plan(graph, cluster, progress=False, pp=1)
        sizes.append(len(json.dumps(plan.search.to_json())))
        assert stored_estimate(plan).step_time_s == pytest.approx(
            plan.search.best.step_time_s, rel=1e-9
        )
    assert sizes[1] < 1.2 * sizes[0]


def test_an_edited_or_damaged_plan_is_refused(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False)
    with pytest.raises(PlanError, match="changed after it was made"):
        stored_estimate(plan.with_(recompute="selective" if plan.recompute == "none" else "none"))
    with pytest.raises(PlanError, match="was not searched for"):
        stored_estimate(sw.strategies.ddp(graph, cluster))
    data = plan.to_json()
    for name in ("step", "memory", "best"):
        broken = {k: v for k, v in data["search"].items() if k != name}
        with pytest.raises(PlanError, match="damaged") as raised:
            sw.Plan.from_json({**data, "search": broken})
        assert raised.value.where == "plan (search)"
    figures = plan.search
    for broken in (
        replace(figures, memory=()),
        replace(figures, step=replace(figures.step, passes=figures.step.passes[1:])),
        replace(figures, step=replace(figures.step, stages=figures.step.stages * 2)),
    ):
        with pytest.raises(PlanError, match="damaged"):
            stored_estimate(plan.with_(search=broken))


def test_transfers_of_tied_parameters_are_restored() -> None:
    graph = sw.capture(*zoo.build("gpt2"))
    plan = sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=2), progress=False, pp=2)
    assert [(tied.owner, tied.replica) for tied in plan.search.step.tied] == [(0, 1)]
    again = stored_estimate(plan)
    assert again.step_time_s == pytest.approx(plan.search.best.step_time_s, rel=1e-9)
    without = replace(plan.search, step=replace(plan.search.step, tied=()))
    again = stored_estimate(plan.with_(search=without))
    assert again.step_time_s < plan.search.best.step_time_s


@pytest.mark.parametrize(
    "options", [{"pp": 2, "num_microbatches": 4}, {"tp": 2, "num_microbatches": 2}, {}]
)
def test_a_16_bit_loss_is_planned_as_it_runs(options: dict[str, Any]) -> None:
    ids = torch.zeros(8, 32, dtype=torch.long)
    model = Tokens(width=32, layers=2, words=4000).to(torch.bfloat16)
    graph = sw.capture(model, {"ids": ids, "labels": ids})
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False, precision="bf16", **options)
    best: Any = plan.search.best
    again = sw.simulate(graph, plan, cluster)
    assert again.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)
    assert again.peak.peak_bytes == pytest.approx(best.memory.peak_bytes)


def test_runners_up_are_slower_and_differ(graph: Graph) -> None:
    plan = sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=4), progress=False)
    best, others = plan.search.best, plan.search.runners_up
    assert others
    times = [best.step_time_s, *(o.step_time_s for o in others)]
    assert times == sorted(times)
    figures = {(o.step_time_s, o.memory.peak_bytes) for o in [best, *others]}
    assert len(figures) == len(others) + 1


def test_relaxations_match_simulations(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", nodes=2, devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False, zero=3, tp=1, all_devices=True)
    rows = {row.kind: row for row in plan.search.relaxations}
    now = sw.simulate(graph, plan, cluster).step_time_s
    for kind, other in (
        ("bandwidth", faster_links(cluster, 2.0)),
        ("compute", faster_devices(cluster, 1.1)),
    ):
        gain = now - sw.simulate(graph, plan, other).step_time_s
        reported = plan.search.best.step_time_s - rows[kind].step_time_s
        assert reported == pytest.approx(gain, rel=0.05, abs=1e-6)
        assert rows[kind].ratio <= 1 + 1e-9
    free = sw.plan(graph, cluster, progress=False, all_devices=True).search.best.step_time_s
    if "options" in rows:
        assert rows["options"].step_time_s == pytest.approx(free, rel=1e-9)
    else:
        assert free >= plan.search.best.step_time_s * 0.998


@pytest.mark.slow
def test_relaxed_constraints_match_a_plan_without_them(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    fixed: dict[str, Any] = {"constraints": {"layers.*.weight": "0"}, "progress": False}
    plan = sw.plan(graph, cluster, **fixed)
    (row,) = [row for row in plan.search.relaxations if row.kind == "constraints"]
    free = sw.plan(graph, cluster, progress=False)
    assert row.step_time_s == pytest.approx(free.search.best.step_time_s, rel=1e-9)
    assert row.ratio < 1


@pytest.mark.slow
def test_more_memory_gains_as_much_as_a_larger_device(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=4)
    free = sw.plan(graph, cluster, progress=False)
    need = free.search.best.memory.peak_bytes / 2**30
    tight = sw.plan(graph, cluster, progress=False, memory_gib=need * 0.9)
    more = [row for row in tight.search.relaxations if row.kind == "memory"]
    for row in more:
        memory_gib = need * 0.9 + row.value * 1.0001
        larger = sw.plan(graph, cluster, progress=False, memory_gib=memory_gib)
        assert larger.search.best.step_time_s <= row.step_time_s * (1 + 1e-9)


def test_layers_add_up_to_the_step(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False, pp=1, num_microbatches=2)
    layers = plan.search.layers
    forward = sum(row.forward_s * row.count for row in layers)
    stage = plan.search.step.stages[0]
    assert forward == pytest.approx(2 * stage.forward_s, rel=1e-9)
    assert any(row.count >= 2 for row in layers)
    parts = plan.search.best.memory.parts
    state = sum(row.state_bytes * row.count for row in layers)
    static = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert state == pytest.approx(static, rel=1e-9)


def test_only_equal_rows_of_numbered_modules_are_merged() -> None:
    rows = [
        LayerFigures(
            name=name,
            stage=stage,
            forward_s=seconds,
            backward_s=0.0,
            communication_s=0.0,
            parameters=0.0,
            state_bytes=0.0,
            activation_bytes=0.0,
        )
        for name, stage, seconds in (
            ("a.0", 0, 1.0), ("a.1", 0, 1.0), ("a.2", 0, 2.0), ("b.0", 0, 1.0), ("a.3", 1, 1.0),
        )
    ]  # fmt: skip
    layers = merged(rows)
    assert [(r.name, r.count) for r in layers] == [
        ("a.0", 2), ("a.2", 1), ("b.0", 1), ("a.3", 1),
    ]  # fmt: skip
    assert layers[0].last == "a.1"


def test_tokens_are_counted_if_an_input_is_a_matrix_of_integers(graph: Graph) -> None:
    assert batch_size(graph, 16) == BatchSize(rows=16, tokens=16 * 32)
    plain = sw.capture(nn.Linear(8, 4), (torch.randn(6, 8),), lambda out, _: out.sum())
    assert batch_size(plain, 6) == BatchSize(rows=6)
