"""Search for plans that divide experts over ranks.

The main search has no axis of experts. For a mixture of experts, plans of every number of ranks
along `ep` are simulated as well, with the sizes and savings that the user leaves open.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from shardwise.cluster import Cluster
from shardwise.cost import OpTable
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.planner.options import Constraints
from shardwise.planner.search_space import RECOMPUTES, ZERO_LEVELS, UserOptions, divisors
from shardwise.planner.strategies.experts import expert_parameters
from shardwise.planner.strategies.make import make_plan
from shardwise.plans import Plan, Precision
from shardwise.simulation.estimate import simulate


def faster_with_experts(
    graph: Graph,
    cluster: Cluster,
    options: UserOptions,
    below: float,
    *,
    constraints: Constraints | None = None,
    memory_gib: float | None = None,
    precision: Precision | None = None,
    table: OpTable | None = None,
) -> Plan | None:
    """Return the fastest plan with `ep` above 1 whose step takes less than `below` seconds.

    None if there is none that fits in memory, or if the model has no experts.
    """
    limit = math.inf if memory_gib is None else memory_gib * 2**30
    best: Plan | None = None
    for draft in _drafts(graph, cluster, options, constraints, precision):
        for recompute in RECOMPUTES if options.recompute is None else (options.recompute,):
            fits = False
            for level in ZERO_LEVELS if options.zero is None else (options.zero,):
                entries = {g: replace(entry, zero=level) for g, entry in draft.parameters.items()}
                plan = draft.with_(recompute=recompute, parameters=entries)
                estimate = simulate(graph, plan, cluster, table=table)
                used = max(memory.peak_bytes for memory in estimate.memory)
                if estimate.fits and used <= limit:
                    fits = True
                    if estimate.step_time_s < below:
                        best, below = plan, estimate.step_time_s
            if fits:
                break  # recomputing more would only take longer
    return best


def _drafts(
    graph: Graph,
    cluster: Cluster,
    options: UserOptions,
    constraints: Constraints | None,
    precision: Precision | None,
) -> Iterator[Plan]:
    """Yield a plan for each number of ranks along `ep` and `tp`."""
    largest = max(expert_parameters(graph).values(), default=1)
    pp, ranks = options.pp or 1, cluster.num_ranks
    node = max(node.count for node in cluster.nodes)
    for ep, tp in product(divisors(ranks), divisors(ranks)):
        dp, remainder = divmod(ranks, ep * tp * pp)
        is_open = (options.ep or ep, options.tp or tp, options.dp or dp) == (ep, tp, dp)
        if not is_open or remainder or not 1 < ep <= largest or (tp > node and not options.tp):
            continue
        try:
            yield make_plan(
                "auto",
                graph,
                cluster,
                dp=dp,
                ep=ep,
                tp=tp,
                pp=pp,
                num_microbatches=options.num_microbatches or 1,
                virtual_stages=options.virtual_stages,
                offload=options.offload or (),
                constraints=constraints,
                precision=precision,
                schedule=options.schedule,
            )
        except InfeasiblePlan:  # fewer rows than ranks, or nothing to shard
            continue
