"""Differentiable redistribution: what generated code calls to change how a value lies on an axis.

On a mesh axis a value is S (shard), P (partial sum), R= (whole, used by the same work on every
rank) or R≠ (whole, used by work that differs). Their gradients are g(S)=S, g(P)=R=, g(R=)=R= and
g(R≠)=P, so that each redistribution has the dual one as its backward:

    gather          S  -> R=   all-gather           | slice
    gather_fanout   S  -> R≠   all-gather           | reduce-scatter
    reduce          P  -> R=   all-reduce           | nothing
    reduce_fanout   P  -> R≠   all-reduce           | all-reduce
    reduce_scatter  P  -> S    reduce-scatter       | all-gather
    shard           R= -> S    slice                | all-gather
    take            R≠ -> S    slice                | zero-pad
    fanout          R= -> R≠   nothing              | all-reduce
    as_partial      R= -> P    keep on the first    | nothing
    pad             S  -> P    zero-pad             | slice
    all_to_all      S  -> S'   all-to-all           | all-to-all
    once            R≠ -> P    keep on the first    | keep on the first

`of` says how the dim is cut over this axis (see `splits`), in sizes that other axes have already
cut. No function changes its argument; over an axis of one rank each returns it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.runtime import moves
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of

__all__ = [
    "all_to_all",
    "as_partial",
    "fanout",
    "gather",
    "gather_fanout",
    "once",
    "pad",
    "reduce",
    "reduce_fanout",
    "reduce_scatter",
    "shard",
    "take",
]

Move = Callable[..., Tensor]


class _Redistribute(torch.autograd.Function):
    """Apply one move forward and its dual backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, move: Move, args: tuple[Any, ...], dual: Move, dual_args: Any
    ) -> Tensor:
        ctx.dual, ctx.dual_args = dual, dual_args
        return move(x, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.dual(grads[0], *ctx.dual_args), None, None, None, None


def _redistribute_eagerly(
    x: Tensor, move: Move, args: tuple[Any, ...], dual: Move, dual_args: tuple[Any, ...]
) -> Tensor:
    return cast(Tensor, _Redistribute.apply(x, move, args, dual, dual_args))  # type: ignore[no-untyped-call]


# A compiled program breaks its graph here: communication is never traced.
_redistribute: Callable[[Tensor, Move, tuple[Any, ...], Move, tuple[Any, ...]], Tensor] = (
    torch.compiler.disable(_redistribute_eagerly)  # type: ignore[no-untyped-call]
)


def gather(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """S -> R=: the whole of all shards."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.gather, (axis, dim, of), moves.take, (axis, dim, of))


def gather_fanout(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """S -> R≠: the whole of all shards, for work that differs between ranks."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.gather, (axis, dim, of), moves.reduce_scatter, (axis, dim, of))


def reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """P -> R=: the sum over ranks; "max" and "min" have no gradient."""
    if axis.size == 1:
        return x
    source = x if op == "sum" else x.detach()
    return _redistribute(source, moves.all_reduce, (axis, op), moves.same, (axis,))


def reduce_fanout(x: Tensor, axis: Axis) -> Tensor:
    """P -> R≠: the sum over ranks, for work that differs between ranks."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.all_reduce, (axis,), moves.all_reduce, (axis,))


def reduce_scatter(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """P -> S: this rank's part of the sum over ranks."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.reduce_scatter, (axis, dim, of), moves.gather, (axis, dim, of))


def shard(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """R= -> S: this rank's part of a value that every rank computes alike."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.slice_, (axis, dim, of), moves.gather, (axis, dim, of))


def take(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """R≠ -> S: this rank's part, when gradients are summed over ranks elsewhere."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.slice_, (axis, dim, of), moves.pad, (axis, dim, of))


def fanout(x: Tensor, axis: Axis) -> Tensor:
    """R= -> R≠: give a value to work that differs between ranks."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.same, (axis,), moves.all_reduce, (axis,))


def as_partial(x: Tensor, axis: Axis) -> Tensor:
    """R= -> P: the value on the axis' first rank, zeros on the others."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.keep_first, (axis,), moves.same, (axis,))


def pad(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """S -> P: the shard in its place among zeros."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.pad, (axis, dim, of), moves.take, (axis, dim, of))


def all_to_all(x: Tensor, axis: Axis, dim: int, of: Of, to_dim: int, to_of: Of) -> Tensor:
    """S -> S': from a shard of `dim` to a shard of `to_dim` (or of the same dim, cut otherwise)."""
    if axis.size == 1:
        return x
    there, back = (axis, dim, of, to_dim, to_of), (axis, to_dim, to_of, dim, of)
    return _redistribute(x, moves.all_to_all, there, moves.all_to_all, back)


def once(x: Tensor, axis: Axis) -> Tensor:
    """R≠ -> P: the value on the first, zeros on the others, and so its gradient."""
    if axis.size == 1:
        return x
    return _redistribute(x, moves.keep_first, (axis,), moves.keep_first, (axis,))
