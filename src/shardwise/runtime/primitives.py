"""The primitives of redistributions on plain tensors: from dims to flat tensors that axes carry.

Nothing here is differentiable: the table in `shardwise.redistribution` pairs each primitive with
its dual, by the names of these functions. Arguments are never changed and may be non-contiguous;
results own their memory or are views of the argument.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of, join, local_length, runs, segments, take_part, whole_length

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "identity",
    "keep_first",
    "reduce_scatter",
    "slice",
    "slice_view",
    "zero_pad",
]


def slice_view(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part, a view where it is one range."""
    return take_part(x, dim, of, axis.shares, axis.index)


def slice(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part, contiguous: local code may call `view` on it."""
    return slice_view(x, axis, dim, of).contiguous()


def identity(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor itself, as a value of its own for autograd."""
    return x.view_as(x)


def keep_first(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor on the axis' first rank, zeros on the others."""
    return x.view_as(x) if axis.index == 0 else torch.zeros_like(x)


def zero_pad(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part in its place in a full tensor of zeros."""
    dim %= x.dim()
    full = x.new_zeros(_with(x, dim, whole_length(of)))
    here = 0
    for start, length in runs(of, axis.shares, axis.index):
        full.narrow(dim, start, length).copy_(x.narrow(dim, here, length))
        here += length
    return full


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Return the reduction over ranks."""
    return axis.all_reduce(x.clone(memory_format=torch.contiguous_format), op).wait()


def all_gather(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return the full tensor of all ranks' parts."""
    dim %= x.dim()
    _check(x, axis, dim, of)
    shapes = [_with(x, dim, local_length(of, axis.shares, i)) for i in range(axis.size)]
    sizes = [shape.numel() for shape in shapes]
    flat = axis.all_gather(x.contiguous().view(-1), sizes).wait()
    if _is_outermost(x, dim) and _is_plain(of):
        return flat.view(_with(x, dim, whole_length(of)))
    parts = torch.split(flat, sizes)
    return join([p.view(s) for p, s in zip(parts, shapes, strict=True)], dim, of, axis.shares)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part of the sum over ranks."""
    dim %= x.dim()
    shapes = [_with(x, dim, local_length(of, axis.shares, i)) for i in range(axis.size)]
    sizes = [shape.numel() for shape in shapes]
    if x.is_contiguous() and _is_outermost(x, dim) and _is_plain(of):
        flat = x.view(-1)
    else:
        flat = _flat([take_part(x, dim, of, axis.shares, i) for i in range(axis.size)])
    return axis.reduce_scatter(flat, sizes).wait().view(shapes[axis.index])


def all_to_all(x: Tensor, axis: Axis, dim: int, of: Of, to_dim: int, to_of: Of) -> Tensor:
    """Exchange parts of `dim` for parts of `to_dim`."""
    dim, to_dim = dim % x.dim(), to_dim % x.dim()
    _check(x, axis, dim, of)
    if dim == to_dim:
        return _recut(x, axis, dim, segments(of), segments(to_of))
    sent = [take_part(x, to_dim, to_of, axis.shares, i) for i in range(axis.size)]
    own = _with(x, to_dim, local_length(to_of, axis.shares, axis.index))
    shapes = [_replace(own, dim, local_length(of, axis.shares, i)) for i in range(axis.size)]
    sizes = [shape.numel() for shape in shapes]
    flat = axis.all_to_all(_flat(sent), [t.numel() for t in sent], sizes).wait()
    parts = torch.split(flat, sizes)
    return join([p.view(s) for p, s in zip(parts, shapes, strict=True)], dim, of, axis.shares)


def _recut(x: Tensor, axis: Axis, dim: int, of: Of, to_of: Of) -> Tensor:
    """Split the same dim differently: each pair of ranks exchanges what the other one needs."""
    me, n = axis.index, axis.shares
    sent = [x.index_select(dim, _shared(of, to_of, n, me, i).to(x.device)) for i in range(n)]
    places = [_shared(to_of, of, n, me, i).to(x.device) for i in range(n)]
    shapes = [_with(x, dim, place.numel()) for place in places]
    sizes = [shape.numel() for shape in shapes]
    flat = axis.all_to_all(_flat(sent), [t.numel() for t in sent], sizes).wait()
    out = x.new_empty(_with(x, dim, local_length(to_of, n, me)))
    for place, part, shape in zip(places, torch.split(flat, sizes), shapes, strict=True):
        out.index_copy_(dim, place, part.view(shape))
    return out


@functools.lru_cache(maxsize=4096)
def _shared(of: Of, to_of: Of, parts: int, index: int, other: int) -> Tensor:
    """Return where in part `index` of `of` the indices are that part `other` of `to_of` has too."""
    own = torch.cat([torch.arange(s, s + n) for s, n in runs(of, parts, index)] or [_NONE])
    remote = torch.cat([torch.arange(s, s + n) for s, n in runs(to_of, parts, other)] or [_NONE])
    return torch.isin(own, remote).nonzero().view(-1)


_NONE = torch.empty(0, dtype=torch.int64)


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _is_outermost(x: Tensor, dim: int) -> bool:
    return all(size == 1 for size in x.shape[:dim])


def _is_plain(of: Of) -> bool:
    cut = segments(of)
    return len(cut) == 1 and cut[0][0] == 1


def _with(x: Tensor, dim: int, length: int) -> torch.Size:
    return _replace(x.shape, dim, length)


def _replace(shape: torch.Size, dim: int, length: int) -> torch.Size:
    return torch.Size([*shape[:dim], length, *shape[dim + 1 :]])


def _check(x: Tensor, axis: Axis, dim: int, of: Of) -> None:
    expected = local_length(of, axis.shares, axis.index)
    if x.shape[dim] != expected:
        raise ProgramError(
            f"dim {dim} of {tuple(x.shape)} should have {expected} of {whole_length(of)} "
            f"on {axis!r}, split as {of}"
        )
