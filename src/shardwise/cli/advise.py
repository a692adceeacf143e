"""`shardwise advise`: the best plan on other machines, with its cost.

Enters: a model, and kinds and counts of devices or cluster files. Leaves: a table, quickest first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import AsJson, Target, capture_target, cluster_of
from shardwise.formatting import (
    Column,
    amount,
    money,
    seconds,
    size,
    table,
    terminal_width,
    wrapped,
)

if TYPE_CHECKING:
    from shardwise.api.advise import Advice, AdviceRow

KINDS = "a100-80,h100,h200"
COUNTS = "8,16,64"
INFEASIBLE = 3


def advise(
    target: Target,
    devices: Annotated[str, typer.Option("--devices", help="Kinds of devices.")] = KINDS,
    counts: Annotated[str, typer.Option("--counts", help="Numbers of devices.")] = COUNTS,
    cluster: Annotated[
        list[str], typer.Option("--cluster", "-c", help="These instead: files, or h100:8x8.")
    ] = [],  # noqa: B006  typer reads it
    precision: Annotated[str | None, typer.Option("--precision", help="bf16, fp16, …")] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory-gib", min=1e-6, help="Memory limit per device."),
    ] = None,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="Do not show progress.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare machines: step time, cost and memory of the best plan on each."""
    from shardwise.api.advise import advise as compare
    from shardwise.cluster.presets import preset_device

    clusters = [cluster_of(text) for text in cluster]
    kinds = [] if clusters else [kind.strip() for kind in devices.split(",") if kind.strip()]
    for kind in kinds:
        preset_device(kind)  # an unknown one is told before the model is captured
    numbers = [] if clusters else _counts(counts)
    _, graph = capture_target(target, precision=precision)
    advice = compare(
        graph,
        kinds,
        numbers,
        clusters=clusters,
        progress=not no_progress,
        precision=precision,
        memory_gib=memory_gib,
    )
    typer.echo(
        json.dumps(advice.to_json(), indent=2) if as_json else advice_text(advice, terminal_width())
    )
    if advice.quickest is None:
        raise typer.Exit(INFEASIBLE)


def _counts(text: str) -> list[int]:
    found = [piece.strip() for piece in text.split(",") if piece.strip()]
    wrong = [piece for piece in found if not piece.isdigit() or not int(piece)]
    if wrong or not found:
        raise typer.BadParameter(f"--counts {text!r} is not numbers with commas, as 8,16,64")
    return [int(piece) for piece in found]


def advice_text(advice: Advice, width: int) -> str:
    """The table: those that fit, then why the others do not."""
    fitting = [row for row in advice.rows if row.feasible]
    unit = "tokens" if any(row.per_s("tokens") for row in fitting) else "rows"
    name = "tokens" if unit == "tokens" else "samples"
    rows = [
        (
            seconds(row.step_time_s or 0.0),
            amount(row.per_s(unit) or 0.0),
            f"{row.price_per_hour:,.2f}" if row.price_per_hour else "-",
            money(row.cost_per_million(unit)),
            size(row.headroom_bytes or 0.0),
            _best(row, advice),
        )
        for row in fitting
    ]
    columns = [
        Column("step"),
        Column(f"{name}/s", 1),
        Column("per hour", 2),
        Column(f"per M {name}", 0),
        Column("free", 3),
    ]
    lines = [f"{advice.model}: the best plan on each cluster, quickest first", ""]
    if rows:
        lines += table(columns, "cluster and plan", rows, width)
    for row in advice.rows:
        if not row.feasible:
            lines += ["", *wrapped(f"{row.cluster}: {row.reason}", width, "", "    ")]
            lines += wrapped(f"  would fit: {row.hint}", width, "", "    ") if row.hint else []
    return "\n".join(lines)


def _best(row: AdviceRow, advice: Advice) -> str:
    marks = [
        mark
        for mark, best in (("QUICKEST", advice.quickest), ("CHEAPEST", advice.cheapest))
        if best is row
    ]
    plan = row.plan.figures.best.what if row.plan is not None else ""
    return f"{row.cluster}{''.join(f' [{mark}]' for mark in marks)}: {plan}"
