"""The chosen plan beside its runners-up, as rows of a report."""

from __future__ import annotations

from shardwise.plans.explain import difference, option_text, why_not
from shardwise.plans.search_result import SearchResult, SimulatedConfig
from shardwise.reporting.document import Compared


def plans_of(search: SearchResult) -> tuple[Compared, ...] | None:
    """Return the chosen plan, then its runners-up; None for a plan that no search made."""
    if search.gap is None:
        return None
    best = search.best
    return (_row(best, best), *(_row(best, other) for other in search.runners_up))


def _row(best: SimulatedConfig, other: SimulatedConfig) -> Compared:
    found, time = difference(best, other), best.step_time_s
    return Compared(
        what=other.what,
        chosen=other is best,
        step_time_s=other.step_time_s,
        ratio=other.step_time_s / time if time else 1.0,
        causes=other.causes,
        peak_bytes=other.memory.peak_bytes,
        limit_bytes=other.memory.limit_bytes,
        changed=found.changed,
        words={
            name: tuple(option_text(name, value) for value in pair)
            for name, pair in found.changed.items()
        },
        differences_s=found.causes_s,
        memory_difference_bytes=found.memory_bytes,
        text="the chosen plan" if other is best else why_not(best, other),
    )
