"""Embedding tables and expert matrices of which a rank holds a range of rows."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.support import empty_result, held, require_in_range
from shardwise.runtime.splits import Of, whole_length

__all__ = ["embedding_rows", "grouped_mm"]


def embedding_rows(
    weight: Tensor, indices: Tensor, axis: Axis, rows: Of, *, padding_idx: int | None = None
) -> Tensor:
    """Return this rank's term of an embedding with `rows` sharded over `axis`: zeros for others."""
    require_in_range(indices, whole_length(rows), "embedding")
    start, length = held(axis, rows)
    if length == 0:
        return empty_result((*indices.shape, weight.shape[1]), weight.dtype, weight)
    local = indices - start
    missing = (local < 0) | (local >= length)
    padding = None
    if padding_idx is not None and start <= padding_idx < start + length:
        padding = padding_idx - start
    result = F.embedding(local.masked_fill(missing, 0), weight, padding)
    return result.masked_fill(missing.unsqueeze(-1), 0)


class _Grouped(torch.autograd.Function):
    """Rows `start:stop` of the input times matrix i of the weight; other rows are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranges = ranges
        out = x.new_zeros(x.shape[0], weight.shape[2])
        for i, (start, stop) in enumerate(ranges):
            if start < stop:
                torch.mm(x[start:stop], weight[i], out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for i, (start, stop) in enumerate(ctx.ranges):
            if start < stop:
                grad_x[start:stop] = grad[start:stop] @ weight[i].T
                grad_weight[i] = x[start:stop].T @ grad[start:stop]
        return grad_x, grad_weight, None


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    row_axis: Axis | None = None,
    rows: Of = 0,
    expert_axis: Axis | None = None,
    experts: Of = 0,
) -> Tensor:
    """Multiply rows sorted by expert with the expert's matrix; `offs` are the ends of their rows.

    `row_axis` cuts the rows, `expert_axis` the experts; rows of other ranks' experts are zero.
    """
    ends = [int(end) for end in offs.tolist()]
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    if expert_axis is not None:
        start, length = held(expert_axis, experts)
        ranges = ranges[start : start + length]
    if row_axis is not None:
        start, length = held(row_axis, rows)
        ranges = [(_clamp(a - start, length), _clamp(b - start, length)) for a, b in ranges]
    return cast(Tensor, _Grouped.apply(x, weight, ranges))  # type: ignore[no-untyped-call]


def _clamp(position: int, length: int) -> int:
    return min(max(position, 0), length)
