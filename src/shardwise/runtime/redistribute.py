"""Differentiable redistributions: generated code calls them to change a value's placement.

Each function is an entry of the table in `shardwise.redistribution`, which names the `primitives`
of its forward and backward. `of` describes how the dim is split over this axis (see `splits`), in
sizes that other axes have already split. No function changes its argument; over an axis of one rank
each returns it unchanged.
"""

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


def gather(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """S -> R: gather all shards."""
    return redistribute("gather", x, axis, dim, of)


def gather_fanout(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """S -> R~: gather all shards, for computation that differs between ranks."""
    return redistribute("gather_fanout", x, axis, dim, of)


def reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """P -> R: sum over ranks; "max" and "min" have no gradient."""
    source = x if op == "sum" or axis.size == 1 else x.detach()
    return redistribute("reduce", source, axis, op, dual_args=(axis,))


def reduce_fanout(x: Tensor, axis: Axis) -> Tensor:
    """P -> R~: sum over ranks, for computation that differs between ranks."""
    return redistribute("reduce_fanout", x, axis)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """P -> S: return this rank's part of the sum over ranks."""
    return redistribute("reduce_scatter", x, axis, dim, of)


def shard(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """R -> S: return this rank's part of a replicated value."""
    return redistribute("shard", x, axis, dim, of)


def take(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """R~ -> S: return this rank's part, when gradients are summed over ranks elsewhere."""
    return redistribute("take", x, axis, dim, of)


def fanout(x: Tensor, axis: Axis) -> Tensor:
    """R -> R~: pass a value to computation that differs between ranks."""
    return redistribute("fanout", x, axis)


def as_partial(x: Tensor, axis: Axis) -> Tensor:
    """R -> P: keep the value on the axis' first rank, zeros on the others."""
    return redistribute("as_partial", x, axis)


def pad(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """S -> P: place the shard among zeros."""
    return redistribute("pad", x, axis, dim, of)


def all_to_all(x: Tensor, axis: Axis, dim: int, of: Of, to_dim: int, to_of: Of) -> Tensor:
    """S -> S': exchange a shard of `dim` for one of `to_dim`, or another split of the same dim."""
    back = (axis, to_dim, to_of, dim, of)
    return redistribute("all_to_all", x, axis, dim, of, to_dim, to_of, dual_args=back)


def once(x: Tensor, axis: Axis) -> Tensor:
    """R~ -> P: keep value and gradient on the axis' first rank, zeros on the others."""
    return redistribute("once", x, axis)
