"""What a plan says of its own making: figures that can be replayed, changes that are true."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.cluster import ClusterNode, Device, Nic
from shardwise.errors import InfeasiblePlan, PlanError
from shardwise.ir import Graph
from shardwise.planner.search import polish
from shardwise.planner.search.larger import copied
from shardwise.planner.search.relax import faster_devices, faster_links
from shardwise.planner.search.replay import replay
from shardwise.planner.search.report import batch_sizes, merged
from tests.support import zoo
from tests.support.tiers import thinned

LITTLE = 2e-4  # GiB, less than any plan needs
OPTIONS = [
    {},
    {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    {"pp": 2, "microbatches": 4, "schedule": "zb_h1", "zero": 1},
    {"pp": 2, "microbatches": 4, "virtual_stages": 2, "schedule": "interleaved"},
    {"pp": 2, "microbatches": 4, "schedule": "zb_v"},
    {"zero": 3, "pp": 1, "tp": 1, "recompute": "full"},
    {"offload": "optimizer", "tp": 2},
]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tokens(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4, words: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture(autouse=True)
def briefly_polished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are the same of plans that few others were compared with: of two ranks' alone."""
    monkeypatch.setattr(polish, "MOST_RANKS", 2)
    monkeypatch.setattr(polish, "SIMULATED", 20)
    monkeypatch.setattr(polish, "LOWERED_NODES", 60)


@pytest.fixture(scope="module")
def graph() -> Graph:
    ids = torch.randint(0, 128, (16, 32))
    return sw.capture(Tokens(), {"ids": ids, "labels": ids})


@pytest.fixture(scope="module")
def unequal() -> sw.Cluster:
    nic = Nic(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
    nodes = []
    for kind, number in (("h100", 2), ("a100-40", 2)):
        (node,) = sw.Cluster.preset(kind, devices_per_node=number).nodes
        nodes.append(ClusterNode(name=kind, devices=node.devices, link=node.link, nic=nic))
    return sw.Cluster(name="two", nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("machines", "options"),
    [
        *thinned((("h100", o) for o in OPTIONS), lambda i, _: i in (0, 4, 5)),
        *(("unequal", options) for options in OPTIONS[:1]),
        *(pytest.param("unequal", o, marks=pytest.mark.slow) for o in OPTIONS[1:3]),
        *(pytest.param("cpu", o, marks=pytest.mark.slow) for o in (OPTIONS[0], OPTIONS[5])),
    ],
    ids=str,
)
def test_a_step_can_be_replayed_from_the_file(
    graph: Graph, unequal: sw.Cluster, machines: str, options: dict[str, object], tmp_path: Path
) -> None:
    cluster = unequal if machines == "unequal" else sw.Cluster.preset(machines, devices_per_node=4)
    plan = sw.plan(graph, cluster, progress=False, **options)
    plan.save(tmp_path / "plan.json")
    again = replay(sw.Plan.load(tmp_path / "plan.json"))
    best = plan.search["best"]
    assert again.step_time_s == pytest.approx(best["step_time_s"], rel=1e-9)
    assert dict(again.timeline.causes) == pytest.approx(best["causes"], rel=1e-9, abs=1e-15)
    assert again.peak.peak_bytes == best["memory"]["peak_bytes"]
    assert again.num_ranks == cluster.num_ranks
    assert again.rows == 16


def test_a_replay_is_the_timeline_of_a_simulation(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=4)
    plan = sw.plan(graph, cluster, progress=False, pp=2, microbatches=4, zero=1)
    again, anew = replay(plan).timeline, sw.simulate(graph, plan, cluster).timeline
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
        sizes.append(len(json.dumps(plan.search)))
        assert replay(plan).step_time_s == pytest.approx(
            plan.search["best"]["step_time_s"], rel=1e-9
        )
    assert sizes[1] < 1.2 * sizes[0]


def test_an_edited_or_damaged_plan_is_not_replayed(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False)
    with pytest.raises(PlanError, match="changed after it was made"):
        replay(plan.with_(recompute="selective" if plan.recompute == "none" else "none"))
    with pytest.raises(PlanError, match="was not searched for"):
        replay(sw.strategies.ddp(graph, cluster))
    for name in ("units", "stages", "groups", "best"):
        broken = {k: v for k, v in plan.search.items() if k != name}
        with pytest.raises(PlanError, match="damaged"):
            replay(plan.with_(search=broken))


def test_what_stages_share_can_be_replayed() -> None:
    graph = sw.capture(*zoo.build("gpt2"))
    plan = sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=2), progress=False, pp=2)
    assert [(row["home"], row["other"]) for row in plan.search["tied"]] == [(0, 1)]
    again = replay(plan)
    assert again.step_time_s == pytest.approx(plan.search["best"]["step_time_s"], rel=1e-9)
    again = replay(plan.with_(search={**plan.search, "tied": []}))
    assert again.step_time_s < plan.search["best"]["step_time_s"]


