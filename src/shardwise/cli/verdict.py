"""What the search found, in words: the verdict, the runners-up, and why.

Enters: a `Plan` that carries its `search`. Leaves: lines of text, and the same as data. Nothing but
the plan's file is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError
from shardwise.formatting import (
    Column,
    amount,
    bar,
    counted,
    money,
    seconds,
    size,
    table,
    wrapped,
)
from shardwise.reporting.compared import differences, idle_devices, why_not

if TYPE_CHECKING:
    from shardwise.plans import Plan

MOST_STAGES = 8  # that a short plan lists
MOST_LAYERS = 40
BAR = 20
NEEDED = ("cluster", "batch", "best", "runners_up", "gap", "binding", "relaxations", "groups")


def searched(plan: Plan) -> Mapping[str, Any]:
    """The figures of a plan that was searched for."""
    if not plan.search:
        raise PlanError(
            f"the plan {plan.name!r} was not searched for: it has no estimate and no runners-up",
            hint="shardwise plan model.py:build --cluster c.yaml -o plan.json, or "
            "shardwise explain model.py:build --plan plan.json for its nodes",
        )
    missing = [
        name for name in ("best", "cluster", "batch", "gap", "groups") if name not in plan.search
    ]
    if missing:
        raise PlanError(
            f"the figures of the plan {plan.name!r} lack {missing[0]!r}",
            where="search",
            hint="shardwise plan makes them again",
        )
    return plan.search


def verdict(plan: Plan, width: int) -> list[str]:
    """Step time, rates, memory and what limits it."""
    found = searched(plan)
    best, batch, cluster = found["best"], found["batch"], found["cluster"]
    time, memory = best["step_time_s"], best["memory"]
    rates = [f"{amount(batch['rows'] / time)} samples/s"]
    if "tokens" in batch:
        rates.append(f"{amount(batch['tokens'] / time)} tokens/s")
    free = memory["limit_bytes"] - memory["peak_bytes"]
    lines = [
        f"{plan.model} on {cluster['name']}, {counted(cluster['num_ranks'], 'rank')}",
        f"  step    {seconds(time)}: {', '.join(rates)}",
        f"  memory  {size(memory['peak_bytes'])} of {size(memory['limit_bytes'])} per device, "
        f"{size(free)} free",
        f"  limit   {found['binding']['text']}",
    ]
    if idle := idle_devices(found):
        lines.append(f"  idle    {idle}")
    if cluster.get("price_per_hour"):
        paid = cluster["price_per_hour"] / 3600 * time / batch["rows"] * 1e6
        hour = f"{cluster['price_per_hour']:,.2f}"
        lines.append(f"  price   {hour} per hour, {money(paid)} per million samples")
    return _fit(lines, width, 10)


def short(plan: Plan, width: int) -> list[str]:
    """The plan in a few lines."""
    from shardwise.messages.ranks import format_ranks

    lines = [f"  plan    {searched(plan)['best']['what']}"]
    types = plan.precision.to_json()
    if types:
        lines.append("  types   " + ", ".join(f"{k} {v}" for k, v in types.items()))
    cut = [e for e in plan.parameters.values() if any(c != "whole" for c in e.layout.values())]
    if any(role == "parameters" for role in plan.roles.values()):
        lines.append(f"  cuts    {len(cut)} of {len(plan.parameters)} kinds of parameters")
    fixed = searched(plan).get("fixed") or {}
    if fixed:
        lines.append(f"  fixed   {', '.join(_fixed(k, v) for k, v in fixed.items())}")
    lines = _fit(lines, width, 10)
    if plan.stages:
        rows = [
            (str(i), format_ranks(s.ranks), s.first or "the first node")
            for i, s in enumerate(plan.stages[:MOST_STAGES])
        ]
        lines += table([Column("stage"), Column("ranks")], "begins at", rows, width)
        more = len(plan.stages) - MOST_STAGES
        lines += [f"  … {more} more stages"] if more > 0 else []
    return lines


def _fixed(name: str, value: Any) -> str:
    """What the user decided, as it is typed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{glob}={_cut(cut)}" for glob, cut in value.items())
    return f"{name}={'+'.join(value) or 'none' if isinstance(value, list | tuple) else value}"


