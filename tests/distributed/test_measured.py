"""Recorded runs of gloo processes laid over the predictions of their plans."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.reports.measured import both_traces, compare
from shardwise.reports.recorded import read_trace
from tests.support import trainer
from tests.support.pool import Pool
from tests.support.training import make, plan_for

pytestmark = pytest.mark.distributed

PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pipeline": (2, "pipeline", {"pp": 2, "num_microbatches": 3, "schedule": "zero_bubble"}),
    "ddp": (2, "ddp", {}),
    "fsdp": (2, "fsdp", {}),
    "zero1": (2, "zero1", {}),
    "tensor": (2, "tensor", {}),
    "recomputed": (2, "pipeline", {"pp": 2, "num_microbatches": 3, "recompute": "full"}),
}


def planned(name: str) -> tuple[Any, Any, sw.Plan]:
    model, batch = make("fused_gpt" if name == "recomputed" else "odd")
    ranks, strategy, options = PLANS[name]
    return model, batch, plan_for(model, batch, strategy, ranks, **options)


def record(name: str, path: str) -> None:
    model, batch, plan = planned(name)
    pm = sw.parallelize(model, batch, plan=plan, record=True, seed=5)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    pm.train_step(batch)
    pm.trace()
    for _ in range(3):
        pm.train_step(batch)
        sw.clip_grad_norm_(pm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pm.trace(path)


SLOW = [n if n in ("pipeline", "ddp") else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]


@pytest.mark.parametrize("name", SLOW)
def test_a_recorded_run_is_explained_by_the_causes_of_its_prediction(
    pool: Callable[[int], Pool], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    pool(PLANS[name][0]).run(record, name, str(path), timeout=120)
    model, batch, plan = planned(name)
    estimate = sw.simulate(sw.capture(model, batch), plan, Cluster.local(plan.num_ranks))
    comparison = compare(read_trace(path), plan, estimate)
    assert comparison.step.steps == 3
    assert comparison.step.has_optimizer
    for rank in comparison.step.ranks:
        assert sum(rank.causes.values()) == pytest.approx(rank.end, rel=1e-6)
        assert rank.causes["forward"] > 0
        assert rank.causes["optimizer"] > 0
    measured = {cause.name: cause.measured_s for cause in comparison.causes}
    predicted = {cause.name: cause.predicted_s for cause in comparison.causes}
    assert sum(predicted.values()) == pytest.approx(estimate.step_time_s, rel=1e-6)
    waits = {
        "pipeline": "bubble", "ddp": "gradients", "fsdp": "parameters", "zero1": "update",
        "tensor": "collectives", "recomputed": "recompute",
    }  # fmt: skip
    assert measured[waits[name]] > 0, measured
    assert comparison.disagreements, "a guess of this machine is never right"
    assert all(d.text and d.advice and d.where for d in comparison.disagreements)


class SlowRank(sw.Callback):
    """Makes one rank's own work longer."""

    def on_start(self, trainer: sw.Trainer) -> None:
        inner = trainer.optimizer.inner
        if trainer.rank == 1:
            quick = inner.step

            def step(*args: Any, **kwargs: Any) -> Any:
                time.sleep(0.3)
                return quick(*args, **kwargs)

            inner.step = step  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_trainer_records_steps_and_the_times_of_its_ranks(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = {
        "folder": str(run),
        "trace": {"steps": [5, 7]},
        "logs": {"console": "off", "ranks_every_s": 0.0},
        "callbacks": [SlowRank()],
    }
    first, _ = pool(2).run(trainer.fit, **changes, timeout=120)
    single_rank = trainer.fit(plan="ddp")
    assert first.losses == pytest.approx(single_rank.losses, rel=1e-9)
    assert first.trace == run / "trace.json"
    rows = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4, 8]
    for row in rows:
        assert row["ranks"] == len(row["each"]["own_s"]) == len(row["slowest"]) == 2
        assert 0 < row["own_s"]["min"] <= row["own_s"]["max"] <= row["step_s"]["max"]
        assert row["memory_bytes"]["min"] > 0
        assert row["slowest"][0]["rank"] == 1
        assert row["slowest"][0]["own_s"] > 0.3
    run_record = json.loads((run / "run.json").read_text())
    state = [run_record[name] for name in ("state", "ranks", "total_steps")]
    assert state == ["finished", 2, 8]
    plan = sw.Plan.load(run / "plan.json")
    batch = torch.utils.data.default_collate([trainer.Samples()[i] for i in range(4)])
    estimate = sw.simulate(sw.capture(trainer.Net(), batch), plan, Cluster.local(2))
    comparison = compare(run / "trace.json", plan, estimate)
    assert comparison.step.steps == 3
    assert comparison.step.number in (5, 6, 7)
    slow = next(d for d in comparison.disagreements if d.cause == "slow rank")
    assert (comparison.slowest, slow.where) == (1, "rank 1")
    assert sw.report(plan, trace=run / "trace.json").measured is not None  # of files single_rank
    both = both_traces(plan, estimate, comparison)
    names = [e["args"]["name"] for e in both["traceEvents"] if e["name"] == "process_name"]
    assert [name.partition(",")[0] for name in names] == ["predicted"] + ["measured"] * 2
