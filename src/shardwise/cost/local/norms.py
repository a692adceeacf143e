"""Normalizations over dims that are cut.

Enters: local tensors and the mesh axis. Leaves: what `runtime.operators.norms` computes on a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.cost.local.talks import Axis, all_reduce, reduce, wide


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dims: tuple[int, ...], count: int, eps: float, center: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.new_zeros(())
        if center:
            mean = all_reduce(x.sum(dims, keepdim=True), axis) / count
        centered = x - mean
        variance = all_reduce(centered.square().sum(dims, keepdim=True), axis) / count
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
        means = all_reduce(torch.stack(sums), ctx.axis) / ctx.count
        found = grad - result * means[0]
        if ctx.center:
            found = found - means[1]
        return found * scale, None, None, None, None, None


def layer_norm(
    x: Tensor,
    axis: Axis,
    num_dims: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float | None,
    count: int,
    dtype: torch.dtype | None = None,
    center: bool = True,
) -> Tensor:
    """Layer norm, or RMS norm without `center`, over cut dims."""
    dims = tuple(range(-num_dims, 0))
    given = x.to(wide(x.dtype))
    result, _, _ = _Normalize.apply(given, axis, dims, count, eps or 1e-6, center)  # type: ignore[no-untyped-call]
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return result.to(x.dtype if dtype is None else dtype)  # type: ignore[no-any-return]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    momentum: float,
    eps: float,
    *,
    axis: Axis = None,
    count: int = 0,
) -> Any:
    """Batch norm with the whole batch's statistics."""
    running = [t.detach().clone() for t in (mean, variance) if t is not None]
    if axis is None:
        first, second = running if len(running) == 2 else (None, None)
        result = torch.batch_norm(x, weight, bias, first, second, True, momentum, eps, False)
        return (result, *running) if running else result
    dims = (0, *range(2, x.dim()))
    shape = [1, -1, *(1 for _ in range(2, x.dim()))]
    found = _Normalize.apply(x.to(wide(x.dtype)), axis, dims, count, eps, True)  # type: ignore[no-untyped-call]
    result = found[0] if weight is None else found[0] * weight.view(shape)
    result = result if bias is None else result + bias.view(shape)
    result = result.to(x.dtype)
    moved = found[1].view(-1), (found[2] * (count / max(count - 1, 1))).view(-1)
    if not running:
        return result
    new = [
        (r * (1 - momentum) + v * momentum).to(r.dtype) for r, v in zip(running, moved, strict=True)
    ]
    return (result, *new)


def weight_norm(v: Tensor, axis: Axis, g: Tensor, dim: int) -> Tensor:
    """A weight by its norm over cut dims."""
    others = tuple(d for d in range(v.dim()) if d != dim)
    values = v.to(wide(v.dtype))
    squares = reduce(values.square().sum(others, keepdim=True), axis, again=True)
    return (values * (g / squares.sqrt())).to(v.dtype)
