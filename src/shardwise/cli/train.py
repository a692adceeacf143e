"""`shardwise train config.yaml`: one process, several that it starts here, or one of torchrun's.

Exit
codes are those of all verbs, and 75 (try again) after a signal, when the state is saved.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson
from shardwise.errors import InfeasiblePlan, ShardwiseError, WatchError
from shardwise.formatting import terminal_width

if TYPE_CHECKING:
    from shardwise.training.trainer import DryRun, FitResult
    from shardwise.watch.run import Run


INTERRUPTED = 130  # as shells count SIGINT


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="What to train.", show_default=False)
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value: optimizer.args.lr=1e-3.")
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
        bool, typer.Option("--dry-run", help="Print plan, memory and step estimate, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train what a config says, from the newest checkpoint if there is one."""
    try:
        _train(config, set_, ranks, folder, resume, dry_run, as_json)
    except ShardwiseError as error:
        if "RANK" not in os.environ:
            raise
        raise typer.Exit(_tell_as_rank(error)) from error
    except KeyboardInterrupt:
        if trainer_talks():
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
    if trainer_talks():
        typer.echo(json.dumps(_to_json(result), indent=2) if as_json else _to_text(result))
    if result.stopped == "signal":
        raise typer.Exit(EXIT_STOPPED)


def trainer_talks() -> bool:
    """Whether this process is the first, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _for_ranks(
    config: Path, set_: list[str] | None, folder: str | None, resume: str | None, as_json: bool
) -> list[str]:
    """The same command, for each of several processes."""
    found = ["--debug"] if "--debug" in sys.argv else []
    found += ["train", str(config)]
    for text in set_ or []:
        found += ["--set", text]
    found += ["--folder", folder] if folder is not None else []
    found += ["--resume", resume] if resume is not None else []
    return found + (["--json"] if as_json else [])


def _tell_as_rank(error: ShardwiseError) -> int:
    """Print an error that ends this rank, where no other rank prints it; return the exit code."""
    from shardwise.training.processes import tell

    if "--debug" in sys.argv:
        raise error
    tell(error)
    return 3 if isinstance(error, InfeasiblePlan) else 1


def _print_plan(found: DryRun, as_json: bool) -> None:
    if as_json:
        both: dict[str, Any] = {"plan": found.plan.to_json(), "estimate": found.estimate.to_json()}
        typer.echo(json.dumps(both, indent=2))
    elif found.plan.search is not None:
        from shardwise.plans.explain import plan_text

        typer.echo(plan_text(found.plan, terminal_width()))
    else:
        typer.echo(str(found))


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
    from shardwise.training.logs.console import summary

    ended = {"finished": "done", "callback": "stopped early", "signal": "stopped by a signal"}
    lines = [f"{ended[result.stopped]} at step {result.steps}  {summary(result.metrics)}".rstrip()]
    if result.stopped == "finished" and not result.losses:
        lines = [f"done at step {result.steps} before: nothing was trained"]
    if result.checkpoint is not None:
        lines.append(f"checkpoint {result.checkpoint}")
    if result.trace is not None:
        plan, trace = str(result.trace.parent / "plan.json"), str(result.trace)
        report = shlex.join(["shardwise", "report", plan, "--trace", trace])
        lines.append(f"trace {trace}: {report}")
    if result.stopped == "signal":
        lines.append("the same command continues it")
    return "\n".join(lines)


# `shardwise watch RUN`: a training while it runs, on the terminal or as a local page.
#
# A page is served until Ctrl-C, on loopback unless another address is named.


READ_S = 0.5
LINE_S = 10.0  # between lines where the output is no terminal


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, help="Seconds to wait for a run to begin.")
    ] = 60.0,
    page: Annotated[bool, typer.Option("--page", help="Serve a local page.")] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 picks a free one.")
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