def _cut(cut: Any) -> str:
    return ",".join(f"{k}:{v}" for k, v in cut.items()) if isinstance(cut, Mapping) else str(cut)


def runners_up(plan: Plan, width: int) -> list[str]:
    """What else was simulated, with the ratio to the best."""
    found = searched(plan)
    time = found["best"]["step_time_s"]
    rows = [
        (
            f"{other['step_time_s'] / time:.3f}x",
            seconds(other["step_time_s"]),
            size(other["memory"]["peak_bytes"]),
            other["what"],
        )
        for other in found["runners_up"]
    ]
    if not rows:
        return ["no runner-up fits"]
    columns = [Column("ratio"), Column("step", 1), Column("memory", 2)]
    return ["runners-up", *table(columns, "plan", rows, width)]


def outlook(plan: Plan, width: int) -> list[str]:
    """What relaxing would buy, and how much better an optimum could be."""
    found = searched(plan)
    rows = [
        (f"{row['ratio'] - 1:+.1%}", seconds(row["step_time_s"]), _changed(row))
        for row in found["relaxations"]
    ]
    lines = ["what would change the step"]
    lines += table([Column("by"), Column("to", 1)], "change", rows, width)
    gap = found["gap"]
    lines += wrapped(
        f"{gap['simulated']:,} of {gap['points']:,} points simulated; a better one is at most "
        f"{gap['search']:.1%} quicker, better layouts at most {gap['layouts']:.1%} by the prices "
        "of a typical micro-batch",
        width,
        "",
        "  ",
    )
    if (told := found.get("polish")) and (told["layouts"] or told["simulated"]):
        lines += wrapped(_polished(told), width, "", "  ")
    return lines


def _polished(told: Mapping[str, Any]) -> str:
    """What came of other cuts and layouts, which were simulated after the search."""
    tried = f"other cuts of stages and {told['layouts']:,} other layouts: "
    tried += f"{told['simulated']:,} more simulated, "
    if told["gain"] > 0:
        tried += f"of which the best, {told['gain']:.2%} quicker than the search's, is this plan"
    else:
        tried += "none is quicker"
    return tried + ("; no other can be" if told["complete"] else "; not all were tried")


def _changed(row: Mapping[str, Any]) -> str:
    return f"{row['change']}: {row['what']}" if "what" in row else str(row["change"])


