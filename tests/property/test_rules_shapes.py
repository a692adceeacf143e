"""Rules of shape operators on random shapes: every candidate equals the full call."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.rules import check_rule

few = settings(max_examples=10, deadline=None)
ranks = st.integers(2, 5)
size = st.integers(0, 6)
shapes = st.lists(size, min_size=1, max_size=3).map(tuple)


def numbers(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 1.0, max(count, 1), dtype=torch.float64)[:count].reshape(shape)


@st.composite
def broadcast(draw: st.DrawFn, num: int) -> list[tuple[int, ...]]:
    """Draw shapes that broadcast together."""
    full = draw(shapes)
    result = []
    for _ in range(num):
        rank = draw(st.integers(0, len(full)))
        result.append(tuple(draw(st.sampled_from([1, n])) for n in full[len(full) - rank :]))
    return result


@few
@given(broadcast(3), ranks, st.sampled_from(["add.Tensor", "mul.Tensor", "maximum.default"]))
def test_binary(operands: list[tuple[int, ...]], num: int, op: str) -> None:
    check_rule(f"aten.{op}", (numbers(*operands[0]), numbers(*operands[1]) + 0.01), ranks=(num,))


@few
@given(broadcast(3), ranks)
def test_where(operands: list[tuple[int, ...]], num: int) -> None:
    a, b, c = (numbers(*shape) for shape in operands)
    check_rule("aten.where.self", (a > 0, b, c), ranks=(num,))


@few
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sets(st.integers(1, 4)),
    st.sets(st.integers(1, 4)),
    ranks,
)
def test_view(factors: list[int], left: set[int], right: set[int], num: int) -> None:
    """Group the same factors in two ways."""

    def group(bounds: set[int]) -> tuple[int, ...]:
        ends = [0, *sorted(b for b in bounds if b < len(factors)), len(factors)]
        pairs = itertools.pairwise(ends)
        return tuple(torch.Size(factors[a:b]).numel() for a, b in pairs)

    check_rule("aten.view.default", (numbers(*group(left)), group(right)), ranks=(num,))


@few
@given(st.permutations(range(4)), ranks)
def test_permute(order: list[int], num: int) -> None:
    check_rule("aten.permute.default", (numbers(2, 3, 1, 5), tuple(order)), ranks=(num,))


@few
@given(shapes, st.data(), ranks)
def test_squeeze_and_unsqueeze(shape: tuple[int, ...], data: st.DataObject, num: int) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    check_rule("aten.squeeze.dim", (numbers(*shape), dim), ranks=(num,))
    check_rule("aten.squeeze.default", (numbers(*shape),), ranks=(num,))
    check_rule("aten.unsqueeze.default", (numbers(*shape), dim), ranks=(num,))


@few
@given(broadcast(1), shapes, ranks)
def test_expand(sources: list[tuple[int, ...]], new: tuple[int, ...], num: int) -> None:
    shape = tuple(1 if n == 0 else n for n in sources[0])
    target = tuple(4 if n == 1 else -1 for n in shape)
    check_rule("aten.expand.default", (numbers(*shape), (*new, *target)), ranks=(num,))


@few
@given(shapes, st.data(), ranks)
def test_repeat(shape: tuple[int, ...], data: st.DataObject, num: int) -> None:
    longer = data.draw(st.integers(len(shape), 4))
    repeats = data.draw(st.lists(st.integers(1, 4), min_size=longer, max_size=longer))
    check_rule("aten.repeat.default", (numbers(*shape), tuple(repeats)), ranks=(num,))
    dim = data.draw(st.integers(0, len(shape) - 1) | st.none())
    args = (numbers(*shape), repeats[0], dim)
    check_rule("aten.repeat_interleave.self_int", args, ranks=(num,))


@few
@given(st.lists(size, min_size=1, max_size=4), st.integers(1, 4), st.booleans(), ranks)
def test_cat(sizes: list[int], other: int, last: bool, num: int) -> None:
    tensors = [numbers(other, n) if last else numbers(n, other) for n in sizes]
    check_rule("aten.cat.default", (tensors, int(last)), ranks=(num,))


@few
@given(st.lists(size, min_size=1, max_size=4), st.integers(1, 4), ranks)
def test_split(sizes: list[int], each: int, num: int) -> None:
    x = numbers(3, sum(sizes))
    check_rule("aten.split_with_sizes.default", (x, tuple(sizes), 1), ranks=(num,))
    check_rule("aten.split.Tensor", (x, each, -1), ranks=(num,))
    check_rule("aten.chunk.default", (x, each, 1), ranks=(num,))


@few
@given(
    st.integers(1, 12),
    st.integers(-13, 13) | st.none(),
    st.integers(-13, 13) | st.none(),
    st.integers(1, 3),
    ranks,
)
def test_slice(length: int, start: int | None, stop: int | None, step: int, num: int) -> None:
    x = numbers(length, 2)
    check_rule("aten.slice.Tensor", (x, 0, start, stop, step), ranks=(num,))
    piece = x[slice(start, stop, step)] * 2
    check_rule("aten.slice_scatter.default", (x, piece, 0, start, stop, step), ranks=(num,))


@few
@given(st.lists(st.integers(-2, 4), min_size=4, max_size=4), st.sampled_from([0.0, 1.0]), ranks)
def test_pad(widths: list[int], value: float, num: int) -> None:
    x = numbers(5, 6)
    check_rule("aten.pad.default", (x, tuple(widths), "constant", value), ranks=(num,))


@few
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), ranks)
def test_windows(length: int, window: int, step: int, num: int) -> None:
    window = min(window, length)
    check_rule("aten.unfold.default", (numbers(2, length), 1, window, step), ranks=(num,))
    check_rule("aten.glu.default", (numbers(3, 2 * length),), ranks=(num,))
    check_rule("aten.roll.default", (numbers(3, length), (window,), (1,)), ranks=(num,))


@few
@given(st.integers(0, 7), st.integers(0, 7), st.integers(-8, 8), ranks)
def test_triangles(rows: int, columns: int, diagonal: int, num: int) -> None:
    x = numbers(2, rows, columns)
    check_rule("aten.tril.default", (x, diagonal), ranks=(num,))
    check_rule("aten.triu.default", (x, diagonal), ranks=(num,))
    check_rule("aten.eye.m", (rows, columns), ranks=(num,))


@few
@given(st.integers(-5, 5), st.integers(0, 9), st.sampled_from([-2, 1, 3]), ranks)
def test_arange(start: int, count: int, step: int, num: int) -> None:
    check_rule("aten.arange.start_step", (start, start + count * step, step), ranks=(num,))
    check_rule("aten.linspace.default", (0.0, 1.0, count), ranks=(num,))
    check_rule("aten.zeros.default", ((count, 3),), ranks=(num,))
    args = (torch.arange(count) % 3, 3)
    check_rule("aten.one_hot.default", args, ranks=(num,))


@few
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data(), ranks)
def test_ordering(shape: list[int], data: st.DataObject, num: int) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(0))
    x = x.to(torch.float64).reshape(shape)
    check_rule("aten.sort.default", (x, dim), ranks=(num,))
    check_rule("aten.topk.default", (x, 1, dim), ranks=(num,))
    check_rule("aten.cumsum.default", (x, dim), ranks=(num,))
    check_rule("aten.argmax.default", (x, dim, data.draw(st.booleans())), ranks=(num,))


@few
@given(shapes, ranks)
def test_dropout(shape: tuple[int, ...], num: int) -> None:
    check_rule("aten.dropout.default", (numbers(*shape), 0.3, True), ranks=(num,), random=True)
