"""Differentiable redistributions: generated code calls them to change a value's placement.

Each function is an entry of the table in `shardwise.redistribution`, which names the `primitives`
of its forward and backward. `of` describes how the dim is split over this axis (see `splits`), in
sizes that other axes have already split. No function changes its argument; over an axis of one rank
each returns it unchanged.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.redistribution import REDISTRIBUTIONS, Primitive
from shardwise.runtime import primitives
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of


class _Redistribute(torch.autograd.Function):
    """Run one primitive forward and its dual backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, name: str, args: tuple[Any, ...], dual_args: tuple[Any, ...]
    ) -> Tensor:
        redistribution = REDISTRIBUTIONS[f"rt.{name}"]
        ctx.dual, ctx.dual_args = redistribution.backward, dual_args
        return _run(redistribution.forward, x, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _run(ctx.dual, grads[0], ctx.dual_args), None, None, None


def _run(primitive: Primitive, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    return cast(Tensor, getattr(primitives, primitive.name)(x, *args))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _communicate(x: Tensor, name: str, args: tuple[Any, ...], dual_args: tuple[Any, ...]) -> Tensor:
    """Apply a redistribution; a compiled program breaks its graph here."""
    return cast(Tensor, _Redistribute.apply(x, name, args, dual_args))  # type: ignore[no-untyped-call]


def redistribute(
    name: str, x: Tensor, *args: Any, dual_args: tuple[Any, ...] | None = None
) -> Tensor:
    """Apply the redistribution `name` of the table; `args` begin with the axis."""
    if args[0].size == 1:
        return x
    return cast(Tensor, _communicate(x, name, args, args if dual_args is None else dual_args))


def _of_dim(name: str) -> Callable[..., Tensor]:
    def apply(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
        return redistribute(name, x, axis, dim, of)

    apply.__name__, apply.__doc__ = name, f"Apply `{name}` of the table to a dim."
    return apply


def _of_value(name: str) -> Callable[..., Tensor]:
    def apply(x: Tensor, axis: Axis) -> Tensor:
        return redistribute(name, x, axis)

    apply.__name__, apply.__doc__ = name, f"Apply `{name}` of the table to all of a value."
    return apply


gather, gather_fanout = _of_dim("gather"), _of_dim("gather_fanout")
reduce_scatter, pad = _of_dim("reduce_scatter"), _of_dim("pad")
shard, take = _of_dim("shard"), _of_dim("take")
reduce_fanout, fanout = _of_value("reduce_fanout"), _of_value("fanout")
as_partial, once = _of_value("as_partial"), _of_value("once")


def reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """P -> R: sum over ranks; "max" and "min" have no gradient."""
    source = x if op == "sum" or axis.size == 1 else x.detach()
    return redistribute("reduce", source, axis, op, dual_args=(axis,))


def all_to_all(x: Tensor, axis: Axis, dim: int, of: Of, to_dim: int, to_of: Of) -> Tensor:
    """S -> S': exchange a shard of `dim` for one of `to_dim`, or another split of the same dim."""
    back = (axis, to_dim, to_of, dim, of)
    return redistribute("all_to_all", x, axis, dim, of, to_dim, to_of, dual_args=back)
