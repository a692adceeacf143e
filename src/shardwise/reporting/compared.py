"""Why this plan and not the runners-up: what they do otherwise, and what that costs.

Enters: `search` of a plan, or two simulated points of one. Leaves: `Compared` rows; differences as
`shardwise explain` tells them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.formatting import seconds, size
from shardwise.reporting.document import Compared

WORDS = {
    "dp": "dp={}",
    "tp": "tp={}",
    "pp": "pp={}",
    "virtual": "{} stages per group",
    "schedule": "schedule {}",
    "num_microbatches": "{} micro-batches",
    "zero": "zero {}",
    "outer": "zero {} outside of blocks",
    "recompute": "recompute {}",
    "offload": "offload {}",
    "layout": "layouts {}",
    "grouping": "device order {}",
    "cuts": "stages from nodes {}",
}
LAYOUTS = ("the quickest", "lean", "mixed", "the leanest", "polished")  # the last is of all others


def differences(best: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What another point does otherwise, and what that costs by cause."""
    mine, its = best["point"], other["point"]
    changed = {name: [mine[name], its[name]] for name in mine if mine[name] != its[name]}
    causes = {
        name: other["causes"][name] - value
        for name, value in best["causes"].items()
        if other["causes"][name] != value
    }
    return {
        "changed": changed,
        "step_time_s": other["step_time_s"] - best["step_time_s"],
        "causes_s": causes,
        "memory_bytes": other["memory"]["peak_bytes"] - best["memory"]["peak_bytes"],
    }


def plans_of(search: Mapping[str, Any]) -> tuple[Compared, ...] | None:
    """Return the chosen plan first, then its runners-up; None for one that was not searched for."""
    if not search.get("gap"):
        return None
    best = search["best"]
    return (_row(best, best), *(_row(best, other) for other in search["runners_up"]))


def _row(best: Mapping[str, Any], other: Mapping[str, Any]) -> Compared:
    told, time = differences(best, other), best["step_time_s"]
    return Compared(
        what=other["what"],
        chosen=other is best,
        step_time_s=other["step_time_s"],
        ratio=other["step_time_s"] / time if time else 1.0,
        causes=dict(other["causes"]),
        peak_bytes=other["memory"]["peak_bytes"],
        limit_bytes=other["memory"]["limit_bytes"],
        changed=told["changed"],
        words={
            name: tuple(worded(name, value) for value in pair)
            for name, pair in told["changed"].items()
        },
        differences_s=told["causes_s"],
        memory_difference_bytes=told["memory_bytes"],
        text="the chosen plan" if other is best else why_not(best, other),
    )


def idle_devices(search: Mapping[str, Any]) -> str:
    """Which devices the planner left out and why, in a sentence; empty where it uses all."""
    left = search.get("left_out")
    if not left:
        return ""
    used, total = search["cluster"]["num_ranks"], left["num_ranks"]
    time = left["step_time_s"]
    because = "no plan fits on all" if time is None else f"using all would take {seconds(time)}"
    if time is not None and time < search["best"]["step_time_s"]:
        because += ", and save less than 1 %"
    return (
        f"{total - used} of {total} devices of {left['cluster']} are left idle: {left['devices']} "
        f"(ranks {left['idle']}); {because}"
    )


def why_not(best: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why another point was not chosen, in a sentence."""
    told, time = differences(best, other), best["step_time_s"]
    instead = "; ".join(
        f"{worded(name, its)} instead of {worded(name, mine)}"
        for name, (mine, its) in told["changed"].items()
    )
    more = told["memory_bytes"]
    memory = f"{size(abs(more))} {'more' if more > 0 else 'less'}" if more else "the same"
    return (
        f"why not {other['what']}: {instead or 'the same in short'} takes "
        f"{_longer(told['step_time_s'], time)}, and {memory} memory"
    )


def _longer(delta: float, time: float) -> str:
    if delta < -1e-6 * time:
        less = f"{seconds(-delta)} less ({delta / time:+.2%})"
        return f"{less}: of plans within 1 %, the simpler one is taken"
    if delta < 1e-6 * time:
        return "as long"
    return f"{seconds(delta)} longer ({delta / time:+.2%})"


def worded(name: str, value: Any) -> str:
    """Return a decision in words.

    >>> worded("num_microbatches", 8), worded("offload", []), worded("layout", 5)
    ('8 micro-batches', 'offload nothing', 'layouts polished')
    >>> worded("cuts", [0, 12]), worded("cuts", [])
    ('stages from nodes 0, 12', 'stages of equal time')
    """
    if name == "cuts" and not value:
        return "stages of equal time"
    if isinstance(value, list | tuple):
        value = (", " if name == "cuts" else "+").join(map(str, value)) or "nothing"
    if name == "layout" and isinstance(value, int):
        value = LAYOUTS[min(max(value, 0), len(LAYOUTS) - 1)]
    return WORDS.get(name, name + " {}").format("none" if value in ("", None) else value)
