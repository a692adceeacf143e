"""The report describes every difference between two configurations of a search."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardwise.plans.search_result import (
    CAUSES,
    BatchSize,
    Binding,
    ClusterSummary,
    MemoryFigures,
    ParallelConfig,
    SearchGap,
    SearchResult,
    SimulatedConfig,
    StepTimes,
)
from shardwise.plans.text import why_not
from shardwise.reports.build import plans_of

BEST = ParallelConfig(dp=2, tp=2, pp=2, schedule="1f1b", num_microbatches=4)
OTHERS = {
    "dp": (4,),
    "tp": (1,),
    "pp": (1,),
    "virtual": (2,),
    "schedule": ("zb_h1", ""),
    "num_microbatches": (1,),
    "zero": (3,),
    "outer": (1,),
    "recompute": ("full",),
    "offload": (("optimizer",), ("optimizer", "activations")),
    "layout": (1, 2, 3),
    "grouping": (1,),
    "cuts": ((0, 12), (0, 3, 9, 40)),
}


def simulated(config: ParallelConfig) -> SimulatedConfig:
    """Return a configuration with arbitrary figures."""
    return SimulatedConfig(
        what=str(config),
        config=config,
        step_time_s=1.0,
        bubble_fraction=0.0,
        causes=dict.fromkeys(CAUSES, 0.125),
        memory=MemoryFigures(group=0, peak_bytes=1.0, limit_bytes=2.0, parts={}, when="0F0"),
        rows=1,
    )


def searched(best: SimulatedConfig, other: SimulatedConfig) -> SearchResult:
    return SearchResult(
        cluster=ClusterSummary(name="c", fingerprint="f", num_ranks=8),
        batch=BatchSize(rows=1),
        best=best,
        runners_up=(other,),
        gap=SearchGap(layouts=0.0, search=0.0, points=2, simulated=2),
        binding=Binding(what="compute", text=""),
        step=StepTimes(passes=(), stages=(), groups=()),
        memory=(),
    )


@pytest.mark.parametrize("name", [field.name for field in fields(ParallelConfig)])
def test_every_decision_is_described(name: str) -> None:
    for value in OTHERS[name]:
        other = replace(BEST, **{name: value})
        for one, two in ((BEST, other), (other, BEST)):
            best, runner_up = simulated(one), simulated(two)
            result = searched(best, runner_up)
            rows = plans_of(result)
            assert rows is not None
            chosen, changed = rows[1].words[name]
            assert chosen.strip()
            assert changed.strip()
            assert chosen != changed
            assert f"{changed} instead of {chosen}" in why_not(best, runner_up)
            assert SearchResult.from_json(result.to_json()) == result
