"""The cost of a call, given the arguments of its signature."""

from __future__ import annotations

from typing import Any

from shardwise.cost import CallCost, call_signature, cost_of


def call_cost(
    op: str, args: tuple[Any, ...], kwargs: Any = (), types: Any = (), *more: Any, **options: Any
) -> CallCost:
    """Return the kernels and the memory of a call and of its backward."""
    return cost_of(call_signature(op, args, kwargs, types, *more, **options))
