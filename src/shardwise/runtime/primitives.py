"""The primitives of redistributions on plain tensors, built on the flat collectives of an axis.

Nothing here is differentiable: the table in `shardwise.redistribution` pairs each primitive with
its dual, by the names of these functions. Arguments are never changed and may be non-contiguous;
results own their memory or are views of the argument.
"""

import functools

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of, full_length, join, local_length, runs, segments, take_part
from shardwise.shares import AxisSize


def slice_view(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part: a view if it is one range, else a copy."""
    return take_part(x, dim, of, axis.shares, axis.index)


def slice(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part, contiguous: local code may call `view` on it."""
    return slice_view(x, axis, dim, of).contiguous()


def identity(x: Tensor, axis: Axis) -> Tensor:
    """Return a view of the tensor, which autograd sees as another value."""
    return x.view_as(x)


def keep_first(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor on the axis' first rank, zeros on the others."""
    return x.view_as(x) if axis.index == 0 else torch.zeros_like(x)


def zero_pad(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part in its place in a full tensor of zeros."""
    dim %= x.dim()
    full = x.new_zeros(_resized(x.shape, dim, full_length(of)))
    offset = 0
    for start, length in runs(of, axis.shares, axis.index):
        full.narrow(dim, start, length).copy_(x.narrow(dim, offset, length))
        offset += length
    return full


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Return the reduction over ranks."""
    return axis.all_reduce(x.clone(memory_format=torch.contiguous_format), op).wait()


def all_gather(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return the full tensor of all ranks' parts."""
    dim %= x.dim()
    _check(x, axis, dim, of)
    shapes = _part_shapes(x.shape, axis, dim, of)
    flat = axis.all_gather(x.contiguous().view(-1), [s.numel() for s in shapes]).wait()
    if _is_contiguous_split(x, dim, of):
        return flat.view(_resized(x.shape, dim, full_length(of)))
    return join(_split(flat, shapes), dim, of, axis.shares)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, of: Of) -> Tensor:
    """Return this rank's part of the sum over ranks."""
    dim %= x.dim()
    shapes = _part_shapes(x.shape, axis, dim, of)
    if x.is_contiguous() and _is_contiguous_split(x, dim, of):
        flat = x.view(-1)
    else:
        flat = _flat([take_part(x, dim, of, axis.shares, i) for i in range(axis.size)])
    result = axis.reduce_scatter(flat, [s.numel() for s in shapes]).wait()
    return result.view(shapes[axis.index])


def all_to_all(x: Tensor, axis: Axis, dim: int, of: Of, to_dim: int, to_of: Of) -> Tensor:
    """Exchange parts of `dim` for parts of `to_dim`."""
    dim, to_dim = dim % x.dim(), to_dim % x.dim()
    _check(x, axis, dim, of)
    if dim == to_dim:
        return _split_anew(x, axis, dim, segments(of), segments(to_of))
    sent = [take_part(x, to_dim, to_of, axis.shares, i) for i in range(axis.size)]
    own = _resized(x.shape, to_dim, local_length(to_of, axis.shares, axis.index))
    parts = _exchange(axis, sent, _part_shapes(own, axis, dim, of))
    return join(parts, dim, of, axis.shares)


def _split_anew(x: Tensor, axis: Axis, dim: int, of: Of, to_of: Of) -> Tensor:
    """Split the same dim differently: ranks exchange the indices that change owner."""
    rank, shares, ranks = axis.index, axis.shares, range(axis.size)
    sent = [x.index_select(dim, _common(of, to_of, shares, rank, i).to(x.device)) for i in ranks]
    places = [_common(to_of, of, shares, rank, i).to(x.device) for i in ranks]
    parts = _exchange(axis, sent, [_resized(x.shape, dim, place.numel()) for place in places])
    out = x.new_empty(_resized(x.shape, dim, local_length(to_of, shares, rank)))
    for place, part in zip(places, parts, strict=True):
        out.index_copy_(dim, place, part)
    return out


def _exchange(axis: Axis, sent: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
    """Send one tensor to every rank; return the received ones, in these shapes."""
    sizes = [shape.numel() for shape in shapes]
    flat = axis.all_to_all(_flat(sent), [t.numel() for t in sent], sizes).wait()
    return _split(flat, shapes)


@functools.lru_cache(maxsize=4096)
def _common(of: Of, to_of: Of, parts: AxisSize, index: int, other: int) -> Tensor:
    """Return the positions, in part `index` of `of`, of indices also in part `other` of `to_of`."""
    own, remote = (
        torch.tensor([i for s, n in runs(*part) for i in range(s, s + n)], dtype=torch.int64)
        for part in ((of, parts, index), (to_of, parts, other))
    )
    return torch.isin(own, remote).nonzero().view(-1)


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _split(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_contiguous_split(x: Tensor, dim: int, of: Of) -> bool:
    """Return whether the parts of a contiguous tensor are consecutive in memory."""
    factors = segments(of)
    return len(factors) == 1 and factors[0][0] == 1 and all(size == 1 for size in x.shape[:dim])


def _part_shapes(shape: torch.Size, axis: Axis, dim: int, of: Of) -> list[torch.Size]:
    return [_resized(shape, dim, local_length(of, axis.shares, i)) for i in range(axis.size)]


def _resized(shape: torch.Size, dim: int, length: int) -> torch.Size:
    return torch.Size([*shape[:dim], length, *shape[dim + 1 :]])


def _check(x: Tensor, axis: Axis, dim: int, of: Of) -> None:
    expected = local_length(of, axis.shares, axis.index)
    if x.shape[dim] != expected:
        raise ProgramError(
            f"dim {dim} of shape {tuple(x.shape)} should be {expected} of {full_length(of)} "
            f"on {axis!r}, split as {of}"
        )
