"""`plan(graph, cluster)`: search for the fastest plan of a model on a cluster.

The plan's `search` says why it was chosen: its estimate, the runners-up, the gaps, what limits it
and what relaxing that would gain.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import TracebackType
from typing import Any, NamedTuple, Unpack

from shardwise.cluster import Cluster, Mesh
from shardwise.cost import OpTable
from shardwise.cost.selection import chooser
from shardwise.errors import InfeasiblePlan, PlanError, ShardwiseError
from shardwise.ir import Graph
from shardwise.layouts.tie_layers import tie_layers
from shardwise.planner.device_groups import Grouping, groupings, left_out, subsets
from shardwise.planner.figures import search_result, simulated_step, with_details
from shardwise.planner.infeasible import infeasible
from shardwise.planner.layout_cache import FASTEST, LEAN, LEANEST, MIXED, LayoutCache
from shardwise.planner.local_search import improved
from shardwise.planner.options import Constraints, FixedOptions, known_options
from shardwise.planner.search import SIMPLER_SLACK, Search, SearchOutcome, simplest
from shardwise.planner.search_space import (
    FixedPlacements,
    SearchLimits,
    UserOptions,
    as_texts,
    configs,
    divisors,
    fixed_parameters,
    min_tensor_ranks,
)
from shardwise.planner.strategies.make import batch_inputs
from shardwise.planner.what_if import Rerun
from shardwise.planner.write import in_captured_names, with_choices, write_plan
from shardwise.plans import Plan, Precision, model_fingerprint
from shardwise.plans.execution import check_types
from shardwise.plans.search_result import LeftOutDevices, ParallelConfig
from shardwise.program.pipeline import check_micro_batches
from shardwise.sharding.factors import analyze
from shardwise.sharding.placements import Placement
from shardwise.simulation.costs import Group
from shardwise.simulation.estimate import Evaluator, in_parts
from shardwise.simulation.folded_graph import FoldedGraph

MAX_MIXED_RANKS = 16  # up to which nodes may differ in whether they shard the batch
TINY_GRAPH = 16  # nodes up to which equal layers may have different layouts
ZERO_LEVELS = (0, 1, 2, 3)
MAX_MODULE_STAGES = 16  # of a model without blocks
SMALL_CLUSTER = 8  # ranks up to which tensor parallelism may also cross nodes
NOTHING = SearchOutcome(feasible=(), bounds=(), next_bound_s=math.inf, num_configs=0)


@known_options("sw.plan")
def plan(
    graph: Graph,
    cluster: Cluster,
    *,
    constraints: Constraints | None = None,
    memory_gib: float | None = None,
    precision: str | Precision | None = None,
    table: OpTable | None = None,
    progress: bool = True,
    all_devices: bool = False,
    **options: Unpack[FixedOptions],
) -> Plan:
    """Return the plan with the shortest simulated step that fits in memory.

    Of plans within 1 % of it, the simplest. Devices that would make the step longer are left out,
    unless `all_devices`: the plan is then for fewer ranks, and says so.

    `constraints` maps globs of parameters to a sharding ("0", "replicate") or to shardings by mesh
    axis. Options fix parts of the plan: `dp`, `tp`, `pp`, `virtual_stages`, `schedule`,
    `num_microbatches`, `zero`, `recompute`, `offload`. `memory_gib` is what a plan may use of each
    device. Raises `InfeasiblePlan`, with figures and the nearest changes, where nothing fits.
    """
    fixed = UserOptions.of(dict(options))
    _check_memory(memory_gib)
    placements = fixed_parameters(graph, constraints)
    dtypes = Precision.of(precision)
    check_types(graph, dtypes)
    with Progress("planning", shown=progress) as bar:

        def prepare(run: Graph, constrained: FixedPlacements, devices: Cluster) -> Search:
            return _prepare(run, devices, constrained, memory_gib, dtypes, table, bar.update)

        def search_graph(
            devices: Cluster, below: float, run: Graph, than: SearchOutcome | None = None
        ) -> _Searched:
            """Search for steps that may take less than `below` seconds.

            With `than`, which has several micro-batches, only for faster ones with a single one.
            """
            search = prepare(run, placements, devices)
            limits = _limits(search, run, devices, fixed)
            minimum = min_tensor_ranks(placements, fixed, devices.num_ranks)
            limits = replace(limits, min_tensor_ranks=minimum)
            _check_options(fixed, devices, limits)
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

        chosen, idle = fastest(cluster), None
        if not all_devices:
            chosen, idle = _without_slow_devices(chosen, cluster, fastest)
        run, search, limits, outcome = chosen

        def unconstrained() -> SearchOutcome:
            wider = replace(limits, min_tensor_ranks=1)
            return _run(prepare(run, {}, search.evaluator.cluster), wider, fixed)

        rerun = Rerun(
            options=partial(_run, search, limits),
            constraints=unconstrained if placements else None,
        )
        if not outcome.feasible:
            raise infeasible(outcome, search, fixed, limits, rerun)
        given = {"memory_gib": memory_gib, "constraints": as_texts(constraints) or None}
        given = {k: v for k, v in {**fixed.given, **given}.items() if v is not None}
        figures = search_result(outcome, search, fixed, given, rerun, idle)
        made = write_plan(run, search.fold, outcome.best, dtypes)
        made = with_choices(in_captured_names(made, run, graph), search.evaluator.costs.choose)
        step = simulated_step(outcome.best, search)
        return with_details(made.with_figures(figures), step, search.memory_limit)


class _Searched(NamedTuple):
    """The search of a graph: as it was captured, or as micro-batches run it."""

    run: Graph
    search: Search
    limits: SearchLimits
    outcome: SearchOutcome


def _faster_graph(
    graph: Graph, options: UserOptions, search_graph: Callable[..., _Searched]
) -> _Searched:
    """Search the graph; where micro-batches compute another one, return the faster of both."""
    parts, asked = in_parts(graph), options.num_microbatches
    if parts is graph or asked == 1:
        return search_graph(graph)
    several = search_graph(parts)
    if asked is not None:
        return several
    single = search_graph(graph, several.outcome)
    if not (single.outcome.feasible and several.outcome.feasible):
        return single if single.outcome.feasible else several
    faster = several.outcome.step_time_s * (1 + SIMPLER_SLACK) < single.outcome.step_time_s
    return several if faster and several.outcome.best.config.num_microbatches > 1 else single


def _without_slow_devices(
    full: _Searched, cluster: Cluster, fastest: Callable[[Cluster, float], _Searched]
) -> tuple[_Searched, LeftOutDevices | None]:
    """Search on fewer devices; all are used only if they save `SIMPLER_SLACK` of the step."""
    best, used, shortest = full, None, full.outcome.step_time_s
    for smaller in subsets(cluster, _rates(full.search.cache, full.search.evaluator)):
        limit = shortest * (1 + SIMPLER_SLACK)
        try:
            other = fastest(smaller.cluster, limit)
        except InfeasiblePlan:  # the user's options need more ranks
            continue
        if other.outcome.step_time_s < limit:
            best, used = other, smaller
            shortest = min(shortest, other.outcome.step_time_s)
    if used is None:
        return full, None
    seconds = full.outcome.step_time_s if full.outcome.feasible else None
    return best, left_out(cluster, used, seconds)


def _check_memory(memory_gib: Any) -> None:
    number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
    if memory_gib is not None and not (number and 0 < memory_gib < math.inf):
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
    evaluator = Evaluator(fold, cluster, table, chooser(cluster))
    values = {p.value for p in fold.graph.parameters}
    limit = memory_gib * 2**30 if memory_gib is not None else None
    layouts = LayoutCache(
        fold,
        analyze(fold.graph),
        evaluator,
        {value: placements for value, placements in constrained.items() if value in values},
        tie_layers(fold, graph, key),
        limit,
        report,
    )
    rates = _rates(layouts, evaluator)

    @cache
    def groups(pp: int) -> list[Grouping]:
        return groupings(cluster.num_ranks, rates, [int(k) for k in evaluator.kind], pp)

    return Search(graph, layouts, evaluator, groups, precision, limit, report)


def _run(search: Search, limits: SearchLimits, options: UserOptions) -> SearchOutcome:
    """Search all configurations; lean layouts where memory limits, offload where nothing fits."""
    wanted = list(configs(limits, options))
    wanted += [replace(config, layout=MIXED) for config in wanted if _may_mix(config, limits)]
    outcome, tried = search.run(wanted), wanted
    if outcome.limited_by_memory:
        tried = [*tried, *_leaner(search, wanted, outcome, LEAN)]
        outcome = search.run(tried)
    if not outcome.feasible:
        on_host = configs(limits, options, offloads=True) if options.offload is None else ()
        outcome = search.run([*tried, *_leaner(search, wanted, outcome, LEANEST), *on_host])
    if options.zero is None:
        outcome = search.refined(outcome, ZERO_LEVELS)
    return simplest(search, improved(search, outcome, wanted), wanted)


def _leaner(
    search: Search, wanted: Sequence[ParallelConfig], outcome: SearchOutcome, layout: int
) -> Iterator[ParallelConfig]:
    """Yield configurations that may be faster than the best one, with layouts that save memory."""
    for config in wanted:
        solved = config.tp > 1 and config.layout == FASTEST
        if solved and search.may_beat(config, outcome.step_time_s):
            yield replace(config, layout=layout)


def _may_mix(config: ParallelConfig, limits: SearchLimits) -> bool:
    """Return whether tensor-parallel ranks may also shard the batch, node by node.

    With many ranks, "dp" does that for all nodes, and layouts are solved for one row.
    """
    each, rest = divmod(limits.rows, config.dp * config.tp)
    few = limits.ranks <= MAX_MIXED_RANKS and config.pp == config.num_microbatches == 1
    return config.tp > 1 and few and each > 0 and rest == 0


def _limits(search: Search, graph: Graph, cluster: Cluster, options: UserOptions) -> SearchLimits:
    """Return the limits of the search space.

    There are at most as many stages as blocks, or as modules with parameters where blocks are few,
    unless the user asks for more; tensor parallelism stays inside a node; there is one micro-batch
    where more would change the result.
    """
    blocks = len({block for block in search.fold.blocks if block})
    modules = min(len({p.name.rpartition(".")[0] for p in graph.parameters}), MAX_MODULE_STAGES)
    places = len(search.cutter.fit) + 1 if len(graph.nodes) <= TINY_GRAPH else 0
    asked = (options.pp or 1) * (options.virtual_stages or 1)
    sharded = any(dim is not None for dim in search.cache.inputs.values())
    node = max(node.count for node in cluster.nodes)
    return SearchLimits(
        ranks=cluster.num_ranks,
        rows=search.cache.rows if sharded else 1,
        stages=max(blocks, modules, places, asked),
        virtual_stages=max(blocks if blocks > 1 else modules, asked),
        num_microbatches=search.cache.rows if _may_split(graph) else 1,
        tensor_ranks=max(node, min(cluster.num_ranks, SMALL_CLUSTER)),
    )


def _may_split(graph: Graph) -> bool:
    """Return whether a batch may be split into micro-batches, unlike with batch norm."""
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
    """Return how fast every rank computes this model, relative to the fastest."""
    if len(evaluator.devices) == 1:
        return [1.0] * len(evaluator.kind)
    workloads = layouts.get(1, FASTEST).workloads
    one_rank = Group(mesh=Mesh(), ranks=(0,))
    seconds = []
    for device in evaluator.devices:
        work = workloads.at(max(1, workloads.rows // len(evaluator.kind)))
        times = evaluator.costs.node_times(work, device, one_rank)
        seconds.append(float((times.forward + times.backward).sum()))
    return [min(seconds) / seconds[kind] for kind in evaluator.kind]


def _constraint_key(path: str, fixed: Mapping[str, Mapping[str, Placement]], graph: Graph) -> str:
    """Return the key of the constraints on a block; blocks with other keys are not folded."""
    if not fixed:
        return ""
    own = {
        p.name.removeprefix(f"{path}."): {a: str(c) for a, c in fixed[p.value].items()}
        for p in graph.parameters
        if p.value in fixed and p.name.startswith(f"{path}.")
    }
    return str(sorted(own.items())) if own else ""


def _check_options(options: UserOptions, cluster: Cluster, limits: SearchLimits) -> None:
    """Raise `InfeasiblePlan` where the sizes do not divide the ranks or the batch."""
    total, rows = cluster.num_ranks, limits.rows
    sizes = {a: n for a in ("dp", "tp", "pp") if (n := getattr(options, a)) is not None}
    for axis, size in sizes.items():
        if size < 1 or total % size:
            raise InfeasiblePlan(
                f"{axis}={size} does not divide the {total} ranks of {cluster.name}",
                hint=f"{axis}={max(d for d in divisors(total) if d <= max(size, 1))}",
            )
    product = math.prod(sizes.values())
    if total % product or (len(sizes) == 3 and product != total):
        text = " x ".join(f"{a}={n}" for a, n in sizes.items())
        raise InfeasiblePlan(
            f"{text} = {product} ranks, {cluster.name} has {total}", hint="leave one of them out"
        )
    if options.dp is not None and options.dp > rows:
        raise InfeasiblePlan(f"dp={options.dp}, the batch has {rows} rows", hint=f"dp={rows}")
    if options.num_microbatches is not None and options.num_microbatches > rows:
        raise InfeasiblePlan(
            f"num_microbatches={options.num_microbatches}, the batch has {rows} rows",
            hint=f"num_microbatches={rows}",
        )
    rest = total // product if len(sizes) == 2 else 1  # the size of the third axis
    dp, count = options.dp or rest, options.num_microbatches
    if count is not None and dp * count > rows:
        per = f"one of each micro-batch for each of dp={dp}"
        raise InfeasiblePlan(
            f"num_microbatches={count} needs {dp * count} rows, {per}; the batch has {rows}",
            hint=f"num_microbatches={rows // dp}" if dp <= rows else "more tp or pp",
        )


# ------------------------------------------------------------ progress


AFTER_S = 2.0


class Progress:
    """`with Progress("planning") as bar: bar.update("layouts for tp=4")`."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        first = os.environ.get("RANK", "0") == "0"
        self.title, self.shown = title, shown and first and sys.stderr.isatty()
        self.begun = time.monotonic()
        self._status: object = None

    def __enter__(self) -> Progress:
        return self

    def update(self, text: str) -> None:
        """Show what is being done."""
        if not self.shown or time.monotonic() - self.begun < AFTER_S:
            return
        from rich.console import Console
        from rich.status import Status

        if self._status is None:
            self._status = Status("", console=Console(stderr=True))
            self._status.start()
        passed = time.monotonic() - self.begun
        self._status.update(f"{self.title}: {text} ({passed:.0f} s)")  # type: ignore[attr-defined]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()  # type: ignore[attr-defined]
