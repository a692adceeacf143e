"""Invariants of dim structures, patterns and placements."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import RuleError
from shardwise.runtime import splits
from shardwise.sharding import dims
from shardwise.sharding.placements import (
    Layout,
    Shard,
    compatible,
    format_shard,
    local_dim,
    local_pattern,
    parse_shard,
    part,
    same_pattern,
    same_shards,
)

factors = st.lists(st.sampled_from([2, 2, 3, 4, 5]), max_size=3).map(tuple)
structures = st.lists(factors, min_size=1, max_size=3).map(lambda s: dims.canonical(tuple(s)))


@st.composite
def patterns(draw: Any) -> dims.Pattern:
    structure = draw(structures)
    choices = dims.choices(structure)
    assume(choices)
    return dims.merge(draw(st.sampled_from(choices)))


@st.composite
def equally_long(draw: Any) -> tuple[dims.Structure, dims.Structure]:
    """Draw two structures of one dim, with random segments and factors."""
    size = draw(st.sampled_from([5, 6, 8, 12]))
    result = []
    for _ in range(2):
        ends = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) | {0, size})
        pieces = [b - a for a, b in pairwise(ends)]
        result.append(dims.canonical(tuple(draw(factorizations(piece)) for piece in pieces)))
    return result[0], result[1]


@st.composite
def factorizations(draw: Any, size: int) -> tuple[int, ...]:
    if size == 1 or draw(st.booleans()):
        return (size,)
    factor = draw(st.sampled_from([f for f in range(2, size + 1) if size % f == 0]))
    return (factor, *draw(factorizations(size // factor)))


@given(st.one_of(equally_long(), st.tuples(structures, structures)))
def test_a_refinement_is_at_least_as_fine(pair: tuple[dims.Structure, dims.Structure]) -> None:
    a, b = pair
    both = dims.refine(a, b)
    if both is not None:
        assert dims.length(both) == dims.length(a) == dims.length(b)
        assert dims.refine(both, a) == both


@settings(max_examples=200)
@given(st.integers(0, 3), st.lists(equally_long(), min_size=2, max_size=4))
def test_repeated_refinement_terminates(first: int, pairs: list[Any]) -> None:
    others = [s for pair in pairs for s in pair]
    structure = others[first]
    for _ in range(12):
        before = structure
        for other in others:
            structure = dims.refine(structure, other) or structure
        if structure == before:
            return
    raise AssertionError(f"{others} refine each other without end")


def test_parts_of_a_dim_can_be_refined_one_after_the_other() -> None:
    """The three parts of a fused projection of 3 x 12 turn out to be 3 heads of 4 each."""
    structure: dims.Structure = ((3, 12),)
    for start in (0, 12, 24):
        structure = dims.replace_section(structure, start, start + 12, ((3, 4),))
    assert structure == ((3, 3, 4),)


@given(structures)
def test_an_unfactored_dim_refines_nothing(a: dims.Structure) -> None:
    assert dims.refine(a, dims.unfactored(dims.length(a))) in (a, dims.canonical(a))
    assert dims.canonical(dims.canonical(a)) == dims.canonical(a)


@given(structures, st.data())
def test_sections_add_up(a: dims.Structure, data: Any) -> None:
    size = dims.length(a)
    at = data.draw(st.integers(1, size))
    left, right = dims.section(a, 0, at), dims.section(a, at, size)
    if at < size and left is not None and right is not None:
        assert dims.length(left) + dims.length(right) == size


@given(structures)
def test_choices_shard_the_full_dim(a: dims.Structure) -> None:
    for pattern in dims.choices(a):
        assert sum(prod(segment) for segment in pattern) == dims.length(a)
        merged = dims.merge(pattern)
        assert same_pattern(pattern, merged, 3)


@given(patterns(), st.integers(1, 6))
def test_parts_cover_every_position_once(pattern: dims.Pattern, ranks: int) -> None:
    positions: list[int] = []
    for index in range(ranks):
        for start, count in splits.runs(pattern, ranks, index):
            positions += range(start, start + count)
    assert sorted(positions) == list(range(sum(prod(s) for s in pattern)))


@st.composite
def pairs(draw: Any) -> tuple[dims.Pattern, dims.Pattern]:
    """Draw two patterns of one dim, whose factors may be in different orders."""
    segment = draw(st.lists(st.sampled_from([2, 2, 3, 4, 5]), min_size=1, max_size=3))
    count = draw(st.sampled_from([1, 1, 2]))
    result: list[dims.Pattern] = []
    for _ in range(2):
        order = tuple(draw(st.permutations(segment))) if draw(st.booleans()) else tuple(segment)
        unfactored = draw(st.booleans())
        inner: dims.Structure = ((prod(segment) * count,),) if unfactored else (order,) * count
        result.append(dims.merge(draw(st.sampled_from(dims.choices(inner)))))
    return result[0], result[1]


@given(pairs(), st.sampled_from([2, 3, 5]))
def test_same_pattern_compares_elements(
    pair: tuple[dims.Pattern, dims.Pattern], ranks: int
) -> None:
    a, b = pair
    equal = all(splits.runs(a, ranks, i) == splits.runs(b, ranks, i) for i in range(ranks))
    assert same_pattern(a, b, ranks) == equal


@given(patterns(), st.integers(0, 2))
def test_shards_are_read_back(pattern: dims.Pattern, dim: int) -> None:
    shape = [7, 7, 7]
    shape[dim] = sum(map(prod, pattern))
    shard = Shard(dim, pattern)
    assert parse_shard(format_shard(shard), tuple(shape)) == shard


@given(pairs(), st.sampled_from([(2, 2), (2, 3), (3, 2), (5, 2)]))
def test_two_axes_may_shard_one_dim(
    pair: tuple[dims.Pattern, dims.Pattern], sizes: tuple[int, int]
) -> None:
    a, b = pair
    size = sum(map(prod, a))
    assume(compatible(a, b))
    assert compatible(b, a)
    mesh = {"x": sizes[0], "y": sizes[1]}
    layout = Layout((("x", Shard(0, a)), ("y", Shard(0, b))))
    dim_splits = [splits.Split(axis=axis, dim=0, of=s.of) for axis, s in layout.shards]
    total = 0
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            place = {"x": (i, sizes[0]), "y": (j, sizes[1])}
            here = local_dim(layout, 0, size, place)
            assert (here,) == splits.local_shape((size,), dim_splits, {"x": i, "y": j}, mesh)
            inner = local_pattern(layout, "y", place)
            outer = layout.with_axis("y", Shard(1, ((1, 1, 1),)))
            assert sum(map(prod, inner)) == local_dim(outer, 0, size, place)
            total += here
    assert total == size
    assert same_shards(layout.dim_shards(0), layout.dim_shards(0), mesh)


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_differ_by_at_most_one(size: int, parts: int) -> None:
    ranges = [part(size, parts, i) for i in range(parts)]
    assert sum(n for _, n in ranges) == size
    assert [s for s, _ in ranges] == [sum(n for _, n in ranges[:i]) for i in range(parts)]
    assert max(n for _, n in ranges) - min(n for _, n in ranges) <= 1


@pytest.mark.parametrize(
    "text", ["", "a", "0:", "0:[]", "0:3x4", "0:[3]x[4]", "0:[0]x12", "3", "0:-1x[-12]"]
)
def test_malformed_shards_are_rejected(text: str) -> None:
    with pytest.raises(RuleError):
        parse_shard(text, (12, 4, 4))
