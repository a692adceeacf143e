"""Automatic plans: correct, deterministic, as fast as estimated, and errors in options."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import InfeasiblePlan, PlanError
from shardwise.planner import local_search
from shardwise.planner.search_space import MAX_STEP, SearchLimits, UserOptions, configs
from tests.support import zoo

UNEQUAL = """
version: 2
name: two
devices:
  fast: {kind: cpu, memory_gib: 8, matmul_flops_per_s: {float64: 2.0e+10, float32: 4.0e+10},
         memory_bytes_per_s: 8.0e+9, overhead_s: 5.0e-6}
  slow: {kind: cpu, memory_gib: 8, matmul_flops_per_s: {float64: 1.0e+10, float32: 2.0e+10},
         memory_bytes_per_s: 4.0e+9, overhead_s: 5.0e-6}
nodes:
  - {name: a, devices: {fast: 2}, link: {bandwidth_gb_per_s: 5, latency_us: 20},
     nic: {count: 1, bandwidth_gbit_per_s: 10, latency_us: 50}}
  - {name: b, devices: {slow: 1}, link: {bandwidth_gb_per_s: 5, latency_us: 20},
     nic: {count: 1, bandwidth_gbit_per_s: 10, latency_us: 50}}
network: {latency_us: 30}
"""


@pytest.fixture(scope="module")
def gpt() -> tuple[object, object, sw.Graph]:
    model, batch = zoo.build("fused_gpt")
    return model, batch, sw.capture(model, batch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp": 2, "pp": 2, "num_microbatches": 2},
        pytest.param({"tp": 4}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "zero": 3}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "num_microbatches": 2, "recompute": "full", "schedule": "1f1b"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_plan_is_correct_and_matches_its_estimate(gpt, options) -> None:
    model, batch, graph = gpt
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=4)
    plan = sw.plan(graph, cluster, progress=False, **options)
    assert plan.num_ranks == 4
    estimate = sw.simulate(graph, plan, cluster)
    assert estimate.step_time_s == pytest.approx(plan.search.best.step_time_s, rel=1e-6)
    for other in plan.search.runners_up:
        assert other.step_time_s >= estimate.step_time_s
    for name, value in options.items():
        if name in ("num_microbatches", "recompute", "schedule"):
            assert getattr(plan, name) == value
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)


@pytest.mark.slow
def test_unequal_devices_take_unequal_shares(gpt) -> None:
    model, batch, graph = gpt
    cluster = sw.Cluster.from_yaml(UNEQUAL)
    plan = sw.plan(graph, cluster, progress=False, pp=1, tp=1, all_devices=True)
    assert ":" in str(plan.mesh)  # shares such as dp=2:2:1
    assert sw.verify(model, batch, plan).ok
    free = sw.plan(graph, cluster, progress=False)
    assert free.search.best.step_time_s <= plan.search.best.step_time_s * (1 + 1e-9)
    assert sw.verify(model, batch, free).ok


def test_planning_is_deterministic(gpt) -> None:
    _, _, graph = gpt
    cluster = sw.Cluster.preset("a100", nodes=2, devices_per_node=1)
    first, second = (sw.plan(graph, cluster, progress=False).to_json() for _ in range(2))
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def test_constraints_are_respected(gpt) -> None:
    _, _, graph = gpt
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=2)
    name = "blocks.*.up.weight"
    for cut in ("replicate", "0"):
        plan = sw.plan(graph, cluster, constraints={name: cut}, tp=2, pp=1, progress=False)
        assert plan.entry("blocks.1.up.weight").layout["tp"] == cut
    plan = sw.plan(graph, cluster, constraints={name: "0"}, progress=False)
    assert plan.entry("blocks.1.up.weight").layout["tp"] == "0"
    assert plan.search.fixed == {"constraints": {name: "0"}}


class Chain(torch.nn.Module):
    """Two blocks of four products each."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        rows = [[torch.nn.Linear(width, width, bias=False) for _ in range(4)] for _ in range(2)]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*row) for row in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().sum()


def test_there_may_be_more_stages_than_blocks() -> None:
    graph = sw.capture(Chain(), {"x": torch.ones(5, 64, 256)})
    cluster = sw.Cluster.preset("cpu", devices_per_node=7)
    free = sw.plan(graph, cluster, progress=False).search.best.step_time_s
    fixed = sw.plan(graph, cluster, progress=False, pp=7).search.best.step_time_s
    assert free <= fixed * (1 + 1e-9)


