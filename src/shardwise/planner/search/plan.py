"""`plan(graph, cluster)`: the best plan for this model on these machines.

Enters: a `Graph`, a `Cluster`, and what the user wants fixed. Leaves: a `Plan` whose `search` says
why: its estimate, the runners-up, the gaps, what limits it and what relaxing that would buy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

from shardwise.cluster import Cluster, Mesh
from shardwise.cost import OpTable
from shardwise.cost.selection import chooser
from shardwise.errors import InfeasiblePlan, PlanError, ShardwiseError
from shardwise.ir import Graph
from shardwise.layouts.tie_layers import tie_layers
from shardwise.planner.collectives import with_choices
from shardwise.planner.options import FixedOptions, known_options
from shardwise.planner.progress import Progress
from shardwise.planner.search.bank import LEAN, LEANEST, MIXED, QUICKEST, Bank
from shardwise.planner.search.constraints import (
    Cuts,
    as_texts,
    fixed_parameters,
    least_tensor_ranks,
)
from shardwise.planner.search.details import Subject, details
from shardwise.planner.search.found import Found
from shardwise.planner.search.grouping import groupings
from shardwise.planner.search.infeasible import infeasible
from shardwise.planner.search.polish import MOST_NODES, polished
from shardwise.planner.search.relax import Again
from shardwise.planner.search.replay import sealed
from shardwise.planner.search.report import search_report
from shardwise.planner.search.search import Search
from shardwise.planner.search.simplest import NEARLY, simplest
from shardwise.planner.search.space import Fixed, Limits, Point, divisors, points
from shardwise.planner.search.subsets import left_out, subsets
from shardwise.planner.search.write import as_written, write_plan
from shardwise.planner.strategies.fields import batch_inputs
from shardwise.plans import Plan, Precision, model_fingerprint
from shardwise.plans.execution import check_types
from shardwise.program.pipeline import check_micro_batches
from shardwise.sharding.factors import analyze
from shardwise.sharding.placements import Placement
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.fold import Fold
from shardwise.simulation.simulate import in_parts
from shardwise.simulation.times import Group

MOST_MIXED = 16  # ranks up to which nodes may differ in whether they cut rows
ZERO_LEVELS = (0, 1, 2, 3)
FEW_STAGES = 16  # that modules without blocks are cut into, at most
SMALL_CLUSTER = 8  # ranks up to which tensor parallelism may also cross nodes
NOTHING = Found(feasible=(), bounds=(), next_bound_s=math.inf, points=0)


@known_options("sw.plan")
def plan(
    graph: Graph,
    cluster: Cluster,
    *,
    constraints: Mapping[str, Any] | None = None,
    memory_gib: float | None = None,
    precision: str | Precision | None = None,
    table: OpTable | None = None,
    progress: bool = True,
    all_devices: bool = False,
    **options: Unpack[FixedOptions],
) -> Plan:
    """The plan with the shortest simulated step that fits in memory.

    Of plans within 1 % of it, the simplest. Devices that would make the step longer are left out,
    unless `all_devices`: the plan is then for fewer ranks, and says so.

    `constraints` maps globs of parameters to a cut ("0", "whole") or to cuts by mesh axis. Options
    fix parts of the plan: `dp`, `tp`, `pp`, `virtual_stages`, `schedule`, `num_microbatches`,
    `zero`, `recompute`, `offload`. `memory_gib` is what a plan may use of each device. Raises
    `InfeasiblePlan`, with figures and the nearest changes, where nothing fits.
    """
    fixed = Fixed.of(dict(options))
    _check_memory(memory_gib)
    cuts = fixed_parameters(graph, constraints or {})
    kinds = Precision.of(precision)
    check_types(graph, kinds)
    with Progress("planning", shown=progress) as bar:

        def prepare(run: Graph, fixed_cuts: Cuts, machines: Cluster) -> Search:
            return _prepare(run, machines, fixed_cuts, memory_gib, kinds, table, bar.update)

        def searched(
            machines: Cluster, below: float, run: Graph, than: Found | None = None
        ) -> _Searched:
            """Search for steps that may take less than `below` seconds.

            With `than`, which has several micro-batches, those of one that may be quicker.
            """
            search = prepare(run, cuts, machines)
            least = least_tensor_ranks(cuts, fixed, machines.num_ranks)
            limits = replace(_limits(search, run, machines, fixed), least_tensor_ranks=least)
            _check_fixed(fixed, machines, limits)
            if than is not None:
                limits = replace(limits, num_microbatches=1)
                below = min(below, _seconds(than))
            if below < math.inf and not _may_beat(search, limits, fixed, below):
                return _Searched(run, search, limits, NOTHING)
            return _Searched(run, search, limits, _run(search, limits, fixed))

        def quickest(machines: Cluster, below: float = math.inf) -> _Searched:
            return _quicker(graph, fixed, partial(searched, machines, below))

        chosen, idle = quickest(cluster), None
        if not all_devices:
            chosen, idle = _without_slow_devices(chosen, cluster, quickest)
        run, search, limits, found = chosen

        def free() -> Found:
            wider = replace(limits, least_tensor_ranks=1)
            return _run(prepare(run, {}, search.evaluator.cluster), wider, fixed)

        again = Again(options=partial(_run, search, limits), constraints=free if cuts else None)
        if not found.feasible:
            raise infeasible(found, search, fixed, limits, again)
        given = {"memory_gib": memory_gib, "constraints": as_texts(constraints or {}) or None}
        report = search_report(found, search, fixed, search.evaluator.cluster, given, again)
        if idle is not None:
            report["left_out"] = idle
        made = as_written(write_plan(run, search.fold, found.best, report, kinds), run, graph)
        made = sealed(with_choices(made, search.evaluator.clock.choose))
        return _detailed(made, search, found)


class _Searched(NamedTuple):
    """What was found for a graph: as it is, or as micro-batches run it."""

    run: Graph
    search: Search
    limits: Limits
    found: Found


def _quicker(graph: Graph, fixed: Fixed, searched: Callable[..., _Searched]) -> _Searched:
    """The search for the graph; where micro-batches compute another one, the quicker of both."""
    parts, asked = in_parts(graph), fixed.num_microbatches
    if parts is graph or asked == 1:
        return searched(graph)
    several = searched(parts)
    if asked is not None:
        return several
    whole = searched(graph, several.found)
    if not (whole.found.feasible and several.found.feasible):
        return whole if whole.found.feasible else several
    quicker = _seconds(several.found) * (1 + NEARLY) < _seconds(whole.found)
    return several if quicker and several.found.best.point.num_microbatches > 1 else whole


def _without_slow_devices(
    whole: _Searched, cluster: Cluster, quickest: Callable[[Cluster, float], _Searched]
) -> tuple[_Searched, Mapping[str, Any] | None]:
    """The search on fewer devices, where more save less than `NEARLY` of the step, and which."""
    best, used, least = whole, None, _seconds(whole.found)
    for smaller in subsets(cluster, _rates(whole.search.bank, whole.search.evaluator)):
        limit = least * (1 + NEARLY)
        try:
            other = quickest(smaller.cluster, limit)
        except InfeasiblePlan:  # what the user fixed needs more ranks
            continue
        if _seconds(other.found) < limit:
            best, used, least = other, smaller, min(least, _seconds(other.found))
    if used is None:
        return whole, None
    seconds = _seconds(whole.found) if whole.found.feasible else None
    return best, left_out(cluster, used, seconds)


def _seconds(found: Found) -> float:
    """The step of what was found, infinite where nothing fits."""
    return found.best.estimate.step_time_s if found.feasible else math.inf


def _may_beat(search: Search, limits: Limits, fixed: Fixed, seconds: float) -> bool:
    """Whether some point may fit, by its bounds, and be quicker than that."""
    return any(search.may_fit(point, seconds) for point in points(limits, fixed))


def _check_memory(memory_gib: Any) -> None:
    number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
    if memory_gib is not None and not (number and 0 < memory_gib < math.inf):
        raise PlanError(f"memory_gib={memory_gib!r}", hint="a number above 0: memory_gib=70")


def _detailed(made: Plan, search: Search, found: Found) -> Plan:
    """The plan with what reports tell of its step; the last of its file."""
    subject = Subject(
        graph=search.graph,
        works=found.best.layouts.works,
        setting=found.best.setting,
        evaluator=search.evaluator,
        estimate=found.best.estimate,
    )
    more = details(subject, made, made.search["relaxations"], search.memory_limit)
    return made.with_(search={**made.search, "details": more})


def _prepare(
    graph: Graph,
    cluster: Cluster,
    fixed: Cuts,
    memory_gib: float | None,
    precision: Precision,
    table: OpTable | None,
    report: Callable[[str], None],
) -> Search:
    few = len(graph.nodes) <= MOST_NODES  # here equal layers, too, may choose otherwise
    key = lambda path, nodes: path if few else _constraint_key(path, fixed, graph)  # noqa: E731
    fold = Fold.of(graph, constraint_key=key)
    facts = analyze(fold.graph)
    evaluator = Evaluator(fold, cluster, table, chooser(cluster))
    values = {p.value for p in fold.graph.parameters}
    limit = memory_gib * 2**30 if memory_gib is not None else None
    bank = Bank(
        fold,
        facts,
        evaluator,
        {value: placements for value, placements in fixed.items() if value in values},
        {},
        tie_layers(fold, graph, key),
        limit,
        report,
    )
    rates = _rates(bank, evaluator)

    def groups(pp: int) -> Any:
        key = pp
        if key not in known:
            kinds = [int(k) for k in evaluator.kind]
            known[key] = groupings(cluster.num_ranks, rates, kinds, pp)
        return known[key]

    known: dict[int, Any] = {}
    return Search(graph, bank, evaluator, groups, precision, limit, report)


def _run(search: Search, limits: Limits, fixed: Fixed) -> Found:
    """All points; layouts that spare memory where memory limits, host memory where nothing fits."""
    wanted = list(points(limits, fixed))
    wanted += [replace(point, layout=MIXED) for point in wanted if _may_mix(point, limits)]
    found, tried = search.run(wanted), wanted
    if found.limited_by_memory:
        tried = [*tried, *_leaner(search, wanted, found, LEAN)]
        found = search.run(tried)
    if not found.feasible:
        on_host = points(limits, fixed, offloads=True) if fixed.offload is None else ()
        found = search.run([*tried, *_leaner(search, wanted, found, LEANEST), *on_host])
    found = found if fixed.zero is not None else search.refined(found, ZERO_LEVELS)
    return simplest(search, polished(search, found, wanted), wanted)


def _leaner(search: Search, wanted: Sequence[Point], found: Found, layout: int) -> Iterator[Point]:
    """Points that may be quicker than the best one, with layouts that spare memory."""
    best = found.best.estimate.step_time_s if found.feasible else math.inf
    for point in wanted:
        if point.tp > 1 and point.layout == QUICKEST and search.may_beat(point, best):
            yield replace(point, layout=layout)


def _may_mix(point: Point, limits: Limits) -> bool:
    """Whether tensor-parallel ranks may also share rows, node by node, as one device's batch.

    Where there are many ranks, "dp" does that for all nodes, and layouts are solved for one row.
    """
    each, rest = divmod(limits.rows, point.dp * point.tp)
    few = point.tp > 1 and point.pp == point.num_microbatches == 1 and limits.ranks <= MOST_MIXED
    return few and each > 0 and rest == 0


def _limits(search: Search, graph: Graph, cluster: Cluster, fixed: Fixed) -> Limits:
    """As many stages as blocks or, if these are few, modules with parameters, and as places to cut
    a small model; tensor parallelism inside a node.

    More stages where they are asked for; one micro-batch where more would change the result.
    """
    named = len({block for block in search.fold.blocks if block})
    modules = min(len({p.name.rpartition(".")[0] for p in graph.parameters}), FEW_STAGES)
    places = len(search.cutter.fit) + 1 if len(graph.nodes) <= MOST_NODES else 0
    asked = (fixed.pp or 1) * (fixed.virtual_stages or 1)
    cuts = any(dim is not None for dim in search.bank.inputs.values())
    node = max(node.count for node in cluster.nodes)
    return Limits(
        ranks=cluster.num_ranks,
        rows=search.bank.rows if cuts else 1,
        stages=max(named, modules, places, asked),
        virtual_stages=max(named if named > 1 else modules, asked),
        num_microbatches=search.bank.rows if _may_split(graph) else 1,
        tensor_ranks=max(node, min(cluster.num_ranks, SMALL_CLUSTER)),
    )


def _may_split(graph: Graph) -> bool:
    """Whether a batch may be computed in parts: batch norm and some losses couple its rows."""
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


def _rates(bank: Bank, evaluator: Evaluator) -> list[float]:
    """How fast every rank is at this model's work."""
    if len(evaluator.devices) == 1:
        return [1.0] * len(evaluator.kind)
    works = bank.get(1, 0).works
    alone = Group(mesh=Mesh(), ranks=(0,))
    seconds = []
    for device in evaluator.devices:
        times = evaluator.clock.node_times(
            works.at(max(1, works.rows // len(evaluator.kind))), device, alone
        )
        seconds.append(float((times.forward + times.backward).sum()))
    return [min(seconds) / seconds[kind] for kind in evaluator.kind]


def _constraint_key(path: str, fixed: Mapping[str, Mapping[str, Placement]], graph: Graph) -> str:
    """Return the user's constraints on a block; blocks that differ in them are not folded."""
    if not fixed:
        return ""
    mine = {
        p.name.removeprefix(f"{path}."): {a: str(c) for a, c in fixed[p.value].items()}
        for p in graph.parameters
        if p.value in fixed and p.name.startswith(f"{path}.")
    }
    return str(sorted(mine.items())) if mine else ""


def _check_fixed(fixed: Fixed, cluster: Cluster, limits: Limits) -> None:
    total, rows = cluster.num_ranks, limits.rows
    sizes = {a: n for a in ("dp", "tp", "pp") if (n := getattr(fixed, a)) is not None}
    for axis, size in sizes.items():
        if size < 1 or total % size:
            raise InfeasiblePlan(
                f"{axis}={size} does not divide the {total} ranks of {cluster.name}",
                hint=f"{axis}={max(d for d in divisors(total) if d <= max(size, 1))}",
            )
    product = 1
    for size in sizes.values():
        product *= size
    if total % product or (len(sizes) == 3 and product != total):
        text = " x ".join(f"{a}={n}" for a, n in sizes.items())
        raise InfeasiblePlan(
            f"{text} = {product} ranks, {cluster.name} has {total}", hint="leave one of them out"
        )
    if fixed.dp is not None and fixed.dp > rows:
        raise InfeasiblePlan(f"dp={fixed.dp}, the batch has {rows} rows", hint=f"dp={rows}")
    if fixed.num_microbatches is not None and fixed.num_microbatches > rows:
        raise InfeasiblePlan(
            f"num_microbatches={fixed.num_microbatches}, the batch has {rows} rows",
            hint=f"num_microbatches={rows}",
        )
    rest = total // product if len(sizes) == 2 else 1  # of the axis that is left
    dp, count = fixed.dp or rest, fixed.num_microbatches
    if count is not None and dp * count > rows:
        least = f"one of each micro-batch for each of dp={dp}"
        raise InfeasiblePlan(
            f"num_microbatches={count} needs {dp * count} rows, {least}; the batch has {rows}",
            hint=f"num_microbatches={rows // dp}" if dp <= rows else "more tp or pp",
        )
