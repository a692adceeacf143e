"""Even and weighted splits of a mesh axis cover every element exactly once."""

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
from shardwise.shares import AxisSize, Shares, num_ranks, part

weights = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)
axis_sizes = st.one_of(st.integers(1, 6), weights.map(Shares.of))


@given(st.integers(0, 500), axis_sizes)
def test_parts_are_consecutive_and_complete(size: int, axis: AxisSize) -> None:
    parts = [part(size, axis, i) for i in range(num_ranks(axis))]
    assert parts[0][0] == 0
    assert sum(parts[-1]) == size
    assert all(sum(a) == b[0] for a, b in pairwise(parts))
    assert all(length >= 0 for _, length in parts)
    assert sh.lengths(size, axis) == {length for _, length in parts}


@given(st.integers(0, 500), weights)
def test_boundaries_are_off_by_at_most_one_half(size: int, numbers: list[int]) -> None:
    assume(len(set(numbers)) > 1)
    shares = Shares(*numbers)
    for index, before in enumerate(accumulate(numbers[:-1], initial=0)):
        exact = Fraction(size * before, sum(numbers))
        assert abs(part(size, shares, index)[0] - exact) <= Fraction(1, 2)
    if size % sh.grain(shares) == 0:
        lengths = [part(size, shares, i)[1] for i in range(len(shares))]
        assert [length * sum(numbers) for length in lengths] == [size * w for w in numbers]


@given(st.lists(axis_sizes, min_size=1, max_size=3), st.integers(0, 3))
def test_combined_axes_split_like_nested_axes(axes: list[AxisSize], times: int) -> None:
    """This holds for sizes that are multiples of all grains."""
    size = times
    for axis in axes:
        size *= sh.grain(axis)
    combined = sh.product(axes)
    for index, place in enumerate(product(*(range(num_ranks(axis)) for axis in axes))):
        start, length = 0, size
        for axis, at in zip(axes, place, strict=True):
            offset, length = part(length, axis, at)
            start += offset
        assert part(size, combined, index) == (start, length)


def test_shares_are_values_of_their_own() -> None:
    shares = Shares(2, 1)
    assert (len(shares), num_ranks(shares), num_ranks(2)) == (2, 2, 2)
    assert shares == Shares(4, 2)
    assert hash(shares) == hash(Shares(4, 2))
    assert shares not in (2, Shares(1, 2))
    assert not isinstance(shares, int)
    assert [part(6, 2, 0), part(6, shares, 0)] == [(0, 3), (0, 4)]  # the cache separates them
    assert [str(shares), repr(shares), f"dp={shares}"] == ["2:1", "Shares(2, 1)", "dp=2:1"]
    assert pickle.loads(pickle.dumps(shares)) == copy.deepcopy(shares) == shares


@given(st.integers(1, 9), st.integers(1, 10**12))
def test_equal_weights_become_a_number_of_ranks(ranks: int, weight: int) -> None:
    axis = Shares.of([weight] * ranks)
    assert (type(axis), axis) == (int, ranks)


def test_large_weights_are_exact() -> None:
    parts = Shares(10**30, 10**30 + 1)
    assert [part(10**6 + 1, parts, i)[1] for i in range(2)] == [500_000, 500_001]


@pytest.mark.parametrize(
    "size", [[], [0, 0], [2, -1], [1.5, 1], ["2", "1"], [True, 1], None, "2:1", {"a": 1}, 2.0]
)
def test_invalid_axis_sizes_are_rejected(size: Any) -> None:
    with pytest.raises(ClusterError, match=r"mesh axis dp has .*must be.*\n  try: "):
        sh.axes_of({"dp": size})


@given(axis_sizes)
def test_written_sizes_are_read_back(axis: AxisSize) -> None:
    again = sh.axes_of({"dp": sh.written(axis)})["dp"]
    assert (type(again), again) == (type(axis), axis)
