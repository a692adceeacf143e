"""`plan(graph, cluster)`: search for the fastest plan of a model on a cluster.

The plan's `search` explains the choice: its estimate, the runners-up, the gaps, the limiting factor
and the gain from relaxing it.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, Unpack

from shardwise.cluster import Cluster, Mesh
from shardwise.cost import OpTable
from shardwise.cost.selection import chooser
from shardwise.errors import InfeasiblePlan, PlanError, ShardwiseError
from shardwise.ir import Graph
from shardwise.layouts.tie_layers import tie_layers
from shardwise.planner.device_groups import Grouping, groupings, left_out, subsets
from shardwise.planner.extra_axes import faster_with_extra_axes, has_extra_axes, num_rows
from shardwise.planner.figures import search_result, simulated_step, with_details
from shardwise.planner.infeasible import infeasible
from shardwise.planner.layout_cache import FASTEST, LEAN, LEANEST, MIXED, LayoutCache
from shardwise.planner.local_search import improved
from shardwise.planner.options import Constraints, FixedOptions, known_options
from shardwise.planner.search import SIMPLER_SLACK, Search, SearchOutcome, simplest
from shardwise.planner.search_space import (
    ZERO_LEVELS,
    FixedPlacements,
    SearchLimits,
    UserOptions,
    configs,
    divisors,
    fixed_parameters,
    fixed_syncs,
    min_tensor_ranks,
    restrictions,
    with_user_syncs,
)
from shardwise.planner.strategies.experts import expert_parameters
from shardwise.planner.strategies.make import batch_inputs
from shardwise.planner.strategies.sequence import attentions
from shardwise.planner.sync_choice import allowed_forms, with_syncs
from shardwise.planner.what_if import Rerun
from shardwise.planner.write import in_captured_names, with_choices, write_plan
from shardwise.plans import Plan, Precision, Sync, model_fingerprint
from shardwise.plans.execution import check_types
from shardwise.plans.search_result import LeftOutDevices, ParallelConfig
from shardwise.program.pipeline import check_micro_batches
from shardwise.sharding.factors import analyze
from shardwise.sharding.placements import Placement
from shardwise.simulation.costs import Group
from shardwise.simulation.estimate import Evaluator, in_parts
from shardwise.simulation.folded_graph import FoldedGraph

MAX_MIXED_RANKS = 16  # with more ranks, all nodes shard the batch over "dp"
TINY_GRAPH = 16  # nodes; in a larger graph equal layers have equal layouts
MAX_MODULE_STAGES = 16  # of a model without blocks
SMALL_CLUSTER = 8  # ranks; in a larger cluster tensor parallelism stays inside a node
PROGRESS_AFTER_S = 2.0
NOTHING = SearchOutcome(feasible=(), bounds=(), next_bound_s=math.inf, num_configs=0)


@known_options("sw.plan")
def plan(
    graph: Graph,
    cluster: Cluster,
    *,
    constraints: Constraints | None = None,
    allowed_syncs: Mapping[str, Sync | Sequence[Sync]] | None = None,
    memory_gib: float | None = None,
    precision: str | Precision | None = None,
    table: OpTable | None = None,
    progress: bool = True,
    all_devices: bool = False,
    **options: Unpack[FixedOptions],
) -> Plan:
    """Return the plan with the shortest simulated step that fits in memory.

    Of all plans within 1 % of it, the simplest is chosen. Devices that would make the step longer
    are left out, so the plan may be for fewer ranks; `all_devices` uses all of them.

    `constraints` maps globs of parameters to a sharding ("0", "replicate") or to shardings by mesh
    axis. `allowed_syncs` maps globs to one or several `Sync`, inexact ones too, that may be used if
    they make the step shorter; without it, the planner chooses exact ones only. Options fix parts
    of the plan: `dp`, `ep`, `cp`, `tp`, `pp`, `virtual_stages`, `schedule`, `num_microbatches`,
    `zero`, `recompute`, `offload`. `memory_gib` limits the memory of each device. Raises
    `InfeasiblePlan`, with figures and the smallest changes that help, if nothing fits.
    """
    fixed = UserOptions.of(dict(options))
    _check_memory(memory_gib)
    placements = fixed_parameters(graph, constraints)
    dtypes = Precision.of(precision)
    check_types(graph, dtypes)
    with show_progress("planning", shown=progress) as report:

        def prepare(run: Graph, constrained: FixedPlacements, devices: Cluster) -> Search:
            return _prepare(run, devices, constrained, memory_gib, dtypes, table, report)

        def search_graph(
            devices: Cluster, below: float, run: Graph, than: SearchOutcome | None = None
        ) -> _Searched:
            """Search for steps that may take less than `below` seconds.

            `than` is the outcome with several micro-batches: if it is passed, only faster steps
            with a single micro-batch are searched for.
            """
            search = prepare(run, placements, devices)
            limits = _limits(search, run, devices, fixed)
            minimum = min_tensor_ranks(placements, fixed, devices.num_ranks)
            limits = replace(limits, min_tensor_ranks=minimum)
            _check_options(fixed, devices, limits.rows)
            if than is not None:
                limits = replace(limits, num_microbatches=1)
                below = min(below, than.step_time_s)
            if below < math.inf and not any(
                search.may_fit(config, below) for config in configs(limits, fixed)
            ):
                return _Searched(run, search, limits, NOTHING)
            return _Searched(run, search, limits, _run(search, limits, fixed))

        def fastest(devices: Cluster, below: float = math.inf) -> _Searched:
            return _faster_graph(graph, fixed, partial(search_graph, devices, below))

        extra = partial(
            faster_with_extra_axes,
            graph,
            cluster,
            fixed,
            constraints=constraints,
            memory_gib=memory_gib,
            precision=dtypes,
            table=table,
        )
        if (fixed.ep or 1) * (fixed.cp or 1) > 1:
            _check_options(fixed, cluster, num_rows(graph))
            return _only_with_extra_axes(extra, graph, cluster, fixed)
        chosen, idle = fastest(cluster), None
        if not all_devices:
            chosen, idle = _without_slow_devices(chosen, cluster, fastest)
        run, search, limits, outcome = chosen

        def unconstrained() -> SearchOutcome:
            wider = replace(limits, min_tensor_ranks=1)
            return _run(prepare(run, {}, search.evaluator.cluster), wider, fixed)

        rerun = Rerun(
            options=partial(_run, search, limits), constraints=unconstrained if placements else None
        )
        if has_extra_axes(graph, fixed) and (better := extra(outcome)) is not None:
            return better
        if not outcome.feasible:
            raise infeasible(outcome, search, fixed, limits, rerun)
        given = restrictions(fixed, memory_gib, constraints)
        required = fixed_syncs(search.fold.graph, constraints)
        allowed = [*allowed_forms(run, search, allowed_syncs)]
        outcome, reasons = with_syncs(outcome, search, required, allowed)
        figures = search_result(outcome, search, fixed, given, rerun, idle)
        best = in_captured_names(write_plan(run, search.fold, outcome.best, dtypes), run, graph)
        best = with_user_syncs(best, constraints).with_(notes=(*best.notes, *reasons))
        best = with_choices(best, search.evaluator.costs.choose)
        step = simulated_step(outcome.best, search)
        return with_details(best.with_figures(figures), step)


def _only_with_extra_axes(
    extra: Callable[[SearchOutcome], Plan | None],
    graph: Graph,
    cluster: Cluster,
    options: UserOptions,
) -> Plan:
    """Return the fastest plan with the user's numbers of ranks along `ep` and `cp`."""
    best = extra(NOTHING)
    if best is None:
        sizes = {a: n for a in ("ep", "cp") if (n := getattr(options, a)) not in (None, 1)}
        text = ", ".join(f"{axis}={n}" for axis, n in sizes.items())
        count = max(expert_parameters(graph).values(), default=0)
        length = max((a.queries for a in attentions(graph)), default=0)
        raise InfeasiblePlan(
            f"{text}: no plan on the {cluster.num_ranks} ranks of {cluster.name} divides the "
            f"{count} experts or {length} positions of {graph.name} like this and fits in memory",
            hint=f"other sizes, or leave {' and '.join(sizes)} to the planner",
        )
    return best


