"""Format a plan as text: its decisions, and the results of its search.

`format_plan` lists decisions. `plan_text` and `explain_plan` show the cost of a searched plan, why
it was chosen and what would change it, from its `SearchResult`, without the model and the cluster.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, NamedTuple

from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import ShardwiseError
from shardwise.formatting import Column, amount, bar, counted, money, seconds, size, table, wrapped
from shardwise.plans.plan import INPUT_ROLES, Plan
from shardwise.plans.search_result import (
    CAUSES,
    LAYOUT_NAMES,
    LayerFigures,
    LocalSearchSummary,
    ParallelConfig,
    SearchResult,
    SimulatedConfig,
)
from shardwise.sharding.placements import REPLICATED
from shardwise.shares import num_ranks

WIDTH = 100
# Plan fields that have their own lines or are not decisions; all others are shown generically.
SHOWN = frozenset(
    {
        "name", "model", "fingerprint", "mesh", "roles", "inputs", "sequence", "parameters", "rng",
        "nodes", "units", "stages", "schedule", "num_microbatches", "per_microbatch", "recompute",
        "precision", "offload", "collectives", "bucket_mib", "seed", "notes", "search", "version",
    }
)  # fmt: skip
ZERO = {
    None: "",
    0: "all-reduce",
    1: "zero 1: optimizer state sharded",
    2: "zero 2: and gradients",
    3: "zero 3: and parameters",
}


def format_plan(plan: Plan) -> str:
    """Return the mesh, what each axis shards, the order of work, and every parameter entry."""
    on = f"{len(plan.stages)} stages of {plan.num_ranks} ranks" if plan.stages else plan.mesh
    lines = [f"Plan {plan.name} for {plan.model} on {on}"]
    if plan.search is not None and (left_out := plan.search.left_out) is not None:
        lines.append(
            f"  uses ranks {left_out.used} of the {left_out.num_ranks} of {left_out.cluster}; "
            "the others would slow the step"
        )
    for axis, role in plan.roles.items():
        what = "parameters"
        if role in ("batch", "sequence"):
            listed = plan.inputs if role == "batch" else plan.sequence
            dims = sorted({d for d in listed.values() if d is not None})
            what = f"the {role} (input dim {', '.join(map(str, dims)) or 'free'})"
        lines.append(f"  {axis:<4} shards {what}")
    lines += _stages(plan) + _execution(plan) + _parameters(plan)
    for node, choices in plan.nodes.items():
        lines.append(f"  node {node}: {', '.join(f'{a}: {c}' for a, c in choices.items())}")
    lines += _collectives(plan) + [f"  note: {note}" for note in plan.notes]
    return "\n".join(_fit(lines, WIDTH, indent=6))


def summary(plan: Plan) -> str:
    """Return the plan in one line: as the search names it, or by its mesh and execution options."""
    if plan.search is not None and not plan.is_edited:
        return plan.search.best.what
    parts = [f"{axis}={num_ranks(n)}" for axis, n in plan.mesh.axes]
    parts += [f"pp={len(plan.groups)}"] if len(plan.groups) > 1 else []
    parts = parts or ["1 rank"]
    if isinstance(plan.schedule, str) and plan.schedule:
        parts.append(plan.schedule)
    if plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} micro-batches")
    levels = sorted({entry.zero for entry in plan.parameters.values() if entry.zero})
    parts += [f"zero {'/'.join(map(str, levels))}"] if levels else []
    if plan.recompute != "none":
        modules = plan.recompute if isinstance(plan.recompute, str) else "of some modules"
        parts.append(f"recompute {modules}")
    parts += [f"offload {'+'.join(plan.offload)}"] if plan.offload else []
    return ", ".join(parts)


def _stages(plan: Plan) -> list[str]:
    if not plan.stages:
        return []
    rows = [("stage", "ranks", "mesh", "begins at")]
    for index, stage in enumerate(plan.stages):
        mesh = str(stage.mesh) if stage.mesh.axes else "one rank"
        first = stage.first or "the first node"
        rows.append((str(index), format_ranks(stage.ranks), mesh, first))
    return _table(rows, max_width=24)


def _execution(plan: Plan) -> list[str]:
    """Return the schedule and other options of execution that are not the default."""
    lines = []
    if plan.is_scheduled:
        kind = "separate batches" if plan.per_microbatch else "parts of one batch"
        count = f"{plan.num_microbatches} micro-batches, {kind}"
        name = plan.schedule or "by default"
        if not isinstance(name, str):
            name = f"of {sum(map(len, name))} listed actions on {len(name)} groups"
        lines.append(f"schedule {name}, {count if plan.num_microbatches > 1 else '1 micro-batch'}")
    if plan.recompute != "none":
        what = plan.recompute if isinstance(plan.recompute, str) else ", ".join(plan.recompute)
        lines.append(f"recompute {what}")
    types = [f"{k} {v}" if v is not True else k for k, v in plan.precision.to_json().items()]
    lines += [f"precision {', '.join(types)}".replace("_", " ")] if types else []
    lines += [f"offload {', '.join(plan.offload)}"] if plan.offload else []
    lines += [f"messages of {plan.bucket_mib} MiB"] if plan.bucket_mib else []
    for item in fields(plan):
        value = getattr(plan, item.name)
        if item.name not in SHOWN and value != item.default:
            lines.append(f"{item.name.replace('_', ' ')} {value}")
    return [f"  {line}" for line in lines]


def _parameters(plan: Plan) -> list[str]:
    rows = []
    for glob, entry in plan.parameters.items():
        layout = ", ".join(f"{axis}: {text}" for axis, text in entry.layout.items()) or REPLICATED
        if not any(c in glob for c in "*?["):
            entry = replace(plan.entry(glob), layout=entry.layout)  # as later globs change it
        shared_axes = [axis for axis, role in plan.roles.items() if role in INPUT_ROLES]
        shared = entry.zero or any(axis not in entry.layout for axis in shared_axes)
        level = "" if entry.sync is not None and entry.sync.kind else ZERO[entry.zero]
        words = [level if shared else "", "" if entry.sync is None else str(entry.sync)]
        rows.append((glob, layout, ", ".join(filter(None, words))))
    gradients = "gradients and state" if any(row[2] for row in rows) else ""
    rows.insert(0, ("parameter", "sharding", gradients))
    return _table(rows, max_width=48)


def _collectives(plan: Plan) -> list[str]:
    """Return the collectives that do not use the library."""
    lines = [f"  {choice}" for choice in plan.collectives]
    return [*lines, "  other collectives are the library's"] if lines else []


def _table(rows: Sequence[tuple[str, ...]], max_width: int) -> list[str]:
    """Return the rows in columns; all but the last are at most `max_width` wide."""
    widths = [min(max_width, max(map(len, column))) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return [
        "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def plan_html(plan: Plan) -> str:
    """Return a plan for notebooks: its verdict and report, or its text if it has no figures."""
    build = import_module("shardwise.reports.build")  # in a layer above this one
    try:
        report = build.report(plan)
        verdict = report.verdict
        text = (
            f"{report.title}: {verdict.plan}; a step takes {verdict.step_time_s * 1e3:,.2f} "
            f"ms, {verdict.rows_per_s:,.1f} samples/s; {verdict.limit['text']}"
        )
        return f"<p>{html.escape(text)}</p>{report._repr_html_()}"
    except ShardwiseError:  # no figures, or those of another plan
        return f"<pre>{html.escape(str(plan))}</pre>"


# ------------------------------------------------------------ explanations of a search
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


def plan_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the text of a searched plan: its figures, the runners-up and the outlook."""
    figures = plan.figures
    return _joined(
        [
            [*verdict(plan, width), *decisions(plan, width)],
            runners_up(figures, width),
            outlook(figures, width),
        ]
    )


