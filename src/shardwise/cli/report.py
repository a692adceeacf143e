"""`shardwise report`: a plan as a page; from its file alone, or with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import AsJson, Perfetto, capture_target, cluster_of
from shardwise.cli.output import about, load_plan, require_own
from shardwise.formatting import Column, amount, seconds, size, table, terminal_width, wrapped

if TYPE_CHECKING:
    from shardwise.plans import Plan
    from shardwise.reports.diff import Change, Cost, Difference
    from shardwise.reports.recorded import Recording


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
        typer.Option("--cluster", "-c", help="Cluster to simulate: a file, or h100:8x8."),
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
    from shardwise.reports.recorded import read_trace
    from shardwise.reports.sections import write_whole

    if not as_json or out != Path("report.html"):
        require_own(out, "report")
    require_own(perfetto, "trace", option="--perfetto")
    require_own(plan_out, "plan", option="--plan-out")
    with about(plan_file):
        plan = _filled(load_plan(plan_file), target, cluster, table)
        recording = None if trace is None else read_trace(trace)
        made = shardwise.reports(plan, trace=recording)
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
    from shardwise.reports.build import with_figures
    from shardwise.reports.render import with_code

    machines = None if cluster is None else cluster_of(cluster)
    _, graph = capture_target(target, plan=plan)
    plan.check(graph)
    measured = None if table is None else OpTable.load(table)
    return with_code(with_figures(plan, graph, machines, measured), graph)


def _timelines(plan: Plan, recording: Recording | None) -> object:
    from shardwise.reports.measured import both_traces, compare
    from shardwise.simulation import stored_estimate

    estimate = stored_estimate(plan)
    measured = None if recording is None else compare(recording, plan, estimate)
    return both_traces(plan, estimate, measured)


# `shardwise diff`: what changed between two plans and what it costs.


MOST_CHANGES = 12  # of a kind
WORTH = 1e-4  # of the step or the peak: smaller differences are not listed


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A plan.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    perfetto: Perfetto = None,
    as_json: AsJson = False,
) -> None:
    """Say what changed between two plans, and what it costs."""
    from shardwise.reports.diff import diff as compare

    require_own(perfetto, "trace", option="--perfetto")
    plans = [load_plan(path) for path in (before, after)]
    found = compare(*plans)
    if perfetto is not None:
        _write_trace(perfetto, [before, after], plans)
    if as_json:
        text = json.dumps({"a": str(before), "b": str(after), **found.to_json()}, indent=2)
    else:
        text = difference_text(found, before.stem, after.stem, terminal_width())
    typer.echo(text)
    if not as_json and perfetto is not None:
        typer.echo(f"\n{perfetto}: open it at https://ui.perfetto.dev")


def _write_trace(path: Path, files: list[Path], plans: list[Plan]) -> None:
    from shardwise.reports.diff import side_by_side
    from shardwise.reports.sections import write_whole
    from shardwise.simulation import stored_estimate

    named = [(f.stem, plan, stored_estimate(plan)) for f, plan in zip(files, plans, strict=True)]
    write_whole(path, json.dumps(side_by_side(named)), option="--perfetto")


def difference_text(found: Difference, before: str, after: str, width: int) -> str:
    """Decisions, then costs, as tables of the terminal's width."""
    parts = [
        [line for note in found.notes for line in wrapped(f"note: {note}", width, "", "  ")],
        _summary(found, before, after, width),
        _decisions(found.changes, width),
    ]
    for kind, title, text in (
        ("time", "time by cause, of the ranks that end last", seconds),
        ("memory", "memory of the fullest rank", size),
        ("traffic", "bytes over the busiest link of a kind, in a step", size),
    ):
        parts.append(_costs([c for c in found.costs if c.kind == kind], title, text, width))
    return "\n\n".join("\n".join(part) for part in parts if part)


def _summary(found: Difference, before: str, after: str, width: int) -> list[str]:
    lines = wrapped(f"from {before} to {after}", width, "", "  ")
    if found.step_time_s is None or found.samples_per_s is None or found.memory_bytes is None:
        return lines
    (a, b), (c, d), (e, f) = found.step_time_s, found.samples_per_s, found.memory_bytes
    ratio = f" ({b / a - 1:+.2%})" if a else ""
    for text in (
        f"  step    {seconds(a)} to {seconds(b)}{ratio}",
        f"  rate    {amount(c)} to {amount(d)} samples/s",
        f"  memory  {size(e)} to {size(f)} per device",
    ):
        lines += wrapped(text, width, "", " " * 10)
    return lines


def _decisions(changes: tuple[Change, ...], width: int) -> list[str]:
    if not changes:
        return ["the plans decide the same"]
    lines = ["what changed"]
    shown: dict[str, int] = {}
    for change in changes:
        shown[change.kind] = shown.get(change.kind, 0) + 1
        if shown[change.kind] > MOST_CHANGES:
            continue
        what = f"{change.kind} {_shortened(change.name)}".rstrip()
        text = f"  {what}: {_shortened(change.before)} -> {_shortened(change.after)}"
        lines += wrapped(text, width, "", "      ")
    for kind, count in shown.items():
        if count > MOST_CHANGES:
            lines.append(f"  … {count - MOST_CHANGES} more {kind}; --json has all")
    return lines


def _shortened(text: str) -> str:
    """A long name's beginning and end; control characters as text."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown if len(shown) <= 160 else f"{shown[:100]}…{shown[-40:]}"


def _costs(costs: list[Cost], title: str, text: Callable[[float], str], width: int) -> list[str]:
    largest = max((max(abs(c.before), abs(c.after)) for c in costs), default=0.0)
    shown = [c for c in costs if max(abs(c.before), abs(c.after)) > WORTH * largest]
    if not shown:
        return []
    columns = [Column("from", 1), Column("to", 2), Column("difference")]
    return [*wrapped(title, width, "", "  "), *table(columns, "", list(_rows(shown, text)), width)]


def _rows(costs: list[Cost], text: Callable[[float], str]) -> Iterator[tuple[str, ...]]:
    for cost in sorted(costs, key=lambda c: -abs(c.difference)):
        sign = "+" if cost.difference > 0 else "-" if cost.difference < 0 else ""
        yield (
            text(cost.before),
            text(cost.after),
            sign + text(abs(cost.difference)),
            _shortened(cost.text),
        )