@pytest.mark.parametrize(
    "options", [{"pp": 2, "microbatches": 4}, {"tp": 2, "microbatches": 2}, {}]
)
def test_a_loss_of_16_bits_is_planned_as_it_runs(options: dict[str, Any]) -> None:
    ids = torch.zeros(8, 32, dtype=torch.long)
    model = Tokens(width=32, layers=2, words=4000).to(torch.bfloat16)
    graph = sw.capture(model, {"ids": ids, "labels": ids})
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False, precision="bf16", **options)
    found: Any = plan.search["best"]
    again = sw.simulate(graph, plan, cluster)
    assert again.step_time_s == pytest.approx(found["step_time_s"], rel=1e-9)
    assert again.peak.peak_bytes == pytest.approx(found["memory"]["peak_bytes"])


def test_runners_up_are_slower_and_differ(graph: Graph) -> None:
    plan = sw.plan(graph, sw.Cluster.preset("h100", devices_per_node=4), progress=False)
    best, others = plan.search["best"], plan.search["runners_up"]
    assert others
    times = [best["step_time_s"], *(o["step_time_s"] for o in others)]
    assert times == sorted(times)
    figures = {(o["step_time_s"], o["memory"]["peak_bytes"]) for o in [best, *others]}
    assert len(figures) == len(others) + 1


def test_relaxations_are_what_a_simulation_gives(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", nodes=2, devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False, zero=3, tp=1)
    rows = {row["kind"]: row for row in plan.search["relaxations"]}
    now = sw.simulate(graph, plan, cluster).step_time_s
    for kind, other in (
        ("links", faster_links(cluster, 2.0)),
        ("compute", faster_devices(cluster, 1.1)),
    ):
        gain = now - sw.simulate(graph, plan, other).step_time_s
        told = plan.search["best"]["step_time_s"] - rows[kind]["step_time_s"]
        assert told == pytest.approx(gain, rel=0.05, abs=1e-6)
        assert rows[kind]["ratio"] <= 1 + 1e-9
    free = sw.plan(graph, cluster, progress=False).search["best"]["step_time_s"]
    if "options" in rows:
        assert rows["options"]["step_time_s"] == pytest.approx(free, rel=1e-9)
    else:
        assert free >= plan.search["best"]["step_time_s"] * 0.998


def test_constraints_cost_what_a_plan_without_them_gains(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    fixed: dict[str, Any] = {"constraints": {"layers.*.weight": "0"}, "progress": False}
    plan = sw.plan(graph, cluster, **fixed)
    (row,) = [row for row in plan.search["relaxations"] if row["kind"] == "constraints"]
    free = sw.plan(graph, cluster, progress=False)
    assert row["step_time_s"] == pytest.approx(free.search["best"]["step_time_s"], rel=1e-9)
    assert row["ratio"] < 1


def test_constraints_may_be_what_does_not_fit(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)

    def refused(memory_gib: float, **fixed: Any) -> Mapping[str, Any]:
        with pytest.raises(InfeasiblePlan) as raised:
            sw.plan(
                graph, cluster, memory_gib=memory_gib, tp=2, offload=(), progress=False, **fixed
            )
        return raised.value.report

    least = refused(LITTLE)["needs_bytes"]
    report = refused(1.01 * least / 2**30, constraints={"*": "whole"})
    (told,) = [c for c in report["changes"] if c["kind"] == "constraints"]
    assert told["peak_bytes"] <= 1.01 * least < report["needs_bytes"]


def test_more_memory_buys_what_a_larger_device_gives(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=4)
    whole = sw.plan(graph, cluster, progress=False)
    need = whole.search["best"]["memory"]["peak_bytes"] / 2**30
    tight = sw.plan(graph, cluster, progress=False, memory_gib=need * 0.9)
    more = [row for row in tight.search["relaxations"] if row["kind"] == "memory"]
    for row in more:
        given = need * 0.9 + row["gib"] * 1.0001
        found = sw.plan(graph, cluster, progress=False, memory_gib=given)
        assert found.search["best"]["step_time_s"] <= row["step_time_s"] * (1 + 1e-9)


def test_layers_add_up_to_the_step(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False, pp=1, microbatches=2)
    layers = plan.search["layers"]
    forward = sum(row["forward_s"] * row["count"] for row in layers)
    stage = plan.search["stages"][0]
    assert forward == pytest.approx(2 * stage["forward_s"], rel=1e-9)
    assert any(row["count"] >= 2 for row in layers)
    parts = plan.search["best"]["memory"]["parts"]
    state = sum(row["state_bytes"] * row["count"] for row in layers)
    static = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert state == pytest.approx(static, rel=1e-9)


def test_rows_of_other_figures_or_modules_are_not_merged() -> None:
    rows = [
        {"name": name, "stage": stage, "count": 1, "forward_s": seconds}
        for name, stage, seconds in (
            ("a.0", 0, 1.0), ("a.1", 0, 1.0), ("a.2", 0, 2.0), ("b.0", 0, 1.0), ("a.3", 1, 1.0),
        )
    ]  # fmt: skip
    found = merged(rows)
    assert [(r["name"], r["count"]) for r in found] == [
        ("a.0", 2), ("a.2", 1), ("b.0", 1), ("a.3", 1),
    ]  # fmt: skip
    assert found[0]["last"] == "a.1"


def test_tokens_are_counted_where_inputs_are_matrices_of_words(graph: Graph) -> None:
    assert batch_sizes(graph, 16) == {"rows": 16, "tokens": 16 * 32}
    plain = sw.capture(nn.Linear(8, 4), (torch.randn(6, 8),), lambda out, _: out.sum())
    assert batch_sizes(plain, 6) == {"rows": 6}


# ------------------------------------------------------------ nothing fits


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"zero": 0, "tp": 1, "offload": ()}],
    ids=str,
)
def test_changes_that_are_named_do_fit(graph: Graph, options: dict[str, object]) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    with pytest.raises(InfeasiblePlan, match="too much") as raised:
        sw.plan(graph, cluster, progress=False, memory_gib=LITTLE, **options)
    report = raised.value.report
    assert report["needs_bytes"] - report["limit_bytes"] == pytest.approx(report["excess_bytes"])
    assert report["excess_bytes"] > 0
    assert report["changes"]
    assert json.loads(json.dumps(report))["changes"]
    kinds = {change["kind"]: change for change in report["changes"]}
    memory = kinds["memory"]
    plan = sw.plan(graph, cluster, progress=False, memory_gib=memory["memory_gib"], **options)
    assert plan.search["best"]["step_time_s"] <= memory["step_time_s"] * (1 + 1e-9)
    if "devices" in kinds:
        factor = kinds["devices"]["num_ranks"] // cluster.num_ranks
        larger = copied(cluster, factor)
        assert larger is not None
        plan = sw.plan(graph, larger, progress=False, memory_gib=LITTLE, **options)
        assert plan.search["best"]["step_time_s"] <= kinds["devices"]["step_time_s"] * (1 + 1e-9)


