"""`shardwise simulate`: the predicted step of a plan, anew or as its file tells it.

Enters: a plan's file, and for a new simulation a model and a cluster. Leaves: the estimate, and a
trace for https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, Perfetto, capture_target, cluster_of
from shardwise.cli.output import load_plan, require_own
from shardwise.formatting import amount, counted, seconds, size, terminal_width, wrapped

if TYPE_CHECKING:
    from shardwise.plans import Plan
    from shardwise.simulation import Estimate

MOST_GROUPS = 8
COLUMNS = 48  # of a chart of memory, at most
HEIGHT = 6


def simulate(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN.json", help="What `shardwise plan -o` wrote.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE.py:FUNCTION]", help="Simulate this model anew."),
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
    as_json: AsJson = False,
) -> None:
    """Predict a plan's step: time, exposed communication, bubbles, memory."""
    require_own(perfetto, "trace", option="--perfetto")
    plan = load_plan(plan_file)
    estimate = _estimate(plan, target, cluster, table)
    if perfetto is not None:
        write_trace(perfetto, estimate, plan)
    if as_json:
        text = json.dumps(estimate_json(plan, estimate), indent=2)
    else:
        text = estimate_text(plan, estimate, terminal_width())
    typer.echo(text)
    if not as_json and perfetto is not None:
        typer.echo(f"\n{perfetto}: open it at https://ui.perfetto.dev")


def _estimate(plan: Plan, target: str | None, cluster: str | None, table: Path | None) -> Estimate:
    if target is None:
        given = [n for n, v in (("--cluster", cluster), ("--table", table)) if v is not None]
        if given:
            raise typer.BadParameter(
                f"{given[0]}: a new simulation needs the model, too: MODULE.py:FUNCTION"
            )
        from shardwise.simulation import stored_estimate

        return stored_estimate(plan)
    if cluster is None:
        raise typer.BadParameter("a new simulation needs --cluster: a file, or h100:8x8")
    import shardwise
    from shardwise.cost import OpTable

    machines = cluster_of(cluster)
    _, graph = capture_target(target, plan=plan)
    measured = None if table is None else OpTable.load(table)
    return shardwise.simulate(graph, plan, machines, table=measured)


def write_trace(path: Path, estimate: Estimate, plan: Plan) -> None:
    """The timeline and memory in the Chrome trace format; a process per group, with its ranks."""
    from shardwise.messages.program import format_ranks
    from shardwise.reports.sections import write_whole

    found: dict[str, Any] = estimate.timeline.trace(estimate.memory)
    for event in found["traceEvents"]:
        if event["name"] == "process_name":
            ranks = plan.groups[event["pid"]]
            event["args"] = {"name": f"ranks {format_ranks(ranks)}"}
    write_whole(path, json.dumps(found), option="--perfetto")


def estimate_json(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """The estimate for machines, with the memory of every group over time."""
    from shardwise.simulation.stored import memory_over_time

    found = estimate.to_json()
    found["memory"] = [
        {**use.to_json(), "ranks": list(ranks), "over_time_bytes": memory_over_time(use)}
        for use, ranks in zip(estimate.memory, plan.groups, strict=True)
    ]
    return {"plan": plan.name, "model": plan.model, **found}


def estimate_text(plan: Plan, estimate: Estimate, width: int) -> str:
    """Return the estimate as text: what takes the time, and the memory of each kind of group."""
    from shardwise.plans.explain import shares
    from shardwise.plans.search_result import CAUSES

    timeline, time = estimate.timeline, estimate.step_time_s
    exposed = sum(
        timeline.causes[name] for name in ("collectives", "parameters", "gradients", "update")
    )
    parts = [
        [
            f"{plan.model}, plan {plan.name!r}, {counted(estimate.num_ranks, 'rank')}",
            f"  step           {seconds(time)}, {amount(estimate.rows / time)} samples/s",
            f"  communication  {seconds(exposed)} exposed, {exposed / time:.1%} of the step",
            f"  bubbles        {timeline.bubble_fraction:.1%} of all groups' time is not computing",
            *([] if estimate.fits else ["  memory         DOES NOT FIT"]),
        ],
        [
            "time by cause, of the ranks that end last",
            *shares({CAUSES[k]: v for k, v in timeline.causes.items()}, time, seconds, width),
        ],
        *_memory(plan, estimate, width),
    ]
    parts += [[f"note: {note}"] for note in estimate.notes]
    lines = ["\n".join(part) for part in parts]
    return "\n\n".join(
        "\n".join(piece for line in part.splitlines() for piece in wrapped(line, width, "", "    "))
        for part in lines
    )


def _memory(plan: Plan, estimate: Estimate, width: int) -> list[list[str]]:
    """Memory of every group, those that are alike once."""
    from shardwise.messages.program import format_ranks
    from shardwise.simulation.stored import memory_over_time

    alike: dict[object, list[int]] = {}
    for number, use in enumerate(estimate.memory):
        key = (f"{use.peak_bytes:.6g}", f"{use.limit_bytes:.6g}", use.when[-1:], len(use.over_time))
        alike.setdefault(key, []).append(number)
    found = []
    for numbers in list(alike.values())[:MOST_GROUPS]:
        use = estimate.memory[numbers[0]]
        ranks = tuple(sorted(rank for n in numbers for rank in plan.groups[n]))
        shown = sorted(((v, k) for k, v in use.parts.items() if v > 0), reverse=True)
        whose = f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
        found.append(
            [
                f"memory over a step, {whose}: {size(use.peak_bytes)} of "
                f"{size(use.limit_bytes)}{'' if use.fits else ': DOES NOT FIT'}",
                "  " + ", ".join(f"{k} {size(v)}" for v, k in shown),
                *chart(memory_over_time(use), use.limit_bytes, min(COLUMNS, width - 12)),
            ]
        )
    if len(alike) > MOST_GROUPS:
        found.append([f"… {len(alike) - MOST_GROUPS} more kinds of groups; --json has all"])
    return found


def chart(values: Sequence[float], limit: float, width: int) -> list[str]:
    """Bytes over time as columns of text, up to the limit or the highest."""
    if not values:
        return []
    step = max(1.0, len(values) / width)
    count = min(len(values), width)
    wide = max(1, width // count)
    columns = [max(values[int(i * step) : max(int(i * step) + 1, int((i + 1) * step))])
               for i in range(count)]  # fmt: skip
    top = max(limit, *columns) if max(columns) > limit / HEIGHT else max(columns)
    lines = []
    for row in range(HEIGHT, 0, -1):
        label = size(top * row / HEIGHT) if row in (HEIGHT, 1) else ""
        cells = "".join(
            ("#" if value >= top * (row - 0.5) / HEIGHT else " ") * wide for value in columns
        )
        lines.append(f"{label:>10} |{cells}".rstrip())
    return [*lines, f"{'':>10} +{'-' * (count * wide)}"]
