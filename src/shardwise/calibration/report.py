"""Predictions beside what was published: for people, for machines, and as a table of figures.

Enters: `Outcome`s and their `Summary`. Leaves: rich tables, a dict for JSON, CSV lines.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.calibration.statistics import Errors, Outcome, Summary
from shardwise.formatting import GIB, digits

_NARROW = 100  # columns; below, a table leaves out what the JSON has
_MAX_ROWS = 400  # of a table for people; -o writes all
_COLUMNS = (
    "row_id",
    "model",
    "gpu",
    "status",
    "note",
    "predicted_step_time_s",
    "published_step_time_s",
    "step_time_error",
    "predicted_memory_bytes",
    "published_memory_bytes",
    "memory_error",
    "device_memory_bytes",
)


def to_dict(outcomes: Sequence[Outcome], summary: Summary) -> dict[str, Any]:
    """For `--json`."""
    return {"rows": [_fields(o) for o in outcomes], "summary": summary.to_dict()}


def to_csv(outcomes: Iterable[Outcome]) -> str:
    """Predicted and published values of all rows, for `-o`."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    writer.writerows(_fields(outcome) for outcome in outcomes)
    return text.getvalue()


def show(outcomes: Sequence[Outcome], summary: Summary, console: Console) -> None:
    """Tables for people."""
    wide = console.width >= _NARROW
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("row", overflow="fold", ratio=3)
    if wide:
        table.add_column("model", overflow="fold")
    for name in ("predicted", "published", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("status", overflow="fold", ratio=3)
    for outcome in outcomes[:_MAX_ROWS]:
        table.add_row(*_cells(outcome, wide=wide))
    console.print(table)
    if len(outcomes) > _MAX_ROWS:
        console.print(f"… and {len(outcomes) - _MAX_ROWS} more: -o predictions.csv")
    console.print()
    console.print(_errors(summary))
    if summary.sweeps:
        console.print()
        console.print(_sweeps(summary))


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "row_id": outcome.row_id,
        "model": outcome.model,
        "gpu": outcome.device,
        "status": outcome.status,
        "note": outcome.note,
        "predicted_step_time_s": outcome.step_time_s,
        "published_step_time_s": outcome.published_step_time_s,
        "step_time_error": outcome.error,
        "predicted_memory_bytes": outcome.memory_bytes,
        "published_memory_bytes": outcome.published_memory_bytes,
        "memory_error": outcome.memory_error,
        "device_memory_bytes": outcome.device_memory_bytes,
    }


def _cells(outcome: Outcome, *, wide: bool) -> list[str]:
    error = "" if outcome.error is None else f"{outcome.error:+.1%}"
    memory = "" if outcome.memory_bytes is None else f"{outcome.memory_bytes / GIB:.1f}"
    times = [_seconds(outcome.step_time_s), _seconds(outcome.published_step_time_s)]
    model = [outcome.model] if wide else []
    status = f"{outcome.status}; note: {outcome.note}" if outcome.note else outcome.status
    return [outcome.row_id, *model, *times, error, memory, status]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{digits(value, 3)} s"


def _errors(summary: Summary) -> Table:
    table = Table(
        title=f"{summary.predicted} of {summary.rows} rows predicted, "
        f"{summary.out_of_memory} out of memory{_ran_out(summary)}",
        title_justify="left",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for name, justify in (("step time", "left"), ("rows", "right"), ("bias", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("median", "p90", "largest"):
        table.add_column(name, justify="right")
    for label, errors in (("all", summary.step_time), *summary.by_device):
        table.add_row(label, *_figures(errors))
    if summary.memory is not None:
        table.add_row("memory", *_figures(summary.memory))
    return table


def _ran_out(summary: Summary) -> str:
    if not summary.ran_out:
        return ""
    return f" ({summary.ran_out_as_predicted} of the {summary.ran_out} that ran out of it)"


def _figures(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", "", "", "", ""]
    sizes = (errors.median, errors.p90, errors.largest)
    return [str(errors.count), f"{errors.bias:+.1%}", *(f"{size:.1%}" for size in sizes)]


def _sweeps(summary: Summary) -> Table:
    table = Table(
        title=f"rank correlation within sweeps: median {summary.median_correlation:.3f}",
        title_justify="left",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("sweep", overflow="fold")
    for name in ("runs", "configurations", "correlation", "of runs"):
        table.add_column(name, justify="right")
    for sweep in summary.sweeps:
        sizes = (str(sweep.count), str(sweep.configurations))
        table.add_row(sweep.name, *sizes, f"{sweep.correlation:.3f}", f"{sweep.of_runs:.3f}")
    return table