def test_the_smallest_memory_is_the_same_whatever_there_is() -> None:
    ids = torch.randint(0, 40, (6, 10))
    graph = sw.capture(Tokens(width=24, layers=2, words=40), {"ids": ids, "labels": ids})
    fixed: dict[str, Any] = {"tp": 2, "offload": (), "progress": False}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(graph, sw.Cluster.local(2), memory_gib=1e-6, **fixed)
    needs = raised.value.report["needs_bytes"]
    plan = sw.plan(graph, sw.Cluster.local(2), memory_gib=1.0001 * needs / 2**30, **fixed)
    assert plan.search["best"]["memory"]["peak_bytes"] <= 1.0001 * needs


def test_a_size_of_devices_that_is_named_does_fit() -> None:
    ids = torch.zeros(16, 512, dtype=torch.long)
    graph = sw.capture(Tokens(width=64, layers=2, words=20_000), {"ids": ids, "labels": ids})
    fixed: dict[str, Any] = {
        "zero": 0,
        "dp": 2,
        "microbatches": 1,
        "offload": (),
        "progress": False,
    }

    def of(gib: float) -> sw.Cluster:
        cluster = sw.Cluster.preset("h100", devices_per_node=2)
        (node,) = cluster.nodes
        devices = tuple(replace(d, memory_bytes=round(gib * 2**30)) for d in node.devices)
        return replace(cluster, nodes=(replace(node, devices=devices),))

    with pytest.raises(InfeasiblePlan, match=r"would fit: devices of \d") as raised:
        sw.plan(graph, of(2.2), **fixed)
    (memory,) = [c for c in raised.value.report["changes"] if c["kind"] == "memory"]
    assert sw.plan(graph, of(memory["memory_gib"]), **fixed)
    with pytest.raises(InfeasiblePlan):
        sw.plan(graph, of(memory["memory_gib"] - 0.02), **fixed)


