"""The command line: `shardwise verify|compile|plan|explain MODULE.py:FUNCTION`, and `doctor`.

Enters: a reference to a function that returns `(model, batch)`, or `(model, batch, loss_fn)`.
Leaves: the result on stdout (`--json` for machines), errors on stderr, and the exit code: 0 ok,
1 failure, 2 usage, 3 infeasible. Torch is imported inside the verbs: `--help` answers at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwise.cli.options import Wanted, with_plan_options
from shardwise.cli.predict import predict
from shardwise.cli.profile import profile
from shardwise.errors import InfeasiblePlan, ShardwiseError

if TYPE_CHECKING:
    from shardwise.equivalence import Certificate
    from shardwise.ir import Graph

FAILURE, USAGE, INFEASIBLE = 1, 2, 3
NARROWEST = 40  # columns; below, a terminal's size is not to be believed

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Turns a PyTorch training step for one device into a verified, readable one for many.",
)


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE.py:FUNCTION",
        help="A function returning (model, batch) or (model, batch, loss_fn).",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Turns a PyTorch training step for one device into a verified, readable one for many."""
    # `main` looks for --debug itself: it also covers errors outside a verb.


@app.command()
@with_plan_options
def plan(
    target: Target,
    wanted: Wanted,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a plan and print it."""
    _, graph = _capture(target)
    made = wanted.plan(graph)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        made.save(out)
    _print(made.to_json() if as_json else made)


@app.command()
@with_plan_options
def verify(
    target: Target,
    wanted: Wanted,
    as_json: AsJson = False,
) -> None:
    """Check that the parallel program equals the model; exit 1 if it does not."""
    import shardwise

    loaded, graph = _capture(target)
    made = wanted.plan(graph)
    certificate = shardwise.verify(loaded.model, loaded.batch, made, loaded.loss_fn)
    _print(certificate_json(certificate) if as_json else certificate)
    if not certificate.ok:
        raise typer.Exit(FAILURE)


@app.command(name="compile")
@with_plan_options
def compile_(
    target: Target,
    wanted: Wanted,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the code.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Write the parallel program as Python files."""
    import shardwise

    _, graph = _capture(target)
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
    target: Target,
    wanted: Wanted,
    node: Annotated[str | None, typer.Option("--node", help="All that one node could do.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a plan splits, what it communicates and where in your code."""
    import shardwise

    _, graph = _capture(target)
    made = wanted.plan(graph)
    text = shardwise.explain(graph, made, node)
    _print({"explanation": text, "plan": made.to_json()} if as_json else text)


app.command()(profile)
app.command()(predict)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, backends, ports, memory, bf16."""
    from shardwise import doctor as checks

    findings = checks.examine()
    if as_json:
        _print(checks.to_dict(findings))
    else:
        checks.show(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(FAILURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a target's function returned."""

    model: Any
    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None = None


def load_target(target: str) -> Loaded:
    """Call the function that `path/module.py:function` names."""
    path_text, separator, name = target.rpartition(":")
    path = Path(path_text)
    if not separator or not name or path.suffix != ".py":
        raise typer.BadParameter(f"{target!r} is not of the form MODULE.py:FUNCTION")
    if not path.is_file():
        raise typer.BadParameter(f"no file {path}")
    try:
        function = getattr(_load_module(path), name, None)
        if callable(function):
            result = function()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ShardwiseError(
            f"{target} failed with {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}",
            hint="shardwise --debug … shows the traceback",
        ) from error
    if not callable(function):
        raise typer.BadParameter(f"{path} has no function {name!r}")
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise typer.BadParameter(
            f"{target} returned {type(result).__name__}, "
            "not (model, batch) or (model, batch, loss_fn)"
        )
    return Loaded(model=result[0], batch=result[1], loss_fn=result[2] if result[2:] else None)


def _load_module(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def _capture(target: str) -> tuple[Loaded, Graph]:
    loaded = load_target(target)
    import shardwise

    return loaded, shardwise.capture(loaded.model, loaded.batch, loaded.loss_fn)


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
    try:
        app(arguments, prog_name="shardwise")
    except ShardwiseError as error:
        if "--debug" in arguments:
            raise
        typer.echo(fit(f"{type(error).__name__}: {error}"), err=True)
        sys.exit(INFEASIBLE if isinstance(error, InfeasiblePlan) else FAILURE)
    sys.exit(0)
