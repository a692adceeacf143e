"""Placements of a value, one per mesh axis; all of them together are its layout.

Local sizes and index sets follow from a layout. The module `shares` determines the part of each
rank: parts are even or weighted, and may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from shardwise.errors import RuleError
from shardwise.sharding.dims import Pattern, merge
from shardwise.shares import AxisSize, dim_runs, nested_part, num_ranks, part


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
    """The factor `size` of every segment `(outer, size, inner)` of dim `dim` is sharded.

    >>> str(Shard(0, ((3, 4, 16),)))
    'S(0:3x[4]x16)'
    """

    dim: int
    of: Pattern

    def __str__(self) -> str:
        return f"S({format_shard(self)})"


Placement = Replicate | Partial | Shard
DimShards = tuple[tuple[str, Pattern], ...]  # of one dim: mesh axes and patterns, in mesh order
SEGMENT = re.compile(r"((?:\d+x)*)\[(\d+)\]((?:x\d+)*)")  # 3x[4]x16
REPLICATE = Replicate()
PARTIAL_GRAD = Replicate(partial_grad=True)
PARTIAL = Partial()
REPLICATED = "replicate"  # in plan files, beside shards such as "0"


def format_shard(shard: Shard) -> str:
    """Return `0` for plain contiguous shards, `0:3x[4]x16` for a factor, `|` between segments."""
    return f"{shard.dim}{format_pattern(shard.of)}"


def format_placement(placement: Placement) -> str:
    """Return the placement of a parameter as plan files write it."""
    return format_shard(placement) if isinstance(placement, Shard) else REPLICATED


def parse_placement(text: str, shape: tuple[int, ...]) -> Replicate | Shard:
    """Return the inverse of `format_placement` for a tensor of this shape."""
    return REPLICATE if text == REPLICATED else parse_shard(text, shape)


def format_pattern(pattern: Pattern) -> str:
    """Return `:3x[4]x16` for a factor, and nothing for plain contiguous shards."""
    if len(pattern) == 1 and pattern[0][0] == pattern[0][2] == 1:
        return ""
    return ":" + "|".join(
        f"{outer}x" * (outer != 1) + f"[{size}]" + f"x{inner}" * (inner != 1)
        for outer, size, inner in pattern
    )


def parse_pattern(text: str) -> Pattern | None:
    """Return the pattern of a text such as `3x[4]x16`, or None if it is malformed.

    >>> parse_pattern("2x3x[4]x16|[4]")
    ((6, 4, 16), (1, 4, 1))
    """
    pattern = []
    for segment in map(SEGMENT.fullmatch, text.split("|")):
        if segment is None:
            return None
        outer, size, inner = (prod(map(int, filter(None, g.split("x")))) for g in segment.groups())
        pattern.append((outer, size, inner))
    return tuple(pattern)


def parse_shard(text: str, shape: tuple[int, ...]) -> Shard:
    """Return the inverse of `format_shard` for a tensor of this shape.

    >>> parse_shard("0:3x[4]x16", (192, 64))
    Shard(dim=0, of=((3, 4, 16),))
    >>> parse_shard("-1", (192, 64))
    Shard(dim=1, of=((1, 64, 1),))
    """
    head, colon, tail = text.partition(":")
    of = parse_pattern(tail) if colon else ()
    if not re.fullmatch(r"-?\d+", head) or of is None:
        raise RuleError(
            f"layout {text!r} is not understood",
            hint=f"a dim such as '0', or '0:3x[4]x16', which shards the 4 of 3*4*16, or "
            f"'{REPLICATED}'",
        )
    dim = int(head)
    if not -len(shape) <= dim < len(shape):
        raise RuleError(f"layout {text!r} names dim {dim} of a tensor of shape {shape}")
    dim %= len(shape)
    if not colon:
        return Shard(dim, ((1, shape[dim], 1),))
    total = sum(map(prod, of))
    if total != shape[dim]:
        raise RuleError(
            f"layout {text!r} describes {total} elements, dim {dim} of shape {shape} has "
            f"{shape[dim]}"
        )
    return Shard(dim, merge(of))


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

    def dim_shards(self, dim: int) -> DimShards:
        """Return the mesh axes that shard a dim, in mesh order, with their patterns."""
        return tuple((n, s.of) for n, s in self.shards if s.dim == dim)

    def __str__(self) -> str:
        return " ".join(f"{name}:{placement}" for name, placement in self.axes)


Coordinate = Mapping[str, tuple[int, AxisSize]]  # mesh axis -> (this rank's index, axis size)


def factor_range(
    layout: Layout, dim: int, segment: int, factor: tuple[int, int, int], coordinate: Coordinate
) -> tuple[int, int]:
    """Return start and length of this rank's part of a factor that several mesh axes may shard."""
    axes = [
        coordinate[axis][::-1]
        for axis, shard in layout.shards
        if shard.dim == dim and segment < len(shard.of) and shard.of[segment] == factor
    ]
    return nested_part(factor[1], axes)


