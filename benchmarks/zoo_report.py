"""Format the results of the zoo as a table and as Markdown, and judge them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

REQUIRED = {
    "ddp": 0.95,
    "fsdp": 0.95,
    "tensor": 0.90,
    "hybrid": 0.90,
    "pipeline": 0.95,
    "hybrid_pp": 0.90,
}
MAX_SHARE = 0.6  # of the parameter bytes of a transformer, on each of 2 ranks
NOT_TRANSFORMERS = {"mlp", "resnet", "unet", "dlrm", "mamba", "convnext", "hf_resnet"}

Row = Mapping[str, Any]


def is_transformer(name: str) -> bool:
    """Return whether a zoo model consists of attention and feed-forward blocks."""
    return name not in NOT_TRANSFORMERS


def shorten(error: BaseException) -> str:
    """Return an error as one line of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:220]}"


def first_failure(certificate: Any) -> str:
    """Return the first difference of a certificate as one line."""
    failure = certificate.failures[0]
    detail = failure.problem or f"relative error {failure.relative_error:.1e}"
    text = " ".join(f"{failure.what}: {detail}".split())[:300]
    if certificate.first_difference:
        text += f"; first difference: {certificate.first_difference}"
    return f"{text} ({len(certificate.failures)} of {len(certificate.comparisons)} differ)"


def stderr() -> Console:
    """Return a console on stderr."""
    return Console(stderr=True)


def machine() -> str:
    """Describe this machine."""
    import torch

    return f"{os.cpu_count()} CPUs, torch {torch.__version__}, Python {platform.python_version()}"


