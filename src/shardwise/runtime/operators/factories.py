"""Tensors whose values depend on the position: each shard computes its own part.

`of` describes how the dim is split (see `splits`), `axis` is the mesh axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of, runs, take

__all__ = ["arange", "eye", "linspace", "nothing", "one_hot", "tril", "triu"]


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
    return take(full, 0, of, axis)


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


def tril(
    matrix: Tensor,
    diagonal: int = 0,
    *,
    row_of: Of | None = None,
    row_axis: Axis | None = None,
    column_of: Of | None = None,
    column_axis: Axis | None = None,
) -> Tensor:
    """Return the lower triangle of a matrix whose rows or columns are sharded."""
    row = _places(matrix.shape[-2], row_of, row_axis, matrix.device)
    column = _places(matrix.shape[-1], column_of, column_axis, matrix.device)
    return torch.where(column <= row.unsqueeze(-1) + diagonal, matrix, matrix.new_zeros(()))


def triu(
    matrix: Tensor,
    diagonal: int = 0,
    *,
    row_of: Of | None = None,
    row_axis: Axis | None = None,
    column_of: Of | None = None,
    column_axis: Axis | None = None,
) -> Tensor:
    """Return the upper triangle of a matrix whose rows or columns are sharded."""
    row = _places(matrix.shape[-2], row_of, row_axis, matrix.device)
    column = _places(matrix.shape[-1], column_of, column_axis, matrix.device)
    return torch.where(column >= row.unsqueeze(-1) + diagonal, matrix, matrix.new_zeros(()))


def _places(
    size: int, of: Of | None, axis: Axis | None, device: torch.device | str | None
) -> Tensor:
    if of is None or axis is None:
        return torch.arange(size, device=device)
    return positions(of, axis, device=device)


def nothing(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of some shape, through which zero gradients still reach `x`.

    Some operators give empty results that are cut off from their operands; a rank with an empty
    shard would then not come to the collectives of the backward pass.
    """
    return x.reshape(-1)[:0].reshape(tuple(shape)).to(dtype)
