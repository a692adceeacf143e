"""What operators share: sums over ranks, the range a rank holds, precision of statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from shardwise.dtypes import torch_pairs
from shardwise.errors import ProgramError
from shardwise.runtime import moves
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of, runs

WIDENED = torch_pairs("widened")
Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """A compiled program breaks its graph here: communication is never traced."""
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def summed(x: Tensor, axis: Axis | None) -> Tensor:
    """The sum over ranks, outside autograd."""
    return x if axis is None else moves.all_reduce(x.detach(), axis)


def held(axis: Axis, of: Of) -> tuple[int, int]:
    """Start and length of the one range of a dim that this rank holds."""
    pieces = runs(of, axis.shares, axis.index)
    if len(pieces) > 1:
        raise ProgramError(f"{axis!r} holds {len(pieces)} ranges of a dim cut as {of}, not one")
    return pieces[0] if pieces else (0, 0)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and statistics of `dtype` are computed."""
    return WIDENED.get(dtype, dtype)


def reduced_shape(x: Tensor, dims: tuple[int, ...]) -> list[int]:
    """The shape with `dims` kept as ones."""
    kept = {d % max(x.dim(), 1) for d in dims}
    return [1 if d in kept else n for d, n in enumerate(x.shape)]


def drop(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Remove dims of one that a reduction left, unless they are kept."""
    return x if keepdim or not x.dim() else x.squeeze(tuple(dims))
