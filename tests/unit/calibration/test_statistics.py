"""Errors and rank correlations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from shardwise.calibration.statistics import Outcome, rank_correlation, summarize

FEW = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)


def outcome(predicted: float | None, published: float | None) -> Outcome:
    return Outcome(
        row_id="r",
        model="m",
        device="d",
        status="ok",
        step_time_s=predicted,
        published_step_time_s=published,
    )


@given(FEW)
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    mine = rank_correlation(a, b)
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert mine == pytest.approx(spearmanr(a, b).statistic)
    else:
        assert math.isnan(mine)


def test_summary() -> None:
    found = summarize(
        [outcome(1.1, 1.0), outcome(1.8, 2.0), outcome(None, 3.0), outcome(4.0, None)]
    )
    assert (found.rows, found.predicted) == (4, 3)
    assert found.step_time is not None
    assert found.step_time.count == 2
    assert found.step_time.median == pytest.approx(0.1)
    assert found.sweeps == ()


def test_nothing_to_compare() -> None:
    found = summarize([outcome(None, None)])
    assert found.step_time is None
    assert found.to_dict()["rank_correlation"]["median"] is None
