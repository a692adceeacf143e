"""Search for plans that divide experts or the sequence over ranks.

The main search has neither axis. Plans with several ranks along `ep` or `cp` are simulated as well,
with the sizes and savings that the user leaves open.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.cost import OpTable
from shardwise.cost.selection import chooser
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.planner import search_space
from shardwise.planner.figures import described, with_figures
from shardwise.planner.options import Constraints
from shardwise.planner.search import RUNNERS_UP, SIMPLER_SLACK, SearchOutcome
from shardwise.planner.strategies.experts import expert_parameters
from shardwise.planner.strategies.make import batch_inputs, make_plan
from shardwise.planner.strategies.sequence import ATTENTION, attentions
from shardwise.planner.write import with_choices
from shardwise.plans import Plan, Precision
from shardwise.plans.text import summary
from shardwise.simulation.estimate import Estimate, simulate


class _Candidate(NamedTuple):
    estimate: Estimate
    peak_bytes: float  # infinite if the plan does not fit
    plan: Plan

    @property
    def step_time_s(self) -> float:
        return self.estimate.step_time_s


def faster_with_extra_axes(
    graph: Graph,
    cluster: Cluster,
    options: search_space.UserOptions,
    than: SearchOutcome,
    *,
    constraints: Constraints | None = None,
    memory_gib: float | None = None,
    precision: Precision | None = None,
    table: OpTable | None = None,
) -> Plan | None:
    """Return the fastest plan with `ep` or `cp` above 1, with the result of its search.

    None if there is none that fits in memory and takes less time `than` the best one without, or
    if the model has neither experts nor attention. Unless the user asks for `cp`, the sequence is
    divided only if there are fewer rows than ranks, or if the best plan without it saves memory by
    recomputing, or does not fit: otherwise `dp` sends less.
    """

    def simulated(plan: Plan) -> _Candidate:
        estimate = simulate(graph, plan, cluster, table=table)
        peak = max(memory.peak_bytes for memory in estimate.memory) if estimate.fits else math.inf
        return _Candidate(estimate, peak, plan)

    limit = math.inf if memory_gib is None else memory_gib * 2**30
    short_of_memory = not than.feasible or than.best.config.recompute != "none"
    shortest_s, fitting = than.step_time_s * (1 - SIMPLER_SLACK), list[_Candidate]()
    for sizes in _sizes(graph, cluster, options, short_of_memory=short_of_memory):
        drafts = _drafts(graph, cluster, sizes, options, constraints, precision)
        fastest = min(map(simulated, drafts), key=lambda c: c.step_time_s, default=None)
        for recompute in (
            search_space.RECOMPUTES if options.recompute is None else (options.recompute,)
        ):
            if fastest is None:
                break
            levels = search_space.ZERO_LEVELS if options.zero is None else (options.zero,)
            entries = fastest.plan.parameters
            plans = [
                simulated(
                    fastest.plan.with_(
                        recompute=recompute,
                        parameters={glob: replace(e, zero=zero) for glob, e in entries.items()},
                    )
                )
                for zero in levels
            ]
            if min(c.step_time_s for c in plans) >= shortest_s:
                break  # recomputing more would only take longer
            fits = [c for c in plans if c.peak_bytes < limit]
            fitting += fits
            if (fastest_s := min((c.step_time_s for c in fits), default=math.inf)) < shortest_s:
                shortest_s = fastest_s
                break
    fitting.sort(key=lambda c: c.step_time_s)
    if not fitting or fitting[0].step_time_s > shortest_s:
        return None
    others = [described(c.estimate, summary(c.plan)) for c in fitting[1:RUNNERS_UP]]
    if than.feasible:
        others.append(described(than.best.estimate, str(than.best.config)))
    best = with_choices(fitting[0].plan, chooser(cluster))
    plan = with_figures(graph, best, cluster, table)
    figures = replace(
        plan.figures,
        fixed=search_space.restrictions(options, memory_gib, constraints),
        runners_up=tuple(sorted(others, key=lambda other: other.step_time_s)),
    )
    return plan.with_(search=figures)


def has_extra_axes(graph: Graph, options: search_space.UserOptions) -> bool:
    """Return whether there are experts or attention that the user lets the planner divide."""
    experts = options.ep is None and bool(expert_parameters(graph))
    return experts or (options.cp is None and bool(attentions(graph)))


def num_rows(graph: Graph) -> int:
    """Return the samples of the batch, 1 if no input has a batch dim."""
    shapes = {i.name: graph.values[i.value].shape for i in graph.inputs}
    rows = (shapes[n][dim] for n, dim in batch_inputs(graph, None).items() if dim is not None)
    return min(rows, default=1)


def _sizes(
    graph: Graph, cluster: Cluster, options: search_space.UserOptions, *, short_of_memory: bool
) -> Iterator[dict[str, int]]:
    """Yield the numbers of ranks along all axes, with more than one along `ep` or `cp`.

    Both are above one only if the user asks for one of them.
    """
    pp, ranks = options.pp or 1, cluster.num_ranks
    experts = max(expert_parameters(graph).values(), default=1)
    length = max((min(a.queries, a.keys) for a in attentions(graph)), default=1)
    rows = num_rows(graph)
    if not (options.cp or short_of_memory or rows < ranks):
        length = 1
    asked = options.tp or options.ep or options.cp
    tensor_ranks = ranks if asked else max(node.count for node in cluster.nodes)
    for ep, cp, tp in product(search_space.divisors(ranks), repeat=3):
        dp, remainder = divmod(ranks, ep * cp * tp * pp)
        sizes = {"dp": dp, "ep": ep, "cp": cp, "tp": tp, "pp": pp}
        is_open = all((getattr(options, axis) or n) == n for axis, n in sizes.items())
        if remainder or not is_open or ep * cp == 1 or tp > tensor_ranks or dp * ep > rows:
            continue
        both = min(ep, cp) > 1 and not (options.ep or options.cp)
        # Rows are divided first: that needs no messages in attention.
        more_rows = any(cp % n == 0 and dp * ep * n <= rows for n in range(2, cp + 1))
        divides_rows = cp > 1 and more_rows and not (options.cp or options.dp)
        if ep <= experts and cp <= length and not (both or divides_rows):
            yield sizes


def _drafts(
    graph: Graph,
    cluster: Cluster,
    sizes: dict[str, int],
    options: search_space.UserOptions,
    constraints: Constraints | None,
    precision: Precision | None,
) -> Iterator[Plan]:
    """Yield a plan for each way in which attention meets the keys of other ranks."""
    for attention in ATTENTION[1:] if sizes["cp"] > 1 else ATTENTION[:1]:
        try:
            yield make_plan(
                "auto",
                graph,
                cluster,
                dp=sizes["dp"],
                ep=sizes["ep"],
                cp=sizes["cp"],
                tp=sizes["tp"],
                pp=sizes["pp"],
                attention=attention,
                num_microbatches=options.num_microbatches or 1,
                virtual_stages=options.virtual_stages,
                offload=options.offload or (),
                constraints=constraints,
                precision=precision,
                schedule=options.schedule,
            )
        except InfeasiblePlan:  # fewer rows than ranks, or nothing to shard
            continue