def explain_plan(plan: Plan, width: int = WIDTH) -> str:
    """Explain why this plan was chosen and not the next, and where its time and memory go."""
    figures = plan.figures
    compared = bool(figures.gap or figures.runners_up)  # not if there was no search
    note = "note: the plan was changed after it was made; the figures are those of the plan as made"
    return _joined(
        [
            wrapped(note, width, "", "  ") if plan.is_edited else [],
            [*verdict(plan, width), *decisions(plan, width)],
            why(figures, width) if compared else [],
            time_by_cause(figures, width),
            memory_by_part(figures, width),
            by_layer(figures, width),
            runners_up(figures, width) if compared else [],
            outlook(figures, width) if compared else [],
        ]
    )


def explain_json(plan: Plan) -> dict[str, Any]:
    """Return the explanation as data."""
    figures = plan.figures
    data = figures.to_json()
    names = ["cluster", "batch", "fixed", "best", "binding", "relaxations", "gap", "layers"]
    names += ["left_out"] if figures.left_out is not None else []
    empty: dict[str, Any] = {"fixed": {}, "relaxations": [], "layers": []}
    return {
        "model": plan.model,
        "plan": plan.name,
        "num_ranks": plan.num_ranks,
        **{name: data.get(name, empty.get(name)) for name in names},
        "runners_up": [
            {**row, "differences": difference(figures.best, other)._asdict()}
            for row, other in zip(data.get("runners_up", ()), figures.runners_up, strict=True)
        ],
        "memory": data["memory"],
    }


