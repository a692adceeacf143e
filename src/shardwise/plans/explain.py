"""Explain a searched plan in words: its figures, why it was chosen, and what would change it.

Everything comes from the plan's `SearchResult`; neither the model nor the cluster is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.formatting import Column, amount, bar, counted, money, seconds, size, table, wrapped
from shardwise.messages.program import format_ranks
from shardwise.plans.search_result import (
    CAUSES,
    LayerFigures,
    LocalSearchSummary,
    ParallelConfig,
    SearchResult,
    SimulatedConfig,
)

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

WIDTH = 100
MAX_STAGES = 8
MAX_LAYERS = 40
BAR = 20
OPTION_TEXTS = {
    "virtual": "{} stages per group",
    "schedule": "schedule {}",
    "num_microbatches": "{} micro-batches",
    "zero": "zero {}",
    "outer": "zero {} outside of blocks",
    "recompute": "recompute {}",
    "offload": "offload {}",
    "layout": "{} layouts",
    "grouping": "device order {}",
    "cuts": "stages from nodes {}",
}
LAYOUTS = ("fastest", "lean", "mixed", "leanest", "ranked")


def plan_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the text of a searched plan: its figures, the runners-up and the outlook."""
    found = plan.figures
    return _joined(
        [
            [*verdict(plan, width), *decisions(plan, width)],
            runners_up(found, width),
            outlook(found, width),
        ]
    )


def explain_plan(plan: Plan, width: int = WIDTH) -> str:
    """Explain why this plan was chosen and not the next, and where its time and memory go."""
    found = plan.figures
    compared = found.gap is not None  # a plan that no search made has no runners-up
    note = "note: the plan was changed after it was made; the figures are those of the plan as made"
    return _joined(
        [
            wrapped(note, width, "", "  ") if plan.is_edited else [],
            [*verdict(plan, width), *decisions(plan, width)],
            why(found, width) if compared else [],
            time_by_cause(found, width),
            memory_by_part(found, width),
            by_layer(found, width),
            runners_up(found, width) if compared else [],
            outlook(found, width) if compared else [],
        ]
    )


def explain_json(plan: Plan) -> dict[str, Any]:
    """Return the explanation as data."""
    found = plan.figures
    data = found.to_json()
    names = ["cluster", "batch", "fixed", "best", "binding", "relaxations", "gap", "layers"]
    names += ["left_out"] if found.left_out is not None else []
    empty: dict[str, Any] = {"fixed": {}, "relaxations": [], "layers": []}
    return {
        "model": plan.model,
        "plan": plan.name,
        "num_ranks": plan.num_ranks,
        **{name: data.get(name, empty.get(name)) for name in names},
        "runners_up": [
            {**row, "differences": difference(found.best, other)._asdict()}
            for row, other in zip(data.get("runners_up", ()), found.runners_up, strict=True)
        ],
        "memory": data["memory"],
    }


def _joined(parts: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts if part)


# ------------------------------------------------------------ the plan and its figures


def verdict(plan: Plan, width: int) -> list[str]:
    """Return step time, throughput, memory and what limits them."""
    found = plan.figures
    batch, cluster = found.batch, found.cluster
    time, memory = found.best.step_time_s, found.best.memory
    rates = [f"{amount(batch.rows / time)} samples/s"]
    if batch.tokens is not None:
        rates.append(f"{amount(batch.tokens / time)} tokens/s")
    lines = [
        f"{plan.model} on {cluster.name}, {counted(cluster.num_ranks, 'rank')}",
        f"  step    {seconds(time)}: {', '.join(rates)}",
        f"  memory  {size(memory.peak_bytes)} of {size(memory.limit_bytes)} per device, "
        f"{size(memory.free_bytes)} free",
        f"  limit   {found.binding.text}",
    ]
    if idle := idle_devices(found):
        lines.append(f"  idle    {idle}")
    if cluster.price_per_hour:
        paid = cluster.price_per_hour / 3600 * time / batch.rows * 1e6
        hour = f"{cluster.price_per_hour:,.2f}"
        lines.append(f"  price   {hour} per hour, {money(paid)} per million samples")
    return _fit(lines, width)


def idle_devices(found: SearchResult) -> str:
    """Return which devices the planner left out and why; empty where it uses all."""
    left = found.left_out
    if left is None:
        return ""
    time = left.step_time_s
    because = "no plan fits on all" if time is None else f"using all would take {seconds(time)}"
    if time is not None and time < found.best.step_time_s:
        because += ", and save less than 1 %"
    return (
        f"{left.num_ranks - found.cluster.num_ranks} of {left.num_ranks} devices of {left.cluster} "
        f"are left idle: {left.devices} (ranks {left.idle}); {because}"
    )


