"""Reductions over dims that are cut.

Enters: local tensors and the mesh axis. Leaves: what `runtime.operators.reductions` computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.cost.local.talks import Axis, all_reduce, drop, reduce, wide

Dims = tuple[int, ...]


def partial_mean(
    x: Tensor, dims: Dims, keepdim: bool = False, *, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's term of a mean."""
    result = x.dtype if dtype is None else dtype
    return (x.sum(dims, keepdim, dtype=wide(result)) / count).to(result)


def _mean(x: Tensor, axis: Axis, dims: Dims, count: int) -> Tensor:
    return reduce(x.sum(dims, keepdim=True), axis) / count


def _variance(x: Tensor, axis: Axis, dims: Dims, correction: float, count: int) -> Tensor:
    mean = all_reduce(x.detach().sum(dims, keepdim=True), axis) / count
    squares = reduce((x - mean).square().sum(dims, keepdim=True), axis)
    return squares / max(count - correction, 1.0)


def _root(square: Tensor) -> Tensor:
    zero = square == 0
    return torch.where(zero, square, torch.where(zero, 1.0, square).sqrt())


def var(x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int) -> Tensor:
    """The variance over cut dims."""
    found = _variance(x.to(wide(x.dtype)), axis, dims, correction, count)
    return drop(found, dims, keepdim).to(x.dtype)


def std(x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int) -> Tensor:
    """The standard deviation over cut dims."""
    found = _root(_variance(x.to(wide(x.dtype)), axis, dims, correction, count))
    return drop(found, dims, keepdim).to(x.dtype)


def var_mean(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int
) -> tuple[Tensor, Tensor]:
    """Variance and mean over cut dims."""
    values = x.to(wide(x.dtype))
    found = _variance(values, axis, dims, correction, count), _mean(values, axis, dims, count)
    return drop(found[0], dims, keepdim).to(x.dtype), drop(found[1], dims, keepdim).to(x.dtype)


def std_mean(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool, correction: float, count: int
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean over cut dims."""
    values = x.to(wide(x.dtype))
    mean = drop(_mean(values, axis, dims, count), dims, keepdim).to(x.dtype)
    return std(x, axis, dims, keepdim, correction, count), mean


def vector_norm(
    x: Tensor,
    axis: Axis,
    dims: Dims,
    keepdim: bool,
    order: float = 2,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The 1- or 2-norm over cut dims."""
    result = x.dtype if dtype is None else dtype
    values = x.to(wide(result))
    if order == 1:
        norm = reduce(values.abs().sum(dims, keepdim=True), axis)
    else:
        norm = _root(reduce(values.abs().square().sum(dims, keepdim=True), axis))
    return drop(norm, dims, keepdim).to(result)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dims: Dims, op: str) -> Tensor:
        found = all_reduce(_extreme(x, dims, op), axis)
        ctx.save_for_backward(x, found)
        ctx.axis, ctx.dims = axis, dims
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, found = ctx.saved_tensors
        attained = x == found
        number = all_reduce(attained.sum(ctx.dims, keepdim=True), ctx.axis)
        return attained * (grads[0] / number), None, None, None


def _extreme(x: Tensor, dims: Dims, op: str) -> Tensor:
    return x.amax(dims, keepdim=True) if op == "max" else x.amin(dims, keepdim=True)


def amax(x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False, op: str = "max") -> Tensor:
    """The extreme along cut dims."""
    found = _Extreme.apply(x, axis, dims, op)  # type: ignore[no-untyped-call]
    return drop(found, dims, keepdim)


def any_true(x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False, op: str = "max") -> Tensor:
    """Whether any (min: all) elements along cut dims are true."""
    truth = (x.detach() != 0).to(torch.uint8)
    found = all_reduce(_extreme(truth, dims, op), axis)
    return drop(found, dims, keepdim).to(torch.uint8 if x.dtype == torch.uint8 else torch.bool)


def logsumexp(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The logarithm of a sum of exponentials along cut dims."""
    result = x.dtype if dtype is None else dtype
    values = x.to(wide(result))
    top = all_reduce(_extreme(values.detach(), dims, "max"), axis)
    top = torch.where(top.isinf(), 0.0, top)
    total = reduce((values - top).exp().sum(dims, keepdim=True), axis)
    return drop(total.log() + top, dims, keepdim).to(result)
