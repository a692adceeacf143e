"""Normalizations whose statistics are taken over sharded dims.

Mean and variance are summed over ranks in forward, and the two sums of the gradient in one
all-reduce in backward. Weights and biases stay outside, for autograd.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.support import empty_result, summed, untraced, widened
from shardwise.runtime.redistribute import reduce_fanout

__all__ = ["batch_norm", "layer_norm", "rms_norm", "weight_norm"]


class _Normalize(torch.autograd.Function):
    """`(x - mean) / sqrt(variance + eps)` with the statistics of all ranks; also gives these."""

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
        results = grad - result * means[0]
        if ctx.center:
            results = results - means[1]
        return results * scale, None, None, None, None, None


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

    `axis` is what batch or space are cut over, `count` the number of elements per channel.
    """
    running = None
    if running_mean is not None and running_var is not None:
        running = running_mean.detach().clone(), running_var.detach().clone()
    if x.shape[1] == 0:
        given = [t for t in (x, weight, bias) if t is not None]
        result = empty_result(x.shape, x.dtype, *given)
    elif axis is None:
        mean, variance = running or (None, None)
        cudnn = torch.backends.cudnn.enabled
        result = torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, cudnn)
    else:
        result, *results = _over_batch(x, weight, bias, eps, axis, count)
        if running is not None:
            running = (
                _moved(running[0], results[0], momentum),
                _moved(running[1], results[1], momentum),
            )
    return result if running is None else (result, *running)


def _over_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axis: Axis, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the mean and the unbiased variance of the full batch."""
    dims = (0, *range(2, x.dim()))
    shape = [1, -1, *(1 for _ in range(2, x.dim()))]
    result, mean, variance = _normalize(x, axis, dims, count, eps)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    unbiased = variance * (count / max(count - 1, 1))
    return result.to(x.dtype), mean.view(-1), unbiased.view(-1)


def _moved(running: Tensor, value: Tensor, momentum: float) -> Tensor:
    """Return the running statistic moved towards the batch's."""
    return (running * (1 - momentum) + value * momentum).to(running.dtype)


@untraced
def weight_norm(v: Tensor, axis: Axis, g: Tensor, dim: int) -> Tensor:
    """Return `v * (g / |v|)`, the norm over all dims but `dim`, some sharded over `axis`."""
    others = tuple(d for d in range(v.dim()) if d != dim)
    values = v.to(widened(v.dtype))
    squares = reduce_fanout(values.square().sum(others, keepdim=True), axis)
    return (values * (g / squares.sqrt())).to(v.dtype)
