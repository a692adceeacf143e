"""Of plans that take nearly as long, the simplest.

Predictions are not exact to the percent, and a simpler plan is easier to read, to debug and to
change. `simplicity` is the order: the first entry in which two points differ decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.planner.search.found import Candidate, Found
from shardwise.planner.search.search import Search
from shardwise.planner.search.space import RECOMPUTES, Point
from shardwise.schedules import DEFAULT_SCHEDULE

NEARLY = 0.01  # of the step: how much longer a simpler plan may take
MOST_TRIED = 24  # simpler points whose memory and step are worked out


def simplicity(point: Point) -> tuple[object, ...]:
    """Return a key by which simpler points sort first."""
    return (
        len(point.offload),
        point.pp > 1,
        sum(size > 1 for size in (point.dp, point.tp, point.pp)),
        point.tp > 1,
        point.virtual > 1,
        point.schedule not in ("", DEFAULT_SCHEDULE),
        point.num_microbatches > 1,
        RECOMPUTES.index(point.recompute) if point.recompute in RECOMPUTES else len(RECOMPUTES),
        point.outer is not None,
        point.layout > 0,
        bool(point.cuts),
        point.zero,
        point.num_microbatches,
        point.pp,
        point.tp,
        point.grouping,
    )


def simplest(search: Search, found: Found, points: Iterable[Point]) -> Found:
    """Put the simplest point that takes at most `NEARLY` longer than the best one first."""
    if not found.feasible:
        return found
    best = found.best
    limit = best.estimate.step_time_s * (1 + NEARLY)
    known = {candidate.point for candidate in found.feasible}
    every = {
        replace(point, grouping=grouping)
        for point in points
        for grouping in range(len(search.groupings(point.pp)))
    }
    simpler = [p for p in known | every if simplicity(p) < simplicity(best.point)]
    tried = 0
    for point in sorted(simpler, key=lambda p: (simplicity(p), str(p))):
        if tried == MOST_TRIED:
            break
        if point not in known:
            if not search.may_fit(point, limit):
                continue
            tried += 1
            if search.fullness(point) > 1.0:
                continue
        candidate = search.simulate(point)
        if candidate.estimate.step_time_s > limit:
            continue
        candidate = search.simulate(point, whole=True)
        if candidate.estimate.fits:
            return replace(found, feasible=_first(candidate, found))
    return found


def _first(candidate: Candidate, found: Found) -> tuple[Candidate, ...]:
    return (candidate, *(c for c in found.feasible if c.point != candidate.point))
