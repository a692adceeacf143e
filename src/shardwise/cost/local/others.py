"""Random numbers, tables, groups of experts, factories and dropped attention weights.

Enters: local tensors; the local types of results where nothing else tells them. Leaves: what the
runtime computes on a rank. Random numbers are drawn for the whole tensor, of which the part is
taken, as the runtime does to give every number of ranks the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.cost.local.talks import device
from shardwise.ir import TensorType

Results = tuple[TensorType, ...]


def drawn(shape: Sequence[int], local: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A draw of the whole shape, and the part of it."""
    whole = torch.empty(tuple(shape), dtype=dtype, device=device())
    whole = whole.uniform_() if dtype.is_floating_point else whole.bernoulli_(0.5)
    if tuple(shape) == tuple(local):
        return whole
    part = whole
    for dim, size in enumerate(local):
        part = part.narrow(dim, 0, size)
    return part.contiguous()


def _kept(x: Tensor, shape: Sequence[int]) -> Tensor:
    kept = drawn(shape, x.shape[: len(shape)], torch.bool)
    return kept.reshape(kept.shape + (1,) * (x.dim() - kept.dim())).to(x.dtype)


def dropout(x: Tensor, p: float, *, shape: Sequence[int], splits: Any = ()) -> Tensor:
    """Dropout of a part of a tensor of `shape`."""
    return x * 0.0 if p == 1.0 else x * _kept(x, shape).mul_(1 / (1 - p))


def native_dropout(
    x: Tensor, p: float, *, shape: Sequence[int], splits: Any = ()
) -> tuple[Tensor, Tensor]:
    """Dropout, and what was kept."""
    kept = _kept(x, shape)
    return x * (kept * 2.0), kept.to(torch.bool)


def alpha_dropout(x: Tensor, p: float, *, shape: Sequence[int], splits: Any = ()) -> Tensor:
    """Dropout for SELU."""
    if p == 1.0:
        return x * 0.0
    kept = _kept(x, shape)
    return x * (kept * 0.5) + ((kept - 1) * 0.5 + 0.5)


def draw(results: Results) -> Callable[..., Tensor]:
    """`rt.draw` and `rt.draw_like`, whose local shape only the results tell."""

    def made(*_: Any, shape: Sequence[int], dtype: Any = torch.float32, **__: Any) -> Tensor:
        local = results[0] if results else TensorType(tuple(shape), dtype)
        return drawn(shape, local.shape, local.dtype)

    return made


def bernoulli(p: Tensor, *, shape: Sequence[int], splits: Any = ()) -> Tensor:
    """Ones with each element's probability."""
    return (drawn(shape, p.shape, p.dtype) < p).to(p.dtype)


def multinomial(weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Indices drawn by whole weights."""
    return torch.multinomial(weights, num_samples, replacement)


def embedding_rows(
    weight: Tensor, indices: Tensor, axis: Any, rows: Any, *, padding_idx: int | None = None
) -> Tensor:
    """A term of an embedding whose rows are cut."""
    local = indices - 0
    missing = (local < 0) | (local >= weight.shape[0])
    found = F.embedding(local.masked_fill(missing, 0), weight, None)
    return found.masked_fill(missing.unsqueeze(-1), 0)


class _Grouped(torch.autograd.Function):
    """Rows in equal groups times a matrix each: how many each has, only the data tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        out = x.new_zeros(x.shape[0], weight.shape[2])
        for i in range(weight.shape[0]):
            torch.mm(x[:rows], weight[i], out=out[:rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows, grad = ctx.rows, grads[0].contiguous()
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for i in range(weight.shape[0]):
            grad_x[:rows] = grad[:rows] @ weight[i].T
            grad_weight[i] = x[:rows].T @ grad[:rows]
        return grad_x, grad_weight, None


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **options: Any) -> Tensor:
    """`offs` are of all experts, of which this rank has some; with cut rows, its part of each."""
    experts = max(offs.shape[0], 1)
    rows = x.shape[0] // experts
    return _Grouped.apply(x, weight, rows)  # type: ignore[no-any-return, no-untyped-call]


def attention(
    query: Tensor,
    key_: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    shape: Sequence[int] = (),
    **options: Any,
) -> Tensor:
    """Attention whose weights are dropped: the composite of products and softmax."""
    if is_causal:
        positions = torch.arange(query.shape[-2], device=query.device).unsqueeze(1)
        mask = positions >= torch.arange(key_.shape[-2], device=query.device)
    if enable_gqa and query.shape[-3] != key_.shape[-3]:
        groups = query.shape[-3] // key_.shape[-3]
        key_, value = (t.repeat_interleave(groups, -3) for t in (key_, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key_.transpose(-2, -1) * factor
    return dropout(_masked_softmax(scores, mask), dropout_p, shape=shape) @ value


def _masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def factory(results: Results) -> Callable[..., Tensor]:
    """A tensor made of positions: one comparison or product over it."""

    def made(*_: Any, **__: Any) -> Tensor:
        kind = results[0]
        found = torch.arange(prod(kind.shape), device=device()).view(kind.shape)
        return (found * 1 + 0).to(kind.dtype)

    return made


def one_hot(results: Results) -> Callable[..., Tensor]:
    """Comparison of every class with this rank's positions."""

    def made(classes: Tensor, *_: Any) -> Tensor:
        at = torch.arange(results[0].shape[-1], device=device())
        return (classes.unsqueeze(-1) == at).to(torch.int64)

    return made


def triangle(matrix: Tensor, diagonal: int = 0, **_: Any) -> Tensor:
    """A triangle of a part of a matrix."""
    row = torch.arange(matrix.shape[-2], device=matrix.device)
    column = torch.arange(matrix.shape[-1], device=matrix.device)
    inside = column <= row.unsqueeze(-1) + diagonal
    return torch.where(inside, matrix, matrix.new_zeros(()))


def nothing(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor, connected to `x`."""
    return x.reshape(-1)[:0].reshape(tuple(shape)).to(dtype)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Any, dtypes: Any, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        results = tuple(
            torch.zeros(tuple(shape), dtype=dtype, device=device())
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(torch.zeros_like(t) for t in ctx.saved_tensors)


def empty_results(shapes: Any, dtypes: Any, *operands: Tensor) -> tuple[Tensor, ...]:
    """Results without elements."""
    return _Zeros.apply(shapes, dtypes, *operands)  # type: ignore[no-any-return, no-untyped-call]


def empty_result(shape: Any, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """One result without elements."""
    return empty_results((shape,), (dtype,), *operands)[0]


def no_channels(
    shape: Any, dtype: torch.dtype, *operands: Tensor, bias: Tensor | None = None
) -> Tensor:
    """A convolution over no channels."""
    zeros = empty_result(shape, dtype, *operands)
    return zeros if bias is None else zeros + bias.view(-1, *(1 for _ in operands[1].shape[2:]))
