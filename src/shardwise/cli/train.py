"""`shardwise train` and `watch`: train a model described by a config, and watch the run.

`train` runs in this process, starts several, or is one of torchrun's ranks. In addition to the exit
codes of all verbs it returns 75 (try again) if a signal stopped it after it saved its state.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson
from shardwise.cli.output import echo, exit_code
from shardwise.cli.planning import plan_text
from shardwise.errors import ShardwiseError, WatchError
from shardwise.formatting import terminal_width

if TYPE_CHECKING:
    from shardwise.training.trainer import DryRun, FitResult
    from shardwise.watch.run import Run

INTERRUPTED = 130  # the shell's exit code for SIGINT
POLL_S = 0.5
LINE_S = 10.0  # between lines of output that is not a terminal


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="Config file.", show_default=False)
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a config value: optimizer.args.lr=1e-3."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Number of ranks to start on this machine."),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder", help="Folder for all files of the run.", show_default="runs/CONFIG"
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="auto, never, or a checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its estimates without training.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the model of a config, from the latest checkpoint if there is one."""
    try:
        _train(config, set_, ranks, folder, resume, dry_run, as_json)
    except ShardwiseError as error:
        if "RANK" not in os.environ:
            raise
        raise typer.Exit(_report_as_rank(error)) from error
    except KeyboardInterrupt:
        if _prints():
            typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _train(
    config: Path,
    set_: list[str] | None,
    ranks: int | None,
    folder: str | None,
    resume: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    from shardwise.training.processes import EXIT_STOPPED
    from shardwise.training.trainer import Trainer

    trainer = Trainer.from_config(config, set_ or [], folder=folder, resume=resume)
    if dry_run:
        _print_plan(trainer.dry_run(ranks), as_json)
        return
    if ranks is not None and ranks > 1 and "RANK" not in os.environ:
        from shardwise.training.processes import start_ranks

        trainer.check()
        raise typer.Exit(start_ranks(ranks, _for_ranks(config, set_, folder, resume, as_json)))
    if trainer.config.folder is None:
        default = f"runs/{config.stem}"
        trainer = Trainer.from_config(config, set_ or [], folder=default, resume=resume)
    with trainer:
        result = trainer.fit()
    if _prints():
        echo(_to_json(result) if as_json else _to_text(result))
    if result.stopped == "signal":
        raise typer.Exit(EXIT_STOPPED)


def _prints() -> bool:
    """Return whether this process is rank 0 or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _for_ranks(
    config: Path, set_: list[str] | None, folder: str | None, resume: str | None, as_json: bool
) -> list[str]:
    """Return the command that each rank runs."""
    command = ["--debug"] if "--debug" in sys.argv else []
    command += ["train", str(config)]
    for text in set_ or []:
        command += ["--set", text]
    command += ["--folder", folder] if folder is not None else []
    command += ["--resume", resume] if resume is not None else []
    return command + (["--json"] if as_json else [])


def _report_as_rank(error: ShardwiseError) -> int:
    """Print an error that ends this rank unless another rank does; return the exit code."""
    from shardwise.training.processes import print_error

    if "--debug" in sys.argv:
        raise error
    print_error(error)
    return exit_code(error)


def _print_plan(run: DryRun, as_json: bool) -> None:
    if as_json:
        echo({"plan": run.plan.to_json(), "estimate": run.estimate.to_json()})
    else:
        echo(run if run.plan.search is None else plan_text(run.plan))


def _to_json(result: FitResult) -> dict[str, Any]:
    return {
        "steps": result.steps,
        "epoch": result.epoch,
        "stopped": result.stopped,
        "metrics": dict(result.metrics),
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "trace": str(result.trace) if result.trace else None,
        "resumed_from": str(result.resumed_from) if result.resumed_from else None,
        "losses": list(result.losses),
    }


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
        lines.append(f"trace {trace}: {report}")
    if result.stopped == "signal":
        lines.append("run the same command to continue")
    return "\n".join(lines)


# ------------------------------------------------------------ watch


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, help="Seconds to wait for the run to begin.")
    ] = 60.0,
    page: Annotated[bool, typer.Option("--page", help="Serve a page instead of printing.")] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 picks a free one.")
    ] = 0,
    host: Annotated[
        str,
        typer.Option("--host", help="Address of the page; loopback is private to this machine."),
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
    from shardwise.watch.run import find_run

    until = time.monotonic() + wait_s
    is_announced = False
    while (run := find_run(folder)) is None:
        if time.monotonic() >= until:
            problem = "has no run" if folder.exists() else "does not exist"
            after = f" after {wait_s:g} s" if wait_s else ""
            raise WatchError(
                f"{problem}{after}",
                where=str(folder),
                hint="the folder of a run: shardwise train CONFIG.yaml writes runs/CONFIG; "
                "--wait-s 600 waits longer",
            )
        if not is_announced:
            typer.echo(f"waiting up to {wait_s:g} s for {folder} …", err=True)
            is_announced = True
        time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
    return run


def _live(run: Run) -> None:
    """Show a live panel until the run ends."""
    from rich.console import Console
    from rich.live import Live

    from shardwise.watch.terminal import panel

    console = Console()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(panel(run, console.width), refresh=True)
            if run.ended:
                return
            time.sleep(POLL_S)
            run.poll()


def _lines(run: Run) -> None:
    """Print a line at intervals until the run ends."""
    from shardwise.watch.terminal import line

    last_step, last_time = None, -LINE_S
    while True:
        now = time.monotonic()
        if (now - last_time >= LINE_S and run.step != last_step) or run.ended:
            typer.echo(line(run))
            last_step, last_time = run.step, now
        if run.ended:
            return
        time.sleep(POLL_S)
        run.poll()


def _serve(run: Run, host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    from shardwise.watch.server import WatchServer, is_loopback

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
