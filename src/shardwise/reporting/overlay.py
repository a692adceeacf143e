"""Both timelines in one file for Perfetto: predicted and measured, from the same beginning.

Enters: a plan, its `Estimate`, and `Measured` where a run was recorded. Leaves: a trace in the
Chrome trace event format: a process for each group of the prediction, then one for each rank that
is shown of the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.plans import Plan
from shardwise.reporting.classes import ranks_label
from shardwise.reporting.measured import Measured
from shardwise.reporting.steps import RankStep, Spans
from shardwise.simulation import Estimate

__all__ = ["both_traces"]

FORMAT = "shardwise-timelines"


def both_traces(plan: Plan, estimate: Estimate, measured: Measured | None) -> dict[str, Any]:
    """One trace of the predicted step and of the recorded one, which both begin at zero."""
    events = list(_predicted(plan, estimate))
    first = len(plan.groups)
    for place, (_, rank, label) in enumerate(measured.rows if measured is not None else ()):
        assert measured is not None
        name = f"measured, {label}"
        events += _process(first + place, name, first + place)
        events += _recorded(first + place, measured.step.ranks[rank])
    about: dict[str, Any] = {"format": FORMAT, "version": 1, "plan": plan.name, "model": plan.model}
    if measured is not None:
        about |= {"file": measured.file, "step": measured.step.number}
    return {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}


def _predicted(plan: Plan, estimate: Estimate) -> Iterator[dict[str, Any]]:
    for event in estimate.timeline.trace()["traceEvents"]:  # type: ignore[attr-defined]
        if event["name"] == "process_name":
            ranks = ranks_label(plan.groups[event["pid"]])
            yield from _process(event["pid"], f"predicted, {ranks}", event["pid"])
        else:
            yield event


def _recorded(pid: int, rank: RankStep) -> Iterator[dict[str, Any]]:
    lanes = [
        ("compute", rank.actions),
        ("compute", rank.tail),
        ("waiting", rank.waiting),
        ("communication", rank.communication),
    ]
    threads: dict[tuple[str, int], int] = {}
    for lane, spans in lanes:
        for row, name, start, end in _rows(spans):
            tid = threads.setdefault((lane, row), len(threads))
            yield {
                "ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid,
                "ts": start * 1e6, "dur": (end - start) * 1e6,
            }  # fmt: skip
    for (lane, row), tid in threads.items():
        name = lane if not row else f"{lane} {row + 1}"
        yield _label("thread_name", pid, tid, "name", name)


def _rows(spans: Spans) -> Iterator[tuple[int, str, float, float]]:
    """Spans with the first row in which they do not overlap another."""
    ends: list[float] = []
    order = np.argsort(spans.start, kind="stable")
    for at in order.tolist():
        start, end = float(spans.start[at]), float(spans.end[at])
        row = next((r for r, reached in enumerate(ends) if reached <= start), len(ends))
        ends[row : row + 1] = [end]
        yield row, spans.names[at], start, end


def _process(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        _label("process_name", pid, 0, "name", name),
        _label("process_sort_index", pid, 0, "sort_index", order),
    ]


def _label(what: str, pid: int, tid: int, key: str, value: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}}
