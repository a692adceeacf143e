"""`shardwise report`: a plan as a page; from its file alone, or with the model.

Enters: a plan's file, a recorded run, a model for what the file does not hold. Leaves: one HTML
file, `--json` its data, `--perfetto` its timelines for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.clusters import cluster_of
from shardwise.cli.files import about, load_plan
from shardwise.cli.kinds import require_own
from shardwise.cli.target import AsJson, Perfetto, capture_target
from shardwise.formatting import size

if TYPE_CHECKING:
    from shardwise.plans import Plan
    from shardwise.reporting.recorded import Recording


def report(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN.json", help="What `shardwise plan -o` wrote.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE.py:FUNCTION]",
            help="The model, for the generated code and for plans without figures.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file: the page.")] = Path(
        "report.html"
    ),
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Read a recorded run and compare it with the plan."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="Simulate on these machines: a file, or h100:8x8."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Measured times of operators.", exists=True, dir_okay=False),
    ] = None,
    perfetto: Perfetto = None,
    plan_out: Annotated[
        Path | None, typer.Option("--plan-out", help="Output file: the plan with its figures.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan, why it was chosen and whether a run followed it, as one offline page."""
    import shardwise
    from shardwise.reporting.files import write_whole
    from shardwise.reporting.recorded import read_trace

    if not as_json or out != Path("report.html"):
        require_own(out, "report")
    require_own(perfetto, "trace", option="--perfetto")
    require_own(plan_out, "plan", option="--plan-out")
    with about(plan_file):
        plan = _filled(load_plan(plan_file), target, cluster, table)
        recording = None if trace is None else read_trace(trace)
        made = shardwise.report(plan, trace=recording)
    page = None if as_json and out == Path("report.html") else made.html
    if perfetto is not None:
        write_whole(perfetto, json.dumps(_timelines(plan, recording)), option="--perfetto")
    if plan_out is not None:
        plan.save(plan_out)
    if page is not None:
        write_whole(out, page)
    if as_json:
        typer.echo(json.dumps(made.to_json()))
        return
    typer.echo(f"{out}: {size(out.stat().st_size)}, open it in a browser")
    for name, why in made.missing.items():
        if name != "measured" or trace is not None:
            typer.echo(f"  without {name}: {why}", err=True)
    if perfetto is not None:
        typer.echo(f"{perfetto}: open it at https://ui.perfetto.dev")


def _filled(plan: Plan, target: str | None, cluster: str | None, table: Path | None) -> Plan:
    """The plan with figures of its own and its code, as far as a model was named."""
    if target is None:
        given = [n for n, v in (("--cluster", cluster), ("--table", table)) if v is not None]
        if given:
            raise typer.BadParameter(
                f"{given[0]}: a new simulation needs the model, too: MODULE.py:FUNCTION"
            )
        return plan
    from shardwise.cost import OpTable
    from shardwise.reporting.build import with_figures
    from shardwise.reporting.code import with_code

    machines = None if cluster is None else cluster_of(cluster)
    _, graph = capture_target(target, plan=plan)
    plan.check(graph)
    measured = None if table is None else OpTable.load(table)
    return with_code(with_figures(plan, graph, machines, measured), graph)


def _timelines(plan: Plan, recording: Recording | None) -> object:
    from shardwise.reporting.measured import compare
    from shardwise.reporting.overlay import both_traces
    from shardwise.simulation import stored_estimate

    estimate = stored_estimate(plan)
    measured = None if recording is None else compare(recording, plan, estimate)
    return both_traces(plan, estimate, measured)
