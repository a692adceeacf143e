"""Softmax along a dim that is cut: maximum and sum go over ranks, nothing is gathered."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwise.runtime import moves
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.reductions import local_extreme
from shardwise.runtime.operators.support import summed, untraced, widened

__all__ = ["log_softmax", "softmax"]


def _shifted(x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`x` less the maximum over ranks, its exponentials and their sum over ranks."""
    values = x.to(widened(dtype))
    shifted = values - moves.all_reduce(local_extreme(values, (dim,), "max"), axis, "max")
    exponentials = shifted.exp()
    return shifted, exponentials, summed(exponentials.sum(dim, keepdim=True), axis)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> Tensor:
        _, exponentials, total = _shifted(x, axis, dim, dtype)
        result = (exponentials / total).to(dtype)
        ctx.save_for_backward(result)
        ctx.axis, ctx.dim, ctx.dtype = axis, dim, x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        weighted = grads[0].to(widened(grads[0].dtype)) * result
        mean = summed(weighted.sum(ctx.dim, keepdim=True), ctx.axis)
        return (weighted - result * mean).to(ctx.dtype), None, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> Tensor:
        shifted, _, total = _shifted(x, axis, dim, dtype)
        result = (shifted - total.log()).to(dtype)
        ctx.save_for_backward(result)
        ctx.axis, ctx.dim, ctx.dtype = axis, dim, x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        grad = grads[0].to(widened(grads[0].dtype))
        total = summed(grad.sum(ctx.dim, keepdim=True), ctx.axis)
        return (grad - result.to(grad.dtype).exp() * total).to(ctx.dtype), None, None, None


@untraced
def softmax(x: Tensor, axis: Axis, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax along `dim`, which is cut over `axis`."""
    found = _Softmax.apply(x, axis, dim, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


@untraced
def log_softmax(x: Tensor, axis: Axis, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Log-softmax along `dim`, which is cut over `axis`."""
    found = _LogSoftmax.apply(x, axis, dim, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)
