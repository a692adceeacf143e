"""The command line: `shardwise VERB`, usually with a model as `MODULE.py:FUNCTION` or a plan file.

Results go to stdout, as JSON with `--json`, and errors to stderr. The exit code is 0 for success, 1
for a failure, 2 for wrong usage and 3 if no plan fits. Verbs import torch only when they run, which
keeps `--help` fast.
"""

import sys
from typing import Annotated, NoReturn

import typer

from shardwise.cli import launch, planning, profile, report, train
from shardwise.cli.checkpoint import app as checkpoint_app
from shardwise.cli.checkpoint import export
from shardwise.cli.collective import app as collective_app
from shardwise.cli.options import AsJson, load_target, option
from shardwise.cli.output import FAILURE, echo, exit_code, fit
from shardwise.errors import InfeasiblePlan, ShardwiseError
from shardwise.version import __version__

app = typer.Typer(name="shardwise", no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, option("--debug", "Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, option("--version", "Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a PyTorch training step for one device into a verified, readable one for many."""
    # `main` handles --debug, so that it covers errors outside verbs, too.


for verb in (
    planning.plan, planning.tune, planning.verify, planning.compile, planning.explain,
    report.simulate, report.replay, report.report, report.diff, planning.advise, profile.profile,
    profile.predict, train.train, train.watch,
):  # fmt: skip
    app.command()(verb)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(collective_app, name="collective")
app.command()(export)
app.command(context_settings=launch.CONTEXT)(launch.launch)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: packages, compiler, backends, ports, memory, disk, bf16."""
    from shardwise import doctor as checks

    findings = checks.examine()
    if as_json:
        echo(checks.to_json(findings))
    else:
        checks.show(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(FAILURE)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Arguments after `--` belong to the program that is launched.
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        app(arguments, prog_name="shardwise")
    except ShardwiseError as error:
        if "--debug" in own:
            raise
        typer.echo(fit(f"{type(error).__name__}: {error}"), err=True)
        if isinstance(error, InfeasiblePlan) and "--json" in own:
            summary = {"error": "InfeasiblePlan", "message": error.message, "try": error.hint}
            echo({**summary, **error.report})
        sys.exit(exit_code(error))
    sys.exit(0)