def plan_text(plan: Plan, width: int) -> str:
    """All that `shardwise plan` prints."""
    parts = [
        [*verdict(plan, width), *short(plan, width)],
        runners_up(plan, width),
        outlook(plan, width),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


# ------------------------------------------------------------ explain


def explain_text(plan: Plan, width: int) -> str:
    """Why this plan and not the next, and of what time and memory are made."""
    from shardwise.plans.plan import decisions

    edited = searched(plan).get("decisions", decisions(plan)) != decisions(plan)
    compared = bool(searched(plan)["gap"])  # a named plan that was simulated has no others
    note = "note: the plan was changed after it was made; the figures are those of the plan as made"
    parts = [
        wrapped(note, width, "", "  ") if edited else [],
        [*verdict(plan, width), *short(plan, width)],
        why(plan, width) if compared else [],
        time_by_cause(plan, width),
        memory_by_cause(plan, width),
        by_layer(plan, width),
        runners_up(plan, width) if compared else [],
        outlook(plan, width) if compared else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def explain_json(plan: Plan) -> dict[str, Any]:
    """The same for machines."""
    found = searched(plan)
    kept = ["cluster", "batch", "fixed", "best", "binding", "relaxations", "gap", "layers"]
    kept += ["left_out"] if "left_out" in found else []
    data: dict[str, Any] = {"model": plan.model, "plan": plan.name, "num_ranks": plan.num_ranks}
    data |= {name: found.get(name) for name in kept}
    data["runners_up"] = [
        {**other, "differences": differences(found["best"], other)} for other in found["runners_up"]
    ]
    data["memory"] = [row["memory"] for row in found["groups"]]
    return data


def why(plan: Plan, width: int) -> list[str]:
    """Why this plan and not the runner-up."""
    found = searched(plan)
    if not found["runners_up"]:
        return ["Nothing else that was simulated fits."]
    best, other = found["best"], found["runners_up"][0]
    told, time = differences(best, other), best["step_time_s"]
    lines = wrapped(why_not(best, other), width, "", "  ")
    rows = [
        (
            seconds(best["causes"][name]),
            seconds(other["causes"][name]),
            ("+" if delta > 0 else "-") + seconds(abs(delta)),
            cause_text(name),
        )
        for name, delta in sorted(told["causes_s"].items(), key=lambda item: -abs(item[1]))
        if abs(delta) > 1e-5 * time
    ]
    if rows:
        columns = [Column("this", 1), Column("runner-up", 1), Column("difference")]
        lines += table(columns, "cause", rows, width)
    return lines


def cause_text(name: str) -> str:
    """A cause of time in words."""
    from shardwise.planner.search.report import CAUSES

    return CAUSES.get(name, name)


def time_by_cause(plan: Plan, width: int) -> list[str]:
    """Seconds of the ranks that end last."""
    best = searched(plan)["best"]
    return [
        *wrapped("time by cause, of the ranks that end last", width, "", "  "),
        *shares(
            {cause_text(k): v for k, v in best["causes"].items()},
            best["step_time_s"],
            seconds,
            width,
        ),
    ]


def memory_by_cause(plan: Plan, width: int) -> list[str]:
    """Bytes of the fullest device at its highest."""
    memory = searched(plan)["best"]["memory"]
    when = "the optimizer's step" if memory["when"] == "optimizer" else f"action {memory['when']}"
    told = f"memory by cause, of the fullest rank (group {memory['group']}) in {when}"
    return [
        *wrapped(told, width, "", "  "),
        *shares(memory["parts"], memory["peak_bytes"], size, width),
    ]


def shares(parts: Mapping[str, float], whole: float, text: Any, width: int) -> list[str]:
    """Parts of a whole with bars, the largest first; those that are nothing are left out."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = [(k, v) for k, v in ordered if v > 5e-4 * whole]
    room = BAR if width >= 72 else 0
    rows = [
        (text(v), f"{v / whole:.1%}", *([f"{bar(v / whole, room):<{room}}"] if room else []), k)
        for k, v in shown
    ]
    columns = [Column(""), Column("", 1), *([Column("", 2)] if room else [])]
    return table(columns, "", rows, width)[1:] if rows else []


def by_layer(plan: Plan, width: int) -> list[str]:
    """Time of a step and bytes on a rank, of every layer."""
    layers = searched(plan).get("layers") or []
    if not layers:
        return []
    ordered = list(layers)[:MOST_LAYERS]
    rows = [
        (
            seconds(row["forward_s"] * row["count"]),
            seconds(row["backward_s"] * row["count"]),
            seconds(row["communication_s"] * row["count"]),
            size(row["state_bytes"] * row["count"]),
            size(row["activation_bytes"] * row["count"]),
            str(row["stage"]),
            layer_name(row),
        )
        for row in ordered
    ]
    columns = [
        Column("forward"),
        Column("backward", 1),
        Column("talk", 2),
        Column("state", 1),
        Column("kept", 1),
        Column("stage", 3),
    ]
    lines = wrapped(
        "by layer, a step on one rank; state: parameters, gradients, optimizer; "
        "kept: activations of a micro-batch",
        width,
        "",
        "  ",
    )
    lines += table(columns, "layer", rows, width)
    more = len(layers) - MOST_LAYERS
    return [*lines, f"  … {more} more; --json has all"] if more > 0 else lines


def layer_name(row: Mapping[str, Any]) -> str:
    """One name for equal layers.

    >>> layer_name({"name": "blocks.0", "last": "blocks.3", "count": 4})
    'blocks.0-3'
    >>> layer_name({"name": "head", "count": 1})
    'head'
    """
    name, last, count = row["name"], row.get("last", row["name"]), row["count"]
    if count == 1:
        return str(name)
    first, final = re.search(r"(\d+)$", name), re.search(r"(\d+)$", last)
    if first and final and int(final[1]) - int(first[1]) + 1 == count:
        return f"{name}-{final[1]}"
    return f"{name} x{count}"


def _fit(lines: Sequence[str], width: int, indent: int) -> list[str]:
    return [part for line in lines for part in wrapped(line, width, "", " " * indent)]
