"""Data parallelism, ZeRO, tensor parallelism and their combination with pipeline stages.

Enters: a `Graph` and a `Cluster`. Leaves: a `Plan` whose parameter entries say what was decided.
The options are those of `PlanOptions`; `hybrid` also takes those of stages.
"""

from __future__ import annotations

from typing import Unpack

from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.planner.options import PlanOptions, StageOptions, known_options
from shardwise.planner.strategies.make import make_plan
from shardwise.plans import Plan


@known_options("sw.strategies.ddp", make_plan)
def ddp(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """The batch is cut over all ranks; gradients are all-reduced in buckets."""
    return make_plan("ddp", graph, cluster, dp=cluster.num_ranks, **options)


@known_options("sw.strategies.zero1", make_plan)
def zero1(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """As `ddp`, with the optimizer state sharded."""
    return make_plan("zero1", graph, cluster, dp=cluster.num_ranks, zero=1, **options)


@known_options("sw.strategies.zero2", make_plan)
def zero2(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """As `zero1`, with the gradients sharded too."""
    return make_plan("zero2", graph, cluster, dp=cluster.num_ranks, zero=2, **options)


@known_options("sw.strategies.fsdp", make_plan)
def fsdp(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """As `zero2`, with the parameters sharded too: gathered for use, block by block."""
    return make_plan("fsdp", graph, cluster, dp=cluster.num_ranks, zero=3, **options)


@known_options("sw.strategies.tensor", make_plan)
def tensor(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Parameters are cut over all ranks, and the work on them with them."""
    return make_plan("tensor", graph, cluster, tp=cluster.num_ranks, **options)


@known_options("sw.strategies.hybrid", make_plan)
def hybrid(
    graph: Graph,
    cluster: Cluster,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    **options: Unpack[StageOptions],
) -> Plan:
    """`pp` groups of ranks over the layers, each of `dp` over the batch by `tp` over parameters."""
    return make_plan("hybrid", graph, cluster, dp=dp, tp=tp, pp=pp, zero=zero, **options)
