"""`shardwise profile`: measures this machine and writes a cluster file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import require_own


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file: the cluster.")] = Path(
        "cluster.yaml"
    ),
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "-n", min=1, show_default="GPUs, or cores", help="Number of ranks."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="Threads of each CPU process.")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, shorter.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Timeout in seconds.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: rates by size, overheads, links; write a cluster file."""
    import json

    from rich.console import Console

    from shardwise.profiling import profile as measure
    from shardwise.reports.sections import write_whole

    require_own(out, "cluster")
    console = Console(stderr=True)
    with console.status("starting the ranks") as status:
        cluster = measure(
            ranks,
            device=device,
            quick=quick,
            threads=threads,
            timeout_s=timeout_s,
            progress=lambda what: status.update(f"measuring {what}"),
            report=lambda note: console.print(f"note: {note}", markup=False, highlight=False),
        )
    write_whole(out, cluster.to_yaml())
    if as_json:
        found = {"file": str(out), "ranks": cluster.num_ranks, "fingerprint": cluster.fingerprint}
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"{cluster}\n{out}")


# `shardwise predict`: predictions beside published measurements.


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

    from shardwise.published import predict_file, report, summarize
    from shardwise.reports.sections import write_whole

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
