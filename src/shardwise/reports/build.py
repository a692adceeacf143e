"""`report(plan)`: what a plan does, why, and whether reality followed it.

Nothing of the user's code runs: figures are those of the plan's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import PlanError
from shardwise.plans import Plan
from shardwise.plans.explain import difference, idle_devices, option_text, why_not
from shardwise.plans.search_result import CAUSES, PlanDetails, SearchResult, SimulatedConfig
from shardwise.reports.document import Cause, Compared, Headroom, Report, Verdict
from shardwise.reports.sections import machines_of, memory_of, modules_of, ways_of
from shardwise.reports.steps import PASSES
from shardwise.reports.timeline import Step, classes_of, groups_of
from shardwise.simulation import Estimate, stored_estimate

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.cost import OpTable
    from shardwise.ir import Graph
    from shardwise.reports.recorded import Recording

__all__ = ["predicted_causes", "predicted_passes"]


# The predicted step of each group of ranks, in the words of a recording.


def predicted_causes(estimate: Estimate, group: int) -> dict[str, float]:
    """Seconds of a group by cause, with those of computing by pass."""
    found = dict(estimate.timeline.by_group[group])
    passes = dict.fromkeys(("forward", "backward", "weight"), 0.0)
    for (kind, _), seconds in predicted_passes(estimate, group).items():
        passes[kind] += seconds
    total, computed = sum(passes.values()), found.pop("compute")
    scale = computed / total if total else 0.0
    return {**{kind: seconds * scale for kind, seconds in passes.items()}, **found}


def predicted_passes(estimate: Estimate, group: int) -> dict[tuple[str, int], float]:
    """Seconds of computing by kind of pass and stage."""
    found: dict[tuple[str, int], float] = {}
    timeline = estimate.timeline
    computing = timeline.ends - timeline.starts - timeline.waits
    computing = np.maximum(0.0, computing - timeline.collectives - timeline.recompute)
    begin = sum(map(len, timeline.schedule.actions[:group]))
    for at, action in enumerate(timeline.schedule.actions[group], start=begin):
        key = (PASSES[action.kind], action.stage)
        found[key] = found.get(key, 0.0) + float(computing[at])
    return found


# The chosen plan beside its runners-up, as rows of a report.


def plans_of(search: SearchResult) -> tuple[Compared, ...] | None:
    """Return the chosen plan, then its runners-up; None for a plan that no search made."""
    if search.gap is None:
        return None
    best = search.best
    return (_row(best, best), *(_row(best, other) for other in search.runners_up))


def _row(best: SimulatedConfig, other: SimulatedConfig) -> Compared:
    found, time = difference(best, other), best.step_time_s
    return Compared(
        what=other.what,
        chosen=other is best,
        step_time_s=other.step_time_s,
        ratio=other.step_time_s / time if time else 1.0,
        causes=other.causes,
        peak_bytes=other.memory.peak_bytes,
        limit_bytes=other.memory.limit_bytes,
        changed=found.changed,
        words={
            name: tuple(option_text(name, value) for value in pair)
            for name, pair in found.changed.items()
        },
        differences_s=found.causes_s,
        memory_difference_bytes=found.memory_bytes,
        text="the chosen plan" if other is best else why_not(best, other),
    )


ANEW = "shardwise report plan.json MODULE.py:FUNCTION --cluster c.yaml"
MISSING = {
    "modules": f"The plan's file does not tell of its modules. {ANEW}",
    "cluster": f"The plan's file does not tell of the machines. {ANEW}",
    "what_if": f"Other machines were not simulated. {ANEW}",
    "code": "The plan's file does not hold the generated code. "
    "shardwise report plan.json MODULE.py:FUNCTION",
    "plans": "The plan was not searched for, so it was compared with no others. "
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
    """What a plan does and why, as a page: `report(plan).save("report.html")`.

    A plan that `sw.plan` made has all figures; with a `graph` the generated code is shown, too. A
    named or edited plan is simulated: it needs a `graph` and a `cluster`. `trace` is a recorded
    run, as a file or read, laid over the prediction; `table` holds measured times of operators.
    """
    plan = with_figures(plan, graph, cluster, table)
    if graph is not None:
        from shardwise.reports.render import with_code

        plan = with_code(plan, graph)
    estimate = stored_estimate(plan)
    made = _build(plan, estimate)
    if trace is not None:
        made = _measured(made, trace, plan, estimate)
    made.verify()
    return made


def with_figures(
    plan: Plan, graph: Graph | None, cluster: Cluster | None, table: OpTable | None = None
) -> Plan:
    """Return the plan with figures that are its own."""
    own = plan.search is not None and not plan.is_edited
    if own and cluster is None and table is None:
        return plan
    if graph is None or cluster is None:
        why = "was changed after it was made" if plan.search else "has no figures"
        why = "is to be simulated on other machines" if own else why
        raise PlanError(
            f"the plan {plan.name!r} {why}: a new simulation needs the model and a cluster",
            hint=f"{ANEW}, or sw.report(plan, graph, cluster)",
        )
    from shardwise.planner.figures import with_figures as simulated

    plan.check(graph)
    if own and table is None and plan.figures.cluster.fingerprint == cluster.fingerprint:
        return plan
    return simulated(graph, plan, cluster, table)


def _build(plan: Plan, estimate: Estimate) -> Report:
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
        "code": _code(details),
    }
    missing = {name: MISSING[name] for name, found in sections.items() if found is None}
    if sections["code"] is None and details.code_missing:
        missing["code"] = details.code_missing
    return Report(
        title=f"{verdict.model} on {verdict.cluster}, {plan.num_ranks} ranks",
        verdict=verdict,
        missing={**missing, "measured": MISSING["measured"]},
        causes=tuple(_causes(estimate)),
        groups=groups_of(plan, classes),
        classes=classes,
        memory=memory_of(search, estimate, classes),
        timeline=step.chart(),
        schedule=step.grid(),
        gap=search.gap,
        collectives=ways_of(plan),
        **sections,
    )


def _code(details: PlanDetails) -> Any:
    from shardwise.reports.render import read_code

    return read_code(details)


def _causes(estimate: Estimate) -> Iterator[Cause]:
    time = estimate.step_time_s
    for name, seconds in estimate.timeline.causes.items():
        share = seconds / time if time else 0.0
        yield Cause(name=name, text=CAUSES.get(name, name), seconds=seconds, share=share)


def _verdict(plan: Plan, estimate: Estimate) -> Verdict:
    search = plan.figures
    best, batch, cluster = search.best, search.batch, search.cluster
    time, memory = estimate.step_time_s, best.memory
    price = None
    if cluster.price_per_hour:
        each = cluster.price_per_hour / 3600 * time / batch.rows * 1e6
        price = {"per_hour": cluster.price_per_hour, "per_million_rows": each}
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
        memory=Headroom(
            group=memory.group,
            peak_bytes=memory.peak_bytes,
            limit_bytes=memory.limit_bytes,
            free_bytes=memory.free_bytes,
        ),
        limit={"what": search.binding.what, "text": search.binding.text},
        price=price,
        notes=(*filter(None, [idle_devices(search)]), *plan.notes, *estimate.notes),
    )


def _measured(
    made: Report, trace: Recording | str | Path, plan: Plan, estimate: Estimate
) -> Report:
    """Return the report with a recorded run laid over it."""
    from shardwise.reports.measured import compare

    found = compare(trace, plan, estimate)
    beyond = found.ratio - 1
    text = f"a recorded run takes {abs(beyond):.1%} {'longer' if beyond >= 0 else 'less'}"
    told = {"step_time_s": found.step_time_s, "difference": beyond, "text": text}
    return replace(
        made,
        measured=found.to_json({group.id: group.class_ for group in made.groups}),
        verdict=replace(made.verdict, measured=told),
        missing={k: v for k, v in made.missing.items() if k != "measured"},
    )
