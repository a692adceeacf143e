"""Named strategies: small functions from a graph and a cluster to a plan.

    ddp(graph, cluster)       the batch is cut, gradients are all-reduced
    zero1, zero2, fsdp        also optimizer state, gradients, parameters are sharded
    tensor(graph, cluster)    parameters are cut, with the work on them
    pipeline(graph, cluster, num_microbatches=8)     layers are cut, one stage per rank
    hybrid(graph, cluster, dp=2, tp=2, pp=2, zero=0)      all of them

All take `num_microbatches`, `recompute`, `precision` and `offload` (see `make_plan`). A strategy of
your own is a function that returns a `Plan`; `make_plan` does the common part.
"""

from shardwise.planner.strategies.basic import ddp, fsdp, hybrid, tensor, zero1, zero2
from shardwise.planner.strategies.make import make_plan
from shardwise.planner.strategies.pipeline import pipeline

__all__ = ["ddp", "fsdp", "hybrid", "make_plan", "pipeline", "tensor", "zero1", "zero2"]
