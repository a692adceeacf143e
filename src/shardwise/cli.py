"""The command line: `shardwise verify|compile|plan|explain MODULE.py:FUNCTION`, and `doctor`.

Enters: a reference to a function that returns `(model, batch)`. Leaves: the result on stdout
(`--json` for machines), errors on stderr, and the exit code: 0 ok, 1 failure, 2 usage,
3 infeasible. Torch is imported inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwise.errors import InfeasiblePlan, ShardwiseError

if TYPE_CHECKING:
    from shardwise.ir import Graph
    from shardwise.plans import Plan

FAILURE, USAGE, INFEASIBLE = 1, 2, 3

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Turns a PyTorch training step for one device into a verified, readable one for many.",
)


class Strategy(StrEnum):
    """The named ways to make a plan."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    TENSOR = "tensor"
    HYBRID = "hybrid"


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE.py:FUNCTION",
        help="A function returning (model, batch).",
        show_default=False,
    ),
]
StrategyOption = Annotated[Strategy, typer.Option("--strategy", "-s", help="How to make the plan.")]
Ranks = Annotated[int, typer.Option("--ranks", "-n", help="Number of ranks.")]
DataParallel = Annotated[int | None, typer.Option("--dp", help="hybrid: data-parallel ranks.")]
TensorParallel = Annotated[int | None, typer.Option("--tp", help="hybrid: tensor-parallel ranks.")]
Zero = Annotated[int, typer.Option("--zero", min=0, max=3, help="hybrid: ZeRO level over dp.")]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", exists=True, dir_okay=False, help="Use this plan file instead."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Turns a PyTorch training step for one device into a verified, readable one for many."""
    # `main` looks for --debug itself: it also covers errors outside a verb.


@app.command()
def plan(
    target: Target,
    strategy: StrategyOption = Strategy.DDP,
    ranks: Ranks = 2,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    zero: Zero = 0,
    plan_file: PlanFile = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a plan and print it."""
    _, _, graph = _capture(target)
    made = _make_plan(graph, strategy, ranks, dp, tp, zero, plan_file)
    if out is not None:
        made.save(out)
    _print(made.to_json() if as_json else made)


@app.command()
def verify(
    target: Target,
    strategy: StrategyOption = Strategy.DDP,
    ranks: Ranks = 2,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    zero: Zero = 0,
    plan_file: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """Check that the parallel program equals the model; exit 1 if it does not."""
    import shardwise

    model, batch, graph = _capture(target)
    made = _make_plan(graph, strategy, ranks, dp, tp, zero, plan_file)
    certificate = shardwise.verify(model, batch, made)
    if as_json:
        first = certificate.first_difference
        _print_json(
            {
                "ok": certificate.ok,
                "max_relative_error": certificate.max_relative_error,
                "first_difference": None if first is None else str(first),
            }
        )
    else:
        _print(certificate)
    if not certificate.ok:
        raise typer.Exit(FAILURE)


@app.command(name="compile")
def compile_(
    target: Target,
    strategy: StrategyOption = Strategy.DDP,
    ranks: Ranks = 2,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    zero: Zero = 0,
    plan_file: PlanFile = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the code.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Write the parallel program as Python files."""
    import shardwise

    _, _, graph = _capture(target)
    made = _make_plan(graph, strategy, ranks, dp, tp, zero, plan_file)
    shardwise.compile(graph, made).save(out)
    files = sorted(str(path) for path in out.rglob("*.py"))
    if as_json:
        _print_json({"files": files})
    else:
        _print("\n".join(files))


@app.command()
def explain(
    target: Target,
    strategy: StrategyOption = Strategy.DDP,
    ranks: Ranks = 2,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    zero: Zero = 0,
    plan_file: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what a plan splits, what it communicates and why."""
    import shardwise

    _, _, graph = _capture(target)
    made = _make_plan(graph, strategy, ranks, dp, tp, zero, plan_file)
    text = str(shardwise.explain(graph, made))
    if as_json:
        _print_json({"explanation": text, "plan": json.loads(made.to_json())})
    else:
        _print(text)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, backends, ports, memory, bf16."""
    from shardwise import doctor as checks

    findings = checks.examine()
    if as_json:
        _print_json(checks.to_dict(findings))
    else:
        checks.show(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(FAILURE)


def load_target(target: str) -> tuple[Any, Any]:
    """Call the function that `path/module.py:function` names; returns its model and batch."""
    path_text, separator, name = target.rpartition(":")
    path = Path(path_text)
    if not separator or not name or path.suffix != ".py":
        raise typer.BadParameter(f"{target!r} is not of the form MODULE.py:FUNCTION")
    if not path.is_file():
        raise typer.BadParameter(f"no file {path}")
    function = getattr(_load_module(path), name, None)
    if not callable(function):
        raise typer.BadParameter(f"{path} has no function {name!r}")
    result = function()
    if not isinstance(result, tuple) or len(result) != 2:
        raise typer.BadParameter(f"{target} returned {type(result).__name__}, not (model, batch)")
    return result


def _load_module(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def _capture(target: str) -> tuple[Any, Any, Graph]:
    model, batch = load_target(target)
    import shardwise

    return model, batch, shardwise.capture(model, batch)


def _make_plan(
    graph: Graph,
    strategy: Strategy,
    ranks: int,
    dp: int | None,
    tp: int | None,
    zero: int,
    plan_file: Path | None,
) -> Plan:
    import shardwise

    if plan_file is not None:
        return shardwise.Plan.load(plan_file)
    if strategy is not Strategy.HYBRID:
        if dp is not None or tp is not None or zero:
            raise typer.BadParameter("--dp, --tp and --zero are for --strategy hybrid")
        make = getattr(shardwise.strategies, strategy.value)
        result: Plan = make(graph, shardwise.Cluster.local(ranks))
        return result
    dp, tp = hybrid_sizes(ranks, dp, tp)
    cluster = shardwise.Cluster.local(dp * tp)
    return shardwise.strategies.hybrid(graph, cluster, dp=dp, tp=tp, zero=zero)


def hybrid_sizes(ranks: int, dp: int | None, tp: int | None) -> tuple[int, int]:
    """Both axes' sizes: the one not given is what remains of `ranks`."""
    if dp is None and tp is None:
        raise typer.BadParameter("--strategy hybrid needs --dp or --tp")
    if dp is not None and tp is not None:
        return dp, tp
    given = dp if dp is not None else tp
    assert given is not None
    if given < 1 or ranks % given:
        raise typer.BadParameter(f"{ranks} ranks cannot be divided by {given}")
    rest = ranks // given
    return (given, rest) if dp is not None else (rest, given)


def _print(value: object) -> None:
    typer.echo(str(value))


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(arguments, prog_name="shardwise")
    except ShardwiseError as error:
        if "--debug" in arguments:
            raise
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(INFEASIBLE if isinstance(error, InfeasiblePlan) else FAILURE)
    sys.exit(0)


if __name__ == "__main__":
    main()