def columns(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Return (strategy, ranks, where) in the order of the table."""
    order = {name: i for i, name in enumerate(REQUIRED)}
    keys = {(r["strategy"], r["ranks"], r["where"]) for r in rows}
    return sorted(keys, key=lambda c: (c[2] != "threads", order[c[0]], c[1]))


def summary(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Return each strategy with the numbers of models that pass on all ranks, and that ran."""
    lines = []
    for strategy in REQUIRED:
        results = [r for r in rows if r["strategy"] == strategy and r["where"] == "threads"]
        models = {r["model"] for r in results}
        failed = {r["model"] for r in results if not r["ok"]}
        if models:
            lines.append((strategy, len(models - failed), len(models)))
    return lines


def enough(rows: Sequence[Row]) -> bool:
    """Return whether every strategy passes on enough models, and all process runs pass."""
    passed = all(good >= REQUIRED[name] * total for name, good, total in summary(rows))
    return passed and all(r["ok"] for r in rows if r["where"] == "processes")


def cell(row: Row | None) -> str:
    """Return the error of a pass, or a mark."""
    if row is None:
        return ""
    if not row["ok"]:
        return "miss"
    return (f"{row['error']:.0e}" if row["error"] else "0") + "*" * bool(row.get("note"))


def table_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and a line for each model."""
    heads = columns(rows)
    by_key = {(r["model"], r["strategy"], r["ranks"], r["where"]): r for r in rows}
    headers = [
        "model",
        *(f"{s} {n}{'p' if w == 'processes' else ''}" for s, n, w in heads),
        "share",
    ]
    lines = []
    for name in dict.fromkeys(r["model"] for r in rows):
        share = by_key.get((name, "tensor", 2, "threads"), {}).get("share")
        cells = [cell(by_key.get((name, *head))) for head in heads]
        lines.append([name, *cells, "" if share is None else f"{share:.2f}"])
    return headers, lines


def misses(rows: Sequence[Row]) -> list[str]:
    """Return a line for each failure; equal reasons share a line."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row["ok"]:
            case = f"{row['strategy']} {row['ranks']}{'p' if row['where'] == 'processes' else ''}"
            grouped.setdefault((row["model"], row["reason"]), []).append(case)
    return [f"{model} ({', '.join(cases)}): {why}" for (model, why), cases in grouped.items()]


def refusals(rows: Sequence[Row]) -> list[str]:
    """Return a line for each model that is refused in micro-batches, with the node."""
    notes = {(r["model"], r["note"]): None for r in rows if r.get("note")}
    return [f"{model}: {note}" for model, note in notes]


def compact(rows: Sequence[Row]) -> Table:
    """Return a table for 80 columns, with the worst of all numbers of ranks."""
    table = Table(box=None, pad_edge=False)
    heads = [s for s in REQUIRED if any(_column(r) == s for r in rows)]
    heads += ["gloo"] * any(r["where"] == "processes" for r in rows)
    table.add_column("model", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("share", justify="right")
    for name in dict.fromkeys(r["model"] for r in rows):
        results = [r for r in rows if r["model"] == name]
        cells = []
        for head in heads:
            column = [r for r in results if _column(r) == head]
            missed = [str(r["ranks"]) for r in column if not r["ok"]]
            worst = max(column, key=lambda r: r["error"] or 0.0, default=None)
            cells.append(f"[red]miss {','.join(missed)}[/]" if missed else cell(worst))
        share = next(
            (r["share"] for r in results if (r["strategy"], r["ranks"]) == ("tensor", 2)), None
        )
        table.add_row(name, *cells, "" if share is None else f"{share:.2f}")
    return table


def _column(row: Row) -> str:
    """Return the column of a row; all runs on processes share one."""
    return "gloo" if row["where"] == "processes" else str(row["strategy"])


def show(rows: Sequence[Row]) -> None:
    """Print the table, the failures and the counts."""
    console = Console()
    console.print(compact(rows))
    for miss in misses(rows):
        console.print(f"miss: {miss}", markup=False, highlight=False)
    for name, good, total in summary(rows):
        need = REQUIRED[name]
        mark = "[green]ok[/]" if good >= need * total else "[red]too few[/]"
        console.print(
            f"{name:<9} {good} of {total} models equal one device, {need:.0%} required: {mark}"
        )


INTRODUCTION = """\
Tiny instances of real architectures under every strategy, compared with one device in float64: the
loss, the outputs, every gradient, and parameters and buffers after an AdamW step. A number is the
largest relative error; 1e-9 is the limit. Columns are strategy and ranks; `p` is on gloo processes,
two AdamW steps. `hybrid` is `dp=2`, `pipeline` has two stages, `hybrid_pp` is `dp=2, tp=2, pp=2`;
pipelines run the batch in two micro-batches. `share` is the share of the parameter bytes on rank 0
under `tensor` on 2 ranks."""


REFUSED = """\
These models couple the samples of a batch, so two micro-batches of one batch are refused (`*`).
They are equal with one micro-batch, and with micro-batches as separate batches compared with one
device that accumulates over them. The number is the larger of both errors."""


def markdown(data: Mapping[str, Any]) -> str:
    """Return the results as a documentation page."""
    rows = data["results"]
    headers, lines = table_rows(rows)
    counts = [f"- `{name}`: {good} of {total} models" for name, good, total in summary(rows)]
    reasons = [f"- {_escape(miss)}" for miss in misses(rows)] or ["None."]
    refused = [f"- {_escape(line)}" for line in refusals(rows)]
    return "\n".join(
        [
            "# Zoo",
            "",
            INTRODUCTION,
            "",
            f"{data['date']}, `{data['command']}`, {data['machine']}.",
            "",
            "Equal on every number of ranks:",
            "",
            *counts,
            "",
            "## Misses",
            "",
            *reasons,
            "",
            *(["## Micro-batches refused", "", REFUSED, "", *refused, ""] if refused else []),
            "## Table",
            "",
            "| " + " | ".join(headers) + " |",
            "|---" * len(headers) + "|",
            *("| " + " | ".join(line) + " |" for line in lines),
            "",
        ]
    )


def _escape(text: str) -> str:
    return re.sub(r"([\\<>*_`|\[\]])", r"\\\1", text)
