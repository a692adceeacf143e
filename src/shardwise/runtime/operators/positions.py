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
