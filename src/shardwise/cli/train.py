"""`shardwise train` and `watch`: train a model described by a config, and watch the run.

`train` runs in this process, starts several, or is one of torchrun's ranks. In addition to the exit
codes of all verbs it returns 75 (try again) if a signal stopped it after it saved its state.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, argument, option
from shardwise.cli.output import echo, exit_code
from shardwise.cli.planning import plan_text
from shardwise.errors import ShardwiseError, WatchError
from shardwise.formatting import terminal_width

if TYPE_CHECKING:
    from shardwise.training.trainer import FitResult
    from shardwise.watch.run import Run

INTERRUPTED = 130  # the shell's exit code for SIGINT
POLL_S = 0.5
LINE_S = 10.0  # between lines of output that is not a terminal


def train(
    config: Annotated[Path, argument("CONFIG.yaml", "Config file.")],
    set_: Annotated[
        list[str] | None, option("--set", "Override a config value: optimizer.args.lr=1e-3.")
    ] = None,
    ranks: Annotated[
        int | None, option("--ranks -n", "Number of ranks to start on this machine.", min=1)
    ] = None,
    folder: Annotated[
        str | None,
        option("--folder", "Folder for all files of the run.", show_default="runs/CONFIG"),
    ] = None,
    resume: Annotated[str | None, option("--resume", "auto, never, or a checkpoint.")] = None,
    dry_run: Annotated[
        bool, option("--dry-run", "Print the plan and its estimates without training.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the model of a config, from the latest checkpoint if there is one."""
    from shardwise.training.elastic import Launcher
    from shardwise.training.processes import EXIT_STOPPED, start_ranks
    from shardwise.training.trainer import Trainer

    with _reported():
        trainer = Trainer.from_config(config, set_ or [], folder=folder, resume=resume)
        if dry_run:
            run = trainer.dry_run(ranks)
            text = run if run.plan.search is None else plan_text(run.plan)
            data = {"plan": run.plan.to_json(), "estimate": run.estimate.to_json()}
            echo(data if as_json else text)
            return
        elastic, is_parent = trainer.config.elastic, "RANK" not in os.environ
        if is_parent and ((ranks or 1) > 1 or elastic is not None):
            trainer.check()
            command = ["--debug"] if "--debug" in sys.argv else []
            command += ["train", str(config), *(word for s in set_ or [] for word in ("--set", s))]
            command += ["--folder", folder] if folder is not None else []
            command += ["--resume", resume] if resume is not None else []
            command += ["--json"] * as_json
            if elastic is None:
                raise typer.Exit(start_ranks(ranks or 1, command))
            run_folder = Path(trainer.config.folder or f"runs/{config.stem}")
            raise typer.Exit(Launcher(ranks or 1, command, elastic, run_folder).run())
        if trainer.config.folder is None:
            default = f"runs/{config.stem}"
            trainer = Trainer.from_config(config, set_ or [], folder=default, resume=resume)
        with trainer:
            result = trainer.fit()
    if os.environ.get("RANK", "0") == "0":
        echo(_to_json(result) if as_json else _to_text(result))
    if result.stopped == "signal":
        raise typer.Exit(EXIT_STOPPED)


@contextmanager
def _reported() -> Iterator[None]:
    """On a rank of several, print an error unless another rank does, and exit."""
    try:
        yield
    except ShardwiseError as error:
        if "RANK" not in os.environ or "--debug" in sys.argv:
            raise
        from shardwise.training.processes import print_error

        print_error(error)
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _to_json(result: FitResult) -> dict[str, Any]:
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    paths = {name: str(value) for name, value in fields.items() if isinstance(value, Path)}
    return {**fields, "metrics": dict(result.metrics), **paths}


