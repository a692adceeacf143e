"""How a tensor dim is made of factors.

A dim is a concatenation of segments, each a product of factor sizes, outermost first:
`((3, 4, 16),)` is a fused QKV dim of 3 x 4 heads x 16, `((8, 16), (2, 16), (2, 16))` is
`[8 heads | 2 key heads | 2 value heads]` of 16. Equal segments are written as one product with
their number in front, and factors of one are left out, so that equal structures are equal tuples.

All functions work on plain tuples, and return None if there is no answer.
"""

import itertools
from functools import lru_cache
from math import prod
from operator import mul

Segment = tuple[int, ...]
Structure = tuple[Segment, ...]
Pattern = tuple[tuple[int, int, int], ...]  # per segment: (outer, size, inner); `size` is sharded

MAX_SEGMENTS = 8
MAX_FACTORS = 7


def unfactored(size: int) -> Structure:
    """Return a dim without known factors: one segment, one factor.

    >>> unfactored(12), unfactored(1)
    (((12,),), ((),))
    """
    return ((size,),) if size != 1 else ((),)


def length(structure: Structure) -> int:
    """Return the size of the dim.

    >>> length(((8, 16), (2, 16), (2, 16)))
    192
    """
    return sum(prod(segment) for segment in structure)


def canonical(segments: Structure) -> Structure:
    """Write equal segments as one product, without factors of one.

    >>> canonical(((4, 16), (4, 16), (4, 16)))
    ((3, 4, 16),)
    """
    trimmed = tuple(tuple(f for f in segment if f != 1) for segment in segments)
    if len(trimmed) > 1 and len(set(trimmed)) == 1:
        return ((len(trimmed), *trimmed[0]),)
    return trimmed


def refine_product(a: Segment, b: Segment) -> Segment | None:
    """Return the coarsest common refinement of two factorizations of one size.

    >>> refine_product((12,), (3, 4)), refine_product((3, 8), (6, 4))
    ((3, 4), (3, 2, 4))
    >>> refine_product((3, 4), (4, 3)) is None
    True
    """
    both = (itertools.accumulate(reversed(s), mul, initial=1) for s in (a, b))
    strides = sorted(set(itertools.chain(*both)))
    factors = []
    for small, large in itertools.pairwise(strides):
        if large % small:
            return None
        factors.append(large // small)
    if len(factors) > MAX_FACTORS:
        return None
    return tuple(reversed(factors))


def split_at(structure: Structure, positions: tuple[int, ...]) -> Structure | None:
    """Return the segments with further boundaries at `positions`; not canonical on purpose.

    >>> split_at(((3, 4),), (4,))
    ((4,), (2, 4))
    >>> split_at(((3, 4),), (5,)) is None
    True
    """
    pieces: list[Segment] = []
    start = 0
    for segment in structure:
        inside = [p - start for p in positions if start < p < start + prod(segment)]
        rows = _split_segment(segment, inside)
        if rows is None:
            return None
        pieces += rows
        start += prod(segment)
    return tuple(pieces)


def _split_segment(segment: Segment, inside: list[int]) -> list[Segment] | None:
    if not inside:
        return [segment]
    inner = prod(segment[1:])
    if any(p % inner for p in inside):
        return None
    bounds = [0, *(p // inner for p in inside), segment[0]]
    return [
        tuple(f for f in (b - a, *segment[1:]) if f != 1) for a, b in itertools.pairwise(bounds)
    ]


def boundaries(structure: Structure) -> tuple[int, ...]:
    """Return the ends of all segments but the last."""
    return tuple(itertools.accumulate(map(prod, structure[:-1])))


@lru_cache(maxsize=100_000)
def refine(a: Structure, b: Structure) -> Structure | None:
    """Return the coarsest common refinement of two structures, or None; it refines `a` at least.

    >>> refine(((3, 4),), ((4,), (4,), (4,)))
    ((3, 4),)
    >>> refine(((12,),), ((6,), (3,), (3,)))
    ((6,), (3,), (3,))
    >>> refine(((2,), (2, 2)), ((2, 2), (2,))) is None
    True
    """
    common = _common(a, b)
    # Writing equal segments as one product loses their boundaries: 2|2x2 and 2x2|2 would give 3x2,
    # and 3x2 with 2|2x2 would give 2|2x2 again, so that refinement would never end.
    return common if common is None or _common(common, a) == common else None


def _common(a: Structure, b: Structure) -> Structure | None:
    if a == b:
        return a
    if length(a) != length(b):
        return None
    left, right = split_at(a, boundaries(b)), split_at(b, boundaries(a))
    if left is None or right is None or len(left) != len(right) or len(left) > MAX_SEGMENTS:
        return None
    refined = []
    for x, y in zip(left, right, strict=True):
        both = refine_product(x, y)
        if both is None:
            return None
        refined.append(both)
    return canonical(tuple(refined))


def section(structure: Structure, start: int, stop: int) -> Structure | None:
    """Return the part of the dim between two positions.

    >>> section(((3, 4),), 4, 8)
    ((4,),)
    """
    pieces = split_at(structure, (start, stop))
    if pieces is None:
        return None
    chosen: list[Segment] = []
    position = 0
    for piece in pieces:
        size = int(prod(piece))
        if start <= position and position + size <= stop and size:
            chosen.append(piece)
        position += size
    return canonical(tuple(chosen)) if chosen else None


def replace_section(structure: Structure, start: int, stop: int, part: Structure) -> Structure:
    """Return the dim with positions `start:stop` structured as `part`, if that refines it."""
    before: Structure = ((start,),) if start else ()
    after: Structure = ((length(structure) - stop,),) if stop < length(structure) else ()
    refined = refine(structure, canonical((*before, *part, *after)))
    return structure if refined is None else refined


def choices(structure: Structure) -> tuple[Pattern, ...]:
    """Return the patterns that shard a dim: one factor of a product, or one of every segment.

    Segments may also be sharded as if they were one: a dim shifted by one position has a segment of
    one element, which no factor divides. Only dims that are used in full can express this.

    >>> choices(((3, 4, 16),))
    (((1, 3, 64),), ((3, 4, 16),), ((12, 16, 1),))
    >>> choices(((8, 16), (2, 16)))
    (((8, 16, 1), (2, 16, 1)), ((1, 8, 16), (1, 2, 16)), ((1, 160, 1),))
    >>> choices(((2047,), ()))
    (((1, 2048, 1),),)
    """
    if len(structure) == 1:
        return tuple((_factor_at(structure[0], i),) for i in range(len(structure[0])))
    common = set(structure[0]).intersection(*structure[1:])
    patterns = [
        tuple(_factor_at(segment, segment.index(size)) for segment in structure)
        for size in sorted(common, reverse=True)
    ]
    if all(structure):
        patterns.append(tuple(_factor_at(segment, 0) for segment in structure))
    return (*dict.fromkeys(patterns), ((1, length(structure), 1),))


def _factor_at(segment: Segment, index: int) -> tuple[int, int, int]:
    """Return `(outer, size, inner)` of the factor at `index`."""
    return prod(segment[:index]), segment[index], prod(segment[index + 1 :])


def merge(pattern: Pattern) -> Pattern:
    """Write the factors of equal segments as one, with their number in the outer size.

    >>> merge(((1, 4, 16), (1, 4, 16)))
    ((2, 4, 16),)
    """
    if len(pattern) > 1 and len(set(pattern)) == 1:
        outer, size, inner = pattern[0]
        return ((outer * len(pattern), size, inner),)
    return pattern
