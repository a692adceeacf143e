"""`report(plan)`: what a plan does, why it was chosen, and how a recorded run compares with it.

The user's code does not run: all figures are stored in the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cluster import Cluster
from shardwise.cluster.links import expand
from shardwise.collectives.messages.choice import REFERENCE_BYTES, CollectiveChoice, format_groups
from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import PlanError
from shardwise.plans import Plan
from shardwise.plans.search_result import (
    CAUSES,
    PARAMETER_COLUMNS,
    PlanDetails,
    SearchResult,
    SimulatedConfig,
)
from shardwise.plans.text import difference, idle_devices, option_text, why_not
from shardwise.reports.document import (
    Cause,
    CollectiveRow,
    Compared,
    Machines,
    MemoryBar,
    Modules,
    RankClass,
    Report,
    Verdict,
    source_row,
)
from shardwise.reports.timeline import Step, classes_of, groups_of, short
from shardwise.simulation import Estimate, MemoryUse, stored_estimate
from shardwise.simulation.estimate import memory_over_time

if TYPE_CHECKING:
    from shardwise.cost import OpTable
    from shardwise.ir import Graph
    from shardwise.reports.recorded import Recording

STATE = ("parameters", "optimizer")  # parts of memory that persist between steps
HEADROOM = ("group", "peak_bytes", "limit_bytes", "free_bytes")
MAX_RANKS = 12  # listed for a device
SIMULATE = "shardwise report plan.json MODULE.py:FUNCTION --cluster c.yaml"
MISSING = {
    "modules": f"The plan file has no modules. {SIMULATE}",
    "cluster": f"The plan file has no cluster. {SIMULATE}",
    "what_if": f"No other clusters were simulated. {SIMULATE}",
    "code": "The plan file has no generated code. shardwise report plan.json MODULE.py:FUNCTION",
    "plans": "The plan is not the result of a search, so there are no others to compare. "
    "shardwise plan MODULE.py:FUNCTION --cluster c.yaml",
    "measured": "No run was recorded. shardwise report plan.json --trace run.json",
}


def report(
    plan: Plan,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    trace: Recording | str | Path | None = None,
    *,
    table: OpTable | None = None,
) -> Report:
    """Describe what a plan does and why, as a page: `report(plan).save("report.html")`.

    A plan of `sw.plan` has all figures; with a `graph`, the generated code is shown, too. A named
    or edited plan is simulated, which needs a `graph` and a `cluster`. `trace` is a recorded run, a
    file or a `Recording`, to compare with the prediction; `table` has measured times of operators.
    """
    plan = with_figures(plan, graph, cluster, table)
    if graph is not None:
        from shardwise.reports.render import with_code

        plan = with_code(plan, graph)
    estimate = stored_estimate(plan)
    result = _build(plan, estimate)
    if trace is not None:
        result = _with_recording(result, trace, plan, estimate)
    result.verify()
    return result


def with_figures(
    plan: Plan, graph: Graph | None, cluster: Cluster | None, table: OpTable | None = None
) -> Plan:
    """Return the plan with figures, simulated if it has none that apply."""
    has_figures = plan.search is not None and not plan.is_edited
    if has_figures and cluster is None and table is None:
        return plan
    if graph is None or cluster is None:
        why = "was changed after its search" if plan.search else "has no figures"
        why = "must be simulated on another cluster" if has_figures else why
        raise PlanError(
            f"the plan {plan.name!r} {why}: a new simulation needs the model and a cluster",
            hint=f"{SIMULATE}, or sw.report(plan, graph, cluster)",
        )
    from shardwise.planner.figures import with_figures as simulated

    plan.check(graph)
    if has_figures and table is None and plan.figures.cluster.fingerprint == cluster.fingerprint:
        return plan
    return simulated(graph, plan, cluster, table)


def _build(plan: Plan, estimate: Estimate) -> Report:
    from shardwise.reports.render import read_code

    search = plan.figures
    details = search.details
    classes = classes_of(plan, estimate)
    step = Step(plan, estimate, classes)
    verdict = _verdict(plan, estimate)
    sections: dict[str, Any] = {
        "modules": modules_of(details),
        "cluster": machines_of(details, plan, estimate),
        "what_if": details.what_if,
        "plans": plans_of(search),
        "code": read_code(details),
    }
    missing = {name: MISSING[name] for name, section in sections.items() if section is None}
    if sections["code"] is None and details.code_missing:
        missing["code"] = details.code_missing
    return Report(
        title=f"{verdict.model} on {verdict.cluster}, {plan.num_ranks} ranks",
        verdict=verdict,
        missing={**missing, "measured": MISSING["measured"]},
        causes=tuple(
            Cause(
                name=name,
                text=CAUSES.get(name, name),
                seconds=seconds,
                share=seconds / estimate.step_time_s if estimate.step_time_s else 0.0,
            )
            for name, seconds in estimate.timeline.causes.items()
        ),
        groups=groups_of(plan, classes),
        classes=classes,
        memory=memory_of(search, estimate, classes),
        timeline=step.chart(),
        schedule=step.grid(),
        gap=search.gap,
        collectives=tuple(_collective(choice) for choice in plan.collectives) or None,
        **sections,
    )


def _verdict(plan: Plan, estimate: Estimate) -> Verdict:
    search = plan.figures
    best, batch, cluster = search.best, search.batch, search.cluster
    time, memory = estimate.step_time_s, best.memory
    price = None
    if cluster.price_per_hour:
        per_million = cluster.price_per_hour / 3600 * time / batch.rows * 1e6
        price = {"per_hour": cluster.price_per_hour, "per_million_rows": per_million}
    return Verdict(
        model=plan.model,
        plan_name=plan.name,
        plan=best.what,
        cluster=cluster.name,
        num_ranks=plan.num_ranks,
        step_time_s=time,
        rows_per_s=estimate.rows / time if time else 0.0,
        tokens_per_s=batch.tokens / time if batch.tokens and time else None,
        fits=all(use.peak_bytes <= use.limit_bytes for use in search.memory),
        memory={name: getattr(memory, name) for name in HEADROOM},
        limit={"what": search.binding.what, "text": search.binding.text},
        price=price,
        notes=(*filter(None, [idle_devices(search)]), *plan.notes, *estimate.notes),
    )


def _with_recording(
    result: Report, trace: Recording | str | Path, plan: Plan, estimate: Estimate
) -> Report:
    """Return the report with a recorded run next to the prediction."""
    from shardwise.reports.measured import compare

    measured = compare(trace, plan, estimate)
    excess = measured.ratio - 1
    text = f"a recorded run takes {abs(excess):.1%} {'longer' if excess >= 0 else 'less'}"
    summary = {"step_time_s": measured.step_time_s, "difference": excess, "text": text}
    return replace(
        result,
        measured=measured.to_json({group.id: group.class_ for group in result.groups}),
        verdict=replace(result.verdict, measured=summary),
        missing={k: v for k, v in result.missing.items() if k != "measured"},
    )


# ------------------------------------------------------------ compared plans
def plans_of(search: SearchResult) -> tuple[Compared, ...] | None:
    """Return the chosen plan and its runners-up, or None if there was no search."""
    if search.gap is None and not search.runners_up:
        return None
    best = search.best
    return (_row(best, best), *(_row(best, other) for other in search.runners_up))


def _row(best: SimulatedConfig, other: SimulatedConfig) -> Compared:
    differences, time = difference(best, other), best.step_time_s
    return Compared(
        what=other.what,
        chosen=other is best,
        step_time_s=other.step_time_s,
        ratio=other.step_time_s / time if time else 1.0,
        causes=other.causes,
        peak_bytes=other.memory.peak_bytes,
        limit_bytes=other.memory.limit_bytes,
        changed=differences.changed,
        words={
            name: tuple(option_text(name, value) for value in pair)
            for name, pair in differences.changed.items()
        },
        differences_s=differences.causes_s,
        memory_difference_bytes=differences.memory_bytes,
        text="the chosen plan" if other is best else why_not(best, other),
    )


# ------------------------------------------------------------ modules
def modules_of(details: PlanDetails) -> Modules | None:
    """Return the module tree, if the plan has one, with numbers replaced by their texts."""
    modules = details.modules
    if modules is None:
        return None
    layouts, ops = modules.layouts, modules.ops
    values = zip(*modules.rows.values(), strict=True)
    rows: list[dict[str, Any]] = [dict(zip(modules.rows, row, strict=True)) for row in values]
    for number, row in enumerate(rows):
        row["id"] = number
        row["parent"] = None if row["parent"] < 0 else row["parent"]
        row["layout"] = layouts[row["layout"]] if row["layout"] >= 0 else ""
    parameters = [dict(zip(PARAMETER_COLUMNS, row, strict=True)) for row in modules.parameters]
    for row in parameters:
        row["layout"] = layouts[row["layout"]]
        above = rows[row["module"]]["path"]
        row["path"] = f"{above}.{row['name']}" if above else row["name"]
    nodes: dict[str, Any] = dict(modules.nodes)
    nodes["op"] = [ops[at].removesuffix(".default") for at in nodes["op"]]
    nodes["layout"] = [layouts[at] for at in nodes["layout"]]
    nodes["bytes"] = nodes.pop("activation_bytes")
    return Modules(
        rows=tuple(rows),
        parameters=tuple(parameters),
        nodes=nodes,
        sources=tuple(source_row(source, text) for source, text in modules.sources),
    )


# ------------------------------------------------------------ cluster and collectives
def machines_of(details: PlanDetails, plan: Plan, estimate: Estimate) -> Machines | None:
    """Return the cluster with its ranks, if the plan has it."""
    if not details.cluster:
        return None
    cluster = Cluster.from_yaml(json.dumps(details.cluster), "search.details.cluster")
    group_of = {rank: number for number, ranks in enumerate(plan.groups) for rank in ranks}
    return Machines(
        name=cluster.name,
        nodes=tuple(_nodes(cluster, group_of, estimate.memory)),
        links=details.links,
    )


def _nodes(
    cluster: Cluster, group_of: Mapping[int, int], memory: Sequence[MemoryUse]
) -> Iterator[dict[str, Any]]:
    """Yield an entry for each kind of node; its devices have the ranks of all copies."""
    first = 0
    for node in cluster.nodes:
        machines = range(node.copies)
        devices = []
        for local, device in enumerate(node.devices):
            ranks = [first + machine * node.count + local for machine in machines]
            groups = sorted({group_of[rank] for rank in ranks if rank in group_of})
            fullest = max(groups, key=lambda g: memory[g].peak_bytes, default=None)
            devices.append(
                {
                    "name": device.name,
                    "kind": device.kind,
                    "memory_bytes": device.memory_bytes,
                    "ranks": listed_ranks(ranks),
                    "groups": groups,
                    "group": groups[0] if groups else None,
                    "peak_bytes": memory[fullest].peak_bytes if fullest is not None else 0.0,
                }
            )
        names = expand(node.name)
        yield {
            "name": node.name,
            "machines": [names[0], names[-1]] if node.copies > 1 else [names[0]],
            "copies": node.copies,
            "kind": node.device.name,
            "first": first,
            "devices": devices,
            "groups": _groups_by_machine(node.copies, node.count, first, group_of),
        }
        first += node.copies * node.count


def _groups_by_machine(
    copies: int, count: int, first: int, group_of: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Return the groups that the copies of a node run, once for copies with the same groups."""
    by_groups: dict[tuple[int, ...], list[int]] = {}
    for machine in range(copies):
        begin = first + machine * count
        groups = {group_of[rank] for rank in range(begin, begin + count) if rank in group_of}
        by_groups.setdefault(tuple(sorted(groups)), []).append(machine)
    return [
        {"machines": format_ranks(tuple(machines)), "groups": list(groups)}
        for groups, machines in by_groups.items()
    ]


