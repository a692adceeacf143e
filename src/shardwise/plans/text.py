"""A plan as a table for people."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module

from shardwise.errors import ShardwiseError
from shardwise.messages.program import format_ranks
from shardwise.plans.plan import Plan

WIDTH = 100
SHOWN = frozenset(  # fields with lines of their own, or that are not decisions; others are generic
    [
        "name",
        "model",
        "fingerprint",
        "mesh",
        "roles",
        "inputs",
        "parameters",
        "nodes",
        "units",
        "stages",
        "schedule",
        "num_microbatches",
        "per_microbatch",
        "recompute",
        "precision",
        "offload",
        "collectives",
        "rng",
        "seed",
        "notes",
        "search",
        "version",
    ]
)
ZERO = {
    None: "",
    0: "all-reduce",
    1: "zero 1: optimizer state sharded",
    2: "zero 2: and gradients",
    3: "zero 3: and parameters",
}


def format_plan(plan: Plan) -> str:
    """Return the mesh, what each axis cuts, the order of work, and every parameter entry."""
    on = f"{len(plan.stages)} stages of {plan.num_ranks} ranks" if plan.stages else plan.mesh
    lines = [f"Plan {plan.name} for {plan.model} on {on}"]
    if plan.search is not None and (left_out := plan.search.left_out) is not None:
        lines.append(
            f"  uses ranks {left_out.used} of the {left_out.num_ranks} of {left_out.cluster}; "
            "the others would slow the step"
        )
    for axis, role in plan.roles.items():
        dims = sorted({d for d in plan.inputs.values() if d is not None})
        what = f"the batch (input dim {', '.join(map(str, dims)) or 'free'})"
        lines.append(f"  {axis:<4} cuts {what if role == 'batch' else 'parameters'}")
    lines += _stages(plan) + _execution(plan) + _parameters(plan)
    for node, choices in plan.nodes.items():
        lines.append(f"  node {node}: {', '.join(f'{a}: {c}' for a, c in choices.items())}")
    lines += _collectives(plan) + [f"  note: {note}" for note in plan.notes]
    return "\n".join(fitted for line in lines for fitted in _fit(line))


def summary(plan: Plan) -> str:
    """Return the plan in one line: as the search names it, or by its mesh and execution options."""
    if plan.search is not None and not plan.is_edited:
        return plan.search.best.what
    parts = [f"{axis}={int(n)}" for axis, n in plan.mesh.axes]
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
    return _table(rows, most=24)


def _execution(plan: Plan) -> list[str]:
    """Return the order of work and what else a step does, where it is not as usual."""
    lines = []
    if plan.is_scheduled:
        kind = "batches of their own" if plan.per_microbatch else "parts of one batch"
        many = f"{plan.num_microbatches} micro-batches, {kind}"
        name = plan.schedule or "by default"
        if not isinstance(name, str):
            name = f"of {sum(map(len, name))} listed actions on {len(name)} groups"
        lines.append(f"schedule {name}, {many if plan.num_microbatches > 1 else '1 micro-batch'}")
    if plan.recompute != "none":
        what = plan.recompute if isinstance(plan.recompute, str) else ", ".join(plan.recompute)
        lines.append(f"recompute {what}")
    types = [f"{k} {v}" if v is not True else k for k, v in plan.precision.to_json().items()]
    lines += [f"precision {', '.join(types)}".replace("_", " ")] if types else []
    lines += [f"offload {', '.join(plan.offload)}"] if plan.offload else []
    for item in fields(plan):
        value = getattr(plan, item.name)
        if item.name not in SHOWN and value != item.default:
            lines.append(f"{item.name.replace('_', ' ')} {value}")
    return [f"  {line}" for line in lines]


def _parameters(plan: Plan) -> list[str]:
    rows = []
    for glob, entry in plan.parameters.items():
        cut = ", ".join(f"{axis}: {text}" for axis, text in entry.layout.items()) or "whole"
        shared = entry.zero or "batch" in plan.roles.values()
        rows.append((glob, cut, ZERO[entry.zero] if shared else ""))
    rows.insert(0, ("parameter", "cut", "gradients and state" if any(r[2] for r in rows) else ""))
    return _table(rows, most=48)


def _collectives(plan: Plan) -> list[str]:
    """What goes another way than the library's."""
    lines = [f"  {choice}" for choice in plan.collectives]
    return [*lines, "  other collectives are the library's"] if lines else []


def _table(rows: Sequence[tuple[str, ...]], most: int) -> list[str]:
    """Return the rows in columns, of which all but the last are at most `most` wide."""
    widths = [min(most, max(map(len, column))) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return [
        "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _fit(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)


# A plan in a notebook: a verdict in a line, and its report in a frame.


def plan_html(plan: Plan) -> str:
    """Return the verdict and the report of a plan that was searched for; else its text."""
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
