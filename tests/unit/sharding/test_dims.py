"""Structures of dims, patterns and placements: what must hold of every one of them."""

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
    found = dims.choices(structure)
    assume(found)
    return dims.merge(draw(st.sampled_from(found)))


@st.composite
def equally_long(draw: Any) -> tuple[dims.Structure, dims.Structure]:
    """Two structures of a dim of 6, 8 or 12, cut anywhere and factored anyhow."""
    size = draw(st.sampled_from([5, 6, 8, 12]))
    found = []
    for _ in range(2):
        ends = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) | {0, size})
        pieces = [b - a for a, b in pairwise(ends)]
        found.append(dims.canonical(tuple(draw(factorizations(piece)) for piece in pieces)))
    return found[0], found[1]


@st.composite
def factorizations(draw: Any, size: int) -> tuple[int, ...]:
    if size == 1 or draw(st.booleans()):
        return (size,)
    factor = draw(st.sampled_from([f for f in range(2, size + 1) if size % f == 0]))
    return (factor, *draw(factorizations(size // factor)))


@given(st.one_of(equally_long(), st.tuples(structures, structures)))
def test_a_refinement_keeps_what_was_known(pair: tuple[dims.Structure, dims.Structure]) -> None:
    a, b = pair
    both = dims.refine(a, b)
    if both is not None:
        assert dims.length(both) == dims.length(a) == dims.length(b)
        assert dims.refine(both, a) == both


@settings(max_examples=200)
@given(st.integers(0, 3), st.lists(equally_long(), min_size=2, max_size=4))
def test_refining_ends(first: int, pairs: list[Any]) -> None:
    """A structure that is refined by others in turn stops changing."""
    found = [s for pair in pairs for s in pair]
    held = found[first]
    for _ in range(12):
        before = held
        for other in found:
            held = dims.refine(held, other) or held
        if held == before:
            return
    raise AssertionError(f"{found} refine each other without end")


def test_heads_of_three_parts_are_found_one_after_the_other() -> None:
    """A fused projection of 3 x 12 whose parts turn out to be 3 heads of 4 each."""
    structure: dims.Structure = ((3, 12),)
    for start in (0, 12, 24):
        structure = dims.replace_section(structure, start, start + 12, ((3, 4),))
    assert structure == ((3, 3, 4),)


@given(structures)
def test_refining_with_nothing_known_changes_nothing(a: dims.Structure) -> None:
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
def test_choices_cut_the_whole_dim(a: dims.Structure) -> None:
    for pattern in dims.choices(a):
        assert sum(prod(segment) for segment in pattern) == dims.length(a)
        merged = dims.merge(pattern)
        assert same_pattern(pattern, merged, 3)


@given(patterns(), st.integers(1, 6))
def test_parts_cover_a_dim_once(pattern: dims.Pattern, ranks: int) -> None:
    seen: list[int] = []
    for index in range(ranks):
        for start, count in splits.runs(pattern, ranks, index):
            seen += range(start, start + count)
    assert sorted(seen) == list(range(sum(prod(s) for s in pattern)))


@st.composite
def pairs(draw: Any) -> tuple[dims.Pattern, dims.Pattern]:
    """Two patterns of one dim: of one structure, or of another order of its factors."""
    segment = draw(st.lists(st.sampled_from([2, 2, 3, 4, 5]), min_size=1, max_size=3))
    count = draw(st.sampled_from([1, 1, 2]))
    found: list[dims.Pattern] = []
    for _ in range(2):
        order = tuple(draw(st.permutations(segment))) if draw(st.booleans()) else tuple(segment)
        whole = draw(st.booleans())
        inner: dims.Structure = ((prod(segment) * count,),) if whole else (order,) * count
        found.append(dims.merge(draw(st.sampled_from(dims.choices(inner)))))
    return found[0], found[1]


@given(pairs(), st.sampled_from([2, 3, 5]))
def test_same_cut_is_the_same_elements(pair: tuple[dims.Pattern, dims.Pattern], ranks: int) -> None:
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
def test_two_axes_on_one_dim(
    pair: tuple[dims.Pattern, dims.Pattern], sizes: tuple[int, int]
) -> None:
    a, b = pair
    size = sum(map(prod, a))
    assume(compatible(a, b))
    assert compatible(b, a)
    mesh = {"x": sizes[0], "y": sizes[1]}
    layout = Layout((("x", Shard(0, a)), ("y", Shard(0, b))))
    cuts = [splits.Split(axis=axis, dim=0, of=s.of) for axis, s in layout.shards]
    total = 0
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            place = {"x": (i, sizes[0]), "y": (j, sizes[1])}
            here = local_dim(layout, 0, size, place)
            assert (here,) == splits.local_shape((size,), cuts, {"x": i, "y": j}, mesh)
            inner = local_pattern(layout, "y", place)
            outer = layout.with_axis("y", Shard(1, ((1, 1, 1),)))
            assert sum(map(prod, inner)) == local_dim(outer, 0, size, place)
            total += here
    assert total == size
    assert same_shards(layout.dim_shards(0), layout.dim_shards(0), mesh)


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_differ_by_at_most_one(size: int, parts: int) -> None:
    found = [part(size, parts, i) for i in range(parts)]
    assert sum(n for _, n in found) == size
    assert [s for s, _ in found] == [sum(n for _, n in found[:i]) for i in range(parts)]
    assert max(n for _, n in found) - min(n for _, n in found) <= 1


@pytest.mark.parametrize(
    "text", ["", "a", "0:", "0:[]", "0:3x4", "0:[3]x[4]", "0:[0]x12", "3", "0:-1x[-12]"]
)
def test_shards_that_are_not_understood(text: str) -> None:
    with pytest.raises(RuleError):
        parse_shard(text, (12, 4, 4))
