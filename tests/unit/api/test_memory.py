"""Predicted memory against that of real runs, where an allocation is counted by the profiler."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.models import GPT, tokens
from benchmarks.recompute import measure, predict
from shardwise.errors import OptimizerError, PlanError, ShardwiseError
from tests.support.tiers import thinned

SIZES = {"layers": 2, "width": 64, "heads": 4, "length": 64, "vocab": 128}
BATCH = 8


@functools.cache
def graph_of() -> sw.Graph:
    with torch.device("meta"):
        model = GPT(**SIZES)
    return sw.capture(model, tokens(BATCH, SIZES["length"], SIZES["vocab"]))


@functools.cache
def predicted(strategy: str, ranks: int, rank: int = 0, **options: Any) -> sw.types.MemoryUse:
    graph = graph_of()
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)
    return sw.compile(graph, plan).memory(rank)


@pytest.mark.parametrize(
    "recompute", [*(pytest.param(r, marks=pytest.mark.slow) for r in ("none", "full")), "selective"]
)
def test_prediction_holds_on_one_rank(recompute: str) -> None:
    job = ("ddp", 1, {"recompute": recompute}, SIZES, BATCH)
    found, (said,) = measure(*job), predict(*job)
    for what in ("peak", "above", "kept"):
        assert said[what] == pytest.approx(found[what], rel=0.1), what


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"precision": "bf16"}])
def test_prediction_holds_with_micro_batches_and_number_types(options: dict[str, Any]) -> None:
    job = ("ddp", 1, options, SIZES, BATCH)
    found, (said,) = measure(*job), predict(*job)
    for what in ("peak", "kept"):
        assert said[what] == pytest.approx(found[what], rel=0.1), what


def test_what_autograd_saves_is_what_it_saves_in_a_real_run() -> None:
    with torch.device("cpu"):
        model = GPT(**SIZES)
    batch = tokens(BATCH, SIZES["length"], SIZES["vocab"])
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *batch.values())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(**batch).backward()
    real = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert predicted("ddp", 1).activations_peak_bytes == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "strategy", thinned(["zero1", "fsdp", "tensor"], lambda _, name: name == "fsdp")
)
def test_state_is_what_the_strategy_keeps_of_it(strategy: str) -> None:
    graph = graph_of()
    whole = sum(graph.values[p.value].num_bytes for p in graph.parameters)
    found = predicted(strategy, 2)
    parameters, optimizer = {
        "ddp": (1, 2),
        "zero1": (1, 1),
        "zero2": (1, 1),
        "fsdp": (0.5, 1),
        "tensor": (0.5, 1),
    }[strategy]
    assert found.parts["parameters"] == pytest.approx(parameters * whole, rel=0.1)
    assert found.parts["optimizer"] == pytest.approx(optimizer * whole, rel=0.1)


def test_parts_add_up_and_the_table_shows_them() -> None:
    found = predicted("fsdp", 2)
    data = found.to_json()
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    assert sum(found.parts[part] for part in parts) == found.peak_bytes
    assert json.loads(json.dumps(data)) == data
    assert f"{found.peak_bytes / 2**20:,.1f} MiB" in str(found)
    assert str(found).startswith(f"memory of rank 0, highest in {found.when}\n  parameters ")


@pytest.mark.slow
def test_recomputation_keeps_less() -> None:
    none, selective, full = (
        predicted("ddp", 1, recompute=mode).activations_peak_bytes
        for mode in ("none", "selective", "full")
    )
    assert none > selective > full


@pytest.mark.slow
def test_schedules_keep_what_is_in_flight() -> None:
    found = {
        schedule: predicted("pipeline", 2, schedule=schedule, pp=2, num_microbatches=8)
        for schedule in ("gpipe", "1f1b")
    }
    gpipe, few = (found[name].activations_peak_bytes for name in ("gpipe", "1f1b"))
    assert gpipe / few == pytest.approx(8 / 2, rel=0.1)  # all micro-batches, or one per stage


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zb_h1", "zb_v"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_schedule_can_be_played(schedule: str, rank: int) -> None:
    options = {"schedule": schedule, "pp": 2, "num_microbatches": 4}
    assert predicted("pipeline", 2, rank, **options).parts["activations"] > 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_three_dimensions_with_sharded_parameters(rank: int) -> None:
    options = {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 4, "zero": 3, "recompute": "full"}
    assert predicted("hybrid", 8, rank, **options).peak_bytes > 0


@pytest.mark.slow
def test_micro_batches_of_their_own_count_with_the_whole_batch() -> None:
    model, batch = GPT(**SIZES), tokens(BATCH, SIZES["length"], SIZES["vocab"])
    plan = sw.strategies.ddp(
        sw.capture(model, batch), sw.Cluster.local(1), num_microbatches=4, per_microbatch=True
    )
    found = sw.compile(sw.capture(model, batch, plan=plan), plan).memory()
    whole = predicted("ddp", 1)
    assert found.activations_peak_bytes == pytest.approx(whole.activations_peak_bytes / 4, rel=0.05)


def test_a_model_larger_than_this_machine() -> None:
    with torch.device("meta"):
        model = GPT(layers=2, width=8192, heads=64, length=2048, vocab=128_000)
        batch = {key: torch.zeros(64, 2048, dtype=torch.int64) for key in ("input_ids", "labels")}
    graph = sw.capture(model, batch)
    plan = sw.strategies.fsdp(graph, sw.Cluster.local(64), precision="bf16")
    graph = sw.capture(model, batch, plan=plan)
    found = sw.compile(graph, plan).memory(63)
    whole = sum(graph.values[p.value].numel for p in graph.parameters)
    assert whole > 2.5e9
    assert found.parts["parameters"] + found.parts["optimizer"] == pytest.approx(
        12 * whole / 64, rel=0.1
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here() -> None:
    graph = graph_of()
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1))
    with pytest.raises(ShardwiseError, match="torch finds no such device here"):
        sw.compile(graph, plan).memory(device="cuda")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).sum()


def test_random_numbers_are_not_drawn() -> None:
    graph = sw.capture(Dropping().train(), {"x": torch.ones(4, 8)})
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    assert sw.compile(graph, plan).memory().peak_bytes > 0


def test_optimizers_are_named_or_given() -> None:
    graph = graph_of()
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1))
    whole = sum(graph.values[p.value].num_bytes for p in graph.parameters)
    assert sw.compile(graph, plan).memory(optimizer="sgd").parts["optimizer"] == 0
    found = sw.compile(graph, plan).memory(optimizer=torch.optim.SGD, momentum=0.9)
    assert found.parts["optimizer"] == whole
    with pytest.raises(OptimizerError, match="did you mean 'adamw'"):
        sw.compile(graph, plan).memory(optimizer="adamww")


def test_a_rank_that_the_plan_does_not_have() -> None:
    graph = graph_of()
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    with pytest.raises(PlanError, match="rank 2 is not among the 2"):
        sw.compile(graph, plan).memory(2)


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = 1.0 if torch.compiler.is_exporting() else float(x.max())
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _Reads.apply(self.linear(x)).sum()  # type: ignore[no-untyped-call,no-any-return]


def test_a_program_that_reads_values_says_so() -> None:
    graph = sw.capture(Reading(), {"x": torch.ones(4, 4)})
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1))
    with pytest.raises(ShardwiseError, match=r"memory cannot be predicted: .* values of"):
        sw.compile(graph, plan).memory()
