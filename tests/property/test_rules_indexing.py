"""Rules of index operators on random shapes and index patterns."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.rules import check_rule

few = settings(max_examples=12, deadline=None)
ranks = st.integers(2, 5)
sizes = st.lists(st.integers(1, 5), min_size=2, max_size=3)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def positions(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Tensor | None]]:
    """Draw a shape and index tensors for some of its dims, which broadcast together."""
    shape = tuple(draw(sizes))
    common = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
    used = draw(st.lists(st.booleans(), min_size=1, max_size=len(shape)).filter(any))
    indices: list[Tensor | None] = []
    for length, present in zip(shape, used, strict=False):
        own = [draw(st.sampled_from([1, n])) for n in common[draw(st.integers(0, 1)) :]]
        indices.append(positions(length, *own) if present else None)
    return shape, indices


@few
@given(indexed(), ranks)
def test_index(case: tuple[tuple[int, ...], list[Tensor | None]], num: int) -> None:
    shape, indices = case
    check_rule("aten.index.Tensor", (numbers(*shape), indices), ranks=(num,))


@few
@given(indexed(), st.data(), ranks)
def test_index_put(
    case: tuple[tuple[int, ...], list[Tensor | None]], data: st.DataObject, num: int
) -> None:
    shape, indices = case
    x = numbers(*shape)
    full = torch.ops.aten.index.Tensor(x, indices).shape
    num_dims = data.draw(st.integers(0, len(full)))
    own = [data.draw(st.sampled_from([1, n])) for n in full[len(full) - num_dims :]]
    check_rule("aten.index_put.default", (x, indices, numbers(*own), True), ranks=(num,))


@few
@given(sizes, st.data(), ranks)
def test_masked_put(shape: list[int], data: st.DataObject, num: int) -> None:
    width = data.draw(st.integers(1, len(shape)))
    before = data.draw(st.integers(0, len(shape) - width))
    mask = numbers(*shape[before : before + width]) > 0
    values = numbers(*shape[before + width :][data.draw(st.integers(0, 1)) :])
    indices = [*([None] * before), mask]
    check_rule("aten.index_put.default", (numbers(*shape), indices, values), ranks=(num,))


@few
@given(sizes, st.data(), ranks)
def test_gather_and_scatter(shape: list[int], data: st.DataObject, num: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(0, 6))
    smaller = [data.draw(st.sampled_from([n, max(n - 2, 0)])) for n in shape]
    smaller[dim] = count
    index = positions(shape[dim], *smaller)
    x = numbers(*shape)
    check_rule("aten.gather.default", (x, dim, index), ranks=(num,))
    check_rule("aten.scatter_add.default", (x, dim, index, numbers(*smaller)), ranks=(num,))
    check_rule("aten.scatter.value", (x, dim, index, 0.0), ranks=(num,))
    source = numbers(*smaller)
    check_rule("aten.scatter_reduce.two", (x, dim, index, source, "amax"), ranks=(num,))


@few
@given(sizes, st.data(), ranks)
def test_rows(shape: list[int], data: st.DataObject, num: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(0, 6))
    index, x = positions(shape[dim], count), numbers(*shape)
    check_rule("aten.index_select.default", (x, dim, index), ranks=(num,))
    rows = numbers(*(count if d == dim else n for d, n in enumerate(shape)))
    check_rule("aten.index_add.default", (x, dim, index, rows), ranks=(num,))
    check_rule("aten.select.int", (x, dim, -1), ranks=(num,))
