"""Boxes: what of a full tensor is where.

A rank's part of a tensor is cut by runs in every dim, and may be a range of the row-major local
tensor on top (ZeRO). Either way it is a set of boxes, each with an offset and a size in the full
tensor: `cut_boxes` gives them, each with the memory that holds it, and `check_cover` says whether
boxes make up a tensor.

    >>> [(b.offset, b.size) for b in range_boxes((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.errors import CheckpointError

__all__ = ["Box", "Placed", "check_cover", "cut_boxes", "narrow", "range_boxes", "split_box"]

Runs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Box:
    """An offset and a size in every dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of the full tensor, and the memory of this rank that holds it, in the box's shape."""

    box: Box
    view: Tensor


def narrow(tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """The view of a tensor at a box."""
    for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def range_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes of elements `begin` … `end` in row-major order, in that order.

    They are at most 2·dims - 1: the rest of a row, whole rows, a part of a row, in every dim.
    """
    if begin >= end:
        return []
    if not shape or (begin == 0 and end == math.prod(shape)):
        return [Box.whole(shape)]
    rest, row = tuple(shape[1:]), math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return _in_row(first - 1, range_boxes(rest, begin - last * row, end - last * row))
    found: list[Box] = []
    if begin < first * row:
        found += _in_row(first - 1, range_boxes(rest, begin - (first - 1) * row, row))
    if first < last:
        found.append(Box((first, *(0 for _ in rest)), (last - first, *rest)))
    if last * row < end:
        found += _in_row(last, range_boxes(rest, 0, end - last * row))
    return found


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes]


def cut_boxes(runs: Sequence[Runs], local: Tensor, bounds: tuple[int, int] | None) -> list[Placed]:
    """The boxes of the full tensor that a rank holds, with their memory; none is empty.

    `runs` are the pieces of the full tensor in every dim that make up the local one. `local` is
    that, or with `bounds` the elements between them of its row-major form, in one dim.
    """
    shape = tuple(sum(length for _, length in dim) for dim in runs)
    if bounds is None:
        return _at_runs(runs, Box.whole(shape), local.reshape(shape))
    found, place = [], 0
    for box in range_boxes(shape, *bounds):
        view = local[place : place + box.numel].view(box.size)
        found += _at_runs(runs, box, view)
        place += box.numel
    return found


def _at_runs(runs: Sequence[Runs], box: Box, view: Tensor) -> list[Placed]:
    """A box of the local tensor as boxes of the full one."""
    if not box.numel:
        return []
    pieces = [list(_within(r, b, n)) for r, b, n in zip(runs, box.offset, box.size, strict=True)]
    found = []
    for piece in itertools.product(*pieces):
        offset, here = tuple(p[0] for p in piece), tuple(p[1] for p in piece)
        size = tuple(p[2] for p in piece)
        found.append(Placed(Box(offset, size), narrow(view, here, size)))
    return found


def _within(runs: Runs, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(start in the whole, start in the box, length) of the runs' parts in a range of the local."""
    place = 0
    for start, size in runs:
        low, high = max(begin, place), min(begin + length, place + size)
        if low < high:
            yield start + low - place, low - begin, high - low
        place += size


def split_box(placed: Placed, max_bytes: int) -> list[Placed]:
    """A box in parts of at most `max_bytes`, or of one element."""
    box, view = placed.box, placed.view
    if view.nbytes <= max_bytes or box.numel <= 1:
        return [placed]
    dim = next(d for d, n in enumerate(box.size) if n > 1)
    row = view.nbytes // box.size[dim]
    step = max(1, max_bytes // row)
    found = []
    for begin in range(0, box.size[dim], step):
        length = min(step, box.size[dim] - begin)
        offset = tuple(o + begin if d == dim else o for d, o in enumerate(box.offset))
        size = tuple(length if d == dim else n for d, n in enumerate(box.size))
        found += split_box(Placed(Box(offset, size), view.narrow(dim, begin, length)), max_bytes)
    return found


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not within the tensor, overlap, or leave something out."""
    for box in boxes:
        inside = len(box.offset) == len(box.size) == len(shape)
        inside = inside and all(o >= 0 and n > 0 for o, n in zip(box.offset, box.size, strict=True))
        if not inside or any(e > n for e, n in zip(box.end, shape, strict=True)):
            raise CheckpointError(f"a box {box} is not within {name} of shape {tuple(shape)}")
    clash = _overlap(boxes) if len(boxes) > 1 else None
    if clash is not None:
        raise CheckpointError(f"boxes of {name} overlap: {clash[0]} and {clash[1]}")
    covered, numel = sum(box.numel for box in boxes), math.prod(shape)
    if covered != numel:
        raise CheckpointError(f"the boxes of {name} have {covered} of its {numel} elements")


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap, found by a sweep along the dim where they begin at most places."""
    dims = range(len(boxes[0].offset))
    if not dims:
        return boxes[0], boxes[1]
    sweep = max(dims, key=lambda d: len({box.offset[d] for box in boxes}))
    active: list[tuple[int, int]] = []
    for index in sorted(range(len(boxes)), key=lambda i: boxes[i].offset[sweep]):
        box = boxes[index]
        del active[: bisect.bisect_right(active, (box.offset[sweep], len(boxes)))]
        for _, other in active:
            if all(
                a < d and c < b
                for a, b, c, d in zip(
                    box.offset, box.end, boxes[other].offset, boxes[other].end, strict=True
                )
            ):
                return boxes[other], box
        bisect.insort(active, (box.end[sweep], index))
    return None
