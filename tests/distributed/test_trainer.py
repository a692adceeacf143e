"""Training on gloo processes equals training in one process, and resumes exactly."""

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
    options = {"num_microbatches": 2} if name == "accumulate" else {}
    return {"plan": PLANS[name][1], **options}


@pytest.mark.parametrize("name", everyday(EVERYDAY))
def test_any_plan_trains_like_one_process(pool: Callable[[int], Pool], name: str) -> None:
    changes = {**changes_of(name), "epochs": 2, "steps": None, "data": {"drop_last": False}}
    single, state, average = support.fit_and_state(
        **{**changes, "plan": "ddp", "num_microbatches": 1}
    )
    for result, actual_state, actual_average in pool(PLANS[name][0]).run(
        support.fit_and_state, **changes
    ):
        assert result.losses == pytest.approx(single.losses, rel=1e-9)
        assert result.metrics["evaluation_loss"] == pytest.approx(
            single.metrics["evaluation_loss"], rel=1e-9
        )
        for key, tensor in state.items():
            torch.testing.assert_close(actual_state[key], tensor, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(actual_average[key], average[key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", everyday(("fsdp3",)))
def test_metrics_are_exact_under_any_plan(pool: Callable[[int], Pool], name: str) -> None:
    changes = {**changes_of(name), "steps": 2}
    single, _ = support.evaluate(steps=2)
    for metrics, _ in pool(PLANS[name][0]).run(support.evaluate, **changes):
        assert metrics == pytest.approx(single, rel=1e-9)


@pytest.mark.parametrize("name", everyday(("zero2",)))
def test_a_resumed_run_is_bit_equal_under_the_same_plan(
    pool: Callable[[int], Pool], name: str, tmp_path: Path
) -> None:
    ranks = pool(PLANS[name][0])
    changes = {**changes_of(name), "model": {"name": "tests.support.trainer:single"}}
    uninterrupted = ranks.run(support.fit, **changes)
    for (before, after), expected in zip(
        ranks.run(support.stop_and_go, str(tmp_path), 3, changes), uninterrupted, strict=True
    ):
        assert before + after == expected.losses


@pytest.mark.slow
@pytest.mark.parametrize("other", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumes_on_other_ranks_and_plans(
    pool: Callable[[int], Pool], other: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    uninterrupted = support.fit()
    stopped = pool(3).run(support.fit, folder=folder, plan="fsdp", callbacks=[support.StopAt(3)])
    changes = {"folder": folder, "plan": "tensor", "callbacks": [support.StopAt(6)]}
    moved = pool(other).run(support.fit, **changes)
    ended = support.fit(folder=folder)
    losses = stopped[0].losses + moved[0].losses + ended.losses
    assert losses == pytest.approx(uninterrupted.losses, rel=1e-9)


def test_each_rank_reads_its_rows_and_a_signal_to_one_stops_all(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    outcomes = pool(3).run(support.stop_by_one_rank, str(tmp_path))
    assert [result.stopped for result, _ in outcomes] == ["signal"] * 3
    assert [result.steps for result, _ in outcomes] == [2] * 3
    for step in range(2):  # a batch of 4 on 3 ranks: 2, 1 and 1 rows, each read once
        rows = [batches[step] for _, batches in outcomes]
        assert sorted(map(len, rows)) == [1, 1, 2]
        assert len({sample for read in rows for sample in read}) == 4
