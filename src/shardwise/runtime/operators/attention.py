"""Attention and softmax where fused operators do not apply: sharded causal masks, dropout."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime import primitives as moves
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.reductions import local_extreme
from shardwise.runtime.operators.support import held, summed, untraced, widened
from shardwise.runtime.rng import Rng, Splits, dropout
from shardwise.runtime.splits import Of

__all__ = ["attention", "log_softmax", "softmax"]


def attention(
    query: Tensor,
    key_: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    row_axis: Axis | None = None,
    rows: Of = 0,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    key: str = "",
    shape: tuple[int, ...] = (),
    splits: Splits = (),
) -> Tensor:
    """Compute scaled dot-product attention.

    `row_axis` cuts the query rows as `rows`, which a causal mask must know. Dropped weights are
    drawn for the node `key` from the whole weights' `shape`, cut as `splits`.
    """
    if is_causal:
        first = held(row_axis, rows)[0] if row_axis is not None else 0
        mask = causal_mask(query.shape[-2], key_.shape[-2], first, query.device)
    if not dropout_p:
        return F.scaled_dot_product_attention(
            query, key_, value, mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and query.shape[-3] != key_.shape[-3]:
        groups = query.shape[-3] // key_.shape[-3]
        key_, value = (t.repeat_interleave(groups, -3) for t in (key_, value))
    assert rng is not None, "dropped weights need a source of random numbers"
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = masked_softmax(query @ key_.transpose(-2, -1) * factor, mask)
    return dropout(weights, dropout_p, rng, key, shape, splits) @ value


def causal_mask(rows: int, columns: int, first: int, device: torch.device) -> Tensor:
    """Return the causal mask of a shard: its row i sees columns up to `first + i`."""
    positions = torch.arange(first, first + rows, device=device).unsqueeze(1)
    return positions >= torch.arange(columns, device=device)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax of masked scores; a fully masked row has zero weights."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


# Softmax along a sharded dim: maximum and sum are reduced over ranks, nothing is gathered.


def _shifted(x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` minus its maximum over ranks, its exponentials and their sum over ranks."""
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
    """Compute softmax along `dim`, which is sharded over `axis`."""
    result = _Softmax.apply(x, axis, dim, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


@untraced
def log_softmax(x: Tensor, axis: Axis, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute log-softmax along `dim`, which is sharded over `axis`."""
    result = _LogSoftmax.apply(x, axis, dim, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)
