"""Moves between random layouts preserve values and gradients.

A full tensor is distributed over a mesh with layout A. The planned moves run on one thread per rank
with the runtime's collectives, and the result must be the same tensor with layout B. Gradients have
the dual layouts: g(S)=S, g(P)=R, g(R)=R, g(R~)=P.
"""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise import runtime as rt
from shardwise.layouts.moves import Move, kind, plan_moves
from shardwise.program.lower import _Lowering
from shardwise.runtime.splits import Split, take_local
from shardwise.runtime.transport.threads import run_threads
from shardwise.sharding import placements as pl
from shardwise.sharding.dims import Structure, choices, length, merge, unfactored
from shardwise.sharding.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Placement,
    Shard,
    compatible,
    parse_shard,
)
from shardwise.shares import AxisSize, Shares, num_ranks

NAMES = ("a", "b", "c")
SIZES = (2, 2, 3, 5, Shares(2, 1), Shares(1, 3), Shares(1, 0, 2))


@st.composite
def structures(draw: Any) -> Structure:
    """Draw a dim: one product of up to three factors, or two or three segments."""
    factor = st.sampled_from([1, 2, 2, 3, 4, 5])
    segments = draw(st.sampled_from([1, 1, 1, 2, 3]))
    inner = draw(st.lists(factor, max_size=1))
    structure = tuple(
        tuple(f for f in (*draw(st.lists(factor, min_size=1, max_size=2)), *inner) if f != 1)
        for _ in range(segments)
    )
    assume(length(structure) <= 24)
    return structure


@st.composite
def layouts(draw: Any, dims: tuple[Structure, ...], mesh: dict[str, AxisSize]) -> Layout:
    """Draw a layout for a tensor of these dims that the candidates of one node could give."""
    shards: list[Shard] = []
    for index, structure in enumerate(dims):
        patterns = {merge(p) for p in choices(structure)}
        patterns |= set(choices(unfactored(length(structure))))
        shards += [Shard(index, of) for of in sorted(patterns)]
    axes: list[tuple[str, Placement]] = []
    for name in mesh:
        others = [placement for _, placement in axes if isinstance(placement, Shard)]
        free = [s for s in shards if all(s.dim != o.dim or compatible(s.of, o.of) for o in others)]
        kinds: list[Placement] = [REPLICATE, PARTIAL, PARTIAL_GRAD]
        is_sharded = bool(free) and draw(st.integers(0, 4)) > 1
        axes.append((name, draw(st.sampled_from(free if is_sharded else kinds))))
    return Layout(tuple(axes))


@st.composite
def cases(
    draw: Any, max_axes: int = 2
) -> tuple[dict[str, AxisSize], tuple[int, ...], Layout, Layout]:
    """Draw the axes of a mesh, the shape of a tensor, and the layouts before and after."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=max_axes))
    assume(prod(map(num_ranks, sizes)) <= 12)
    mesh = dict(zip(NAMES, sizes, strict=False))
    dims = tuple(draw(st.lists(structures(), min_size=1, max_size=2)))
    current = draw(layouts(dims, mesh))
    needed = draw(layouts(dims, mesh))
    for axis in mesh:  # the table of redistributions has no such move
        assume(not (current[axis] == PARTIAL_GRAD and kind(needed[axis]) == "P"))
    return mesh, tuple(length(d) for d in dims), current, needed


def splits(layout: Layout) -> tuple[Split, ...]:
    return tuple(Split(axis=axis, dim=s.dim, of=s.of) for axis, s in layout.shards)


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient: g(S)=S, g(P)=R, g(R)=R, g(R~)=P."""
    dual = {"P": REPLICATE, "R": REPLICATE, "R~": PARTIAL}
    return Layout(tuple((a, dual.get(kind(p), p)) for a, p in layout.axes))


def local(tensor: torch.Tensor, layout: Layout, mesh: rt.ProcessMesh, seed: int) -> torch.Tensor:
    """Return this rank's part of a full tensor; terms of a partial sum are random."""
    partial = [a for a, p in layout.axes if kind(p) == "P"]
    counts = [num_ranks(mesh.axes[a]) for a in partial]
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(prod(counts), *tensor.shape, generator=generator, dtype=tensor.dtype)
    terms[-1] = tensor - terms[:-1].sum(0)
    index = 0
    for axis, count in zip(partial, counts, strict=True):
        index = index * count + mesh.coordinates[axis]
    return take_local(terms[index], splits(layout), mesh.coordinates, mesh.axes).clone()


def assert_local(
    actual: torch.Tensor, tensor: torch.Tensor, layout: Layout, mesh: rt.ProcessMesh, label: str
) -> None:
    """Assert that `actual` is this rank's part of the tensor, after completing partial sums."""
    partial = tuple(a for a, p in layout.axes if kind(p) == "P")
    if partial:
        actual = mesh.axis(*partial).all_reduce(actual.detach().contiguous().clone()).wait()
    expected = take_local(tensor, splits(layout), mesh.coordinates, mesh.axes)
    assert actual.shape == expected.shape, (
        f"{label}: {tuple(actual.shape)}, {tuple(expected.shape)}"
    )
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=label)


def apply_move(move: Move, x: torch.Tensor, mesh: rt.ProcessMesh) -> torch.Tensor:
    """Run a move with the arguments that lowering would write for this rank."""
    coordinate = {a: (mesh.coordinates[a], n) for a, n in mesh.axes.items()}
    step = _Lowering._move_step(SimpleNamespace(coordinate=coordinate), move, "x", "y", None)
    function = getattr(rt, move.fn.removeprefix("rt."))
    return function(x, mesh.axis(*move.axes), **dict(step.kwargs))


