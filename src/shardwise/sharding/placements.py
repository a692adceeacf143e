"""Where the parts of a value are: one placement per mesh axis, together a layout.

Enters: structures and patterns of `dims`. Leaves: `Replicate | Partial | Shard`, `Layout`, and
the local sizes and index sets that follow from them. What each rank holds of a cut follows from
`shares`: even parts, or by weights; a rank may hold nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from shardwise.errors import RuleError
from shardwise.sharding.dims import Pattern, merge
from shardwise.shares import part


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the full value.

    With `partial_grad` (R~) the ranks use it for different work, so that each has a term of its
    gradient; otherwise (R) they do the same work and have the same gradient.
    """

    partial_grad: bool = False

    def __str__(self) -> str:
        return "R~" if self.partial_grad else "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the value is their sum (or max, or min)."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Shard:
    """The factor `size` of every segment `(outer, size, inner)` of dim `dim` is cut.

    >>> str(Shard(0, ((3, 4, 16),)))
    'S(0:3x[4]x16)'
    """

    dim: int
    of: Pattern

    def __str__(self) -> str:
        return f"S({format_shard(self)})"


Placement = Replicate | Partial | Shard
Cuts = tuple[tuple[str, Pattern], ...]  # of one dim: mesh axis and pattern, in mesh order
SEGMENT = re.compile(r"((?:\d+x)*)\[(\d+)\]((?:x\d+)*)")  # 3x[4]x16
REPLICATE = Replicate()
PARTIAL_GRAD = Replicate(partial_grad=True)
PARTIAL = Partial()


def format_shard(shard: Shard) -> str:
    """`0` for a plain contiguous cut, `0:3x[4]x16` for a factor, `|` between segments."""
    if len(shard.of) == 1 and shard.of[0][0] == 1 and shard.of[0][2] == 1:
        return f"{shard.dim}"
    parts = []
    for outer, size, inner in shard.of:
        text = f"{outer}x" * (outer != 1) + f"[{size}]" + f"x{inner}" * (inner != 1)
        parts.append(text)
    return f"{shard.dim}:{'|'.join(parts)}"


def parse_shard(text: str, shape: tuple[int, ...]) -> Shard:
    """Return the inverse of `format_shard` for a tensor of this shape.

    >>> parse_shard("0:3x[4]x16", (192, 64))
    Shard(dim=0, of=((3, 4, 16),))
    >>> parse_shard("-1", (192, 64))
    Shard(dim=1, of=((1, 64, 1),))
    """
    head, colon, tail = text.partition(":")
    segments = [SEGMENT.fullmatch(piece) for piece in tail.split("|")] if colon else []
    if not re.fullmatch(r"-?\d+", head) or not all(segments):
        raise RuleError(
            f"layout {text!r} is not understood",
            hint="a dim such as '0', or '0:3x[4]x16', which cuts the 4 of 3*4*16",
        )
    dim = int(head)
    if not -len(shape) <= dim < len(shape):
        raise RuleError(f"layout {text!r} names dim {dim} of a tensor of shape {shape}")
    dim %= len(shape)
    if not colon:
        return Shard(dim, ((1, shape[dim], 1),))
    of = []
    for segment in segments:
        assert segment is not None
        before, size, after = (
            prod(int(f) for f in group.split("x") if f) for group in segment.groups()
        )
        of.append((before, size, after))
    total = sum(prod(segment) for segment in of)
    if total != shape[dim]:
        raise RuleError(
            f"layout {text!r} describes {total} elements, dim {dim} of shape {shape} has "
            f"{shape[dim]}"
        )
    return Shard(dim, merge(tuple(of)))


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement for every mesh axis, in mesh order.

    >>> str(Layout((("dp", Shard(0, ((1, 8, 1),))), ("tp", REPLICATE))))
    'dp:S(0) tp:R'
    """

    axes: tuple[tuple[str, Placement], ...]

    def __getitem__(self, axis: str) -> Placement:
        for name, placement in self.axes:
            if name == axis:
                return placement
        raise KeyError(axis)

    def with_axis(self, axis: str, placement: Placement) -> Layout:
        return Layout(tuple((n, placement if n == axis else p) for n, p in self.axes))

    @property
    def shards(self) -> tuple[tuple[str, Shard], ...]:
        return tuple((n, p) for n, p in self.axes if isinstance(p, Shard))

    def cuts(self, dim: int) -> Cuts:
        """Return the mesh axes that cut a dim, in mesh order, with their patterns."""
        return tuple((n, s.of) for n, s in self.shards if s.dim == dim)

    def __str__(self) -> str:
        return " ".join(f"{name}:{placement}" for name, placement in self.axes)


Coordinate = Mapping[str, tuple[int, int]]  # mesh axis -> (this rank's index, axis size)


def factor_range(
    layout: Layout, dim: int, segment: int, factor: tuple[int, int, int], coordinate: Coordinate
) -> tuple[int, int]:
    """Start and length of this rank's part of a factor that one or more mesh axes cut, nested."""
    start, size = 0, factor[1]
    for axis, shard in layout.shards:
        if shard.dim == dim and segment < len(shard.of) and shard.of[segment] == factor:
            index, parts = coordinate[axis]
            offset, size = part(size, parts, index)
            start += offset
    return start, size


