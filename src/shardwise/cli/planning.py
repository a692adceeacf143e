"""`shardwise plan`, `tune`, `verify`, `compile`, `explain` and `advise`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import (
    AsJson,
    Loaded,
    NoProgress,
    PlanOptions,
    PlanOut,
    Target,
    argument,
    capture_target,
    load_target,
    option,
    with_plan_options,
)
from shardwise.cli.output import (
    FAILURE,
    INFEASIBLE,
    echo,
    load_plan,
    naming_plan,
    require_own,
    require_own_folder,
)
from shardwise.formatting import (
    Column,
    amount,
    money,
    seconds,
    size,
    table,
    terminal_width,
    wrapped,
)

if TYPE_CHECKING:
    from shardwise.api.advise import Advice, AdviceRow
    from shardwise.equivalence import Certificate
    from shardwise.ir import Graph
    from shardwise.plans import Plan


def _capture(target: str, options: PlanOptions) -> tuple[Loaded, Graph]:
    return capture_target(target, precision=options.precision, plan=options.load_plan())


# ------------------------------------------------------------ creating plans
@with_plan_options
def plan(
    target: Target, options: PlanOptions, out: PlanOut = None, as_json: AsJson = False
) -> None:
    """Find the best plan for a cluster, or build a named one, and print it."""
    require_own(out, "plan")
    if options.is_automatic:  # report mistakes before the model is captured
        options.load_cluster(), options.search_options()
    _, graph = _capture(target, options)
    _finish_plan(options.make_plan(graph), graph, target, out, as_json)


@with_plan_options
def tune(
    target: Target,
    options: PlanOptions,
    out: PlanOut = None,
    table_out: Annotated[
        Path | None, option("--table-out", "File with measured times: read, extended and written.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a cluster by measuring candidates on this machine, and print it."""
    require_own(out, "plan")
    require_own(table_out, "times", option="--table-out")
    if not options.is_automatic:
        raise typer.BadParameter("tune needs --cluster, without --strategy or --plan")
    options.search_options()  # report mistakes before the model is captured
    options.hide_unplanned_gpus()
    _, graph = _capture(target, options)
    _finish_plan(options.tune(graph, table_out), graph, target, out, as_json)


def _finish_plan(plan: Plan, graph: Graph, target: str, out: Path | None, as_json: bool) -> None:
    """Print the plan, and write it with its code to `out`."""
    if out is not None:
        from shardwise.reports.render import with_code_if_quick

        plan = with_code_if_quick(plan, graph, target)
        plan.save(out)
    echo(plan.to_json() if as_json else plan_text(plan))
    if out is not None and plan.search is not None and not as_json:
        commands = (f"shardwise {verb} {out}" for verb in ("explain", "simulate", "report"))
        echo(f"\n{out}: {', '.join(commands)}")


def plan_text(plan: Plan) -> str:
    """Format a plan for this terminal, with the figures of its search if there was one."""
    if plan.search is None or plan.is_edited:
        return str(plan)
    from shardwise.plans.text import plan_text

    return plan_text(plan, terminal_width())


