"""Splitting a tensor and joining its parts returns the tensor, for every split."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.runtime.mesh import coordinates
from shardwise.runtime.splits import (
    Split,
    assemble,
    full_length,
    join,
    local_length,
    local_runs,
    local_shape,
    take_local,
    take_part,
)
from shardwise.shares import AxisSize, Shares, num_ranks, part

factor = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3))
cuts = st.lists(factor, min_size=1, max_size=3).map(tuple)
weights = st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any)
extents = st.one_of(st.integers(1, 5), weights.map(Shares.of))


@given(st.integers(0, 40), st.integers(1, 9))
def test_part_is_numpys_array_split(size: int, parts: int) -> None:
    expected = [list(a) for a in np.array_split(np.arange(size), parts)]
    starts = [part(size, parts, i) for i in range(num_ranks(parts))]
    assert [list(range(s, s + n)) for s, n in starts] == expected


@given(cuts, extents, st.integers(0, 2))
def test_join_undoes_take(of: tuple[tuple[int, int, int], ...], parts: AxisSize, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = full_length(of)
    full = torch.arange(math.prod(shape)).view(shape)
    pieces = [take_part(full, dim, of, parts, i) for i in range(num_ranks(parts))]
    assert [p.shape[dim] for p in pieces] == [
        local_length(of, parts, i) for i in range(num_ranks(parts))
    ]
    assert torch.equal(join(pieces, dim, of, parts), full)
    assert torch.equal(join(pieces, dim - 3, of, parts), full)
    assert isinstance(parts, Shares) or torch.equal(join(pieces, dim, of), full)


@given(factor, extents)
def test_a_part_keeps_the_factor_order(of: tuple[int, int, int], parts: AxisSize) -> None:
    size = of[1]
    full = torch.arange(math.prod(of))
    for i in range(num_ranks(parts)):
        start, length = part(size, parts, i)
        expected = full.view(of)[:, start : start + length].reshape(-1)
        assert torch.equal(take_part(full, 0, (of,), parts, i), expected)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Split, ...], dict[str, AxisSize]]:
    """A shape, splits of it over up to three axes, and the axes' sizes."""
    size = st.one_of(st.integers(1, 3), weights.map(Shares.of))
    axes = {name: draw(size) for name in ("dp", "cp", "tp")}
    a, b, c = (draw(st.integers(1, 4)) for _ in range(3))
    shape = (a * b * c, draw(st.integers(1, 5)))
    factors = [
        (0, ((1, a, b * c),)),
        (0, ((a, b, c),)),
        (0, ((a * b, c, 1),)),
        (1, ((1, shape[1], 1),)),
    ]
    if b > 1:
        factors.append((0, ((1, a, c), (b - 1, a, c))))
    splits = []
    for name in draw(st.permutations(list(axes))):
        if draw(st.booleans()):
            dim, of = draw(st.sampled_from(factors))
            mixed = any(len(of) != len(s.of) for s in splits if s.dim == dim)
            if not mixed:
                splits.append(Split(axis=name, dim=dim, of=of))
    return shape, tuple(splits), axes


@given(cut_tensors())
def test_assemble_undoes_take_local_over_several_axes(
    case: tuple[tuple[int, ...], tuple[Split, ...], dict[str, AxisSize]],
) -> None:
    shape, splits, axes = case
    full = torch.arange(math.prod(shape)).view(shape)
    parts = {}
    for rank in range(math.prod(map(num_ranks, axes.values()))):
        coords = coordinates(axes, rank)
        local = take_local(full, splits, coords, axes)
        rows, columns = (
            [i for start, n in runs for i in range(start, start + n)]
            for runs in local_runs(shape, splits, coords, axes)
        )
        assert torch.equal(local, full[rows][:, columns])
        assert tuple(local.shape) == local_shape(shape, splits, coords, axes)
        parts[tuple(coords.values())] = local
    assert torch.equal(assemble(parts, shape, splits, axes), full)
    if len({(s.dim, s.of) for s in splits}) == len(splits):
        cut = math.prod(num_ranks(axes[s.axis]) for s in splits)
        copies = math.prod(map(num_ranks, axes.values())) // cut
        assert sum(p.numel() for p in parts.values()) == full.numel() * copies


def test_two_axes_on_one_factor_are_nested_in_the_order_given() -> None:
    full, axes = torch.arange(12), {"dp": 2, "tp": 3}
    of = ((1, 12, 1),)
    dp_first = (Split(axis="dp", dim=0, of=of), Split(axis="tp", dim=0, of=of))
    there = {"dp": 1, "tp": 2}
    assert take_local(full, dp_first, there, axes).tolist() == [10, 11]
    assert take_local(full, dp_first[::-1], {"dp": 1, "tp": 0}, axes).tolist() == [2, 3]
