"""`shardwise watch RUN`: a training while it runs, on the terminal or as a local page.

Enters: a run's folder, which need not be there yet. Leaves: what is shown; it ends when the run
ends, or by Ctrl-C. A page is served until Ctrl-C, on loopback unless another address is named.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.target import AsJson
from shardwise.errors import WatchError
from shardwise.formatting import terminal_width

if TYPE_CHECKING:
    from shardwise.watch.run import Run

READ_S = 0.5
LINE_S = 10.0  # between lines where the output is no terminal


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)
    ],
    once: Annotated[bool, typer.Option("--once", help="Print what is there, and stop.")] = False,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, help="Seconds to wait for a run to begin.")
    ] = 60.0,
    page: Annotated[bool, typer.Option("--page", help="Serve a local page.")] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Of the page; 0 takes a free one.")
    ] = 0,
    host: Annotated[
        str, typer.Option("--host", help="Address of the page; loopback is this machine alone.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Watch a training: loss, throughput, memory, slow ranks."""
    from shardwise.watch.run import Run

    try:
        run = Run(_found(folder, 0.0 if once or as_json else wait_s))
        run.poll()
        if once or as_json:
            from shardwise.watch.terminal import summary

            shown = (
                json.dumps(run.to_json(), indent=2) if as_json else summary(run, terminal_width())
            )
            typer.echo(shown)
        elif page:
            _serve(run, host, port)
        elif sys.stdout.isatty():
            _live(run)
        else:
            _lines(run)
    except KeyboardInterrupt:
        typer.echo("", err=True)


def _found(folder: Path, wait_s: float) -> Path:
    """The folder, once a run is there."""
    from shardwise.watch.run import find_run

    until = time.monotonic() + wait_s
    told = False
    while (found := find_run(folder)) is None:
        if time.monotonic() >= until:
            what = "has no run" if folder.exists() else "is not there"
            after = f" after {wait_s:g} s" if wait_s else ""
            raise WatchError(
                f"{what}{after}",
                where=str(folder),
                hint="the folder of a run: shardwise train CONFIG.yaml writes runs/CONFIG; "
                "--wait-s 600 waits longer",
            )
        if not told:
            typer.echo(f"waiting up to {wait_s:g} s for {folder} …", err=True)
            told = True
        time.sleep(min(READ_S, max(0.0, until - time.monotonic())))
    return found


def _live(run: Run) -> None:
    """A panel that is drawn anew until the run ends."""
    from rich.console import Console
    from rich.live import Live

    from shardwise.watch.terminal import panel

    console = Console()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(panel(run, console.width), refresh=True)
            if run.ended:
                return
            time.sleep(READ_S)
            run.poll()


def _lines(run: Run) -> None:
    """A line now and then until the run ends."""
    from shardwise.watch.terminal import line

    told, said = None, -LINE_S
    while True:
        now = time.monotonic()
        if (now - said >= LINE_S and run.step != told) or run.ended:
            typer.echo(line(run))
            told, said = run.step, now
        if run.ended:
            return
        time.sleep(READ_S)
        run.poll()


def _serve(run: Run, host: str, port: int) -> None:
    """The page until Ctrl-C."""
    from shardwise.watch.server import WatchServer, is_loopback

    server = WatchServer(run, host, port)
    if not is_loopback(host):
        typer.echo(
            f"warning: everybody who reaches {host} port {server.port} sees this run; "
            "without --host only this machine does",
            err=True,
        )
    typer.echo(f"{server.url}  (Ctrl-C ends it)")
    sys.stdout.flush()
    server.serve()