def listed_ranks(ranks: Sequence[int]) -> str:
    """List ranks, or only the first few and the last of many.

    >>> listed_ranks([0, 8]), listed_ranks(range(0, 160, 8))
    ('0, 8', '0, 8, 16, … 152; 20 in all')
    """
    if len(ranks) <= MAX_RANKS:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, … {ranks[-1]}; {len(ranks)} in all"


def _collective(choice: CollectiveChoice) -> CollectiveRow:
    return CollectiveRow(
        operation=choice.operation,
        groups=format_groups(choice.groups),
        num_groups=len(choice.groups),
        group_ranks=len(choice.groups[0]),
        uses=choice.uses,
        implementation=choice.summary,
        min_bytes=choice.min_bytes,
        reference_bytes=REFERENCE_BYTES,
        predicted_s=dict(choice.predicted_s),
        saved_share=choice.gain,
    )


# ------------------------------------------------------------ memory
def memory_of(
    search: SearchResult, estimate: Estimate, classes: Sequence[RankClass]
) -> tuple[MemoryBar, ...]:
    """Return the memory of every class, with its course over the step."""
    curves = {curve.group: curve for curve in search.details.memory}
    bars = []
    for rank_class in classes:
        use, data = estimate.memory[rank_class.shown], search.memory[rank_class.shown]
        curve = curves.get(rank_class.shown)
        moments = (list(curve.times), list(curve.bytes)) if curve else _moments(use, estimate)
        times, sizes = _from_zero(*moments, data.parts)
        bars.append(
            MemoryBar(
                class_=rank_class.id,
                group=rank_class.shown,
                ranks=rank_class.label,
                peak_bytes=data.peak_bytes,
                limit_bytes=data.limit_bytes,
                when=data.when,
                parts=data.parts,
                others=data.others,
                host_bytes=data.host_bytes,
                over_time=tuple(float(size) for size in sizes),
                times=tuple(float(time) for time in times),
            )
        )
    return tuple(bars)


def _from_zero(
    times: Sequence[float], sizes: Sequence[float], parts: Mapping[str, float]
) -> tuple[Sequence[float], Sequence[float]]:
    """Start the curve at time zero: a group that begins later stores its state before."""
    if not times or times[0] <= 0:
        return times, sizes
    state = sum(parts.get(name, 0.0) for name in STATE)
    return [0.0, *times], [min(state, sizes[0]), *sizes]


def _moments(use: MemoryUse, estimate: Estimate) -> tuple[list[float], list[float]]:
    """Return the start of each moment (of its first action) and its bytes."""
    timeline = estimate.timeline
    counts = [len(actions) for actions in timeline.schedule.actions]
    begin = sum(counts[: use.group])
    own = slice(begin, begin + counts[use.group])
    starts = timeline.starts[own].tolist()
    values, has_update = memory_over_time(use), use.when == "optimizer"
    count = len(values) - has_update
    step = -(-len(starts) // count) if count > 0 else 1
    times = [short(starts[min(at * step, len(starts) - 1)]) for at in range(count)]
    if has_update:
        times.append(short(float(timeline.ends[own].max())))
    return times, values