def check(
    mesh_axes: dict[str, AxisSize], shape: tuple[int, ...], current: Layout, needed: Layout
) -> None:
    """Run the moves between two layouts and compare values and gradients."""
    moves = plan_moves(current, needed, mesh_axes, True)
    final = moves[-1].layout if moves else current
    for axis, placement in needed.axes:
        relaxed = current[axis] == PARTIAL_GRAD and placement == REPLICATE
        assert relaxed or kind(final[axis]) == kind(placement), str(final)
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    reached = Layout(
        tuple((a, PARTIAL_GRAD if final[a] == PARTIAL_GRAD else p) for a, p in needed.axes)
    )

    def run(rank: int, transport: Any) -> None:
        mesh = rt.ProcessMesh(mesh_axes, rank, transport)
        coordinate = {a: (mesh.coordinates[a], n) for a, n in mesh_axes.items()}
        x = local(value, current, mesh, 1).requires_grad_()
        assert tuple(x.shape) == pl.local_shape(current, shape, coordinate)
        y = x
        for move in moves:
            y = apply_move(move, y, mesh)
            assert_local(y, value, move.layout, mesh, f"value after {move.fn} {move.layout}")
        assert_local(y, value, reached, mesh, "value")
        y.backward(local(weight, gradient_layout(reached), mesh, 2))
        assert x.grad is not None
        assert_local(x.grad, weight, gradient_layout(current), mesh, "gradient")

    try:
        run_threads(prod(map(num_ranks, mesh_axes.values())), run, timeout_s=20)
    except BaseException as error:
        error.add_note(f"{mesh_axes} {shape}: {current} -> {needed}: {[m.fn for m in moves]}")
        raise


@settings(max_examples=60)
@given(cases())
def test_moves_preserve_values_and_gradients(case: Any) -> None:
    check(*case)


@pytest.mark.slow
@settings(max_examples=3000)
@given(cases(max_axes=3))
def test_many_moves_preserve_values_and_gradients(case: Any) -> None:
    check(*case)


def layout(shape: tuple[int, ...], **axes: str) -> Layout:
    """Return a layout from text, as in `layout((8,), a="R", b="S(0:2x[4])")`."""
    plain: dict[str, Placement] = {"R": REPLICATE, "R~": PARTIAL_GRAD, "P": PARTIAL}
    return Layout(
        tuple(
            (axis, plain[text] if text in plain else parse_shard(text[2:-1], shape))
            for axis, text in axes.items()
        )
    )


@pytest.mark.parametrize(
    ("current", "needed"),
    [
        # Heads of 16 or positions: the same halves, but not the same quarters.
        ({"a": "S(0:[2]x16)", "b": "S(0:[2]x16)"}, {"a": "S(0)", "b": "S(0)"}),
        ({"a": "S(0:[2]x16)", "b": "S(0:2x[16])"}, {"a": "S(0)", "b": "S(0)"}),
        ({"a": "R", "b": "S(0:[2]x16)"}, {"a": "S(0)", "b": "S(0)"}),
        ({"a": "S(0:[2]x16)", "b": "R"}, {"a": "S(0)", "b": "S(0)"}),
        ({"a": "S(0)", "b": "S(0)"}, {"a": "R", "b": "S(0:[2]x16)"}),
        ({"a": "S(0)", "b": "S(0)"}, {"a": "S(0:[16]x2)", "b": "S(0:16x[2])"}),
        ({"a": "P", "b": "S(0)"}, {"a": "S(0:[2]x16)", "b": "S(0:[2]x16)"}),
    ],
)
def test_patterns_with_equal_halves_may_have_different_quarters(
    current: dict[str, str], needed: dict[str, str]
) -> None:
    check({"a": 2, "b": 2}, (32,), layout((32,), **current), layout((32,), **needed))


def test_equivalent_patterns_need_no_moves() -> None:
    shape, sizes = (32,), {"a": 2, "b": 2}
    current = layout(shape, a="S(0:[2]x16)", b="S(0:2x[16])")
    assert plan_moves(current, layout(shape, a="S(0)", b="S(0)"), sizes, True) == ()
    one_axis = layout(shape, a="S(0:[2]x16)", b="R")
    (move,) = plan_moves(one_axis, layout(shape, a="S(0)", b="S(0)"), sizes, True)
    assert (move.fn, move.axes) == ("rt.shard", ("b",))


def test_only_an_axis_inside_prevents_an_all_to_all() -> None:
    rows, columns = Shard(0, ((1, 8, 1),)), Shard(1, ((1, 8, 1),))
    current, needed = Layout((("dp", rows), ("tp", columns))), Layout((("dp", rows), ("tp", rows)))

    def names(dp: int) -> list[str]:
        return [move.fn for move in plan_moves(current, needed, {"dp": dp, "tp": 2}, True)]

    assert names(1) == names(2) == ["rt.all_to_all"]
    check({"dp": 2, "tp": 2}, (8, 8), current, needed)
    outer = Layout((("dp", columns), ("tp", rows)))
    moves = plan_moves(outer, Layout((("dp", rows), ("tp", rows))), {"dp": 2, "tp": 2}, True)
    assert "rt.all_to_all" not in [move.fn for move in moves]
    check({"dp": 2, "tp": 3}, (8, 8), current, needed)
