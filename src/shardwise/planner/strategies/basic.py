"""Data parallelism, ZeRO, tensor parallelism and their combination with pipeline stages.

Enters: a `Graph` and a `Cluster`. Leaves: a `Plan` whose parameter entries say what was decided.
Options are those of `make_plan`.
"""

from __future__ import annotations

from typing import Any

from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.planner.strategies.make import make_plan
from shardwise.plans import Plan


def ddp(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """The batch is cut over all ranks; gradients are all-reduced in buckets."""
    return make_plan("ddp", graph, cluster, dp=cluster.num_ranks, **options)


def zero1(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """As `ddp`, with the optimizer state sharded."""
    return make_plan("zero1", graph, cluster, dp=cluster.num_ranks, zero=1, **options)


def zero2(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """As `zero1`, with the gradients sharded too."""
    return make_plan("zero2", graph, cluster, dp=cluster.num_ranks, zero=2, **options)


def fsdp(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """As `zero2`, with the parameters sharded too: gathered for use, block by block."""
    return make_plan("fsdp", graph, cluster, dp=cluster.num_ranks, zero=3, **options)


def tensor(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """Parameters are cut over all ranks, and the work on them with them."""
    return make_plan("tensor", graph, cluster, tp=cluster.num_ranks, **options)


def hybrid(
    graph: Graph,
    cluster: Cluster,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    **options: Any,
) -> Plan:
    """`pp` groups of ranks over the layers, each of `dp` over the batch by `tp` over parameters."""
    return make_plan("hybrid", graph, cluster, dp=dp, tp=tp, pp=pp, zero=zero, **options)
