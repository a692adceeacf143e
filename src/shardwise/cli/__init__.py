"""The command line: a verb, and mostly `MODULE.py:FUNCTION`.

Enters: a reference to a function that returns `(model, batch)`, or `(model, batch, loss_fn)`; or a
plan's file. Leaves: the result on stdout (`--json` for machines), errors on stderr, and the exit
code: 0 ok, 1 failure, 2 usage, 3 infeasible. Torch is imported inside the verbs: `--help` answers
at once.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwise.cli.advise import advise
from shardwise.cli.checkpoint import app as checkpoint_app
from shardwise.cli.checkpoint import export
from shardwise.cli.collective import app as collective_app
from shardwise.cli.launch import CONTEXT as LAUNCH_CONTEXT
from shardwise.cli.launch import launch
from shardwise.cli.options import (
    AsJson,
    Loaded,
    Target,
    Wanted,
    capture_target,
    load_target,
    with_plan_options,
)
from shardwise.cli.output import about, load_plan, require_own, require_own_folder
from shardwise.cli.profile import predict, profile
from shardwise.cli.report import diff, report
from shardwise.cli.simulate import simulate
from shardwise.cli.train import train, watch
from shardwise.errors import InfeasiblePlan, ShardwiseError
from shardwise.formatting import NARROWEST, terminal_width
from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise.equivalence import Certificate
    from shardwise.ir import Graph
    from shardwise.plans import Plan

__all__ = ["app", "fit", "load_target", "main"]

FAILURE, USAGE, INFEASIBLE = 1, 2, 3

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Turns a PyTorch training step for one device into a verified, readable one for many.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Turns a PyTorch training step for one device into a verified, readable one for many."""
    # `main` looks for --debug itself: it also covers errors outside a verb.


