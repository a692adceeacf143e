"""Predicted memory agrees with that of real runs, whose allocations the profiler counts."""

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
def test_prediction_matches_a_measurement_on_one_rank(recompute: str) -> None:
    job = ("ddp", 1, {"recompute": recompute}, SIZES, BATCH)
    measured, (estimate,) = measure(*job), predict(*job)
    for figure in ("peak", "above", "kept"):
        assert estimate[figure] == pytest.approx(measured[figure], rel=0.1), figure


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"precision": "bf16"}])
def test_prediction_matches_with_micro_batches_and_dtypes(options: dict[str, Any]) -> None:
    job = ("ddp", 1, options, SIZES, BATCH)
    measured, (estimate,) = measure(*job), predict(*job)
    for figure in ("peak", "kept"):
        assert estimate[figure] == pytest.approx(measured[figure], rel=0.1), figure


def test_predicted_activations_are_those_that_autograd_saves() -> None:
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
def test_state_is_the_share_that_the_strategy_stores(strategy: str) -> None:
    graph = graph_of()
    full_bytes = sum(graph.values[p.value].num_bytes for p in graph.parameters)
    memory = predicted(strategy, 2)
    parameters, optimizer = {
        "ddp": (1, 2),
        "zero1": (1, 1),
        "zero2": (1, 1),
        "fsdp": (0.5, 1),
        "tensor": (0.5, 1),
    }[strategy]
    assert memory.parts["parameters"] == pytest.approx(parameters * full_bytes, rel=0.1)
    assert memory.parts["optimizer"] == pytest.approx(optimizer * full_bytes, rel=0.1)


def test_parts_add_up_to_the_peak_and_are_shown() -> None:
    memory = predicted("fsdp", 2)
    data = memory.to_json()
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    assert sum(memory.parts[part] for part in parts) == memory.peak_bytes
    assert json.loads(json.dumps(data)) == data
    assert f"{memory.peak_bytes / 2**20:,.1f} MiB" in str(memory)
    assert str(memory).startswith(f"memory of rank 0, highest in {memory.when}\n  parameters ")


@pytest.mark.slow
def test_recomputation_saves_fewer_activations() -> None:
    none, selective, full = (
        predicted("ddp", 1, recompute=mode).activations_peak_bytes
        for mode in ("none", "selective", "full")
    )
    assert none > selective > full


@pytest.mark.slow
def test_schedules_store_micro_batches_in_flight() -> None:
    gpipe, one_f_one_b = (
        predicted("pipeline", 2, schedule=schedule, pp=2, num_microbatches=8)
        for schedule in ("gpipe", "1f1b")
    )  # which store activations of all micro-batches, and of one per stage
    ratio = gpipe.activations_peak_bytes / one_f_one_b.activations_peak_bytes
    assert ratio == pytest.approx(8 / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zb_h1", "zb_v"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_schedule_runs_without_data(schedule: str, rank: int) -> None:
    options = {"schedule": schedule, "pp": 2, "num_microbatches": 4}
    assert predicted("pipeline", 2, rank, **options).parts["activations"] > 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_dp_tp_and_pp_with_sharded_parameters(rank: int) -> None:
    options = {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 4, "zero": 3, "recompute": "full"}
    assert predicted("hybrid", 8, rank, **options).peak_bytes > 0


@pytest.mark.slow
def test_separate_micro_batches_store_one_micro_batch() -> None:
    model, batch = GPT(**SIZES), tokens(BATCH, SIZES["length"], SIZES["vocab"])
    plan = sw.strategies.ddp(
        sw.capture(model, batch), sw.Cluster.local(1), num_microbatches=4, per_microbatch=True
    )
    memory = sw.compile(sw.capture(model, batch, plan=plan), plan).memory()
    full_batch = predicted("ddp", 1).activations_peak_bytes
    assert memory.activations_peak_bytes == pytest.approx(full_batch / 4, rel=0.05)


def test_a_model_larger_than_this_machine() -> None:
    with torch.device("meta"):
        model = GPT(layers=2, width=8192, heads=64, length=2048, vocab=128_000)
        batch = {key: torch.zeros(64, 2048, dtype=torch.int64) for key in ("input_ids", "labels")}
    graph = sw.capture(model, batch)
    plan = sw.strategies.fsdp(graph, sw.Cluster.local(64), precision="bf16")
    graph = sw.capture(model, batch, plan=plan)
    memory = sw.compile(graph, plan).memory(63)
    numel = sum(graph.values[p.value].numel for p in graph.parameters)
    assert numel > 2.5e9
    state_bytes = memory.parts["parameters"] + memory.parts["optimizer"]
    assert state_bytes == pytest.approx(12 * numel / 64, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_an_error() -> None:
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


def test_a_model_with_dropout_runs_without_data() -> None:
    graph = sw.capture(Dropping().train(), {"x": torch.ones(4, 8)})
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    assert sw.compile(graph, plan).memory().peak_bytes > 0


def test_optimizers_by_name_or_by_class() -> None:
    graph = graph_of()
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1))
    full_bytes = sum(graph.values[p.value].num_bytes for p in graph.parameters)
    assert sw.compile(graph, plan).memory(optimizer="sgd").parts["optimizer"] == 0
    memory = sw.compile(graph, plan).memory(optimizer=torch.optim.SGD, momentum=0.9)
    assert memory.parts["optimizer"] == full_bytes
    with pytest.raises(OptimizerError, match="did you mean 'adamw'"):
        sw.compile(graph, plan).memory(optimizer="adamww")


def test_a_rank_outside_the_plan_is_an_error() -> None:
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


def test_a_program_that_reads_values_is_an_error() -> None:
    graph = sw.capture(Reading(), {"x": torch.ones(4, 4)})
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1))
    with pytest.raises(ShardwiseError, match=r"memory cannot be predicted: .* values of"):
        sw.compile(graph, plan).memory()
