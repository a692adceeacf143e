"""Attention where the fused operator does not do: cut rows of a causal mask, dropped weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.support import held
from shardwise.runtime.random import Rng, Splits, dropout
from shardwise.runtime.splits import Of

__all__ = ["attention"]


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
    """Scaled dot-product attention.

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
    """Row i of a shard that begins at row `first` sees columns up to `first + i`."""
    positions = torch.arange(first, first + rows, device=device).unsqueeze(1)
    return positions >= torch.arange(columns, device=device)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of masked scores; a row that sees nothing has no weights."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