def local_dim(layout: Layout, dim: int, size: int, coordinate: Coordinate) -> int:
    """This rank's length of a dim of global length `size`."""
    cuts = [shard.of for _, shard in layout.shards if shard.dim == dim]
    if not cuts:
        return size
    total = 0
    for i in range(len(cuts[0])):
        segment = prod(cuts[0][i])
        for factor in dict.fromkeys(of[i] for of in cuts):
            _, kept = factor_range(layout, dim, i, factor, coordinate)
            segment = segment // factor[1] * kept if factor[1] else 0
        total += segment
    return total


def local_shape(layout: Layout, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[int, ...]:
    """Return the shape of this rank's part."""
    sizes = list(shape)
    for dim in {shard.dim for _, shard in layout.shards}:
        sizes[dim] = local_dim(layout, dim, shape[dim], coordinate)
    return tuple(sizes)


def local_pattern(layout: Layout, axis: str, coordinate: Coordinate) -> Pattern:
    """Return the cut of `axis` in terms of the tensor as the other axes leave it.

    Outer and inner sizes shrink by the other axes' cuts of the same dim; the size is what the
    axes before this one leave of the factor.
    """
    shard = layout[axis]
    assert isinstance(shard, Shard)
    others = Layout(tuple((n, p) for n, p in layout.axes if n != axis))
    before = Layout(layout.axes[: [n for n, _ in layout.axes].index(axis)])
    result = []
    for i, factor in enumerate(shard.of):
        outer, _, inner = factor
        for other in dict.fromkeys(s.of[i] for _, s in others.shards if s.dim == shard.dim):
            if other == factor:
                continue
            _, kept = factor_range(others, shard.dim, i, other, coordinate)
            if other[0] * other[1] <= outer:
                outer = outer // other[1] * kept
            else:
                inner = inner // other[1] * kept
        _, extent = factor_range(before, shard.dim, i, factor, coordinate)
        result.append((outer, extent, inner))
    return tuple(result)


@lru_cache(maxsize=100_000)
def same_cut(a: Pattern, b: Pattern, parts: int) -> bool:
    """Return whether two patterns give every rank the same elements in the same order.

    >>> same_cut(((1, 4, 16),), ((1, 64, 1),), 2), same_cut(((1, 3, 16),), ((1, 48, 1),), 2)
    (True, False)
    """
    if a == b:
        return True
    if all(o == 1 for o, _, _ in (*a, *b)) and len(a) == len(b) == 1:
        (_, x, i), (_, y, j) = a[0], b[0]
        return x * i == y * j and all(
            part(x, parts, r)[0] * i == part(y, parts, r)[0] * j for r in range(parts)
        )
    return all(_intervals(a, parts, r) == _intervals(b, parts, r) for r in range(parts))


def _intervals(pattern: Pattern, parts: int, index: int) -> list[tuple[int, int]]:
    """Return the maximal ranges of positions that rank `index` holds."""
    return _ranges(pattern, [part(size, parts, index) for _, size, _ in pattern])


def _ranges(pattern: Pattern, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the maximal ranges of positions, given start and length of each segment's part."""
    ranges: list[tuple[int, int]] = []
    base = 0
    for (outer, size, inner), (start, count) in zip(pattern, parts, strict=True):
        for o in range(outer):
            first = base + (o * size + start) * inner
            last = first + count * inner
            if count == 0:
                continue
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((first, last))
        base += outer * size * inner
    return ranges


def same_cuts(a: Cuts, b: Cuts, sizes: Mapping[str, int]) -> bool:
    """Whether mesh axes that cut one dim as `a` and as `b` give every rank the same elements.

    >>> nested = (("dp", ((1, 2, 16),)), ("tp", ((1, 2, 16),)))
    >>> same_cuts(nested, (("dp", ((1, 32, 1),)), ("tp", ((1, 32, 1),))), {"dp": 2, "tp": 2})
    False
    """
    if a == b or [name for name, _ in a] != [name for name, _ in b]:
        return a == b
    if len(a) == 1:
        return same_cut(a[0][1], b[0][1], sizes[a[0][0]])
    mine, theirs = (tuple(of for _, of in cuts) for cuts in (a, b))
    return _same_nested(mine, theirs, tuple(sizes[name] for name, _ in a))


def same_on_axis(a: Layout, b: Layout, axis: str, sizes: Mapping[str, int]) -> bool:
    """Whether two layouts agree on a mesh axis; cuts of one dim by several axes count together."""
    mine, theirs = a[axis], b[axis]
    if isinstance(mine, Shard) and isinstance(theirs, Shard) and mine.dim == theirs.dim:
        return same_cuts(a.cuts(mine.dim), b.cuts(mine.dim), sizes)
    return mine == theirs


@lru_cache(maxsize=100_000)
def _same_nested(a: tuple[Pattern, ...], b: tuple[Pattern, ...], sizes: tuple[int, ...]) -> bool:
    return all(
        _nested_intervals(a, sizes, place) == _nested_intervals(b, sizes, place)
        for place in product(*(range(size) for size in sizes))
    )


def _nested_intervals(
    cuts: tuple[Pattern, ...], sizes: tuple[int, ...], place: tuple[int, ...]
) -> list[tuple[int, int]]:
    """The maximal ranges of positions at one place, each axis cutting what earlier ones left."""
    kept: list[tuple[int, int]] | None = None
    for pattern in dict.fromkeys(cuts):
        axes = [i for i, of in enumerate(cuts) if of == pattern]
        parts = []
        for _, size, _ in pattern:
            start, count = 0, size
            for i in axes:
                offset, count = part(count, sizes[i], place[i])
                start += offset
            parts.append((start, count))
        ranges = _ranges(pattern, parts)
        kept = ranges if kept is None else _common(kept, ranges)
    return kept or []


def _common(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        first, last = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if first < last:
            found.append((first, last))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def compatible(a: Pattern, b: Pattern) -> bool:
    """Return whether two mesh axes may cut one dim like this: the same factor, or disjoint ones."""
    if a == b:
        return True
    if len(a) != len(b):
        return False
    for (o1, s1, i1), (o2, s2, i2) in zip(a, b, strict=True):
        first_outside = o2 % (o1 * s1) == 0 and i1 % (s2 * i2) == 0
        second_outside = o1 % (o2 * s2) == 0 and i2 % (s1 * i1) == 0
        if not (first_outside or second_outside):
            return False
    return True
