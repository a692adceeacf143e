"""`shardwise simulate`, `replay`, `report` and `diff`: predictions of plans as text or a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import (
    AsJson,
    Perfetto,
    PlanFile,
    Simulated,
    Table,
    Target,
    argument,
    capture_target,
    load_table,
    option,
)
from shardwise.cli.output import PERFETTO, echo, load_plan, naming_plan, require_own, write_output
from shardwise.formatting import (
    Column,
    amount,
    counted,
    seconds,
    size,
    table,
    terminal_width,
    wrapped,
)

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.ir import Graph
    from shardwise.plans import Plan
    from shardwise.reports.diff import Change, Cost, Difference
    from shardwise.reports.recorded import Recording
    from shardwise.simulation import Estimate

REPORT = Path("report.html")
MAX_CHANGES = 12  # listed per kind
MIN_SHARE = 1e-4  # of the step time or peak memory, for differences to be listed
MAX_GROUPS = 8
CHART_WIDTH = 48
CHART_HEIGHT = 6


def _simulation_inputs(
    plan: Plan, target: str | None, cluster: str | None, table: Path | None
) -> tuple[Graph, Cluster | None] | None:
    """Return the graph and cluster for a new simulation, or None without a model."""
    if target is None:
        for option, value in (("--cluster", cluster), ("--table", table)):
            if value is not None:
                raise typer.BadParameter(
                    f"{option}: a new simulation also needs the model, MODULE.py:FUNCTION"
                )
        return None
    from shardwise.cluster.presets import parse_cluster

    parsed = None if cluster is None else parse_cluster(cluster)
    _, graph = capture_target(target, plan=plan)
    return graph, parsed


def _write_timeline(path: Path, timeline: object) -> None:
    write_output(path, json.dumps(timeline), option="--perfetto")


# ------------------------------------------------------------ simulate
def simulate(
    plan_file: PlanFile,
    target: Annotated[
        str | None, argument("MODULE.py:FUNCTION", "Model, to simulate it again.")
    ] = None,
    cluster: Simulated = None,
    table: Table = None,
    perfetto: Perfetto = None,
    as_json: AsJson = False,
) -> None:
    """Predict the step time, exposed communication, bubbles and memory of a plan."""
    from shardwise.reports.timeline import named_events

    require_own(perfetto, "trace", option="--perfetto")
    plan = load_plan(plan_file)
    estimate = _estimate(plan, target, cluster, table)
    if perfetto is not None:
        events = list(named_events(plan, estimate, memory=estimate.memory))
        _write_timeline(perfetto, {"traceEvents": events, "displayTimeUnit": "ms"})
    if as_json:
        echo(estimate_json(plan, estimate))
        return
    echo(estimate_text(plan, estimate, terminal_width()))
    if perfetto is not None:
        typer.echo(f"\n{perfetto}: {PERFETTO}")


def replay(
    plan_file: PlanFile,
    target: Target,
    cluster: Annotated[str, option("--cluster -c", "Cluster of the plan: a file, or h100:8x8.")],
    rank: Annotated[int, option("--rank -r", "Rank to run.", min=0)] = 0,
    steps: Annotated[int, option("--steps", "Measured steps.", min=1)] = 5,
    device: Annotated[str | None, option("--device", "Device that runs it.")] = None,
    calibrate: Annotated[
        Path | None, option("--calibrate", "Output file: the cluster with the measured times.")
    ] = None,
    perfetto: Perfetto = None,
    as_json: AsJson = False,
) -> None:
    """Run one rank of a plan here, with messages as slow as on the cluster's links."""
    import shardwise
    from shardwise.cluster.presets import parse_cluster

    require_own(perfetto, "trace", option="--perfetto")
    plan, parsed = load_plan(plan_file), parse_cluster(cluster)
    _, graph = capture_target(target, plan=plan)
    run = shardwise.replay(graph, plan, parsed, rank, steps=steps, device=device)
    residual = None
    if calibrate is not None:
        better = run.calibrated(parsed)
        better.save(calibrate)
        residual = run.step_time_s / shardwise.simulate(graph, plan, better).step_time_s - 1
    if perfetto is not None:
        _write_timeline(perfetto, run.trace)
    if as_json:
        echo({**run.to_json(), "calibrated_residual": residual})
        return
    echo(run.text(terminal_width()))
    if residual is not None:
        typer.echo(
            f"\n{calibrate}: the cluster, whose prediction the step exceeds by {residual:+.1%}"
        )
    if perfetto is not None:
        typer.echo(f"\n{perfetto}: {PERFETTO}")


