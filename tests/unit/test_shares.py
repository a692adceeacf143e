"""Unequal shares of a mesh axis: every rank's part, and no element is lost."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise import shares as sh
from shardwise.errors import ClusterError
from shardwise.shares import Shares, part

weights = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)
extents = st.one_of(st.integers(1, 6), weights.map(Shares.of))


@given(st.integers(0, 500), extents)
def test_parts_are_contiguous_and_cover_the_size(size: int, parts: int) -> None:
    ends = [part(size, parts, i) for i in range(parts)]
    assert ends[0][0] == 0
    assert sum(ends[-1]) == size
    assert all(sum(a) == b[0] for a, b in pairwise(ends))
    assert all(length >= 0 for _, length in ends)
    assert sh.lengths(size, parts) == {length for _, length in ends}


@given(st.integers(0, 500), weights)
def test_boundaries_are_within_one_half_of_the_exact_share(size: int, shares: list[int]) -> None:
    assume(len(set(shares)) > 1)
    parts = Shares(*shares)
    for index, before in enumerate(accumulate(shares[:-1], initial=0)):
        exact = Fraction(size * before, sum(shares))
        assert abs(part(size, parts, index)[0] - exact) <= Fraction(1, 2)
    if size % sh.grain(parts) == 0:
        assert [part(size, parts, i)[1] * sum(shares) for i in range(parts)] == [
            size * weight for weight in shares
        ]


@given(st.lists(extents, min_size=1, max_size=3), st.integers(0, 3))
def test_a_product_of_axes_splits_like_nested_axes(axes: list[int], times: int) -> None:
    """Sizes are multiples of all grains."""
    size = times
    for axis in axes:
        size *= sh.grain(axis)
    joined = sh.product(axes)
    for index, place in enumerate(product(*(range(axis) for axis in axes))):
        start, length = 0, size
        for axis, at in zip(axes, place, strict=True):
            offset, length = part(length, axis, at)
            start += offset
        assert part(size, joined, index) == (start, length)


def test_shares_behave_like_counts_but_equal_only_themselves() -> None:
    two = Shares(2, 1)
    assert (two + 1, list(range(two)), two > 1, [0] * two) == (3, [0, 1], True, [0, 0])
    assert two == Shares(4, 2)
    assert hash(two) == hash(Shares(4, 2))
    assert two not in (2, Shares(1, 2))
    assert two != 2
    assert [part(6, 2, 0), part(6, two, 0)] == [(0, 3), (0, 4)]  # caches distinguish them
    assert [str(two), repr(two), f"dp={two}"] == ["2:1", "Shares(2, 1)", "dp=2:1"]
    assert pickle.loads(pickle.dumps(two)) == copy.deepcopy(two) == two


@given(st.integers(1, 9), st.integers(1, 10**12))
def test_equal_weights_become_a_plain_count(ranks: int, weight: int) -> None:
    shares = Shares.of([weight] * ranks)
    assert type(shares) is int
    assert shares == ranks


def test_large_weights_are_exact() -> None:
    parts = Shares(10**30, 10**30 + 1)
    assert [part(10**6 + 1, parts, i)[1] for i in range(2)] == [500_000, 500_001]


@pytest.mark.parametrize(
    "shares", [[], [0, 0], [2, -1], [1.5, 1], ["2", "1"], [True, 1], None, "2:1", {"a": 1}, 2.0]
)
def test_invalid_shares_are_refused(shares: Any) -> None:
    with pytest.raises(ClusterError, match=r"mesh axis dp has .*need.*\n  try: "):
        sh.axes_of({"dp": shares})


@given(extents)
def test_written_shares_are_read_back(parts: int) -> None:
    again = sh.axes_of({"dp": sh.written(parts)})["dp"]
    assert (type(again), again) == (type(parts), parts)