class _Searched(NamedTuple):
    """The search of a graph, which is the captured one or the one that micro-batches run."""

    run: Graph
    search: Search
    limits: SearchLimits
    outcome: SearchOutcome


def _faster_graph(
    graph: Graph, options: UserOptions, search_graph: Callable[..., _Searched]
) -> _Searched:
    """Search the graph, and that of micro-batches if it differs; return the faster of both."""
    split, count = in_parts(graph), options.num_microbatches
    if split is graph or count == 1:
        return search_graph(graph)
    several = search_graph(split)
    if count is not None:
        return several
    single = search_graph(graph, several.outcome)
    if not (single.outcome.feasible and several.outcome.feasible):
        return single if single.outcome.feasible else several
    faster = several.outcome.step_time_s * (1 + SIMPLER_SLACK) < single.outcome.step_time_s
    return several if faster and several.outcome.best.config.num_microbatches > 1 else single


def _without_slow_devices(
    full: _Searched, cluster: Cluster, fastest: Callable[[Cluster, float], _Searched]
) -> tuple[_Searched, LeftOutDevices | None]:
    """Search on fewer devices; all are used only if that saves `SIMPLER_SLACK` of the step."""
    best, used, shortest = full, None, full.outcome.step_time_s
    layouts, evaluator = full.search.cache, full.search.evaluator
    if len(evaluator.devices) == 1 and not full.outcome.feasible:
        return full, None
    rates = _rates(layouts, evaluator)
    one_device_s = min(_seconds(layouts, evaluator, layouts.rows))
    rest_s = 0.0  # in a node of equal devices, communication grows at most with their number
    if len(evaluator.devices) == 1 and cluster.nodes[0].count == cluster.num_ranks:
        rest_s = (shortest - one_device_s / sum(rates)) / cluster.num_ranks
    for smaller in subsets(cluster, rates):
        limit = shortest * (1 + SIMPLER_SLACK)
        count = len(smaller.ranks)
        bound_s = one_device_s / sum(rates[rank] for rank in smaller.ranks)
        if bound_s + rest_s * (count if count > 1 else 0) > limit:
            continue
        try:
            other = fastest(smaller.cluster, limit)
        except InfeasiblePlan:  # the user's options require more ranks
            continue
        if other.outcome.step_time_s < limit:
            best, used = other, smaller
            shortest = min(shortest, other.outcome.step_time_s)
    if used is None:
        return full, None
    seconds = full.outcome.step_time_s if full.outcome.feasible else None
    return best, left_out(cluster, used, seconds)


