"""Errors and rank correlations."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.published import Row
from shardwise.published.report import Outcome, rank_correlation, summarize
from shardwise.published.rows import Entry
from tests.unit.published.test_models import ROW

FEW = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)


def outcome(predicted: float | None, published: float | None, row: Row | None = None) -> Outcome:
    entry = Entry(
        row_id="r",
        row=row,
        reason="",
        model="m",
        device="d",
        step_time_s=published,
        memory_bytes=None,
    )
    return Outcome(published=entry, status="ok", step_time_s=predicted)


@given(FEW)
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    correlation = rank_correlation(a, b)
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert correlation == pytest.approx(statistics.correlation(ranks(a), ranks(b)))
    else:
        assert math.isnan(correlation)


def ranks(values: list[float]) -> list[float]:
    """Return ranks; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + ordered.count(value) / 2 for value in values]


def test_summary() -> None:
    summary = summarize(
        [outcome(1.1, 1.0), outcome(1.8, 2.0), outcome(None, 3.0), outcome(4.0, None)]
    )
    assert (summary.rows, summary.predicted) == (4, 3)
    assert summary.step_time is not None
    assert summary.step_time.count == 2
    assert summary.step_time.median == pytest.approx(0.1)
    assert summary.sweeps == ()


def test_runs_out_of_memory() -> None:
    ok, out = outcome(1.0, None), replace(outcome(1.0, None), status="out of memory: needs 9 GiB")
    published = [
        replace(run, published=replace(run.published, out_of_memory=True)) for run in (ok, out)
    ]
    summary = summarize([ok, out, *published])
    assert (summary.out_of_memory, summary.published_out_of_memory) == (2, 2)
    assert summary.to_dict()["out_of_memory_as_published"] == 1


def test_repeated_runs_count_once() -> None:
    """Runs of two series are ordered by their means, although the second ran on slower software."""
    sizes = (8, 16, 32, 64)
    rows = [replace(ROW, row_id=f"{series}:{n}", gpus=n) for series in "ab" for n in sizes]
    slower = [1.0] * 4 + [1.1] * 4
    published = [s * (1 + row.gpus / 1e4) for s, row in zip(slower, rows, strict=True)]
    runs = [outcome(1 + r.gpus / 1e4, t, r) for r, t in zip(rows, published, strict=True)]
    (sweep,) = summarize(runs).sweeps
    assert (sweep.count, sweep.configurations, sweep.correlation) == (8, 4, 1.0)
    assert sweep.of_runs < 0.6
    without = [replace(run, published=replace(run.published, row=None)) for run in runs]
    (unconfigured,) = summarize(without).sweeps
    assert (unconfigured.configurations, unconfigured.correlation) == (8, unconfigured.of_runs)


def test_equal_predictions_of_different_rows_stay_apart() -> None:
    rows = [replace(ROW, gpus=n) for n in (8, 16, 32, 64)]
    runs = [outcome(float(min(n, 2)), float(n), row) for n, row in enumerate(rows, start=1)]
    (sweep,) = summarize(runs).sweeps
    assert sweep.configurations == 4
    assert sweep.correlation < 0.9


def test_nothing_to_compare() -> None:
    summary = summarize([outcome(None, None)])
    assert summary.step_time is None
    assert summary.to_dict()["rank_correlation"]["median"] is None
