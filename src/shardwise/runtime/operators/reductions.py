"""Reductions over a sharded dim: partial means, and those that need all ranks inside.

Every function but `partial_mean` gives each rank the full result; its gradient is then the same on
each rank, and the backward pass computes the exact gradient of the local shard.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwise.runtime import primitives as moves
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.support import drop, reduced_shape, summed, untraced, widened
from shardwise.runtime.redistribute import reduce

__all__ = [
    "all_true",
    "amax",
    "amin",
    "any_true",
    "logsumexp",
    "partial_mean",
    "std",
    "std_mean",
    "var",
    "var_mean",
    "vector_norm",
]

Dims = tuple[int, ...]


def partial_mean(
    x: Tensor, dims: Dims, keepdim: bool = False, *, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return this rank's term of the mean over `count` elements of all ranks."""
    result = x.dtype if dtype is None else dtype
    return (x.sum(dims, keepdim, dtype=widened(result)) / count).to(result)


def _mean(x: Tensor, axis: Axis, dims: Dims, count: int) -> Tensor:
    return reduce(x.sum(dims, keepdim=True), axis) / count


def _variance(x: Tensor, axis: Axis, dims: Dims, correction: float, count: int) -> Tensor:
    # The mean needs no gradient: deviations from it add up to zero.
    mean = summed(x.detach().sum(dims, keepdim=True), axis) / count
    squares = reduce((x - mean).square().sum(dims, keepdim=True), axis)
    return squares / max(count - correction, 0.0)


def _root(square: Tensor) -> Tensor:
    """Compute the square root, with gradient zero at zero."""
    zero = square == 0
    return torch.where(zero, square, torch.where(zero, 1.0, square).sqrt())


@untraced
def var_mean(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int
) -> tuple[Tensor, Tensor]:
    """Compute variance and mean over dims that are sharded over `axis`, of `count` elements."""
    values = x.to(widened(x.dtype))
    result = _variance(values, axis, dims, correction, count), _mean(values, axis, dims, count)
    return drop(result[0], dims, keepdim).to(x.dtype), drop(result[1], dims, keepdim).to(x.dtype)


@untraced
def var(x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int) -> Tensor:
    """Compute the variance over dims that are sharded over `axis`."""
    result = _variance(x.to(widened(x.dtype)), axis, dims, correction, count)
    return drop(result, dims, keepdim).to(x.dtype)


@untraced
def std(x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int) -> Tensor:
    """Compute the standard deviation over dims that are sharded over `axis`."""
    result = _root(_variance(x.to(widened(x.dtype)), axis, dims, correction, count))
    return drop(result, dims, keepdim).to(x.dtype)


@untraced
def std_mean(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int
) -> tuple[Tensor, Tensor]:
    """Compute standard deviation and mean over dims that are sharded over `axis`."""
    values = x.to(widened(x.dtype))
    mean = drop(_mean(values, axis, dims, count), dims, keepdim).to(x.dtype)
    return std(x, axis, dims, keepdim, correction, count), mean


@untraced
def vector_norm(
    x: Tensor,
    axis: Axis,
    dims: Dims,
    keepdim: bool,
    order: float = 2,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the 1- or 2-norm over dims that are sharded over `axis`."""
    result = x.dtype if dtype is None else dtype
    values = x.to(widened(result))
    if order == 1:
        norm = reduce(values.abs().sum(dims, keepdim=True), axis)
    else:
        norm = _root(reduce(values.abs().square().sum(dims, keepdim=True), axis))
    return drop(norm, dims, keepdim).to(result)


def local_extreme(x: Tensor, dims: Dims, op: str) -> Tensor:
    """Return the extreme of this rank's elements; the operation's identity if it has none."""
    if x.numel():
        return x.amax(dims, keepdim=True) if op == "max" else x.amin(dims, keepdim=True)
    lowest = op == "max"
    if x.dtype.is_floating_point:
        identity: float = -torch.inf if lowest else torch.inf
    else:
        identity = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
    return x.new_full(reduced_shape(x, dims), identity)


class _Extreme(torch.autograd.Function):
    """The gradient is shared evenly by all elements, on all ranks, that attain the extreme."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dims: Dims, op: str) -> Tensor:
        result = moves.all_reduce(local_extreme(x, dims, op), axis, op)
        ctx.save_for_backward(x, result)
        ctx.axis, ctx.dims = axis, dims
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, result = ctx.saved_tensors
        attained = x == result
        number = summed(attained.sum(ctx.dims, keepdim=True), ctx.axis)
        return attained * (grads[0] / number), None, None, None


@untraced
def amax(x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False) -> Tensor:
    """Return the largest elements along dims that are sharded over `axis`."""
    result = cast(Tensor, _Extreme.apply(x, axis, dims, "max"))  # type: ignore[no-untyped-call]
    return drop(result, dims, keepdim)


@untraced
def amin(x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False) -> Tensor:
    """Return the smallest elements along dims that are sharded over `axis`."""
    result = cast(Tensor, _Extreme.apply(x, axis, dims, "min"))  # type: ignore[no-untyped-call]
    return drop(result, dims, keepdim)


@untraced
def any_true(x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False) -> Tensor:
    """Return whether any element along dims that are sharded over `axis` is true."""
    return _logical(x, axis, dims, keepdim, "max")


@untraced
def all_true(x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False) -> Tensor:
    """Return whether all elements along dims that are sharded over `axis` are true."""
    return _logical(x, axis, dims, keepdim, "min")


def _logical(x: Tensor, axis: Axis, dims: Dims, keepdim: bool, op: str) -> Tensor:
    truth = (x.detach() != 0).to(torch.uint8)
    result = moves.all_reduce(local_extreme(truth, dims, op), axis, op)
    return drop(result, dims, keepdim).to(torch.uint8 if x.dtype == torch.uint8 else torch.bool)


@untraced
def logsumexp(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute log-sum-exp along dims that are sharded over `axis`."""
    result = x.dtype if dtype is None else dtype
    values = x.to(widened(result))
    top = moves.all_reduce(local_extreme(values.detach(), dims, "max"), axis, "max")
    top = torch.where(top.isinf(), 0.0, top)
    total = reduce((values - top).exp().sum(dims, keepdim=True), axis)
    return drop(total.log() + top, dims, keepdim).to(result)
