"""Reductions and normalizations over sharded dims.

Every function but `partial_mean` returns the full result on each rank; its gradient is then the
same on each rank, and the backward pass computes the exact gradient of the local shard.
"""

from typing import Any, cast

import torch
from torch import Tensor

from shardwise.runtime import primitives
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators import drop, empty_result, reduced_shape, summed, untraced, widened
from shardwise.runtime.redistribute import reduce, reduce_fanout

Dims = tuple[int, ...]


def partial_mean(
    x: Tensor, dims: Dims, keepdim: bool = False, *, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return this rank's term of the mean over `count` elements of all ranks."""
    result = x.dtype if dtype is None else dtype
    return (x.sum(dims, keepdim, dtype=widened(result)) / count).to(result)


def _mean(x: Tensor, axis: Axis, dims: Dims, keepdim: bool, count: int) -> Tensor:
    total = reduce(x.to(widened(x.dtype)).sum(dims, keepdim=True), axis)
    return drop(total / count, dims, keepdim).to(x.dtype)


def _variance(x: Tensor, axis: Axis, dims: Dims, correction: float, count: int) -> Tensor:
    # The mean needs no gradient, because deviations from it add up to zero.
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
    variance = var(x, axis, dims, keepdim, correction, count)
    return variance, _mean(x, axis, dims, keepdim, count)


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
    mean = _mean(x, axis, dims, keepdim, count)
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
        result = primitives.all_reduce(local_extreme(x, dims, op), axis, op)
        ctx.save_for_backward(x, result)
        ctx.axis, ctx.dims = axis, dims
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, result = ctx.saved_tensors
        attained = x == result
        count = summed(attained.sum(ctx.dims, keepdim=True), ctx.axis)
        return attained * (grads[0] / count), None, None, None


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
    result = primitives.all_reduce(local_extreme(truth, dims, op), axis, op)
    return drop(result, dims, keepdim).to(torch.uint8 if x.dtype == torch.uint8 else torch.bool)


@untraced
def logsumexp(
    x: Tensor, axis: Axis, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute log-sum-exp along dims that are sharded over `axis`."""
    result = x.dtype if dtype is None else dtype
    values = x.to(widened(result))
    top = primitives.all_reduce(local_extreme(values.detach(), dims, "max"), axis, "max")
    top = torch.where(top.isinf(), 0.0, top)
    total = reduce((values - top).exp().sum(dims, keepdim=True), axis)
    return drop(total.log() + top, dims, keepdim).to(result)


class _Normalize(torch.autograd.Function):
    """Return `(x - mean) / sqrt(variance + eps)` with the statistics of all ranks, and these."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dims: tuple[int, ...], count: int, eps: float, center: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.new_zeros(())
        if center:
            mean = summed(x.sum(dims, keepdim=True), axis) / count
        centered = x - mean
        variance = summed(centered.square().sum(dims, keepdim=True), axis) / count
        scale = (variance + eps).rsqrt()
        result = centered * scale
        ctx.save_for_backward(result, scale)
        ctx.axis, ctx.dims, ctx.count, ctx.center = axis, dims, count, center
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        result, scale = ctx.saved_tensors
        grad = grads[0]
        sums = [(grad * result).sum(ctx.dims, keepdim=True)]
        if ctx.center:
            sums.append(grad.sum(ctx.dims, keepdim=True))
        means = summed(torch.stack(sums), ctx.axis) / ctx.count
        to_x = grad - result * means[0]
        if ctx.center:
            to_x = to_x - means[1]
        return to_x * scale, None, None, None, None, None


def _normalize(
    x: Tensor, axis: Axis, dims: tuple[int, ...], count: int, eps: float, *, center: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    result = _Normalize.apply(  # type: ignore[no-untyped-call]
        x.to(widened(x.dtype)), axis, dims, count, eps, center
    )
    return cast(tuple[Tensor, Tensor, Tensor], result)


@untraced
def layer_norm(
    x: Tensor,
    axis: Axis,
    num_dims: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    count: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute layer norm over the last `num_dims` dims (`count` elements) sharded over `axis`."""
    result, _, _ = _normalize(x, axis, tuple(range(-num_dims, 0)), count, eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(x.dtype if dtype is None else dtype)


@untraced
def rms_norm(
    x: Tensor,
    axis: Axis,
    num_dims: int,
    weight: Tensor | None = None,
    *,
    eps: float | None,
    count: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute RMS norm over the last `num_dims` dims (`count` elements) sharded over `axis`."""
    dims = tuple(range(-num_dims, 0))
    small = torch.finfo(widened(x.dtype)).eps if eps is None else eps
    result, _, _ = _normalize(x, axis, dims, count, small, center=False)
    if weight is not None:
        result = result * weight
    return result.to(x.dtype if dtype is None else dtype)


@untraced
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    *,
    axis: Axis | None = None,
    count: int = 0,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Compute batch norm with full-batch statistics; return the new running ones too, if any.

    `axis` shards the batch or spatial dims; `count` is the number of elements per channel.
    """
    running = None
    if running_mean is not None and running_var is not None:
        running = running_mean.detach().clone(), running_var.detach().clone()
    if x.shape[1] == 0:
        operands = [t for t in (x, weight, bias) if t is not None]
        result = empty_result(x.shape, x.dtype, *operands)
    elif axis is None:
        mean, variance = running or (None, None)
        cudnn = torch.backends.cudnn.enabled
        result = torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, cudnn)
    else:
        dims = (0, *range(2, x.dim()))
        shape = [1, -1, *(1 for _ in range(2, x.dim()))]
        result, mean, variance = _normalize(x, axis, dims, count, eps)
        if weight is not None:
            result = result * weight.view(shape)
        if bias is not None:
            result = result + bias.view(shape)
        result = result.to(x.dtype)
        if running is not None:
            unbiased = variance * (count / max(count - 1, 1))
            pairs = zip(running, (mean.view(-1), unbiased.view(-1)), strict=True)
            new = [(old * (1 - momentum) + v * momentum).to(old.dtype) for old, v in pairs]
            running = new[0], new[1]
    return result if running is None else (result, *running)


@untraced
def weight_norm(v: Tensor, axis: Axis, g: Tensor, dim: int) -> Tensor:
    """Return `v * (g / |v|)`, the norm over all dims but `dim`, some sharded over `axis`."""
    others = tuple(d for d in range(v.dim()) if d != dim)
    values = v.to(widened(v.dtype))
    squares = reduce_fanout(values.square().sum(others, keepdim=True), axis)
    return (values * (g / squares.sqrt())).to(v.dtype)
