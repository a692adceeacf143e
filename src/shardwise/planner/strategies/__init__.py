"""Named strategies: small functions from a graph and a cluster to a plan.

    ddp(graph, cluster)       shard the batch, all-reduce the gradients
    zero1, zero2, fsdp        also shard optimizer state, gradients, parameters
    tensor(graph, cluster)    shard parameters, and the work on them
    context(graph, cluster)   shard the sequence, and attention over it
    expert(graph, cluster)    divide experts, whose tokens are exchanged; shard the batch
    pipeline(graph, cluster, num_microbatches=8)     divide the layers, one stage per rank
    parameter_server, balanced_parameter_server      ranks own parameters and update them
    partitioned_parameter_server, partitioned_all_reduce      ranks own parts of parameters
    parallax(graph, cluster)  rows of embeddings to their owners, other gradients all-reduced
    hybrid(graph, cluster, dp=2, ep=2, cp=2, tp=2, pp=2, zero=0)      all of them
    local_sgd(graph, cluster, every=10)     a replica on each rank, averaged now and then
    diloco(graph, cluster, every=50)        the same with an outer optimizer

All take `num_microbatches`, `recompute`, `precision` and `offload` (see `make_plan`). A custom
strategy is a function that returns a `Plan`; `make_plan` does the common part, and
`register_strategy` gives it a name for trainers and for the command line.

Strategies are imported on first use: the command line lists them without importing torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    from shardwise.planner.strategies.make import make_plan
    from shardwise.planner.strategies.named import (
        balanced_parameter_server,
        context,
        ddp,
        diloco,
        expert,
        fsdp,
        hybrid,
        local_sgd,
        parallax,
        parameter_server,
        partitioned_all_reduce,
        partitioned_parameter_server,
        pipeline,
        tensor,
        zero1,
        zero2,
    )
    from shardwise.plans import Plan


# The table of strategies: None for those of `named.py`, and functions that users registered.
_STRATEGIES: dict[str, Callable[..., Plan] | None] = dict.fromkeys(
    (
        "ddp", "zero1", "zero2", "fsdp", "tensor", "context", "expert", "pipeline", "hybrid",
        "parameter_server", "balanced_parameter_server", "partitioned_parameter_server",
        "partitioned_all_reduce", "parallax", "local_sgd", "diloco",
    )
)  # fmt: skip


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies."""
    return tuple(_STRATEGIES)


def find_strategy(name: str) -> Callable[..., Plan]:
    """Return the strategy with this name."""
    if name not in _STRATEGIES:
        raise PlanError(
            f"there is no strategy {name!r}{did_you_mean(name, strategy_names())}",
            hint=", ".join(strategy_names()),
        )
    strategy: Callable[..., Plan] = _STRATEGIES[name] or __getattr__(name)
    return strategy


def register_strategy(name: str, function: Callable[..., Plan]) -> None:
    """Register `function(graph, cluster, **options)` for trainers and the command line."""
    if name in _STRATEGIES:
        raise PlanError(f"a strategy named {name!r} is already registered")
    _STRATEGIES[name] = function


def __getattr__(name: str) -> Any:
    if name not in ("make_plan", *_STRATEGIES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "make" if name == "make_plan" else "named"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
