"""Named strategies: small functions from a graph and a cluster to a plan.

    ddp(graph, cluster)       the batch is cut, gradients are all-reduced
    zero1, zero2, fsdp        also optimizer state, gradients, parameters are sharded
    tensor(graph, cluster)    parameters are cut, with the work on them
    hybrid(graph, cluster, dp=2, tp=2, zero=0)      both

A strategy of your own is a function that returns a `Plan`; `make_plan` does the common part.
"""

from shardwise.planner.strategies.basic import ddp, fsdp, hybrid, make_plan, tensor, zero1, zero2

__all__ = ["ddp", "fsdp", "hybrid", "make_plan", "tensor", "zero1", "zero2"]
