"""Timelines of two plans in one file for Perfetto.

Enters: plans with their estimates. Leaves: a trace in the Chrome trace event format: a process for
each group of ranks of the first plan, then those of the second; both begin at zero.
"""

from __future__ import annotations

from typing import Any

from shardwise.plans import Plan
from shardwise.reporting.classes import ranks_label
from shardwise.simulation import Estimate


def side_by_side(plans: list[tuple[str, Plan, Estimate]]) -> dict[str, Any]:
    """One trace of several predicted steps, each named."""
    events: list[dict[str, Any]] = []
    first = 0
    for name, plan, estimate in plans:
        for event in estimate.timeline.trace()["traceEvents"]:  # type: ignore[attr-defined]
            moved = {**event, "pid": first + event["pid"]}
            if event["name"] == "process_name":
                label = ranks_label(plan.groups[event["pid"]])
                moved["args"] = {"name": f"{name}: {label}"}
            events.append(moved)
        first += len(plan.groups)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
