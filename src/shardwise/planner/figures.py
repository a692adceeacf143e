"""Build a plan's `SearchResult`, from a search or by simulating a plan without one.

`search_result` describes the outcome of a search: the best configuration, its runners-up, the
limiting factor and the gain from relaxing it. `with_figures` simulates a named or edited plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import yaml

from shardwise.cluster import Cluster
from shardwise.cluster.cluster import DEFAULT_START
from shardwise.collectives.messages.choice import chosen
from shardwise.cost import OpTable
from shardwise.ir import Graph
from shardwise.ir.blocks import block_glob
from shardwise.planner.module_tree import PlanModules
from shardwise.planner.search import RUNNERS_UP, Candidate, Search, SearchOutcome
from shardwise.planner.search_space import UserOptions
from shardwise.planner.step_details import SimulatedStep, link_traffic, memory_curves
from shardwise.planner.what_if import Rerun, relaxations, sensitivity
from shardwise.plans import Plan
from shardwise.plans.search_result import (
    CAUSES,
    BatchSize,
    Binding,
    ClusterSummary,
    LayerFigures,
    LeftOutDevices,
    ParallelConfig,
    PlanDetails,
    SearchGap,
    SearchResult,
    SimulatedConfig,
    WhatIf,
)
from shardwise.plans.text import summary
from shardwise.simulation.estimate import (
    Estimate,
    Evaluator,
    as_run,
    check_plan,
    execution_of,
    memory_figures,
    workloads_of,
)
from shardwise.simulation.memory import peak_of

MIN_BINDING_GAIN = 0.01  # fraction of the step that relaxing a binding constraint must gain
SAME = 1e-9  # relative tolerance of equal figures


def search_result(
    outcome: SearchOutcome,
    search: Search,
    options: UserOptions,
    fixed: Mapping[str, Any],
    rerun: Rerun,
    left_out: LeftOutDevices | None = None,
) -> SearchResult:
    """Return the figures of a search; `fixed` has all decisions of the user."""
    best = outcome.best
    step = simulated_step(best, search)
    relaxed = relaxations(outcome, search, step, options, rerun)
    return replace(
        _figures(step, described(best.estimate, str(best.config), best.config), relaxed),
        fixed=fixed,
        runners_up=tuple(
            described(other.estimate, str(other.config), other.config)
            for other in distinct(outcome.feasible)[1:]
        ),
        gap=SearchGap(
            layouts=best.layouts.solution.gap,
            search=outcome.gap,
            points=outcome.num_configs,
            simulated=len(outcome.feasible),
        ),
        local_search=outcome.local_search,
        relaxations=relaxed,
        layers=merged(by_layer(step)),
        left_out=left_out,
    )


def simulated_step(candidate: Candidate, search: Search) -> SimulatedStep:
    """Return a candidate's step, from which details are derived."""
    return SimulatedStep(
        graph=search.graph,
        workloads=candidate.layouts.workloads,
        execution=candidate.execution,
        evaluator=search.evaluator,
        estimate=candidate.estimate,
    )


def with_figures(graph: Graph, plan: Plan, cluster: Cluster, table: OpTable | None = None) -> Plan:
    """Return the plan with its figures, simulated on `cluster`."""
    cluster = check_plan(graph, plan, cluster)
    fold, workloads = workloads_of(graph, plan)
    execution = execution_of(plan, fold)
    evaluator = Evaluator(fold, cluster, table, chosen(plan.collectives))
    step = SimulatedStep(
        graph=as_run(graph, plan),
        workloads=workloads,
        execution=execution,
        evaluator=evaluator,
        estimate=evaluator.estimate(workloads, execution),
    )
    figures = _figures(step, described(step.estimate, summary(plan.with_(search=None))))
    figures = replace(figures, batch=batch_size(graph, step.estimate.rows))
    return with_details(plan.with_figures(figures), step)


def with_details(plan: Plan, step: SimulatedStep) -> Plan:
    """Return the plan with the details of its step that reports show."""
    details = PlanDetails(
        cluster=cluster_json(step.evaluator.cluster),
        modules=PlanModules(step, plan).folded(),
        memory=tuple(memory_curves(step)),
        links=link_traffic(step),
        what_if=sensitivity(step, plan.figures.relaxations),
    )
    return plan.with_(search=replace(plan.figures, details=details))


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as `Cluster.from_yaml` reads it, without access to its nodes.

    Readers of a report should not see the addresses, keys and environments of a cluster file.
    """
    nodes = tuple(replace(n, address="", ssh=None, start=DEFAULT_START) for n in cluster.nodes)
    shown: dict[str, Any] = yaml.safe_load(
        replace(cluster, nodes=nodes, start=DEFAULT_START).to_yaml()
    )
    return shown


def _figures(
    step: SimulatedStep, best: SimulatedConfig, relaxed: Sequence[WhatIf] = ()
) -> SearchResult:
    """Return the figures of a simulated step, without those that only a search has."""
    cluster, estimate = step.evaluator.cluster, step.estimate
    price = sum(
        node.copies * sum(device.price_per_hour for device in node.devices)
        for node in cluster.nodes
    )
    return SearchResult(
        cluster=ClusterSummary(
            name=cluster.name,
            fingerprint=cluster.fingerprint,
            num_ranks=cluster.num_ranks,
            price_per_hour=price,
        ),
        batch=batch_size(step.graph, estimate.rows),
        best=best,
        binding=binding(estimate, relaxed),
        step=estimate.timeline.times,
        memory=tuple(memory_figures(use, over_time=True) for use in estimate.memory),
    )


def batch_size(graph: Graph, rows: int) -> BatchSize:
    """Return the samples of a batch, and its tokens if an input is a matrix of integers."""
    for source in graph.inputs:
        kind = graph.values[source.value]
        integers = not (kind.dtype.is_floating_point or kind.dtype.is_complex)
        if integers and len(kind.shape) == 2 and kind.shape[0] == rows and kind.shape[1] > 1:
            return BatchSize(rows=rows, tokens=rows * kind.shape[1])
    return BatchSize(rows=rows)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best and its runners-up, without any that takes as long and as much memory."""
    ranked: list[Candidate] = []
    for candidate in candidates:
        if len(ranked) > RUNNERS_UP:
            break
        time, peak = candidate.estimate.step_time_s, candidate.estimate.peak.peak_bytes
        if not any(
            isclose(time, other.step_time_s, rel_tol=SAME)
            and peak >= other.peak.peak_bytes * (1 - SAME)
            for other in (better.estimate for better in ranked)
        ):
            ranked.append(candidate)
    return ranked


