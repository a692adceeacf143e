"""`shardwise predict`: predictions beside published measurements.

Enters: a CSV file of configurations. Leaves: a table, JSON or a CSV file; progress on stderr when
it takes longer than two seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.kinds import require_own

PATIENCE_S = 2.0


def predict(
    table: Annotated[
        Path, typer.Option("--csv", help="Configurations, one per row.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output file: the predictions as CSV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict step time and memory of published configurations."""
    from rich.console import Console

    from shardwise.calibration import predict_file, report, summarize
    from shardwise.reporting.files import write_whole

    require_own(out, "predictions")
    console = Console(stderr=True)
    with console.status("") as status:
        status.stop()
        outcomes = predict_file(table, _after_patience(status.start, status.update))
    summary = summarize(outcomes)
    if out is not None:
        write_whole(out, report.to_csv(outcomes))
    if as_json:
        typer.echo(json.dumps(report.to_dict(outcomes, summary), indent=2, allow_nan=False))
    else:
        report.show(outcomes, summary, Console())


def _after_patience(
    start: Callable[[], None], update: Callable[[str], None]
) -> Callable[[int, int], None]:
    """Tells how many rows are done, once two seconds have passed."""
    began = time.monotonic()
    shown = False

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - began < PATIENCE_S:
            return
        if not shown:
            start()
            shown = True
        update(f"{done} of {total} rows")

    return tell
