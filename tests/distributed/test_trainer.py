"""Trainings on gloo processes equal those of one process, and go on as if never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import trainer as support
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

PLANS: dict[str, tuple[int, Any]] = {
    "ddp3": (3, "ddp"),
    "fsdp3": (3, "fsdp"),
    "zero2": (2, "zero2"),
    "tensor2": (2, "tensor"),
    "pipeline2": (2, {"name": "pipeline", "args": {"num_microbatches": 2}}),
    "tp2 x pp2": (4, {"name": "hybrid", "args": {"tp": 2, "pp": 2, "num_microbatches": 2}}),
    "dp2 x tp2": (4, {"name": "hybrid", "args": {"tp": 2, "zero": 1}}),
    "accumulate": (2, "ddp"),
    "auto": (2, "auto"),
}
EVERYDAY = ("fsdp3",)


def everyday(names: tuple[str, ...]) -> list[Any]:
    return [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]


def changes_of(name: str) -> dict[str, Any]:
    more = {"num_microbatches": 2} if name == "accumulate" else {}
    return {"plan": PLANS[name][1], **more}


@pytest.mark.parametrize("name", everyday(EVERYDAY))
def test_any_plan_trains_as_one_process(pool: Callable[[int], Pool], name: str) -> None:
    changes = {**changes_of(name), "epochs": 2, "steps": None, "data": {"drop_last": False}}
    alone, state, average = support.fit_and_state(
        **{**changes, "plan": "ddp", "num_microbatches": 1}
    )
    for result, whole, mean in pool(PLANS[name][0]).run(support.fit_and_state, **changes):
        assert result.losses == pytest.approx(alone.losses, rel=1e-9)
        assert result.metrics["evaluation_loss"] == pytest.approx(
            alone.metrics["evaluation_loss"], rel=1e-9
        )
        for name_, tensor in state.items():
            torch.testing.assert_close(whole[name_], tensor, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(mean[name_], average[name_], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", everyday(("fsdp3",)))
def test_metrics_are_exact_under_any_plan(pool: Callable[[int], Pool], name: str) -> None:
    changes = {**changes_of(name), "steps": 2}
    alone, _ = support.evaluate(steps=2)
    for found, _ in pool(PLANS[name][0]).run(support.evaluate, **changes):
        assert found == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("name", everyday(("zero2",)))
def test_a_resumed_run_is_bit_equal_under_the_same_plan(
    pool: Callable[[int], Pool], name: str, tmp_path: Path
) -> None:
    ranks = pool(PLANS[name][0])
    changes = {**changes_of(name), "model": {"name": "tests.support.trainer:single"}}
    whole = ranks.run(support.fit, **changes)
    for (before, after), straight in zip(
        ranks.run(support.stop_and_go, str(tmp_path), 3, changes), whole, strict=True
    ):
        assert before + after == straight.losses


@pytest.mark.slow
@pytest.mark.parametrize("other", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_continues_on_other_ranks_and_plans(
    pool: Callable[[int], Pool], other: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    straight = support.fit()
    stopped = pool(3).run(support.fit, folder=folder, plan="fsdp", callbacks=[support.StopAt(3)])
    changes = {"folder": folder, "plan": "tensor", "callbacks": [support.StopAt(6)]}
    moved = pool(other).run(support.fit, **changes)
    ended = support.fit(folder=folder)
    losses = stopped[0].losses + moved[0].losses + ended.losses
    assert losses == pytest.approx(straight.losses, rel=1e-9)


def test_each_rank_reads_its_rows_and_a_signal_to_one_stops_all(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    found = pool(3).run(support.stop_by_one_rank, str(tmp_path))
    assert [result.stopped for result, _ in found] == ["signal"] * 3
    assert [result.steps for result, _ in found] == [2] * 3
    for step in range(2):  # a batch of 4 on 3 ranks: 2, 1 and 1 rows, each read once
        rows = [batches[step] for _, batches in found]
        assert sorted(map(len, rows)) == [1, 1, 2]
        assert len({sample for mine in rows for sample in mine}) == 4