def described(
    estimate: Estimate, what: str, config: ParallelConfig | None = None
) -> SimulatedConfig:
    """Return the figures of a simulated configuration."""
    return SimulatedConfig(
        what=what,
        config=config,
        step_time_s=estimate.step_time_s,
        bubble_fraction=estimate.timeline.bubble_fraction,
        causes=dict(estimate.timeline.causes),
        memory=memory_figures(peak_of(estimate.memory)),
        rows=estimate.rows,
    )


def binding(estimate: Estimate, relaxed: Sequence[WhatIf]) -> Binding:
    """Return the limit of the plan: memory or options if relaxing them helps, else a cause."""
    for kind in ("memory", "options", "constraints"):
        for row in relaxed:
            if row.kind == kind and row.ratio is not None and row.ratio < 1 - MIN_BINDING_GAIN:
                text = f"{row.change}: -{1 - row.ratio:.1%} step time"
                return Binding(what=kind, text=text)
    causes = estimate.timeline.causes
    largest = max(causes, key=lambda name: causes[name])
    share = causes[largest] / estimate.step_time_s if estimate.step_time_s else 0.0
    return Binding(what=largest, text=f"{CAUSES[largest]}: {share:.0%} of the step")


# ------------------------------------------------------------ layers
def by_layer(step: SimulatedStep) -> Iterator[LayerFigures]:
    """Yield the seconds of a step and the bytes of every unit on a rank."""
    execution, estimate = step.execution, step.estimate
    for stage in estimate.stages:
        layers = step.evaluator.group_layers(step.workloads, execution, stage.group)[0]
        saved = layers.at_positions("saved" + execution.recompute_suffix)
        members = [s for s in estimate.stages if s.group == stage.group]
        total = sum(layers.num_trained(u.first, u.end, execution) for s in members for u in s.units)
        parts = estimate.memory[stage.group].parts
        state = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
        for unit in stage.units:
            numel = layers.num_trained(unit.first, unit.end, execution)
            communication = unit.forward_comm + unit.backward_comm
            yield LayerFigures(
                name=unit.name or outside(step, unit.first, unit.end),
                stage=stage.index,
                forward_s=unit.forward * execution.num_microbatches,
                backward_s=unit.backward * execution.num_microbatches,
                communication_s=communication * execution.num_microbatches,
                parameters=numel,
                state_bytes=state * numel / total if total else 0.0,
                activation_bytes=float(saved[unit.first : unit.end].sum()),
            )


def outside(step: SimulatedStep, first: int, end: int) -> str:
    """Return a name for a unit outside of all blocks: its modules, preferably with parameters."""
    places = step.fold.places[first:end]
    modules = list(dict.fromkeys(place.rpartition(".")[0] for place in places))
    owners = {p.name.rpartition(".")[0] for p in step.graph.parameters}
    named = [m for m in modules if m in owners and m] or [m for m in modules if m]
    more = f", {len(named) - 2} more" if len(named) > 2 else ""
    return ", ".join(named[:2]) + more if named else f"({step.graph.name})"


def merged(rows: Iterable[LayerFigures]) -> tuple[LayerFigures, ...]:
    """Join rows of a stage with equal figures whose modules differ only in a number."""
    joined: list[LayerFigures] = []
    by_glob: dict[object, list[int]] = {}
    for row in rows:
        similar = by_glob.setdefault((row.stage, block_glob(f"{row.name}.")), [])
        first = next((at for at in similar if _equal(joined[at], row)), None)
        if first is None:
            similar.append(len(joined))
            joined.append(row)
        else:
            joined[first] = replace(joined[first], count=joined[first].count + 1, last=row.name)
    return tuple(joined)


def _equal(one: LayerFigures, other: LayerFigures) -> bool:
    figures = [name for name in LayerFigures.__slots__ if name not in ("name", "count", "last")]
    return all(
        isclose(getattr(one, name), getattr(other, name), rel_tol=SAME, abs_tol=1e-15)
        for name in figures
    )
