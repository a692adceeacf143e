"""The compute of a plan is timed on every rank by itself, without communication."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.api.memory import SingleRank
from shardwise.cluster import Cluster
from shardwise.cost import OpTable
from shardwise.errors import RankError, ShardwiseError
from shardwise.profiling.compute import with_training_rates
from shardwise.runtime.transport.fake import UninitializedTransport
from shardwise.tuning import measurement_server
from shardwise.tuning import tune as tuning
from shardwise.tuning.compute_time import (
    WEIGHT,
    ComputeTimes,
    Samples,
    _here,
    _steps,
    batch_of,
    fill,
    time_compute,
)
from shardwise.tuning.measurement_server import MeasurementServer, compute_factors
from shardwise.tuning.tune import tune
from tests.support import training

CPU = torch.device("cpu")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_every_group_of_ranks_is_timed(strategy: str) -> None:
    graph = sw.capture(*training.make("fused_gpt"))
    cluster = Cluster.local(2)
    options = {"pp": 2, "num_microbatches": 3} if strategy == "pipeline" else {}
    plan = getattr(sw.strategies, strategy)(graph, cluster, **options)
    run = time_compute(graph, plan, cluster)
    assert set(run.training_s) == set(range(len(plan.groups)))
    assert all(s > 0 for s in (*run.training_s.values(), *run.update_s.values()))


class Demanding(nn.Module):
    """Fails on values other than those of the captured batch."""

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.weight[index - 1 + 10**9].sum()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_a_failing_program_is_noted_in_the_table() -> None:
    graph = sw.capture(Demanding(), (torch.ones(4, dtype=torch.int64),))
    cluster = Cluster.local(1)
    plan = sw.strategies.ddp(graph, cluster)
    with pytest.raises(RankError, match="rank 0 cannot run here: BatchError"):
        time_compute(graph, plan, cluster)
    table = OpTable()
    assert compute_factors(MeasurementServer(graph, cluster), plan, table) == []
    assert "was not timed" in table.notes[0]


def test_a_rank_that_ran_in_this_process_is_freed() -> None:
    graph = sw.capture(*training.make("fused_gpt"))
    program = sw.compile(graph, sw.strategies.ddp(graph, Cluster.local(2)))
    refs: list[weakref.ref[SingleRank]] = []

    def steps(rank: int, meet: Callable[[], object]) -> Samples:
        single_rank = SingleRank(program, rank, CPU, transport=UninitializedTransport)
        refs.append(weakref.ref(single_rank))
        return _steps(single_rank, meet)

    def failing(rank: int, meet: Callable[[], object]) -> Samples:
        steps(rank, meet)
        raise ValueError("no such kernel")

    training_s, update_s = _here(steps, CPU)
    assert len(training_s) == len(update_s) > 0
    with pytest.raises(RankError, match="rank 0 cannot run here: ValueError: no such kernel"):
        _here(failing, CPU)
    assert [ref() for ref in refs] == [None, None]


def test_gathered_parameters_have_values() -> None:
    graph = sw.capture(*training.make("fused_gpt"))
    program = sw.compile(graph, sw.strategies.fsdp(graph, Cluster.local(2)))
    single_rank = SingleRank(program, 0, CPU, transport=UninitializedTransport)
    fill(single_rank)
    group = max(single_rank.store.groups, key=lambda g: g.numel)
    full = group.gather().wait()
    assert full.numel() == group.numel
    assert 0.5 * WEIGHT < float(full.std()) < 2 * WEIGHT
    group.free()
    assert single_rank.module.train_step(batch_of(single_rank)).isfinite()


def test_predictions_follow_timed_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sw.capture(*training.make("fused_gpt"))
    cluster = Cluster.local(2)
    plan = sw.strategies.ddp(graph, cluster)
    monkeypatch.setattr(
        measurement_server,
        "time_compute",
        lambda *_: ComputeTimes(training_s={0: 3.0}, update_s={0: 1.0}),
    )
    table = OpTable().with_programs(
        compute_factors(MeasurementServer(graph, cluster), plan, OpTable())
    )
    estimate = sw.simulate(graph, plan, cluster, table=OpTable.from_json(table.to_json()))
    computing = sum(plan.num_microbatches * stage.computing for stage in estimate.stages)
    assert computing == pytest.approx(3.0)


@pytest.mark.slow
@pytest.mark.parametrize(("other_s", "is_simple"), [(0.98, True), (0.9, False)])
def test_the_simpler_plan_wins_if_another_gains_little(
    other_s: float, is_simple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = sw.capture(*training.make("fused_gpt"))
    monkeypatch.setattr(tuning, "measure_plan", lambda *_, table, **__: table)
    monkeypatch.setattr(tuning, "compute_factors", lambda *_: [])
    monkeypatch.setattr(tuning, "can_race", lambda _: False)

    def fake_simulate(graph: object, plan: sw.Plan, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(step_time_s=1.0 if plan.mesh.names == ("dp",) else other_s)

    monkeypatch.setattr(tuning, "simulate", fake_simulate)
    plan = tune(graph, Cluster.local(2), progress=False)
    assert (plan.mesh.names == ("dp",)) == is_simple


def test_training_slows_all_rates_of_a_device() -> None:
    device = Cluster.local(1).device(0)
    slower = with_training_rates(device, 1.25)
    assert slower.memory_rate(1e6) == pytest.approx(device.memory_rate(1e6) / 1.25, rel=1e-3)
    assert slower.overhead_s == pytest.approx(device.overhead_s * 1.25, rel=1e-3)
    slow_rate, rate = (d.matmul_rate("float32", 64, 64, 64) for d in (slower, device))
    assert slow_rate == pytest.approx(rate / 1.25, rel=1e-3)


@pytest.mark.slow
def test_a_plan_that_cannot_run_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = sw.capture(*training.make("fused_gpt")), Cluster.local(2)
    monkeypatch.setattr(tuning, "measure_plan", lambda *_, table, **__: table)
    monkeypatch.setattr(tuning, "can_race", lambda _: False)
    plans: list[sw.Plan] = []

    def failing(_: object, plan: sw.Plan, table: OpTable) -> list[Any]:
        plans.append(plan)
        if plan.mesh.names == ("dp",):
            table.notes.append("plan was not timed: rank 1 cannot run here")
            return []
        return [(cluster.device(0).name, 2.0, 2.0)]

    monkeypatch.setattr(tuning, "compute_factors", failing)
    plan = tune(graph, cluster)
    assert {p.mesh.names == ("dp",) for p in plans} == {True, False}
    assert plan.mesh.names != ("dp",)
    assert "rank 1 cannot run here" in capsys.readouterr().err


@pytest.mark.parametrize("entry", [{}, {"device": "cpu", "training": 0, "optimizer": 1}, 3])
def test_invalid_programs_of_a_table_are_an_error(entry: object) -> None:
    text = json.dumps({"version": 1, "entries": [], "programs": [entry]})
    with pytest.raises(ShardwiseError, match=r"programs\[0\]"):
        OpTable.from_json(text)
