"""Boxes of random shardings cover every tensor exactly once, and have the right elements."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.shards import (
    Box,
    LocalBox,
    check_cover,
    local_boxes,
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
    parts = [narrow(full, box.offset, box.size).reshape(-1) for box in boxes]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert torch.cat([*parts, full.new_empty(0)]).tolist() == list(range(begin, end))


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Split], dict[str, int], int]:
    """Draw a shape, its splits along two axes (even or not, strided or not), and ZeRO ranks."""
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
@given(shardings(), st.integers(16, 256))
def test_boxes_of_all_ranks_cover_a_tensor_once(
    sharding: tuple[tuple[int, ...], list[Split], dict[str, int], int], max_bytes: int
) -> None:
    shape, splits, sizes, ranks = sharding
    full = torch.arange(math.prod(shape)).view(shape)
    split_axes = [axis for axis in sizes if any(s.axis == axis for s in splits)]
    boxes: list[Box] = []
    for indices in product(*(range(sizes[axis]) for axis in split_axes)):
        coords = {**dict.fromkeys(sizes, 0), **dict(zip(split_axes, indices, strict=True))}
        runs = local_runs(shape, splits, coords, sizes)
        local = take_local(full, splits, coords, sizes).contiguous()
        assert tuple(local.shape) == local_shape(shape, splits, coords, sizes)
        for rank in range(ranks):
            begin, length = part(local.numel(), ranks, rank)
            piece = local.view(-1)[begin : begin + length]
            bounds = None if ranks == 1 else (begin, begin + length)
            shards = local_boxes(runs, local if bounds is None else piece, bounds)
            for part_box in (p for shard in shards for p in split_box(shard, max_bytes)):
                expected = narrow(full, part_box.box.offset, part_box.box.size)
                assert torch.equal(part_box.view, expected)
                assert part_box.view.nbytes <= max(max_bytes, 8)
                boxes.append(part_box.box)
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
    assert local_boxes([], value, None) == [LocalBox(Box((), ()), value)]
    check_cover("w", (), [Box((), ())])
    with pytest.raises(CheckpointError, match="have 0 of its 1"):
        check_cover("w", (), [])
