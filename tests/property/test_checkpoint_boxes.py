"""Boxes of random cuts cover every tensor exactly once, and hold the right elements."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.shards import (
    Box,
    Placed,
    check_cover,
    cut_boxes,
    narrow,
    range_boxes,
    split_box,
)
from shardwise.errors import CheckpointError
from shardwise.runtime.splits import Split, local_runs, local_shape, take_local
from shardwise.shares import part

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_range_is_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    full = torch.arange(numel).view(shape)
    boxes = range_boxes(shape, begin, end)
    found = [narrow(full, box.offset, box.size).reshape(-1) for box in boxes]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert torch.cat([*found, full.new_empty(0)]).tolist() == list(range(begin, end))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Split], dict[str, int], int]:
    """A shape, how two axes cut it (evenly or not, strided or not), and ranks of a flat cut."""
    dims = draw(st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=1, max_size=3))
    shape = tuple(outer * size * inner for outer, size, inner in dims)
    splits = [
        Split(axis=axis, dim=dim, of=(dims[dim],))
        for axis in ("a", "b")
        for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=1))
    ]
    sizes = {"a": draw(st.integers(1, 3)), "b": draw(st.integers(1, 3))}
    return shape, splits, sizes, draw(st.integers(1, 4))


@settings(max_examples=20)
@given(cuts(), st.integers(16, 256))
def test_all_ranks_boxes_cover_once(
    cut: tuple[tuple[int, ...], list[Split], dict[str, int], int], max_bytes: int
) -> None:
    shape, splits, sizes, ranks = cut
    full = torch.arange(math.prod(shape)).view(shape)
    cutting = [axis for axis in sizes if any(s.axis == axis for s in splits)]
    boxes: list[Box] = []
    for place in product(*(range(sizes[axis]) for axis in cutting)):
        coords = {**dict.fromkeys(sizes, 0), **dict(zip(cutting, place, strict=True))}
        runs = local_runs(shape, splits, coords, sizes)
        local = take_local(full, splits, coords, sizes).contiguous()
        assert tuple(local.shape) == local_shape(shape, splits, coords, sizes)
        for rank in range(ranks):
            begin, length = part(local.numel(), ranks, rank)
            piece = local.view(-1)[begin : begin + length]
            bounds = None if ranks == 1 else (begin, begin + length)
            held = cut_boxes(runs, local if bounds is None else piece, bounds)
            for placed in (p for whole in held for p in split_box(whole, max_bytes)):
                expected = narrow(full, placed.box.offset, placed.box.size)
                assert torch.equal(placed.view, expected)
                assert placed.view.nbytes <= max(max_bytes, 8)
                boxes.append(placed.box)
    check_cover("w", shape, boxes)
    if len(boxes) > 1:
        with pytest.raises(CheckpointError, match=r"have .* of its"):
            check_cover("w", shape, boxes[1:])
        with pytest.raises(CheckpointError, match="overlap"):
            check_cover("w", shape, [*boxes, boxes[0]])


def test_boxes_outside_are_refused() -> None:
    for box in (Box((0,), (5,)), Box((-1,), (3,)), Box((0, 0), (2, 2)), Box((0,), (0,))):
        with pytest.raises(CheckpointError, match="not within"):
            check_cover("w", (4,), [box])


def test_a_tensor_without_dims_is_one_box() -> None:
    value = torch.tensor(3.0)
    assert cut_boxes([], value, None) == [Placed(Box((), ()), value)]
    check_cover("w", (), [Box((), ())])
    with pytest.raises(CheckpointError, match="have 0 of its 1"):
        check_cover("w", (), [])
