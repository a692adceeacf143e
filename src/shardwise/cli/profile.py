"""`shardwise profile` and `predict`: measure this machine, or predict published measurements."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import AsJson, option
from shardwise.cli.output import echo, require_own, write_output
from shardwise.formatting import terminal_width

PATIENCE_S = 2.0  # before progress is shown


def profile(
    out: Annotated[Path, option("--out -o", "Output file: the cluster.")] = Path("cluster.yaml"),
    ranks: Annotated[
        int | None, option("--ranks -n", "Number of ranks.", min=1, show_default="GPUs, or cores")
    ] = None,
    device: Annotated[str | None, option("--device", "Kind of device: cpu or cuda.")] = None,
    threads: Annotated[int, option("--threads", "Threads per CPU rank.", min=1)] = 1,
    quick: Annotated[bool, option("--quick", "Measure fewer sizes for less time.")] = False,
    timeout_s: Annotated[float, option("--timeout-s", "Timeout in seconds.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Measure the compute, memory and links of this machine, and write a cluster file."""
    from rich.console import Console

    from shardwise.profiling import profile as measure

    require_own(out, "cluster")
    console = Console(stderr=True)
    with console.status("starting the ranks") as status:
        cluster = measure(
            ranks,
            device=device,
            quick=quick,
            threads=threads,
            timeout_s=timeout_s,
            progress=lambda step: status.update(f"measuring {step}"),
            report=lambda note: console.print(f"note: {note}", markup=False, highlight=False),
        )
    write_output(out, cluster.to_yaml())
    if as_json:
        echo({"file": str(out), "ranks": cluster.num_ranks, "fingerprint": cluster.fingerprint})
    else:
        typer.echo(f"{cluster}\n{out}")


def predict(
    table: Annotated[Path, option("--csv", "Configurations, one per row.", show_default=False)],
    out: Annotated[Path | None, option("--out -o", "Output file: the predictions as CSV.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict step time and memory of published configurations."""
    from rich.console import Console

    from shardwise.published import predict_file, report, summarize

    require_own(out, "predictions")
    console = Console(stderr=True)
    with console.status("") as status:
        status.stop()
        outcomes = predict_file(table, _after_patience(status.start, status.update))
    summary = summarize(outcomes)
    if out is not None:
        write_output(out, report.to_csv(outcomes))
    echo(
        report.to_dict(outcomes, summary)
        if as_json
        else report.text(outcomes, summary, terminal_width())
    )


def _after_patience(
    start: Callable[[], None], update: Callable[[str], None]
) -> Callable[[int, int], None]:
    """Return a function that shows the number of finished rows after some time."""
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        if time.monotonic() - began >= PATIENCE_S:
            start()  # no effect if already started
            update(f"{done} of {total} rows")

    return show