def local_dim(layout: Layout, dim: int, size: int, coordinate: Coordinate) -> int:
    """Return this rank's length of a dim of global length `size`."""
    patterns = [of for _, of in layout.dim_shards(dim)]
    if not patterns:
        return size
    total = 0
    for i, segment in enumerate(map(prod, patterns[0])):
        for factor in dict.fromkeys(of[i] for of in patterns):
            _, local = factor_range(layout, dim, i, factor, coordinate)
            segment = segment // factor[1] * local if factor[1] else 0
        total += segment
    return total


def local_shape(layout: Layout, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[int, ...]:
    """Return the shape of this rank's part."""
    sizes = list(shape)
    for dim in {shard.dim for _, shard in layout.shards}:
        sizes[dim] = local_dim(layout, dim, shape[dim], coordinate)
    return tuple(sizes)


def local_pattern(layout: Layout, axis: str, coordinate: Coordinate) -> Pattern:
    """Return the pattern of `axis` in terms of the tensor as the other axes leave it.

    The other axes' shards of the same dim reduce the outer and inner sizes; the size is the part of
    the factor that the axes before this one leave.
    """
    shard = layout[axis]
    assert isinstance(shard, Shard)
    other_axes = Layout(tuple((n, p) for n, p in layout.axes if n != axis))
    before = Layout(layout.axes[: [n for n, _ in layout.axes].index(axis)])
    result = []
    for i, factor in enumerate(shard.of):
        outer, _, inner = factor
        for other_factor in dict.fromkeys(of[i] for _, of in other_axes.dim_shards(shard.dim)):
            if other_factor == factor:
                continue
            _, local = factor_range(other_axes, shard.dim, i, other_factor, coordinate)
            if other_factor[0] * other_factor[1] <= outer:
                outer = outer // other_factor[1] * local
            else:
                inner = inner // other_factor[1] * local
        _, extent = factor_range(before, shard.dim, i, factor, coordinate)
        result.append((outer, extent, inner))
    return tuple(result)


@lru_cache(maxsize=100_000)
def same_pattern(a: Pattern, b: Pattern, axis: AxisSize) -> bool:
    """Return whether two patterns give every rank the same elements in the same order.

    >>> same_pattern(((1, 4, 16),), ((1, 64, 1),), 2), same_pattern(((1, 3, 16),), ((1, 48, 1),), 2)
    (True, False)
    """
    if a == b:
        return True
    if all(o == 1 for o, _, _ in (*a, *b)) and len(a) == len(b) == 1:
        (_, x, i), (_, y, j) = a[0], b[0]
        return x * i == y * j and all(
            part(x, axis, r)[0] * i == part(y, axis, r)[0] * j for r in range(num_ranks(axis))
        )
    return _same_nested((a,), (b,), (axis,))


def same_shards(a: DimShards, b: DimShards, sizes: Mapping[str, AxisSize]) -> bool:
    """Return whether mesh axes that shard a dim as `a` and as `b` give ranks the same elements.

    >>> nested = (("dp", ((1, 2, 16),)), ("tp", ((1, 2, 16),)))
    >>> same_shards(nested, (("dp", ((1, 32, 1),)), ("tp", ((1, 32, 1),))), {"dp": 2, "tp": 2})
    False
    """
    if a == b or [name for name, _ in a] != [name for name, _ in b]:
        return a == b
    if len(a) == 1:
        return same_pattern(a[0][1], b[0][1], sizes[a[0][0]])
    first, second = (tuple(of for _, of in shards) for shards in (a, b))
    return _same_nested(first, second, tuple(sizes[name] for name, _ in a))


def same_on_axis(a: Layout, b: Layout, axis: str, sizes: Mapping[str, AxisSize]) -> bool:
    """Return whether two layouts agree on a mesh axis; nested shards of a dim count together."""
    first, second = a[axis], b[axis]
    if isinstance(first, Shard) and isinstance(second, Shard) and first.dim == second.dim:
        return same_shards(a.dim_shards(first.dim), b.dim_shards(first.dim), sizes)
    return first == second


@lru_cache(maxsize=100_000)
def _same_nested(
    a: tuple[Pattern, ...], b: tuple[Pattern, ...], sizes: tuple[AxisSize, ...]
) -> bool:
    return all(
        dim_runs(zip(a, sizes, place, strict=True)) == dim_runs(zip(b, sizes, place, strict=True))
        for place in product(*(range(num_ranks(size)) for size in sizes))
    )


def compatible(a: Pattern, b: Pattern) -> bool:
    """Return whether two mesh axes may shard one dim like this: at equal or disjoint factors."""
    if a == b or len(a) != len(b):
        return a == b
    return all(
        (o2 % (o1 * s1) == 0 and i1 % (s2 * i2) == 0)  # the first factor is outside the second
        or (o1 % (o2 * s2) == 0 and i2 % (s1 * i1) == 0)
        for (o1, s1, i1), (o2, s2, i2) in zip(a, b, strict=True)
    )