def test_a_smaller_batch_keeps_the_micro_batches_that_are_asked_for() -> None:
    ids = torch.zeros(16, 512, dtype=torch.long)
    graph = sw.capture(Tokens(width=16, layers=2), {"ids": ids, "labels": ids})
    cluster = sw.Cluster.preset("h100", devices_per_node=1)
    fixed: dict[str, Any] = {"recompute": "none", "offload": (), "progress": False}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(graph, cluster, memory_gib=0.001, microbatches=16, **fixed)
    assert not [c for c in raised.value.report["changes"] if c["kind"] == "batch"]


def test_a_smaller_batch_that_is_named_does_fit() -> None:
    def captured(rows: int) -> Graph:
        ids = torch.randint(0, 128, (rows, 512))
        return sw.capture(Tokens(width=16, layers=2), {"ids": ids, "labels": ids})

    cluster = sw.Cluster.preset("h100", devices_per_node=1)
    fixed: dict[str, object] = {"microbatches": 1, "recompute": "none", "offload": ()}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(captured(16), cluster, progress=False, memory_gib=0.01, **fixed)
    (batch,) = [c for c in raised.value.report["changes"] if c["kind"] == "batch"]
    plan = sw.plan(captured(batch["rows"]), cluster, progress=False, memory_gib=0.01, **fixed)
    found = plan.search["best"]["memory"]["peak_bytes"]
    assert found == pytest.approx(batch["peak_bytes"], rel=0.02)
    with pytest.raises(InfeasiblePlan):
        sw.plan(captured(2 * batch["rows"]), cluster, progress=False, memory_gib=0.01, **fixed)


@pytest.mark.parametrize("kind", ["h100", "gb200", "cpu"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_copied_cluster_has_as_many_times_the_devices(kind: str, nodes: int) -> None:
    more = {} if kind == "gb200" else {"oversubscription": 2.0}
    cluster = sw.Cluster.preset(kind, nodes=nodes, devices_per_node=2, **more)
    larger = copied(cluster, 4)
    assert larger is not None
    assert larger.num_ranks == 4 * cluster.num_ranks
    assert sw.Cluster.from_yaml(larger.to_yaml()) == larger
    assert copied(sw.Cluster.local(2), 2).num_ranks == 4  # type: ignore[union-attr]


def test_a_single_device_is_planned_for(graph: Graph) -> None:
    (node,) = sw.Cluster.preset("a100-40", devices_per_node=1).nodes
    alone = sw.Cluster(name="solo", nodes=(replace(node, link=None, nic=None),))
    plan = sw.plan(graph, alone, progress=False)
    rows = plan.search["details"]["what_if"]
    counts = [row for row in rows if row["kind"] == "devices"]
    assert counts
    assert not any(row["feasible"] for row in counts)


def hosts(cluster: sw.Cluster, gib: float) -> sw.Cluster:
    """The cluster with so much host memory for each device."""

    def less(device: Device) -> Device:
        return replace(device, host_memory_bytes=int(gib * 2**30))

    nodes = [replace(n, devices=tuple(map(less, n.devices))) for n in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


def test_host_memory_that_is_too_little_is_told_as_such(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    options: dict[str, Any] = {"dp": 2, "zero": 3, "offload": ("optimizer",), "progress": False}
    with pytest.raises(InfeasiblePlan, match="of host memory for a device") as raised:
        sw.plan(graph, hosts(cluster, 0.001), **options)
    report = raised.value.report
    assert report["memory"] == "host"
    assert report["limit_bytes"] == int(0.001 * 2**30)
    assert sum(report["parts"].values()) == pytest.approx(report["needs_bytes"])
    (change,) = [c for c in report["changes"] if c["kind"] == "host_memory"]
    assert "memory_gib" not in change
    assert f"host_memory_gib: {change['host_memory_gib']:.2f}" in change["try"]
    sw.plan(graph, hosts(cluster, change["host_memory_gib"]), **options)


@pytest.mark.slow
def test_devices_and_hosts_may_both_be_too_small(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)
    options: dict[str, Any] = {"dp": 2, "zero": 3, "offload": ("optimizer",), "progress": False}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(graph, hosts(cluster, 0.001), memory_gib=0.001, **options)
    (change,) = [c for c in raised.value.report["changes"] if c["kind"] == "memory"]
    assert change["try"].startswith(f"memory_gib={change['memory_gib']:.2f}, nodes with host_")
    larger = hosts(cluster, change["host_memory_gib"])
    sw.plan(graph, larger, memory_gib=change["memory_gib"], **options)