def _check_memory(memory_gib: Any) -> None:
    is_number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
    if memory_gib is not None and not (is_number and 0 < memory_gib < math.inf):
        raise PlanError(f"memory_gib={memory_gib!r}", hint="a number above 0: memory_gib=70")


def _prepare(
    graph: Graph,
    cluster: Cluster,
    constrained: FixedPlacements,
    memory_gib: float | None,
    precision: Precision,
    table: OpTable | None,
    report: Callable[[str], None],
) -> Search:
    tiny = len(graph.nodes) <= TINY_GRAPH
    key = lambda path, nodes: path if tiny else _constraint_key(path, constrained, graph)  # noqa: E731
    fold = FoldedGraph.of(graph, constraint_key=key)
    limit = math.inf if memory_gib is None else memory_gib * 2**30
    evaluator = Evaluator(fold, cluster, table, chooser(cluster), limit)
    values = {p.value for p in fold.graph.parameters}
    layouts = LayoutCache(
        fold,
        analyze(fold.graph),
        evaluator,
        {value: placements for value, placements in constrained.items() if value in values},
        tie_layers(fold, graph, key),
        report,
    )
    rates = _rates(layouts, evaluator)

    @cache
    def groups(pp: int) -> list[Grouping]:
        return groupings(cluster.num_ranks, rates, [int(k) for k in evaluator.kind], pp)

    return Search(graph, layouts, evaluator, groups, precision, report)