# ------------------------------------------------------------ using plans
@with_plan_options
def verify(
    target: Target,
    options: PlanOptions,
    program: Annotated[
        Path | None, option("--program", "Check the code in this folder, with its plan.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the parallel program and the model and compare them; exit 1 if they differ."""
    import shardwise

    if program is not None:
        loaded, plan = load_target(target), options.load_plan() or load_plan(program / "plan.json")
    else:
        loaded, graph = _capture(target, options)
        plan = options.make_plan(graph)
    certificate = shardwise.verify(
        loaded.model, loaded.batch, plan, loaded.loss_fn, program=program
    )
    echo(certificate_json(certificate) if as_json else certificate)
    if not certificate.ok:
        raise typer.Exit(FAILURE)


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    """Return the certificate as data; an error that is not finite becomes null."""
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


@with_plan_options
def compile(
    target: Target,
    options: PlanOptions,
    out: Annotated[Path, option("--out -o", "Output folder: the code.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Write the parallel program as Python files."""
    import shardwise
    from shardwise.files import require_writable

    require_own_folder(out)
    require_writable(out / "plan.json", hint="-o with a writable folder")
    _, graph = _capture(target, options)
    program = shardwise.compile(graph, options.make_plan(graph))
    files = {str(out / name): ranks for name, ranks in program.save(out).items()}
    plan_file = str(out / "plan.json")
    if as_json:
        echo({"files": files, "plan": plan_file, "fingerprint": program.fingerprint})
    else:
        lines = [f"{file}  ranks {', '.join(map(str, ranks))}" for file, ranks in files.items()]
        echo("\n".join([*lines, plan_file]))


@with_plan_options
def explain(
    target: Annotated[
        str, argument("PLAN.json|MODULE.py:FUNCTION", "Plan found by a search, or model.")
    ],
    options: PlanOptions,
    node: Annotated[str | None, option("--node", "Show all options of one node.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a plan was chosen, or what it shards and communicates at each line."""
    import shardwise

    if Path(target).suffix == ".json":
        _explain_file(Path(target), node, as_json)
        return
    _, graph = _capture(target, options)
    plan = options.make_plan(graph)
    text = shardwise.explain(graph, plan, node)
    echo({"explanation": text, "plan": plan.to_json()} if as_json else text)


def _explain_file(path: Path, node: str | None, as_json: bool) -> None:
    from shardwise.plans.text import explain_json, explain_plan

    if node is not None:
        raise typer.BadParameter(f"--node needs the model: MODULE.py:FUNCTION --plan {path}")
    plan = load_plan(path)
    with naming_plan(path):
        echo(explain_json(plan) if as_json else explain_plan(plan, terminal_width()))


# ------------------------------------------------------------ comparing clusters
def advise(
    target: Target,
    devices: Annotated[str, option("--devices", "Kinds of devices.")] = "a100-80,h100,h200",
    counts: Annotated[str, option("--counts", "Numbers of devices.")] = "8,16,64",
    cluster: Annotated[
        list[str], option("--cluster -c", "Clusters instead: files, or h100:8x8.")
    ] = [],  # noqa: B006  typer reads it
    precision: Annotated[str | None, option("--precision", "bf16, fp16, …")] = None,
    memory_gib: Annotated[
        float | None, option("--memory-gib", "Memory limit per device.", min=1e-6)
    ] = None,
    no_progress: NoProgress = False,
    as_json: AsJson = False,
) -> None:
    """Compare the step time, cost and memory of the best plan on several clusters."""
    import shardwise
    from shardwise.cluster.presets import parse_cluster, preset_device

    clusters = [parse_cluster(text) for text in cluster]
    kinds = [] if clusters else [kind.strip() for kind in devices.split(",") if kind.strip()]
    for kind in kinds:
        preset_device(kind)  # check the name before the model is captured
    numbers = [] if clusters else _parse_counts(counts)
    _, graph = capture_target(target, precision=precision)
    advice = shardwise.advise(
        graph,
        kinds,
        numbers,
        clusters=clusters,
        progress=not no_progress,
        precision=precision,
        memory_gib=memory_gib,
    )
    echo(advice.to_json() if as_json else advice_text(advice, terminal_width()))
    if advice.fastest is None:
        raise typer.Exit(INFEASIBLE)


def _parse_counts(text: str) -> list[int]:
    counts = [count.strip() for count in text.split(",") if count.strip()]
    if not counts or not all(count.isdigit() and int(count) for count in counts):
        raise typer.BadParameter(f"--counts {text!r} is not a list of numbers, such as 8,16,64")
    return [int(count) for count in counts]


def advice_text(advice: Advice, width: int) -> str:
    """Format a table of the clusters with a plan, and why the others have none."""
    feasible = [row for row in advice.rows if row.feasible]
    unit = "tokens" if any(row.per_s("tokens") for row in feasible) else "rows"
    name = "tokens" if unit == "tokens" else "samples"
    rows = [
        (
            seconds(row.step_time_s or 0.0),
            amount(row.per_s(unit) or 0.0),
            f"{row.price_per_hour:,.2f}" if row.price_per_hour else "-",
            money(row.cost_per_million(unit)),
            size(row.headroom_bytes or 0.0),
            _cluster_and_plan(row, advice),
        )
        for row in feasible
    ]
    columns = [
        Column("step"),
        Column(f"{name}/s", 1),
        Column("per hour", 2),
        Column(f"per M {name}", 0),
        Column("free", 3),
    ]
    lines = [f"{advice.model}: the best plan on each cluster, fastest first", ""]
    lines += table(columns, "cluster and plan", rows, width) if rows else []
    for row in advice.rows:
        if not row.feasible:
            lines += ["", *wrapped(f"{row.cluster}: {row.reason}", width, "", "    ")]
            lines += wrapped(f"  would fit: {row.hint}", width, "", "    ") if row.hint else []
    return "\n".join(lines)


def _cluster_and_plan(row: AdviceRow, advice: Advice) -> str:
    marks = "".join(f" [{mark.upper()}]" for mark in advice.marks(row))
    return f"{row.cluster}{marks}: {row.plan.figures.best.what if row.plan else ''}"