def _estimate(plan: Plan, target: str | None, cluster: str | None, table: Path | None) -> Estimate:
    import shardwise
    from shardwise.simulation import stored_estimate

    if target is not None and cluster is None:
        raise typer.BadParameter("a new simulation needs --cluster, a file or h100:8x8")
    inputs = _simulation_inputs(plan, target, cluster, table)
    if inputs is None:
        return stored_estimate(plan)
    graph, parsed = inputs
    assert parsed is not None
    return shardwise.simulate(graph, plan, parsed, table=load_table(table))


def estimate_json(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as data, including the memory of every group over time."""
    from shardwise.simulation.estimate import memory_over_time

    memory = [
        {**use.to_json(), "ranks": list(ranks), "over_time_bytes": memory_over_time(use)}
        for use, ranks in zip(estimate.memory, plan.groups, strict=True)
    ]
    return {"plan": plan.name, "model": plan.model, **estimate.to_json(), "memory": memory}


def estimate_text(plan: Plan, estimate: Estimate, width: int) -> str:
    """Format the estimate: step time by cause, and the memory of each kind of group."""
    from shardwise.plans.search_result import CAUSES
    from shardwise.plans.text import shares

    timeline, time = estimate.timeline, estimate.step_time_s
    exposed = sum(
        timeline.causes[name] for name in ("collectives", "parameters", "gradients", "update")
    )
    parts = [
        [
            f"{plan.model}, plan {plan.name!r}, {counted(estimate.num_ranks, 'rank')}",
            f"  step           {seconds(time)}, {amount(estimate.rows / time)} samples/s",
            f"  communication  {seconds(exposed)} exposed, {exposed / time:.1%} of the step",
            f"  bubbles        groups are idle {timeline.bubble_fraction:.1%} of the time",
            *([] if estimate.fits else ["  memory         DOES NOT FIT"]),
        ],
        [
            "time by cause, on the slowest ranks",
            *shares({CAUSES[k]: v for k, v in timeline.causes.items()}, time, seconds, width),
        ],
        *_memory(plan, estimate, width),
        *([f"note: {note}"] for note in estimate.notes),
    ]
    return "\n\n".join(
        "\n".join(piece for line in part for piece in wrapped(line, width, "", "    "))
        for part in parts
    )


def _memory(plan: Plan, estimate: Estimate, width: int) -> Iterator[list[str]]:
    """Yield the memory of every group over a step, once for groups with equal memory."""
    from shardwise.collectives.messages.program import format_ranks
    from shardwise.simulation.estimate import memory_over_time

    equal: dict[object, list[int]] = {}
    for number, use in enumerate(estimate.memory):
        key = (f"{use.peak_bytes:.6g}", f"{use.limit_bytes:.6g}", use.when[-1:], len(use.over_time))
        equal.setdefault(key, []).append(number)
    for numbers in list(equal.values())[:MAX_GROUPS]:
        use = estimate.memory[numbers[0]]
        ranks = tuple(sorted(rank for n in numbers for rank in plan.groups[n]))
        parts = sorted(((v, k) for k, v in use.parts.items() if v > 0), reverse=True)
        yield [
            f"memory over a step, rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}: "
            f"{size(use.peak_bytes)} of {size(use.limit_bytes)}"
            f"{'' if use.fits else ': DOES NOT FIT'}",
            "  " + ", ".join(f"{k} {size(v)}" for v, k in parts),
            *chart(memory_over_time(use), use.limit_bytes, min(CHART_WIDTH, width - 12)),
        ]
    if len(equal) > MAX_GROUPS:
        yield [f"… {len(equal) - MAX_GROUPS} more kinds of groups; --json lists all"]


def chart(values: Sequence[float], limit: float, width: int) -> list[str]:
    """Draw bytes over time, up to the limit or the highest value."""
    if not values:
        return []
    step = max(1.0, len(values) / width)
    count = min(len(values), width)
    bar_width = max(1, width // count)
    columns = [max(values[int(i * step) : max(int(i * step) + 1, int((i + 1) * step))])
               for i in range(count)]  # fmt: skip
    top = max(limit, *columns) if max(columns) > limit / CHART_HEIGHT else max(columns)
    lines = []
    for row in range(CHART_HEIGHT, 0, -1):
        label = size(top * row / CHART_HEIGHT) if row in (CHART_HEIGHT, 1) else ""
        cells = "".join(
            ("#" if value >= top * (row - 0.5) / CHART_HEIGHT else " ") * bar_width
            for value in columns
        )
        lines.append(f"{label:>10} |{cells}".rstrip())
    return [*lines, f"{'':>10} +{'-' * (count * bar_width)}"]


# ------------------------------------------------------------ report
def report(
    plan_file: PlanFile,
    target: Annotated[
        str | None,
        argument("MODULE.py:FUNCTION", "Model, to show generated code or a plan without figures."),
    ] = None,
    out: Annotated[Path, option("--out -o", "Output file: the page.")] = REPORT,
    trace: Annotated[
        Path | None, option("--trace", "Recorded trace of a run to compare with the plan.")
    ] = None,
    cluster: Simulated = None,
    table: Table = None,
    perfetto: Perfetto = None,
    plan_out: Annotated[
        Path | None, option("--plan-out", "Output file: the plan with its figures.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an offline page: the plan, why it was chosen, and how a run compares with it."""
    import shardwise
    from shardwise.reports.recorded import read_trace

    writes_page = not as_json or out != REPORT
    if writes_page:
        require_own(out, "report")
    require_own(perfetto, "trace", option="--perfetto")
    require_own(plan_out, "plan", option="--plan-out")
    with naming_plan(plan_file):
        plan = _with_figures(load_plan(plan_file), target, cluster, table)
        recording = None if trace is None else read_trace(trace)
        page = shardwise.report(plan, trace=recording)
    if perfetto is not None:
        _write_timeline(perfetto, _both_timelines(plan, recording))
    if plan_out is not None:
        plan.save(plan_out)
    if writes_page:
        write_output(out, page.html)
    if as_json:
        typer.echo(json.dumps(page.to_json()))
        return
    typer.echo(f"{out}: {size(out.stat().st_size)}, open it in a browser")
    for name, why in page.missing.items():
        if name != "measured" or trace is not None:
            typer.echo(f"  without {name}: {why}", err=True)
    if perfetto is not None:
        typer.echo(f"{perfetto}: {PERFETTO}")


def _with_figures(plan: Plan, target: str | None, cluster: str | None, table: Path | None) -> Plan:
    """Return the plan with figures and code, if there is a model."""
    inputs = _simulation_inputs(plan, target, cluster, table)
    if inputs is None:
        return plan
    from shardwise.reports.build import with_figures
    from shardwise.reports.render import with_code

    graph, parsed = inputs
    plan.check(graph)
    return with_code(with_figures(plan, graph, parsed, load_table(table)), graph)


def _both_timelines(plan: Plan, recording: Recording | None) -> object:
    from shardwise.reports.measured import both_traces, compare
    from shardwise.simulation import stored_estimate

    estimate = stored_estimate(plan)
    measured = None if recording is None else compare(recording, plan, estimate)
    return both_traces(plan, estimate, measured)


# ------------------------------------------------------------ diff
def diff(
    before: Annotated[Path, argument("A.json", "First plan.")],
    after: Annotated[Path, argument("B.json", "Second plan.")],
    perfetto: Perfetto = None,
    as_json: AsJson = False,
) -> None:
    """Show the differences between two plans, and their cost."""
    from shardwise.reports.diff import diff as compare
    from shardwise.reports.diff import side_by_side
    from shardwise.simulation import stored_estimate

    require_own(perfetto, "trace", option="--perfetto")
    plans = {path: load_plan(path) for path in (before, after)}
    difference = compare(plans[before], plans[after])
    if perfetto is not None:
        named = [(path.stem, plans[path], stored_estimate(plans[path])) for path in (before, after)]
        _write_timeline(perfetto, side_by_side(named))
    if as_json:
        echo({"a": str(before), "b": str(after), **difference.to_json()})
        return
    echo(difference_text(difference, before.stem, after.stem, terminal_width()))
    if perfetto is not None:
        typer.echo(f"\n{perfetto}: {PERFETTO}")


def difference_text(difference: Difference, before: str, after: str, width: int) -> str:
    """Format the changes and their costs as tables of the given width."""
    parts = [
        [line for note in difference.notes for line in wrapped(f"note: {note}", width, "", "  ")],
        _summary(difference, before, after, width),
        _decisions(difference.changes, width),
    ]
    for kind, title, text in (
        ("time", "time by cause, on the slowest ranks", seconds),
        ("memory", "memory of the rank with the highest peak", size),
        ("traffic", "bytes per step over the busiest link of each kind", size),
    ):
        parts.append(_costs([c for c in difference.costs if c.kind == kind], title, text, width))
    return "\n\n".join("\n".join(part) for part in parts if part)


def _summary(difference: Difference, before: str, after: str, width: int) -> list[str]:
    lines = wrapped(f"from {before} to {after}", width, "", "  ")
    step, rate, memory = difference.step_time_s, difference.samples_per_s, difference.memory_bytes
    if step is None or rate is None or memory is None:
        return lines
    ratio = f" ({step[1] / step[0] - 1:+.2%})" if step[0] else ""
    for text in (
        f"  step    {seconds(step[0])} to {seconds(step[1])}{ratio}",
        f"  rate    {amount(rate[0])} to {amount(rate[1])} samples/s",
        f"  memory  {size(memory[0])} to {size(memory[1])} per device",
    ):
        lines += wrapped(text, width, "", " " * 10)
    return lines


def _decisions(changes: tuple[Change, ...], width: int) -> list[str]:
    if not changes:
        return ["the plans make the same decisions"]
    lines = ["changes"]
    shown: dict[str, int] = {}
    for change in changes:
        shown[change.kind] = shown.get(change.kind, 0) + 1
        if shown[change.kind] > MAX_CHANGES:
            continue
        subject = f"{change.kind} {_shortened(change.name)}".rstrip()
        text = f"  {subject}: {_shortened(change.before)} -> {_shortened(change.after)}"
        lines += wrapped(text, width, "", "      ")
    for kind, count in shown.items():
        if count > MAX_CHANGES:
            lines.append(f"  … {count - MAX_CHANGES} more {kind}; --json lists all")
    return lines


def _shortened(text: str) -> str:
    """Shorten a long name in the middle, and escape control characters."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown if len(shown) <= 160 else f"{shown[:100]}…{shown[-40:]}"


def _costs(costs: list[Cost], title: str, text: Callable[[float], str], width: int) -> list[str]:
    largest = max((max(abs(c.before), abs(c.after)) for c in costs), default=0.0)
    shown = [c for c in costs if max(abs(c.before), abs(c.after)) > MIN_SHARE * largest]
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