@given(rows=st.integers(1, 2000), dp=st.integers(1, 64))
def test_neighbouring_micro_batch_counts_are_close(rows: int, dp: int) -> None:
    assume(dp <= rows)
    limits = SearchLimits(
        ranks=dp, rows=rows, num_microbatches=rows, stages=1, virtual_stages=1, tensor_ranks=1
    )
    counts = sorted({p.num_microbatches for p in configs(limits, UserOptions(dp=dp))})
    assert counts[0] == 1
    assert counts[-1] * dp <= rows
    assert all(high <= 2 * MAX_STEP * low for low, high in pairwise(counts))


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (1, 1)])
def test_ranks_with_replicated_parameters_have_zero_levels(dp: int, tp: int) -> None:
    ranks = dp * tp
    limits = SearchLimits(
        ranks=ranks, rows=2, num_microbatches=1, stages=1, virtual_stages=1, tensor_ranks=tp
    )
    levels = {p.zero for p in configs(limits, UserOptions(dp=dp, tp=tp))}
    assert levels == ({0, 1, 2, 3} if ranks > 1 else {0})


def test_batch_norm_is_not_split_into_micro_batches() -> None:
    model, batch = zoo.build("resnet")
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=2)
    plan = sw.plan(graph, cluster, progress=False)
    assert plan.num_microbatches == 1
    assert sw.verify(model, batch, plan).ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_gib": 0}, "memory_gib"),
        ({"tpp": 2}, "tpp"),
        ({"zero": 5}, "zero=5"),
        ({"schedule": "1f1"}, "did you mean"),
        ({"recompute": "ful"}, "did you mean"),
        ({"offload": "optimiser"}, "did you mean"),
        ({"constraints": {"nothing.*": "0"}}, "matches none"),
        ({"constraints": {"*": {"xx": "0"}}}, "mesh axis"),
        ({"constraints": [("*", "0")]}, "globs"),
        ({"constraints": {"*.up.weight": "0"}, "tp": 1}, "tp=1 of 4"),
        ({"constraints": {"*.up.weight": "0"}, "dp": 2, "pp": 2}, "dp=2, pp=2 of 4"),
        ({"memory_gib": "70"}, "memory_gib"),
        ({"memory_gib": float("inf")}, "memory_gib"),
        ({"precision": "bf16"}, r"model\.to\(torch\.bfloat16\)"),
        ({"tp": 3}, "does not divide"),
        ({"dp": 64}, "does not divide"),
        ({"num_microbatches": 10**6}, "rows"),
        (
            {"dp": 4, "num_microbatches": 3},
            r"needs 12 rows.*dp=4; the batch has \d\n.*num_microbatches=",
        ),
        ({"tp": 2, "pp": 1, "num_microbatches": 4}, r"needs 8 rows.*dp=2; the batch has \d"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(gpt, options, message) -> None:
    _, _, graph = gpt
    graph32 = graph
    if "precision" in options:
        model, batch = zoo.build("mlp", dtype=torch.float32)
        graph32 = sw.capture(model, batch)
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=4)
    with pytest.raises((PlanError, InfeasiblePlan), match=message):
        sw.plan(graph32, cluster, progress=False, **options)


def test_the_error_names_the_required_memory(gpt) -> None:
    _, _, graph = gpt
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=2)
    with pytest.raises(InfeasiblePlan, match=r"too much|GiB|MiB") as caught:
        sw.plan(graph, cluster, memory_gib=1e-5, progress=False)
    assert caught.value.hint


@pytest.mark.slow
def test_reported_memory_is_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported memory fits, a little less does not, and more memory gains as predicted."""
    monkeypatch.setattr(local_search, "MAX_RANKS", 0)
    with torch.device("meta"):
        graph = sw.capture(Chain(4096), {"x": torch.ones(64, 512, 4096)})
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=2)

    def planned(memory_gib: float) -> sw.Plan:
        return sw.plan(graph, cluster, memory_gib=memory_gib, progress=False)

    with pytest.raises(InfeasiblePlan) as caught:
        planned(0.1)
    needed = next(c["memory_gib"] for c in caught.value.report["changes"] if c["kind"] == "memory")
    with pytest.raises(InfeasiblePlan):
        planned(0.9 * needed)
    lean = planned(needed)
    row = next(row for row in lean.search.relaxations if row.kind == "memory")
    more = planned(needed + row.value).search.best.step_time_s
    assert more <= row.step_time_s * (1 + 1e-9) < lean.search.best.step_time_s