def _joined(parts: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts if part)


# ------------------------------------------------------------ the plan and its figures
def verdict(plan: Plan, width: int) -> list[str]:
    """Return step time, throughput, memory and the limiting factor."""
    figures = plan.figures
    batch, cluster = figures.batch, figures.cluster
    time, memory = figures.best.step_time_s, figures.best.memory
    rates = [f"{amount(batch.rows / time)} samples/s"]
    if batch.tokens is not None:
        rates.append(f"{amount(batch.tokens / time)} tokens/s")
    lines = [
        f"{plan.model} on {cluster.name}, {counted(cluster.num_ranks, 'rank')}",
        f"  step    {seconds(time)}: {', '.join(rates)}",
        f"  memory  {size(memory.peak_bytes)} of {size(memory.limit_bytes)} per device, "
        f"{size(memory.free_bytes)} free",
        f"  limit   {figures.binding.text}",
    ]
    if idle := idle_devices(figures):
        lines.append(f"  idle    {idle}")
    if cluster.price_per_hour:
        per_million = cluster.price_per_hour / 3600 * time / batch.rows * 1e6
        lines.append(
            f"  price   {cluster.price_per_hour:,.2f} per hour, {money(per_million)} per million "
            "samples"
        )
    return _fit(lines, width)


def idle_devices(figures: SearchResult) -> str:
    """Return the devices that the planner left out and the reason; empty if it uses all."""
    omitted = figures.left_out
    if omitted is None:
        return ""
    time = omitted.step_time_s
    reason = "no plan fits on all" if time is None else f"using all would take {seconds(time)}"
    if time is not None and time < figures.best.step_time_s:
        reason += ", and save less than 1 %"
    return (
        f"{omitted.num_ranks - figures.cluster.num_ranks} of {omitted.num_ranks} devices of "
        f"{omitted.cluster} are left idle: {omitted.devices} (ranks {omitted.idle}); {reason}"
    )