def _to_text(result: FitResult) -> str:
    from shardwise.training.logs import summary

    ended = {"finished": "done", "callback": "stopped early", "signal": "stopped by a signal"}
    lines = [f"{ended[result.stopped]} at step {result.steps}  {summary(result.metrics)}".rstrip()]
    if result.stopped == "finished" and not result.losses:
        lines = [f"already finished at step {result.steps}; nothing to train"]
    if result.checkpoint is not None:
        lines.append(f"checkpoint {result.checkpoint}")
    if result.trace is not None:
        plan, trace = str(result.trace.parent / "plan.json"), str(result.trace)
        report = shlex.join(["shardwise", "report", plan, "--trace", trace])
        lines += [f"trace {trace}", f"  {report}"]
    if result.stopped == "signal":
        lines.append("run the same command to continue")
    return "\n".join(lines)


# ------------------------------------------------------------ watch
def watch(
    folder: Annotated[Path, argument("RUN", "Folder of the run.")],
    once: Annotated[bool, option("--once", "Print the current state and exit.")] = False,
    wait_s: Annotated[
        float, option("--wait-s", "Seconds to wait for the run to begin.", min=0)
    ] = 60.0,
    page: Annotated[bool, option("--page", "Serve a page instead of printing.")] = False,
    port: Annotated[
        int, option("--port", "Port of the page; 0 picks a free one.", min=0, max=65535)
    ] = 0,
    host: Annotated[
        str, option("--host", "Address of the page; loopback is private to this machine.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Watch the loss, throughput, memory and slow ranks of a training run."""
    from shardwise.watch.run import Run

    try:
        run = Run(_wait_for_run(folder, 0.0 if once or as_json else wait_s))
        run.poll()
        if once or as_json:
            from shardwise.watch.terminal import summary

            echo(run.to_json() if as_json else summary(run, terminal_width()))
        elif page:
            _serve(run, host, port)
        elif sys.stdout.isatty():
            _live(run)
        else:
            _lines(run)
    except KeyboardInterrupt:
        typer.echo("", err=True)


def _wait_for_run(folder: Path, wait_s: float) -> Path:
    """Wait for the run to begin and return its folder."""
    from shardwise.watch.run import HINT, find_run

    until = time.monotonic() + wait_s
    is_announced = False
    while (run := find_run(folder)) is None:
        if time.monotonic() >= until:
            problem = "has no run" if folder.exists() else "does not exist"
            after = f" after {wait_s:g} s" if wait_s else ""
            hint = f"{HINT}; --wait-s 600 waits longer"
            raise WatchError(f"{problem}{after}", where=str(folder), hint=hint)
        if not is_announced:
            typer.echo(f"waiting up to {wait_s:g} s for {folder} …", err=True)
            is_announced = True
        time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
    return run


def _updates(run: Run) -> Iterator[None]:
    """Yield now and after every poll until the run ends."""
    yield
    while not run.ended:
        time.sleep(POLL_S)
        run.poll()
        yield


def _live(run: Run) -> None:
    """Show a live panel until the run ends."""
    from rich.console import Console
    from rich.live import Live

    from shardwise.watch.terminal import panel

    console = Console()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for _ in _updates(run):
            live.update(panel(run, console.width), refresh=True)


def _lines(run: Run) -> None:
    """Print a line at intervals until the run ends."""
    from shardwise.watch.terminal import line

    last_step, last_time = None, -LINE_S
    for _ in _updates(run):
        now = time.monotonic()
        if (now - last_time >= LINE_S and run.step != last_step) or run.ended:
            typer.echo(line(run))
            last_step, last_time = run.step, now


def _serve(run: Run, host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    from shardwise.listening import is_loopback
    from shardwise.watch.server import WatchServer

    server = WatchServer(run, host, port)
    if not is_loopback(host):
        typer.echo(
            f"warning: anyone who can reach {host} port {server.port} can see this run; "
            "omit --host to serve only this machine",
            err=True,
        )
    typer.echo(f"{server.url}  (Ctrl-C to stop)")
    sys.stdout.flush()
    server.serve()