@app.command()
@with_plan_options
def plan(
    target: Target,
    wanted: Wanted,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file: the plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a cluster, or make a named one, and print it."""
    require_own(out, "plan")
    if wanted.automatic:  # report mistakes in the options before the model is captured
        wanted.machines(), wanted.search_options()
    _, graph = _capture(target, wanted)
    _finish_plan(wanted.plan(graph), graph, target, out, as_json, searched=wanted.automatic)


@app.command()
@with_plan_options
def tune(
    target: Target,
    wanted: Wanted,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file: the plan.")] = None,
    table_out: Annotated[
        Path | None,
        typer.Option("--table-out", help="Output file: measured times; those in it are used."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a cluster by measuring candidates on this machine, and print it."""
    require_own(out, "plan")
    require_own(table_out, "times", option="--table-out")
    if not wanted.automatic:
        raise typer.BadParameter(
            "tune searches for a plan: --cluster, without --strategy or --plan"
        )
    wanted.machines(), wanted.search_options()
    wanted.hide_unplanned_gpus()
    _, graph = _capture(target, wanted)
    made = wanted.tuned_plan(graph, table_out)
    _finish_plan(made, graph, target, out, as_json, searched=True)


def _finish_plan(
    made: Plan, graph: Graph, target: str, out: Path | None, as_json: bool, *, searched: bool
) -> None:
    """Write the plan to `out`, with its code, and print it."""
    if out is not None:
        from shardwise.reports.render import with_code_if_quick

        made = with_code_if_quick(made, graph, target)
        made.save(out)
    if as_json or not searched:
        _print(made.to_json() if as_json else made)
        return
    from shardwise.plans.explain import plan_text

    typer.echo(plan_text(made, terminal_width()))
    if out is not None:
        verbs = ", ".join(f"shardwise {verb} {out}" for verb in ("explain", "simulate", "report"))
        typer.echo(fit(f"\n{out}: {verbs}"))


@app.command()
@with_plan_options
def verify(
    target: Target,
    wanted: Wanted,
    program: Annotated[
        Path | None,
        typer.Option("--program", help="Check the code in this folder, with the plan beside it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check by execution that the parallel program equals the model; exit 1 if it does not."""
    import shardwise

    if program is not None:
        loaded, made = load_target(target), wanted.loaded_plan() or load_plan(program / "plan.json")
    else:
        loaded, graph = _capture(target, wanted)
        made = wanted.plan(graph)
    certificate = shardwise.verify(
        loaded.model, loaded.batch, made, loaded.loss_fn, program=program
    )
    _print(certificate_json(certificate) if as_json else certificate)
    if not certificate.ok:
        raise typer.Exit(FAILURE)


@app.command(name="compile")
@with_plan_options
def compile_(
    target: Target,
    wanted: Wanted,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder: the code.")] = Path(
        "out"
    ),
    as_json: AsJson = False,
) -> None:
    """Write the parallel program as Python files."""
    import shardwise
    from shardwise.files import require_writable

    require_own_folder(out)
    require_writable(out / "plan.json", hint="-o FOLDER, in a place that you may write to")
    _, graph = _capture(target, wanted)
    made = wanted.plan(graph)
    program = shardwise.compile(graph, made)
    files = {str(out / name): ranks for name, ranks in program.save(out).items()}
    if as_json:
        _print({"files": files, "plan": str(out / "plan.json"), "fingerprint": program.fingerprint})
    else:
        lines = [f"{file}  ranks {', '.join(map(str, who))}" for file, who in files.items()]
        _print("\n".join([*lines, str(out / "plan.json")]))


@app.command()
@with_plan_options
def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PLAN.json|MODULE.py:FUNCTION",
            help="A plan that was searched for, or a model.",
            show_default=False,
        ),
    ],
    wanted: Wanted,
    node: Annotated[
        str | None, typer.Option("--node", help="Show every option of one node.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a plan is the best; or what it splits and communicates, and where in your code."""
    import shardwise

    if Path(target).suffix == ".json":
        _explain_file(Path(target), node, as_json)
        return
    _, graph = _capture(target, wanted)
    made = wanted.plan(graph)
    text = shardwise.explain(graph, made, node)
    _print({"explanation": text, "plan": made.to_json()} if as_json else text)


def _explain_file(path: Path, node: str | None, as_json: bool) -> None:
    """From the plan's file alone."""
    from shardwise.plans.explain import explain_json, explain_plan

    if node is not None:
        raise typer.BadParameter(f"--node needs the model: MODULE.py:FUNCTION --plan {path}")
    loaded = load_plan(path)
    with about(path):
        text = explain_json(loaded) if as_json else explain_plan(loaded, terminal_width())
    typer.echo(json.dumps(text, indent=2) if as_json else text)


app.command()(simulate)
app.command()(report)
app.command()(diff)
app.command()(advise)
app.command()(profile)
app.command()(predict)
app.command()(train)
app.command()(watch)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(collective_app, name="collective")
app.command()(export)
app.command(context_settings=LAUNCH_CONTEXT)(launch)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: packages, compiler, backends, ports, memory, disk, bf16."""
    from shardwise import doctor as checks

    findings = checks.examine()
    if as_json:
        _print(checks.to_dict(findings))
    else:
        checks.show(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(FAILURE)


def _capture(target: str, wanted: Wanted) -> tuple[Loaded, Graph]:
    return capture_target(target, precision=wanted.precision, plan=wanted.loaded_plan())


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    """The certificate for machines; an error that is no number is null."""
    error = certificate.max_relative_error
    return {
        "ok": certificate.ok,
        "plan": certificate.plan,
        "model": certificate.model,
        "mesh": certificate.mesh,
        "max_relative_error": error if math.isfinite(error) else None,
        "compared": len(certificate.comparisons),
        "failures": [c.what for c in certificate.failures],
        "first_difference": certificate.first_difference,
        "scaled": list(certificate.scaled),
        "trials": list(certificate.trials),
        "not_exercised": list(certificate.not_exercised),
    }


def _print(value: object) -> None:
    typer.echo(json.dumps(value, indent=2) if isinstance(value, dict) else fit(str(value)))


def fit(text: str) -> str:
    """Wrap lines wider than the terminal, indented further; text for a pipe stays as it is."""
    width = shutil.get_terminal_size((0, 0)).columns
    if width < NARROWEST:
        return text
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        wrapped = textwrap.wrap(
            line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        lines += wrapped if len(line) > width else [line]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # What follows `--` is another program's.
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        app(arguments, prog_name="shardwise")
    except ShardwiseError as error:
        if "--debug" in own:
            raise
        typer.echo(fit(f"{type(error).__name__}: {error}"), err=True)
        if isinstance(error, InfeasiblePlan) and "--json" in own:
            told = {"error": "InfeasiblePlan", "message": error.message, "try": error.hint}
            typer.echo(json.dumps({**told, **error.report}, indent=2))
        sys.exit(INFEASIBLE if isinstance(error, InfeasiblePlan) else FAILURE)
    sys.exit(0)