def _run(search: Search, limits: SearchLimits, options: UserOptions) -> SearchOutcome:
    """Search all configurations, with lean layouts if memory limits, offload if nothing fits."""
    space = list(configs(limits, options))
    space += [replace(config, layout=MIXED) for config in space if _may_mix(config, limits)]
    outcome, tried = search.run(space), space
    if outcome.limited_by_memory:
        tried = [*tried, *_leaner(search, space, outcome, LEAN)]
        outcome = search.run(tried)
    if not outcome.feasible:
        on_host = configs(limits, options, offloads=True) if options.offload is None else ()
        outcome = search.run([*tried, *_leaner(search, space, outcome, LEANEST), *on_host])
    if options.zero is None:
        outcome = search.refined(outcome, ZERO_LEVELS)
    return simplest(search, improved(search, outcome, space), space)


def _leaner(
    search: Search, space: Sequence[ParallelConfig], outcome: SearchOutcome, layout: int
) -> Iterator[ParallelConfig]:
    """Yield configurations that may be faster than the best one, with layouts that save memory."""
    for config in space:
        solved = config.tp > 1 and config.layout == FASTEST
        if solved and search.may_beat(config, outcome.step_time_s):
            yield replace(config, layout=layout)


def _may_mix(config: ParallelConfig, limits: SearchLimits) -> bool:
    """Return whether tensor-parallel ranks may also shard the batch, node by node.

    With many ranks, "dp" does that for all nodes, and layouts are solved for one row.
    """
    is_small = limits.ranks <= MAX_MIXED_RANKS and config.pp == config.num_microbatches == 1
    return config.tp > 1 and is_small and limits.rows % (config.dp * config.tp) == 0


def _limits(search: Search, graph: Graph, cluster: Cluster, options: UserOptions) -> SearchLimits:
    """Return the limits of the search space.

    There are at most as many stages as blocks, or as modules with parameters if there are few
    blocks, unless the user asks for more; tensor parallelism stays inside a node; the batch is not
    split into micro-batches if that would change the result.
    """
    blocks = len({block for block in search.fold.blocks if block})
    modules = min(len({p.name.rpartition(".")[0] for p in graph.parameters}), MAX_MODULE_STAGES)
    places = len(search.cutter.fit) + 1 if len(graph.nodes) <= TINY_GRAPH else 0
    requested = (options.pp or 1) * (options.virtual_stages or 1)
    sharded = any(dim is not None for dim in search.cache.inputs.values())
    node = max(node.count for node in cluster.nodes)
    return SearchLimits(
        ranks=cluster.num_ranks,
        rows=search.cache.rows if sharded else 1,
        stages=max(blocks, modules, places, requested),
        virtual_stages=max(blocks if blocks > 1 else modules, requested),
        num_microbatches=search.cache.rows if _may_split(graph) else 1,
        tensor_ranks=max(node, min(cluster.num_ranks, SMALL_CLUSTER)),
    )


def _may_split(graph: Graph) -> bool:
    """Return whether micro-batches give the same result, which batch norm prevents."""
    draft = Plan(
        name="draft",
        model=graph.name,
        fingerprint=model_fingerprint(graph),
        mesh=Mesh(),
        roles={},
        inputs=batch_inputs(graph, None),
        num_microbatches=2,
    )
    try:
        check_micro_batches(graph, draft)
    except ShardwiseError:
        return False
    return True