def decisions(plan: Plan, width: int) -> list[str]:
    """Return the plan's decisions in a few lines."""
    lines = [f"  plan    {plan.figures.best.what}"]
    dtypes = plan.precision.to_json()
    if dtypes:
        lines.append("  types   " + ", ".join(f"{k} {v}" for k, v in dtypes.items()))
    entries = plan.parameters.values()
    sharded = [e for e in entries if any(c != "whole" for c in e.layout.values())]
    if any(role == "parameters" for role in plan.roles.values()):
        lines.append(f"  shards  {len(sharded)} of {len(entries)} kinds of parameters")
    if plan.figures.fixed:
        fixed = ", ".join(_option(k, v) for k, v in plan.figures.fixed.items())
        lines.append(f"  fixed   {fixed}")
    lines = _fit(lines, width)
    if plan.stages:
        rows = [
            (str(i), format_ranks(s.ranks), s.first or "the first node")
            for i, s in enumerate(plan.stages[:MAX_STAGES])
        ]
        lines += table([Column("stage"), Column("ranks")], "begins at", rows, width)
        more = len(plan.stages) - MAX_STAGES
        lines += [f"  … {more} more stages"] if more > 0 else []
    return lines


def _option(name: str, value: Any) -> str:
    """An option as it is typed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{glob}={_sharding(layout)}" for glob, layout in value.items())
    return f"{name}={'+'.join(value) or 'none' if isinstance(value, list | tuple) else value}"


def _sharding(layout: Any) -> str:
    if isinstance(layout, Mapping):
        return ",".join(f"{k}:{v}" for k, v in layout.items())
    return str(layout)


def _fit(lines: Sequence[str], width: int) -> list[str]:
    return [part for line in lines for part in wrapped(line, width, "", " " * 10)]


# ------------------------------------------------------------ other plans


class ConfigDifference(NamedTuple):
    """What another configuration does differently, and what that costs by cause."""

    changed: dict[str, list[Any]]  # by option: the value of the plan, the other's
    step_time_s: float
    causes_s: dict[str, float]
    memory_bytes: float


def difference(best: SimulatedConfig, other: SimulatedConfig) -> ConfigDifference:
    """Return what another configuration does differently."""
    changed: dict[str, list[Any]] = {}
    if best.config is not None and other.config is not None:
        for name in ParallelConfig.__slots__:
            own, its = getattr(best.config, name), getattr(other.config, name)
            if own != its:
                changed[name] = [own, its]
    return ConfigDifference(
        changed=changed,
        step_time_s=other.step_time_s - best.step_time_s,
        causes_s={
            name: other.causes[name] - value
            for name, value in best.causes.items()
            if other.causes[name] != value
        },
        memory_bytes=other.memory.peak_bytes - best.memory.peak_bytes,
    )


def why_not(best: SimulatedConfig, other: SimulatedConfig) -> str:
    """Explain in a sentence why another configuration was not chosen."""
    found, time = difference(best, other), best.step_time_s
    instead = "; ".join(
        f"{option_text(name, its)} instead of {option_text(name, own)}"
        for name, (own, its) in found.changed.items()
    )
    more = found.memory_bytes
    memory = f"{size(abs(more))} {'more' if more > 0 else 'less'}" if more else "the same"
    return (
        f"why not {other.what}: {instead or 'the same in short'} takes "
        f"{_longer(found.step_time_s, time)}, and {memory} memory"
    )


def _longer(delta: float, time: float) -> str:
    if delta < -1e-6 * time:
        less = f"{seconds(-delta)} less ({delta / time:+.2%})"
        return f"{less}: of plans within 1 %, the simpler one is taken"
    if delta < 1e-6 * time:
        return "as long"
    return f"{seconds(delta)} longer ({delta / time:+.2%})"


def option_text(name: str, value: Any) -> str:
    """Return one option of a configuration in words.

    >>> option_text("num_microbatches", 8), option_text("offload", ()), option_text("layout", 1)
    ('8 micro-batches', 'offload nothing', 'lean layouts')
    >>> option_text("cuts", (0, 12)), option_text("cuts", ()), option_text("dp", 4)
    ('stages from nodes 0, 12', 'stages of equal time', 'dp=4')
    """
    if name == "cuts" and not value:
        return "stages of equal time"
    if isinstance(value, list | tuple):
        value = (", " if name == "cuts" else "+").join(map(str, value)) or "nothing"
    if name == "layout":
        value = LAYOUTS[min(value, len(LAYOUTS) - 1)]
    return OPTION_TEXTS.get(name, name + "={}").format("none" if value in ("", None) else value)


def runners_up(found: SearchResult, width: int) -> list[str]:
    """Return the other simulated configurations, with their ratio to the best."""
    rows = [
        (
            f"{other.step_time_s / found.best.step_time_s:.3f}x",
            seconds(other.step_time_s),
            size(other.memory.peak_bytes),
            other.what,
        )
        for other in found.runners_up
    ]
    if not rows:
        return ["no runner-up fits"]
    columns = [Column("ratio"), Column("step", 1), Column("memory", 2)]
    return ["runners-up", *table(columns, "plan", rows, width)]


def why(found: SearchResult, width: int) -> list[str]:
    """Explain why this plan and not the first runner-up."""
    if not found.runners_up:
        return ["Nothing else that was simulated fits."]
    best, other = found.best, found.runners_up[0]
    lines = wrapped(why_not(best, other), width, "", "  ")
    causes = difference(best, other).causes_s
    rows = [
        (
            seconds(best.causes[name]),
            seconds(other.causes[name]),
            ("+" if delta > 0 else "-") + seconds(abs(delta)),
            CAUSES[name],
        )
        for name, delta in sorted(causes.items(), key=lambda item: -abs(item[1]))
        if abs(delta) > 1e-5 * best.step_time_s
    ]
    if rows:
        columns = [Column("this", 1), Column("runner-up", 1), Column("difference")]
        lines += table(columns, "cause", rows, width)
    return lines


def outlook(found: SearchResult, width: int) -> list[str]:
    """Return what relaxing would gain, and how much better an optimum could be."""
    rows = [
        (
            f"{row.ratio - 1:+.1%}",
            seconds(row.step_time_s),
            f"{row.change}: {row.plan}" if row.plan else row.change,
        )
        for row in found.relaxations
        if row.ratio is not None and row.step_time_s is not None
    ]
    lines = ["what would change the step"]
    lines += table([Column("by"), Column("to", 1)], "change", rows, width)
    gap = found.gap
    if gap is not None:
        text = (
            f"{gap.simulated:,} of {gap.points:,} configurations simulated; a better one is at "
            f"most {gap.search:.1%} faster, better layouts at most {gap.layouts:.1%} by the prices "
            "of a typical micro-batch"
        )
        lines += wrapped(text, width, "", "  ")
    if found.local_search is not None and found.local_search.simulated:
        lines += wrapped(_local_search(found.local_search), width, "", "  ")
    return lines


def _local_search(summary: LocalSearchSummary) -> str:
    layouts = f" and {summary.layouts:,} other layouts" if summary.layouts else ""
    text = f"other stage boundaries{layouts}: {summary.simulated:,} more simulated, "
    if summary.gain > 0:
        text += f"of which the best, {summary.gain:.2%} faster than the search's, is this plan"
    else:
        text += "none is faster"
    return text + ("; no other can be" if summary.complete else "; not all were tried")


# ------------------------------------------------------------ time and memory


def time_by_cause(found: SearchResult, width: int) -> list[str]:
    """Return where the time goes, of the ranks that end last."""
    causes = {CAUSES[name]: value for name, value in found.best.causes.items()}
    return [
        *wrapped("time by cause, of the ranks that end last", width, "", "  "),
        *shares(causes, found.best.step_time_s, seconds, width),
    ]


def memory_by_part(found: SearchResult, width: int) -> list[str]:
    """Return what takes the memory of the fullest device at its peak."""
    memory = found.best.memory
    when = "the optimizer step" if memory.when == "optimizer" else f"action {memory.when}"
    title = f"memory by cause, of the fullest rank (group {memory.group}) in {when}"
    return [
        *wrapped(title, width, "", "  "),
        *shares(memory.parts, memory.peak_bytes, size, width),
    ]


def shares(
    parts: Mapping[str, float], total: float, text: Callable[[float], str], width: int
) -> list[str]:
    """Return the parts of a total with bars, largest first, without negligible ones."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    room = BAR if width >= 72 else 0
    rows = [
        (text(v), f"{v / total:.1%}", *([f"{bar(v / total, room):<{room}}"] if room else []), k)
        for k, v in ordered
        if v > 5e-4 * total
    ]
    columns = [Column(""), Column("", 1), *([Column("", 2)] if room else [])]
    return table(columns, "", rows, width)[1:] if rows else []


