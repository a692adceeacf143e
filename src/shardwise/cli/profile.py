"""`shardwise profile`: measures this machine and writes a cluster file.

Enters: what was typed. Leaves: the file; what is going on, on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.kinds import require_own


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
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of each CPU process.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, shorter.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Timeout in seconds.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: rates by size, overheads, links; write a cluster file."""
    import json

    from rich.console import Console

    from shardwise.profiling import profile as measure
    from shardwise.reporting.files import write_whole

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
