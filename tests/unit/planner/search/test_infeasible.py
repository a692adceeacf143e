"""Infeasible plans: the report, and that the suggested changes do fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cluster import Device
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.planner.what_if import copy_cluster
from tests.unit.planner.search.tokens import Tokens

pytestmark = pytest.mark.usefixtures("short_local_search")
LITTLE = 2e-4  # GiB, less than any plan needs


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"zero": 0, "tp": 1, "offload": ()}],
    ids=str,
)
def test_suggested_changes_fit(graph: Graph, options: dict[str, object]) -> None:
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
    assert plan.search.best.step_time_s <= memory["step_time_s"] * (1 + 1e-9)
    if "devices" in kinds:
        factor = kinds["devices"]["num_ranks"] // cluster.num_ranks
        larger = copy_cluster(cluster, factor)
        assert larger is not None
        plan = sw.plan(graph, larger, progress=False, memory_gib=LITTLE, **options)
        assert plan.search.best.step_time_s <= kinds["devices"]["step_time_s"] * (1 + 1e-9)


@pytest.mark.slow
def test_the_smallest_memory_does_not_depend_on_the_limit() -> None:
    ids = torch.randint(0, 40, (6, 10))
    graph = sw.capture(Tokens(width=24, layers=2, words=40), {"ids": ids, "labels": ids})
    fixed: dict[str, Any] = {"tp": 2, "offload": (), "progress": False}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(graph, sw.Cluster.local(2), memory_gib=1e-6, **fixed)
    needs = raised.value.report["needs_bytes"]
    plan = sw.plan(graph, sw.Cluster.local(2), memory_gib=1.0001 * needs / 2**30, **fixed)
    assert plan.search.best.memory.peak_bytes <= 1.0001 * needs


@pytest.mark.slow
def test_a_suggested_device_size_fits() -> None:
    ids = torch.zeros(16, 512, dtype=torch.long)
    graph = sw.capture(Tokens(width=64, layers=2, words=20_000), {"ids": ids, "labels": ids})
    fixed: dict[str, Any] = {
        "zero": 0,
        "dp": 2,
        "num_microbatches": 1,
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


def test_a_smaller_batch_keeps_the_requested_micro_batches() -> None:
    ids = torch.zeros(16, 512, dtype=torch.long)
    graph = sw.capture(Tokens(width=16, layers=2), {"ids": ids, "labels": ids})
    cluster = sw.Cluster.preset("h100", devices_per_node=1)
    fixed: dict[str, Any] = {"recompute": "none", "offload": (), "progress": False}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(graph, cluster, memory_gib=0.001, num_microbatches=16, **fixed)
    assert not [c for c in raised.value.report["changes"] if c["kind"] == "batch"]


def test_a_suggested_batch_fits() -> None:
    def captured(rows: int) -> Graph:
        ids = torch.randint(0, 128, (rows, 512))
        return sw.capture(Tokens(width=16, layers=2), {"ids": ids, "labels": ids})

    cluster = sw.Cluster.preset("h100", devices_per_node=1)
    fixed: dict[str, object] = {"num_microbatches": 1, "recompute": "none", "offload": ()}
    with pytest.raises(InfeasiblePlan) as raised:
        sw.plan(captured(16), cluster, progress=False, memory_gib=0.01, **fixed)
    (batch,) = [c for c in raised.value.report["changes"] if c["kind"] == "batch"]
    plan = sw.plan(captured(batch["rows"]), cluster, progress=False, memory_gib=0.01, **fixed)
    peak_bytes = plan.search.best.memory.peak_bytes
    assert peak_bytes == pytest.approx(batch["peak_bytes"], rel=0.02)
    with pytest.raises(InfeasiblePlan):
        sw.plan(captured(2 * batch["rows"]), cluster, progress=False, memory_gib=0.01, **fixed)


@pytest.mark.parametrize("kind", ["h100", "gb200", "cpu"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_copied_cluster_multiplies_the_devices(kind: str, nodes: int) -> None:
    more = {} if kind == "gb200" else {"oversubscription": 2.0}
    cluster = sw.Cluster.preset(kind, nodes=nodes, devices_per_node=2, **more)
    larger = copy_cluster(cluster, 4)
    assert larger is not None
    assert larger.num_ranks == 4 * cluster.num_ranks
    assert sw.Cluster.from_yaml(larger.to_yaml()) == larger
    assert copy_cluster(sw.Cluster.local(2), 2).num_ranks == 4  # type: ignore[union-attr]


def test_a_single_device_is_planned_for(graph: Graph) -> None:
    (node,) = sw.Cluster.preset("a100-40", devices_per_node=1).nodes
    solo = sw.Cluster(name="solo", nodes=(replace(node, link=None, nic=None),))
    plan = sw.plan(graph, solo, progress=False)
    rows = plan.search.details.what_if
    counts = [row for row in rows if row.kind == "devices"]
    assert counts
    assert not any(row.feasible for row in counts)


def hosts(cluster: sw.Cluster, gib: float) -> sw.Cluster:
    """Return the cluster with `gib` of host memory for each device."""

    def less(device: Device) -> Device:
        return replace(device, host_memory_bytes=int(gib * 2**30))

    nodes = [replace(n, devices=tuple(map(less, n.devices))) for n in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


@pytest.mark.slow
def test_too_little_host_memory_is_reported(graph: Graph) -> None:
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


@pytest.mark.slow
def test_constraints_may_make_a_plan_infeasible(graph: Graph) -> None:
    cluster = sw.Cluster.preset("h100", devices_per_node=2)

    def refused(memory_gib: float, **fixed: Any) -> Mapping[str, Any]:
        with pytest.raises(InfeasiblePlan) as raised:
            sw.plan(
                graph, cluster, memory_gib=memory_gib, tp=2, offload=(), progress=False, **fixed
            )
        return raised.value.report

    needs = refused(LITTLE)["needs_bytes"]
    report = refused(1.01 * needs / 2**30, constraints={"*": "replicate"})
    (change,) = [c for c in report["changes"] if c["kind"] == "constraints"]
    assert change["peak_bytes"] <= 1.01 * needs < report["needs_bytes"]