def by_layer(found: SearchResult, width: int) -> list[str]:
    """Return the time of a step and the bytes on a rank, of every layer."""
    if not found.layers:
        return []
    rows = [
        (
            seconds(row.forward_s * row.count),
            seconds(row.backward_s * row.count),
            seconds(row.communication_s * row.count),
            size(row.state_bytes * row.count),
            size(row.activation_bytes * row.count),
            str(row.stage),
            layer_name(row),
        )
        for row in found.layers[:MAX_LAYERS]
    ]
    columns = [
        Column("forward"),
        Column("backward", 1),
        Column("comm", 2),
        Column("state", 1),
        Column("saved", 1),
        Column("stage", 3),
    ]
    title = (
        "by layer, a step on one rank; comm: communication; state: parameters, gradients, "
        "optimizer; saved: activations of a micro-batch"
    )
    lines = [*wrapped(title, width, "", "  "), *table(columns, "layer", rows, width)]
    more = len(found.layers) - MAX_LAYERS
    return [*lines, f"  … {more} more; --json has all"] if more > 0 else lines


def layer_name(row: LayerFigures) -> str:
    """Return one name for equal layers: `blocks.0-3` for four of them."""
    if row.count == 1:
        return row.name
    first, final = re.search(r"(\d+)$", row.name), re.search(r"(\d+)$", row.last)
    if first and final and int(final[1]) - int(first[1]) + 1 == row.count:
        return f"{row.name}-{final[1]}"
    return f"{row.name} x{row.count}"
