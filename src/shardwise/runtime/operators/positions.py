"""Operators whose result depends on the position in a sharded dim.

Factories compute their own part; ranks hold ranges of rows of embedding tables.
`of` describes how the dim is split (see `splits`), `axis` is the mesh axis.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators import empty_result, local_range, require_in_range
from shardwise.runtime.splits import Of, full_length, runs, take_part


def positions(of: Of, axis: Axis, *, device: torch.device | str | None = None) -> Tensor:
    """Return the global positions of this rank's part of a dim."""
    pieces = [
        torch.arange(start, start + length, device=device)
        for start, length in runs(of, axis.shares, axis.index)
    ]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.arange(0, device=device)


def arange(
    start: float,
    step: float,
    of: Of,
    axis: Axis,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return this rank's part of `torch.arange(start, …, step)`."""
    at = positions(of, axis, device=device)
    if dtype.is_floating_point:
        at = at.to(torch.float64)
    return (at * step + start).to(dtype)


def linspace(
    start: float | Tensor,
    end: float | Tensor,
    steps: int,
    of: Of,
    axis: Axis,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return this rank's part of `torch.linspace`."""
    full = torch.linspace(start, end, steps, dtype=dtype, device=device)
    return take_part(full, 0, of, axis.shares, axis.index)


def one_hot(classes: Tensor, of: Of, axis: Axis) -> Tensor:
    """Return this rank's classes of `one_hot`, whose last dim is sharded."""
    at = positions(of, axis, device=classes.device)
    return (classes.unsqueeze(-1) == at).to(torch.int64)


def eye(
    rows: int,
    columns: int,
    *,
    row_of: Of | None = None,
    row_axis: Axis | None = None,
    column_of: Of | None = None,
    column_axis: Axis | None = None,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return this rank's part of the identity matrix."""
    row = _places(rows, row_of, row_axis, device)
    column = _places(columns, column_of, column_axis, device)
    return (row.unsqueeze(-1) == column).to(dtype)


def _triangle(side: str, is_inside: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def triangle(
        matrix: Tensor,
        diagonal: int = 0,
        *,
        row_of: Of | None = None,
        row_axis: Axis | None = None,
        column_of: Of | None = None,
        column_axis: Axis | None = None,
    ) -> Tensor:
        rows = _places(matrix.shape[-2], row_of, row_axis, matrix.device)
        columns = _places(matrix.shape[-1], column_of, column_axis, matrix.device)
        inside = is_inside(columns, rows.unsqueeze(-1) + diagonal)
        return torch.where(inside, matrix, matrix.new_zeros(()))

    triangle.__doc__ = f"Return the {side} triangle of a matrix whose rows or columns are sharded."
    return triangle


tril, triu = _triangle("lower", torch.le), _triangle("upper", torch.ge)


def _places(
    size: int, of: Of | None, axis: Axis | None, device: torch.device | str | None
) -> Tensor:
    if of is None or axis is None:
        return torch.arange(size, device=device)
    return positions(of, axis, device=device)


def nothing(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of some shape, through which zero gradients still reach `x`.

    Some operators return empty results that are disconnected from their operands; a rank with an
    empty shard would then miss the collectives of the backward pass.
    """
    return x.reshape(-1)[:0].reshape(tuple(shape)).to(dtype)


def embedding_rows(
    weight: Tensor,
    indices: Tensor,
    axis: Axis,
    rows: Of,
    *,
    padding_idx: int | None = None,
    sparse: bool = False,
) -> Tensor:
    """Return this rank's term of an embedding with `rows` sharded over `axis`: zeros for others."""
    require_in_range(indices, full_length(rows), "embedding")
    start, length = local_range(axis, rows)
    if length == 0:
        return empty_result((*indices.shape, weight.shape[1]), weight.dtype, weight)
    local = indices - start
    missing = (local < 0) | (local >= length)
    padding = None
    if padding_idx is not None and start <= padding_idx < start + length:
        padding = padding_idx - start
    result = F.embedding(local.masked_fill(missing, 0), weight, padding, sparse=sparse)
    return result.masked_fill(missing.unsqueeze(-1), 0)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int = 0,
    scales: Tensor | None = None,
    *,
    rows: Of | None = None,
    row_axis: Axis | None = None,
    bags: Of | None = None,
    bag_axis: Axis | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    sparse: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Return this rank's bags, or with sharded `rows` their terms from this rank's rows.

    `indices`, `offsets` and `scales` are those of all bags.
    """
    require_in_range(indices, len(weight) if rows is None else full_length(rows), "embedding_bag")
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_tensor([len(indices)])])
    if bags is not None and bag_axis is not None:
        start, length = local_range(bag_axis, bags)
        offsets = offsets[start : start + length + 1]
        begin, end = (0, len(indices)) if offsets.is_meta else offsets[[0, -1]].tolist()
        indices, offsets = indices[begin:end], offsets - begin
        scales = None if scales is None else scales[begin:end]
    counts = offsets.diff()
    if rows is not None and row_axis is not None and not indices.is_meta:
        first, length = local_range(row_axis, rows)
        local = (indices >= first) & (indices < first + length)
        if padding_idx is not None:
            counts = _sums_before(indices != padding_idx)[offsets].diff()
            local &= indices != padding_idx
            padding_idx = None
        offsets = _sums_before(local)[offsets]
        indices, scales = indices[local] - first, None if scales is None else scales[local]
    if not len(weight) or not len(counts):
        operands = (weight,) if scales is None else (weight, scales)
        result = empty_result((len(counts), weight.shape[1]), weight.dtype, *operands)
        return result, None, None, None
    partial_mean = mode == 1 and rows is not None
    result = F.embedding_bag(
        indices,
        weight,
        offsets,
        mode=("sum" if partial_mean else ("sum", "mean", "max")[mode]),
        per_sample_weights=scales,
        include_last_offset=True,
        padding_idx=padding_idx,
        sparse=sparse and mode != 2,  # torch has no sparse gradient of a maximum
    )
    if partial_mean:
        result = result / counts.clamp(min=1).unsqueeze(1).to(result.dtype)
    return result, None, None, None


def _sums_before(mask: Tensor) -> Tensor:
    """Return the number of true elements before each position, and in all."""
    return F.pad(mask.cumsum(0), (1, 0))