def decisions(plan: Plan, width: int) -> list[str]:
    """Return the plan's decisions in a few lines."""
    lines = [f"  plan    {plan.figures.best.what}"]
    dtypes = plan.precision.to_json()
    if dtypes:
        lines.append("  types   " + ", ".join(f"{k} {v}" for k, v in dtypes.items()))
    entries = plan.parameters.values()
    sharded = [e for e in entries if any(c != REPLICATED for c in e.layout.values())]
    if any(role == "parameters" for role in plan.roles.values()):
        text = f"{len(sharded)} of {len(entries)} kinds of parameters"
        if not sharded and {c for node in plan.nodes.values() for c in node.values()} == {"same"}:
            text = "nothing along tp: its ranks all compute the same, as fast as one of them alone"
        lines.append(f"  shards  {text}")
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
    """Return an option as users write it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{glob}={_sharding(layout)}" for glob, layout in value.items())
    return f"{name}={'+'.join(value) or 'none' if isinstance(value, list | tuple) else value}"


def _sharding(layout: Any) -> str:
    is_mapping = isinstance(layout, Mapping)
    return ",".join(f"{k}:{v}" for k, v in layout.items()) if is_mapping else str(layout)


def _fit(lines: Sequence[str], width: int, indent: int = 10) -> list[str]:
    return [part for line in lines for part in wrapped(line, width, "", " " * indent)]


# ------------------------------------------------------------ other plans
class ConfigDifference(NamedTuple):
    """The differences of another configuration: its options, time by cause, and memory."""

    changed: dict[str, list[Any]]  # option -> the plan's value, the other's value
    step_time_s: float
    causes_s: dict[str, float]
    memory_bytes: float


def difference(best: SimulatedConfig, other: SimulatedConfig) -> ConfigDifference:
    """Return the differences of another configuration from the best."""
    names = ParallelConfig.__slots__ if best.config and other.config else ()
    pairs = {name: [getattr(c.config, name) for c in (best, other)] for name in names}
    changed = {name: values for name, values in pairs.items() if values[0] != values[1]}
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
    delta, time = difference(best, other), best.step_time_s
    instead = "; ".join(
        f"{option_text(name, value)} instead of {option_text(name, chosen)}"
        for name, (chosen, value) in delta.changed.items()
    )
    same = "the same configuration" if best.config else "it"
    more = delta.memory_bytes
    memory = f"{size(abs(more))} {'more' if more > 0 else 'less'}" if more else "the same"
    return (
        f"why not {other.what}: {instead or same} takes "
        f"{_longer(delta.step_time_s, time)}, and {memory} memory"
    )


def _longer(delta: float, time: float) -> str:
    if delta < -1e-6 * time:
        less = f"{seconds(-delta)} less ({delta / time:+.2%})"
        return f"{less}: of plans within 1 %, the simpler one is chosen"
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
        value = LAYOUT_NAMES[min(value, len(LAYOUT_NAMES) - 1)]
    return OPTION_TEXTS.get(name, name + "={}").format("none" if value in ("", None) else value)


def runners_up(figures: SearchResult, width: int) -> list[str]:
    """Return the next best configurations, with their ratio to the best."""
    rows = [
        (
            f"{other.step_time_s / figures.best.step_time_s:.3f}x",
            seconds(other.step_time_s),
            size(other.memory.peak_bytes),
            other.what,
        )
        for other in figures.runners_up
    ]
    if not rows:
        return ["no runner-up fits"]
    columns = [Column("ratio"), Column("step", 1), Column("memory", 2)]
    return ["runners-up", *table(columns, "plan", rows, width)]


def why(figures: SearchResult, width: int) -> list[str]:
    """Explain why this plan and not the first runner-up."""
    if not figures.runners_up:
        return ["No other simulated configuration fits."]
    best, other = figures.best, figures.runners_up[0]
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


def outlook(figures: SearchResult, width: int) -> list[str]:
    """Return the gains from relaxing limits, and how much faster an optimal plan could be."""
    rows = [
        (
            f"{row.ratio - 1:+.1%}",
            seconds(row.step_time_s),
            f"{row.change}: {row.plan}" if row.plan else row.change,
        )
        for row in figures.relaxations
        if row.ratio is not None and row.step_time_s is not None
    ]
    lines = []
    if rows:
        columns = [Column("by"), Column("to", 1)]
        lines = ["what would change the step", *table(columns, "change", rows, width)]
    gap = figures.gap
    if gap is not None:
        text = (
            f"{gap.simulated:,} of {gap.points:,} configurations simulated; another one is at "
            f"most {gap.search:.1%} faster, other layouts at most {gap.layouts:.1%} by the prices "
            "of a typical micro-batch"
        )
        lines += wrapped(text, width, "", "  ")
    if figures.local_search is not None and figures.local_search.simulated:
        lines += wrapped(_local_search(figures.local_search), width, "", "  ")
    return lines


def _local_search(summary: LocalSearchSummary) -> str:
    layouts = f" and {summary.layouts:,} other layouts" if summary.layouts else ""
    text = f"other stage boundaries{layouts}: {summary.simulated:,} more simulated, "
    if summary.gain > 0:
        text += f"and the best of them, {summary.gain:.2%} faster, is this plan"
    else:
        text += "none is faster"
    return text + ("; no other can be faster" if summary.complete else "; not all were tried")


# ------------------------------------------------------------ time and memory
def time_by_cause(figures: SearchResult, width: int) -> list[str]:
    """Return the time of a step by cause, for the ranks that end last."""
    causes = {CAUSES[name]: value for name, value in figures.best.causes.items()}
    return [
        *wrapped("time by cause, on the slowest ranks", width, "", "  "),
        *shares(causes, figures.best.step_time_s, seconds, width),
    ]


def memory_by_part(figures: SearchResult, width: int) -> list[str]:
    """Return the memory of the fullest device at its peak, by cause."""
    memory = figures.best.memory
    when = "the optimizer step" if memory.when == "optimizer" else f"action {memory.when}"
    title = f"memory by cause, on the fullest rank (group {memory.group}) in {when}"
    return [*wrapped(title, width, "", "  "), *shares(memory.parts, memory.peak_bytes, size, width)]


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


def by_layer(figures: SearchResult, width: int) -> list[str]:
    """Return the time of a step and the bytes on a rank, for every layer."""
    if not figures.layers:
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
        for row in figures.layers[:MAX_LAYERS]
    ]
    orders = {"forward": 0, "backward": 1, "comm": 2, "state": 1, "saved": 1, "stage": 3}
    columns = [Column(title, order) for title, order in orders.items()]
    title = (
        "by layer, for a step on one rank; comm: communication; state: parameters, gradients, "
        "optimizer; saved: activations of a micro-batch"
    )
    lines = [*wrapped(title, width, "", "  "), *table(columns, "layer", rows, width)]
    more = len(figures.layers) - MAX_LAYERS
    return [*lines, f"  … {more} more; --json has all"] if more > 0 else lines


def layer_name(row: LayerFigures) -> str:
    """Return one name for equal layers, such as `blocks.0-3` for four of them."""
    if row.count == 1:
        return row.name
    first, final = re.search(r"(\d+)$", row.name), re.search(r"(\d+)$", row.last)
    if first and final and int(final[1]) - int(first[1]) + 1 == row.count:
        return f"{row.name}-{final[1]}"
    return f"{row.name} x{row.count}"
