"""Pipeline plans: sizes, schedules, files, and the programs that are built from them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cluster import Mesh
from shardwise.errors import InfeasiblePlan, PlanError
from shardwise.plans import ParameterEntry, Plan, Precision
from shardwise.program.pipeline import build_pipeline
from shardwise.schedules import Schedule, ScheduleError, make
from tests.support import zoo
from tests.support.tiers import thinned


@functools.cache
def graph(name: str) -> sw.Graph:
    return sw.capture(*zoo.build(name))


def pipeline(name: str, ranks: int, **options: Any) -> Plan:
    return sw.strategies.pipeline(graph(name), sw.Cluster.local(ranks), **options)


def hybrid(name: str, ranks: int, **options: Any) -> Plan:
    return sw.strategies.hybrid(graph(name), sw.Cluster.local(ranks), **options)


@pytest.mark.parametrize(
    "name",
    [
        "fused_gpt",
        "unet",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5", "vit")),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pp": 2}),
        (3, {"pp": 3, "schedule": "zero_bubble"}),
        (2, {"pp": 2, "schedule": "interleaved"}),
        (2, {"pp": 2, "schedule": "zb_v"}),
    ],
    ids=["two", "three", "interleaved", "v"],
)
def test_plans_of_the_zoo_become_programs(name: str, ranks: int, options: dict[str, Any]) -> None:
    plan = pipeline(name, ranks, num_microbatches=4, **options)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    built = build_pipeline(graph(name), plan)
    assert len(built.stages) == options["pp"] * (
        2 if options.get("schedule") in ("interleaved", "zb_v") else 1
    )
    for stage, program in zip(plan.stages[1:], built.stages[1:], strict=True):
        assert stage.first in [node.key for node in program.program.graph.nodes]
        assert program.program.graph.parameters
    assert all(len(line) <= 100 for line in str(plan).splitlines())


@pytest.mark.parametrize("name", thinned(["fused_gpt", "llama", "unet", "vit"], lambda i, _: i < 2))
def test_stages_with_data_and_tensor_parallel_ranks(name: str) -> None:
    plan = pipeline(name, 4, pp=2, num_microbatches=2)
    assert [s.ranks for s in plan.stages] == [(0, 1), (2, 3)]
    assert {s.mesh for s in plan.stages} == {Mesh.of(dp=2)}
    build_pipeline(graph(name), plan)


def test_hybrid_combines_three_axes() -> None:
    plan = hybrid("fused_gpt", 8, dp=2, tp=2, pp=2, zero=1, num_microbatches=2)
    assert plan.mesh == Mesh.of(dp=2, tp=2)
    assert [s.ranks for s in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.roles == {"dp": "batch", "tp": "parameters"}
    assert plan.schedule == "1f1b"
    assert plan.entry("blocks.1.qkv.weight").layout == {"tp": "0:3x[4]x16"}
    unstaged = sw.strategies.hybrid(graph("fused_gpt"), sw.Cluster.local(4), dp=2, tp=2, zero=1)
    assert plan.parameters == unstaged.parameters
    built = build_pipeline(graph("fused_gpt"), plan)
    assert built.tied == {"tok.weight": (0, 1)}


def test_ranks_are_divided_over_the_stages() -> None:
    plan = pipeline("fused_gpt", 8, pp=4, num_microbatches=2)
    assert [s.ranks for s in plan.stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    two_ranks = pipeline("fused_gpt", 2, pp=2, num_microbatches=2)
    assert two_ranks.mesh == Mesh()
    assert two_ranks.roles == {}
    assert two_ranks.inputs == {"input_ids": 0, "labels": 0}
    assert pipeline("fused_gpt", 2, pp=2, num_microbatches=1).inputs == {}


def test_each_rank_has_a_stage_by_default() -> None:
    assert [s.ranks for s in pipeline("fused_gpt", 3, num_microbatches=2).stages] == [
        (0,),
        (1,),
        (2,),
    ]
    plan = pipeline("fused_gpt", 2, schedule="zb_v", num_microbatches=2)
    assert [s.ranks for s in plan.stages] == [(0,), (1,), (1,), (0,)]


def test_virtual_stages_are_where_the_schedule_runs_them() -> None:
    plan = pipeline("fused_gpt", 2, pp=2, schedule="zb_v", num_microbatches=2)
    assert [s.ranks for s in plan.stages] == [(0,), (1,), (1,), (0,)]
    options = {"pp": 2, "virtual_stages": 3, "schedule": "interleaved"}
    plan = pipeline("fused_gpt", 2, num_microbatches=2, **options)
    assert [s.ranks for s in plan.stages] == [(0,), (1,)] * 3
    plan = hybrid("fused_gpt", 2, pp=2, virtual_stages=2, num_microbatches=2)
    assert plan.schedule == "interleaved"
    assert len(plan.stages) == 4


def test_stages_may_have_unequal_ranks() -> None:
    plan = pipeline("fused_gpt", 4, stage_ranks=(1, 2, 1), num_microbatches=2)
    assert [s.ranks for s in plan.stages] == [(0,), (1, 2), (3,)]
    assert [s.mesh for s in plan.stages] == [Mesh(), Mesh.of(dp=2), Mesh()]
    assert plan.mesh == Mesh()
    assert plan.roles == {"dp": "batch"}
    build_pipeline(graph("fused_gpt"), plan)
    meshes = (Mesh(), Mesh.of(tp=2))
    plan = pipeline("fused_gpt", 3, stage_meshes=meshes, num_microbatches=2)
    assert plan.entry("blocks.1.up.weight").layout == {"tp": "0"}
    build_pipeline(graph("fused_gpt"), plan)


def test_accumulation_is_a_pipeline_of_one_stage() -> None:
    for name, ranks in (("ddp", 2), ("zero1", 2), ("fsdp", 2), ("tensor", 2), ("hybrid", 1)):
        make_plan = getattr(sw.strategies, name)
        cluster = sw.Cluster.local(ranks)
        plain = make_plan(graph("fused_gpt"), cluster)
        plan = make_plan(graph("fused_gpt"), cluster, num_microbatches=2)
        assert (plan.stages, plan.num_microbatches, plan.schedule) == ((), 2, "1f1b")
        assert plan.parameters == plain.parameters
        assert plain.schedule == ""
        build_pipeline(graph("fused_gpt"), plan)


def test_execution_options_are_stored_and_shown() -> None:
    plan = pipeline(
        "fused_gpt",
        2,
        pp=2,
        num_microbatches=4,
        per_microbatch=True,
        recompute=["blocks.*"],
        precision="bf16",
        offload="optimizer",
    )
    assert plan.per_microbatch
    assert plan.recompute == ("blocks.*",)
    assert plan.precision == Precision.of("bf16")
    assert plan.offload == ("optimizer",)
    text = str(plan)
    for line in (
        "Plan pipeline for FusedGPT on 2 stages of 2 ranks",
        "1      1      one rank  blocks.1.n1.layer_norm_0",
        "schedule 1f1b, 4 micro-batches, separate batches",
        "recompute blocks.*",
        "precision compute bfloat16, master float32, gradients float32, reduce float32",
        "offload optimizer",
    ):
        assert line in text
    with pytest.raises(PlanError, match=r"recompute 'block' matches none .*did you mean"):
        pipeline("fused_gpt", 2, pp=2, num_microbatches=2, recompute=["block"])
    with pytest.raises(PlanError, match="recompute 'ful'; did you mean 'full'"):
        pipeline("fused_gpt", 2, pp=2, num_microbatches=2, recompute="ful")


# ---------------------------------------------------------------- schedules


def test_a_schedule_may_be_a_value_or_a_file(tmp_path: Path) -> None:
    schedule = make("gpipe", num_groups=2, num_microbatches=4)
    schedule.save(tmp_path / "schedule.txt")
    plan = pipeline("fused_gpt", 2, schedule=schedule)
    assert plan.schedule == tuple(tuple(map(str, row)) for row in schedule.actions)
    assert (len(plan.stages), plan.num_microbatches) == (2, 4)
    assert pipeline("fused_gpt", 2, schedule=str(tmp_path / "schedule.txt")) == plan
    assert hybrid("fused_gpt", 2, pp=2, num_microbatches=4, schedule=schedule).stages == plan.stages
    assert "schedule of 16 listed actions on 2 groups, 4 micro-batches" in str(plan)
    assert build_pipeline(graph("fused_gpt"), plan).schedule.actions == schedule.actions


def test_groups_of_a_file_are_numbered_by_their_first_stage(tmp_path: Path) -> None:
    (tmp_path / "schedule.txt").write_text("1F0, 1B0, 1F1, 1B1\n0F0, 0F1, 0B0, 0B1\n")
    plan = pipeline("fused_gpt", 2, schedule=tmp_path / "schedule.txt")
    assert plan.schedule == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    build_pipeline(graph("fused_gpt"), plan)


def test_schedules_for_other_sizes_are_refused(tmp_path: Path) -> None:
    schedule = make("1f1b", num_groups=2, num_microbatches=4)
    with pytest.raises(InfeasiblePlan, match=r"2 stages on 2 groups .* 4 micro-batches.* 2 micro"):
        pipeline("fused_gpt", 2, pp=2, num_microbatches=2, schedule=schedule)
    with pytest.raises(InfeasiblePlan, match="pp=4, schedule '1f1b' is for 2"):
        pipeline("fused_gpt", 4, pp=4, num_microbatches=4, schedule=schedule)
    with pytest.raises(InfeasiblePlan, match="2 stages on 1 groups"):
        hybrid("fused_gpt", 2, dp=2, num_microbatches=4, schedule=schedule)
    with pytest.raises(ScheduleError, match=r"'1fb1'.*'1f1b'"):
        pipeline("fused_gpt", 2, pp=2, schedule="1fb1")
    with pytest.raises(ScheduleError, match=r"none\.txt"):
        pipeline("fused_gpt", 2, pp=2, schedule="none.txt")
    (tmp_path / "blocks.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    blocked = Schedule.load(tmp_path / "blocks.txt")
    with pytest.raises(ScheduleError, match=r"[01][FB][01]"):
        pipeline("fused_gpt", 2, schedule=blocked)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("ranks", "options", "message", "hint"),
    [
        (3, {"pp": 2}, "3 ranks cannot be divided over 2", "stage_ranks=[2, 1]"),
        (2, {"pp": 4}, "2 ranks cannot be divided over 4", "pp=2"),
        (4, {"stage_ranks": (1, 2)}, "1 + 2 = 3 ranks, the cluster has 4", "cluster of 3"),
        (4, {"pp": 2, "stage_ranks": (1, 2, 1)}, "ranks for 3 groups", "2 counts"),
        (2, {"stage_ranks": (2, 0)}, "stage_ranks=[2, 0]", "1 or more"),
        (2, {"cuts": ["blocks.0", "blocks.1"], "schedule": "zb_v"}, "3 stages, with 2", "3 cuts"),
        (2, {"pp": 0}, "pp=0", "1 or more"),
        (2, {"pp": 2, "num_microbatches": 0}, "num_microbatches=0", "1 or more"),
        (2, {"pp": 2}, "num_microbatches=8, the batch has 4", "num_microbatches=4"),
        (
            4,
            {"pp": 2, "num_microbatches": 4},
            "num_microbatches=4 on dp=2 ranks each, the batch has 4",
            "num_microbatches=2",
        ),
        (2, {"pp": 2, "cuts": ["blocks.0", "blocks.1"]}, "2 cuts make 3 stages", "1 cuts"),
    ],
)
def test_impossible_sizes_are_refused(
    ranks: int, options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        pipeline("fused_gpt", ranks, **options)
    assert message in str(caught.value)
    assert hint in str(caught.value)


def test_impossible_hybrid_sizes_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="dp=2 x tp=2 x pp=2 = 8 ranks, the cluster has 4"):
        hybrid("fused_gpt", 4, dp=2, tp=2, pp=2)
    with pytest.raises(InfeasiblePlan, match="pp=0 need at least one rank"):
        hybrid("fused_gpt", 4, dp=2, tp=2, pp=0)


def test_more_stages_than_nodes_are_refused() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum()

    short = sw.capture(Short(), {"x": torch.ones(8, 4)})
    with pytest.raises(InfeasiblePlan, match="4 stages of Short: 1 of its 2 nodes") as caught:
        sw.strategies.pipeline(short, sw.Cluster.local(4))
    assert "2 stages or fewer" in str(caught.value)


def test_coupled_samples_cannot_be_split_into_micro_batches() -> None:
    plan = pipeline("resnet", 2, pp=2, num_microbatches=2, per_microbatch=True)
    build_pipeline(graph("resnet"), plan)
    with pytest.raises(InfeasiblePlan, match="couples the samples"):
        build_pipeline(graph("resnet"), plan.with_(per_microbatch=False))


def test_constraints_are_entries_of_the_plan() -> None:
    entry = ParameterEntry(layout={"tp": "0"}, zero=1)
    constraints = {
        "tok.*": "replicate",
        "blocks.0.up.*": {"tp": "replicate"},
        "blocks.1.up.*": entry,
    }
    plan = hybrid("fused_gpt", 2, dp=1, tp=2, constraints=constraints)
    assert (
        plan.entry("tok.weight").layout
        == plan.entry("blocks.0.up.bias").layout
        == {"tp": "replicate"}
    )
    assert plan.entry("blocks.1.up.weight") == entry
