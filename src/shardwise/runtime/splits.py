"""Split a dim into parts, and join parts to the full dim.

A dim is a concatenation of segments, each a product `outer x size x inner`; the factor `size` of
every segment is split, evenly or by the weights of a mesh axis. A fused QKV dim `3*H*E` that is
split on heads is `((3, H, E),)`, a dim `[H*E | K*E | K*E]` is `((1, H, E), (1, K, E), (1, K, E))`,
and a plain dim of n is `n` or `((1, n, 1),)`. A part keeps the order of the full dim.

`take_part` and `join` split one dim over one axis. A `Split` names the mesh axis and dim; a tuple
of them splits a tensor over several axes: on different dims, on different factors of one dim, or on
the same factor, where the later axis splits the earlier one's part.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.shares import AxisSize, Runs, Segments, dim_runs, part

Of = int | Segments
Place = Mapping[str, int]  # coordinates on mesh axes
Axes = Mapping[str, AxisSize]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One mesh axis splits one factor of one dim of a full tensor."""

    axis: str
    dim: int
    of: Segments


def segments(of: Of) -> Segments:
    """Return the segments of a dim; a plain size is one segment."""
    return ((1, of, 1),) if isinstance(of, int) else of


def full_length(of: Of) -> int:
    """Return the size of the full dim."""
    return sum(outer * size * inner for outer, size, inner in segments(of))


@functools.lru_cache(maxsize=65536)
def local_length(of: Of, parts: AxisSize, index: int) -> int:
    """Return the size of the dim in one part.

    >>> local_length(((3, 4, 2),), 3, 0)
    12
    """
    return sum(outer * part(size, parts, index)[1] * inner for outer, size, inner in segments(of))


@functools.lru_cache(maxsize=65536)
def runs(of: Of, parts: AxisSize, index: int) -> Runs:
    """Return the consecutive (start, length) pieces of the full dim that make up one part.

    >>> runs(((3, 4, 2),), 2, 1)
    ((4, 4), (12, 4), (20, 4))
    """
    return dim_runs([(segments(of), parts, index)])


def take_part(full: Tensor, dim: int, of: Of, parts: AxisSize, index: int) -> Tensor:
    """Return one of `parts` parts of a full tensor: a view where it is one run, else a copy."""
    if full.shape[dim] != full_length(of):
        raise ProgramError(f"dim {dim} of {tuple(full.shape)} does not consist of {of}")
    return _take_runs(full, dim, runs(of, parts, index))


def _take_runs(full: Tensor, dim: int, pieces: Runs) -> Tensor:
    if len(pieces) == 1:
        return full.narrow(dim, *pieces[0])
    if not pieces:
        return full.narrow(dim, 0, 0)
    return torch.cat([full.narrow(dim, *piece) for piece in pieces], dim)


def join(parts: Sequence[Tensor], dim: int, of: Of, shares: AxisSize | None = None) -> Tensor:
    """Return the full tensor of all ranks' parts, which are even without `shares`."""
    of, dim = segments(of), dim % parts[0].dim()
    num = shares if shares is not None else len(parts)
    if len(of) == 1 and of[0][0] == 1:
        return torch.cat(tuple(parts), dim)
    lengths = [
        [outer * part(size, num, i)[1] * inner for outer, size, inner in of]
        for i in range(len(parts))
    ]
    pieces = [torch.split(t, length, dim) for t, length in zip(parts, lengths, strict=True)]
    joined = []
    for s, (outer, size, inner) in enumerate(of):
        rows = [
            torch.unflatten(piece[s], dim, (outer, part(size, num, i)[1] * inner))
            for i, piece in enumerate(pieces)
        ]
        joined.append(torch.cat(rows, dim + 1).flatten(dim, dim + 1))
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim)


def local_runs(
    shape: Sequence[int], splits: Sequence[Split], coords: Place, sizes: Axes
) -> tuple[Runs, ...]:
    """Return for every dim the pieces of the full tensor at mesh coordinate `coords`."""
    return tuple(
        _dim_runs(length, [s for s in splits if s.dim % len(shape) == dim], coords, sizes)
        for dim, length in enumerate(shape)
    )


def _dim_runs(length: int, splits: Sequence[Split], coords: Place, sizes: Axes) -> Runs:
    for split in splits:
        if full_length(split.of) != length:
            raise ProgramError(
                f"a dim of {length} does not consist of {split.of} (split over {split.axis})"
            )
    if not splits:
        return ((0, length),) if length else ()
    return dim_runs((s.of, sizes[s.axis], coords[s.axis]) for s in splits)


def local_shape(
    shape: Sequence[int], splits: Sequence[Split], coords: Place, sizes: Axes
) -> tuple[int, ...]:
    """Return the shape of the part at a mesh coordinate."""
    return tuple(sum(n for _, n in pieces) for pieces in local_runs(shape, splits, coords, sizes))


def take_local(full: Tensor, splits: Sequence[Split], coords: Place, sizes: Axes) -> Tensor:
    """Return the part of a full tensor at a mesh coordinate: a view where possible."""
    for dim, pieces in enumerate(local_runs(full.shape, splits, coords, sizes)):
        if pieces != ((0, full.shape[dim]),):
            full = _take_runs(full, dim, pieces)
    return full


def assemble(
    parts: Mapping[tuple[int, ...], Tensor],
    shape: Sequence[int],
    splits: Sequence[Split],
    sizes: Axes,
) -> Tensor:
    """Assemble a full tensor from parts keyed by the coordinates on the axes of `sizes`, in order.

    Of parts that are equal because an axis does not split the tensor, one suffices.
    """
    full = next(iter(parts.values())).new_empty(tuple(shape))
    for place, local in parts.items():
        coords = dict(zip(sizes, place, strict=True))
        pieces = local_runs(shape, splits, coords, sizes)
        for box in itertools.product(*map(offsets, pieces)):
            target = narrow(full, [(begin, length) for begin, _, length in box])
            target.copy_(narrow(local, [(offset, length) for _, offset, length in box]))
    covered = sum(t.numel() for t in parts.values())
    assert covered >= math.prod(shape), f"parts have {covered} of {math.prod(shape)} elements"
    return full


def narrow(tensor: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
    """Return a view of the elements from a start, of a length, in every dim."""
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def offsets(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (start in the full dim, start in the part, length) of each piece."""
    starts = itertools.accumulate((n for _, n in pieces), initial=0)
    return [(begin, offset, n) for (begin, n), offset in zip(pieces, starts, strict=False)]
