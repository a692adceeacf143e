"""Write a custom strategy: a function from a graph and a cluster to a plan.

python examples/08_own_strategy.py

It can be used like a named one: `sw.parallelize(…, plan=frugal(graph, cluster))`,
`plan: examples/08_own_strategy.py:frugal` in a training config, `ShardwiseStrategy(frugal)`.
"""

from __future__ import annotations

import math
import re

import small_gpt

import shardwise as sw
from shardwise.plans import ParameterEntry


def frugal(graph: sw.Graph, cluster: sw.Cluster, *, large: int = 10_000) -> sw.Plan:
    """Return data parallelism that shards only large parameters.

    Parameters of at least `large` elements are sharded and gathered for use (ZeRO 3). The others
    are replicated, because many small messages cost more than they save.
    """
    entries = {}
    for parameter in graph.parameters:
        size = math.prod(graph.values[parameter.value].shape)
        every_block = re.sub(r"\.\d+\.", ".*.", parameter.name)  # one entry for all blocks
        entries[every_block] = ParameterEntry(zero=3 if size >= large else 0)
    return sw.strategies.make_plan(
        "frugal", graph, cluster, dp=cluster.num_ranks, parameters=entries
    )


def tall_and_wide(graph: sw.Graph, cluster: sw.Cluster) -> sw.Plan:
    """Return a pipeline whose first stage is split over rows and the second over heads.

    A plan is data, so that `with_` can derive it from another one.
    """
    ranks = cluster.num_ranks // 2
    plan = sw.strategies.pipeline(
        graph,
        cluster,
        cuts=["blocks.1"],
        stage_meshes=(sw.Mesh.of(dp=ranks), sw.Mesh.of(tp=ranks)),
        num_microbatches=2,
    )
    return plan.with_(name="tall_and_wide", recompute=("blocks.0",))


def main() -> None:
    """Create plans, compare their memory, and verify them."""
    model, batch = small_gpt.make()
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.local(4)
    for strategy in (sw.strategies.ddp, sw.strategies.fsdp, frugal, tall_and_wide):
        plan = strategy(graph, cluster)
        memory = sw.compile(graph, plan).memory(rank=0)
        print(f"{plan.name:14}{memory.peak_bytes / 2**10:6.0f} KiB peak memory of rank 0")
    print(frugal(graph, cluster))
    for strategy in (frugal, tall_and_wide):
        print(sw.verify(model, batch, strategy(graph, cluster)))


if __name__ == "__main__":
    main()