def _rates(layouts: LayoutCache, evaluator: Evaluator) -> list[float]:
    """Return the speed at which every rank computes this model, relative to the fastest."""
    if len(evaluator.devices) == 1:
        return [1.0] * len(evaluator.kind)
    seconds = _seconds(layouts, evaluator, layouts.rows // len(evaluator.kind))
    return [min(seconds) / seconds[kind] for kind in evaluator.kind]


def _seconds(layouts: LayoutCache, evaluator: Evaluator, rows: int) -> list[float]:
    """Return the time in which one device of every kind computes `rows` rows, at least one."""
    work = layouts.get(1, FASTEST).workloads.at(max(1, rows))
    times = [
        evaluator.costs.node_times(work, device, Group(mesh=Mesh(), ranks=(0,)))
        for device in evaluator.devices
    ]
    return [float(((t.forward + t.backward) * evaluator.fold.copies).sum()) for t in times]


def _constraint_key(path: str, fixed: Mapping[str, Mapping[str, Placement]], graph: Graph) -> str:
    """Return the key of a block's constraints; blocks with different keys are not folded."""
    if not fixed:
        return ""
    of_block = {
        p.name.removeprefix(f"{path}."): {a: str(c) for a, c in fixed[p.value].items()}
        for p in graph.parameters
        if p.value in fixed and p.name.startswith(f"{path}.")
    }
    return str(sorted(of_block.items())) if of_block else ""


def _check_options(options: UserOptions, cluster: Cluster, rows: int) -> None:
    """Raise `InfeasiblePlan` if the sizes do not divide the ranks or the batch."""
    total = cluster.num_ranks
    sizes = {a: n for a in ("dp", "ep", "cp", "tp", "pp") if (n := getattr(options, a)) is not None}
    for axis, size in sizes.items():
        if size < 1 or total % size:
            raise InfeasiblePlan(
                f"{axis}={size} does not divide the {total} ranks of {cluster.name}",
                hint=f"{axis}={max(d for d in divisors(total) if d <= max(size, 1))}",
            )
    product, num_open = math.prod(sizes.values()), 3 - len(sizes.keys() & {"dp", "tp", "pp"})
    text = " x ".join(f"{a}={n}" for a, n in sizes.items())
    if total % product or (not num_open and product != total):
        raise InfeasiblePlan(
            f"{text} = {product} ranks, {cluster.name} has {total}", hint="leave one of them out"
        )
    parts = {axis: n for axis, n in sizes.items() if axis in ("dp", "ep")}
    if math.prod(parts.values()) > rows:
        text = " x ".join(f"{a}={n}" for a, n in parts.items())
        fewer = {axis: min(n, rows) for axis, n in parts.items()}
        raise InfeasiblePlan(
            f"{text}, the batch has {rows} rows",
            hint=" or ".join(f"{a}={n}" for a, n in fewer.items()),
        )
    if options.num_microbatches is not None and options.num_microbatches > rows:
        raise InfeasiblePlan(
            f"num_microbatches={options.num_microbatches}, the batch has {rows} rows",
            hint=f"num_microbatches={rows}",
        )
    third = total // product if num_open == 1 else 1  # the size of the remaining axis
    dp, count = options.dp or third, options.num_microbatches
    if count is not None and dp * count > rows:
        raise InfeasiblePlan(
            f"num_microbatches={count} needs {dp * count} rows, one of each micro-batch for each "
            f"of dp={dp}; the batch has {rows}",
            hint=f"num_microbatches={rows // dp}" if dp <= rows else "more tp or pp",
        )


@contextmanager
def show_progress(title: str, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done, on the terminal of rank 0 after a while."""
    shown = shown and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    began, status = time.monotonic(), None
    with ExitStack() as stack:

        def report(text: str) -> None:
            nonlocal status
            passed = time.monotonic() - began
            if not shown or passed < PROGRESS_AFTER_S:
                return
            from rich.console import Console
            from rich.status import Status

            if status is None:
                status = stack.enter_context(Status("", console=Console(stderr=True)))
            status.update(f"{title}: {text} ({passed:.0f} s)")

        yield report
