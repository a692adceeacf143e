"""Compare flops and bytes with formulas by hand, for operators of every kind."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost import CallCost, Kernel
from shardwise.cost.kernels import causal_fraction
from shardwise.ir import Ref, TensorType, map_refs
from shardwise.ir.operators import operator
from tests.support.call_costs import call_cost

A, B, C, D = (Ref(name) for name in "abcd")
FLOAT, HALF, INT = torch.float32, torch.bfloat16, torch.int64


def types(*shapes: tuple[int, ...], dtype: torch.dtype = FLOAT) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, dtype) for shape in shapes)


def cost(
    op: str, args: tuple[Any, ...], *shapes: tuple[int, ...], grads: str = "all", **kwargs: Any
) -> CallCost:
    given = types(*shapes)
    wanted = frozenset(range(len(shapes))) if grads == "all" else frozenset()
    return call_cost(op, args, tuple(kwargs.items()), given, wanted, frozenset())


def flops(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels)


# operator, arguments, shapes, keyword arguments, multiply-adds forward, products in backward
PRODUCTS = [
    ("aten.mm.default", (A, B), ((3, 4), (4, 5)), {}, 3 * 4 * 5, 2),
    ("aten.addmm.default", (C, A, B), ((5,), (3, 4), (4, 5)), {}, 3 * 4 * 5, 2),
    ("aten.bmm.default", (A, B), ((2, 3, 4), (2, 4, 5)), {}, 2 * 3 * 4 * 5, 2),
    ("aten.baddbmm.default", (C, A, B), ((2, 3, 5), (2, 3, 4), (2, 4, 5)), {}, 120, 2),
    ("aten.linear.default", (A, B), ((2, 3, 4), (5, 4)), {}, 2 * 3 * 4 * 5, 2),
    ("aten.linear.default", (A, B, C), ((2, 3, 4), (5, 4), (5,)), {}, 2 * 3 * 4 * 5, 2),
    ("aten.matmul.default", (A, B), ((2, 3, 4), (4, 5)), {}, 2 * 3 * 4 * 5, 2),
    ("aten.matmul.default", (A, B), ((2, 6, 3, 4), (2, 6, 4, 5)), {}, 12 * 3 * 4 * 5, 2),
    ("aten.matmul.default", (A, B), ((3, 4), (2, 4, 5)), {}, 2 * 3 * 4 * 5, 2),
    ("aten.einsum.default", ("bij,bjk->bik", (A, B)), ((2, 3, 4), (2, 4, 5)), {}, 120, 2),
    ("aten.einsum.default", ("ij,kj->ik", (A, B)), ((3, 4), (5, 4)), {}, 3 * 4 * 5, 2),
    ("aten.conv1d.default", (A, B), ((2, 3, 9), (4, 3, 3)), {}, 2 * 7 * 4 * 3 * 3, 2),
    ("aten.conv2d.default", (A, B, C), ((2, 4, 8, 8), (6, 4, 3, 3), (6,)), {}, 2 * 36 * 6 * 36, 2),
    (
        "aten.conv2d.default",
        (A, B),
        ((2, 4, 8, 8), (6, 2, 3, 3)),
        {"groups": 2},
        2 * 36 * 6 * 18,
        2,
    ),
    ("aten.conv2d.default", (A, B), ((2, 4, 8, 8), (4, 1, 3, 3)), {"groups": 4}, 2 * 36 * 4 * 9, 2),
    (
        "aten.conv2d.default",
        (A, B),
        ((2, 4, 8, 8), (6, 4, 2, 2)),
        {"stride": (2, 2)},
        2 * 16 * 96,
        2,
    ),
    ("aten.conv3d.default", (A, B), ((1, 2, 4, 4, 4), (3, 2, 3, 3, 3)), {}, 8 * 3 * 54, 2),
    ("aten.conv_transpose2d.input", (A, B), ((2, 4, 5, 5), (4, 6, 3, 3)), {}, 2 * 25 * 4 * 54, 2),
    ("rt.linear", (A, B, C), ((2, 3, 4), (5, 4), (5,)), {}, 2 * 3 * 4 * 5, 2),
    ("rt.addmm", (C, A, B), ((5,), (3, 4), (4, 5)), {}, 3 * 4 * 5, 2),
    ("rt.matmul", (A, B), ((2, 3, 4), (4, 5)), {}, 2 * 3 * 4 * 5, 2),
]


@pytest.mark.parametrize(("op", "args", "shapes", "options", "adds", "back"), PRODUCTS)
def test_products(
    op: str, args: Any, shapes: Any, options: dict[str, Any], adds: int, back: int
) -> None:
    actual = cost(op, args, *shapes, **options)
    assert flops(actual.forward) == 2 * adds
    assert flops(actual.backward) == 2 * adds * back
    assert len([k for k in actual.backward if k.flops]) == back
    assert not actual.note
    for kernel in (*actual.forward, *actual.backward):
        if kernel.flops:
            assert kernel.flops == 2 * prod(kernel.shape)


BYTES = [  # operator, arguments, shapes, options, elements read and written, those of backward
    ("aten.relu.default", (A,), ((3, 4),), {}, 24, 36),
    ("aten.gelu.default", (A,), ((3, 4),), {}, 24, 36),
    ("aten.silu.default", (A,), ((3, 4),), {}, 24, 36),
    ("aten.add.Tensor", (A, B), ((3, 4), (3, 4)), {}, 36, 0),
    ("aten.add.Tensor", (A, B), ((3, 4), (4,)), {}, 28, 16),
    ("aten.mul.Tensor", (A, B), ((3, 4), (3, 4)), {}, 36, 72),
    ("aten.mul.Tensor", (A, A), ((3, 4), (3, 4)), {}, 24, 108),
    ("aten.softmax.int", (A, -1), ((3, 4),), {}, 24, 36),
    ("aten.layer_norm.default", (A, (4,), B, C), ((3, 4), (4,), (4,)), {}, 38, 84),
    ("aten.mean.dim", (A, (1,)), ((3, 4),), {}, 15, 15),
    ("aten.sum.dim_IntList", (A, (1,)), ((3, 4),), {}, 15, 0),
    ("aten.cat.default", ((A, B), 0), ((3, 4), (2, 4)), {}, 40, 0),
    ("aten.clone.default", (A,), ((3, 4),), {}, 24, 0),
    ("aten.transpose.int", (A, 0, 1), ((3, 4),), {}, 0, 0),
    ("aten.reshape.default", (A, (4, 3)), ((3, 4),), {}, 0, 0),
    ("aten.expand.default", (A, (5, 4)), ((1, 4),), {}, 0, 24),
    ("aten.slice.Tensor", (A, 0, 0, 2), ((3, 4),), {}, 0, 20),
]


@pytest.mark.parametrize(("op", "args", "shapes", "options", "forward", "backward"), BYTES)
def test_bytes(
    op: str, args: Any, shapes: Any, options: dict[str, Any], forward: int, backward: int
) -> None:
    actual = cost(op, args, *shapes, **options)
    assert not actual.note
    assert not flops(actual.forward)
    assert not flops(actual.backward)
    assert sum(k.bytes for k in actual.forward) == 4 * forward
    assert sum(k.bytes for k in actual.backward) == 4 * backward


def test_lookups_read_only_the_selected_rows() -> None:
    given = (*types((1000, 8)), *types((5,), dtype=INT))
    actual = call_cost("aten.embedding.default", (A, B), (), given, frozenset({0}), frozenset({0}))
    assert sum(k.bytes for k in actual.forward) == 2 * 5 * 8 * 4 + 5 * 8
    assert actual.weight == actual.backward  # the table's gradient is the only one
    indexed = call_cost("aten.index.Tensor", (A, (B,)), (), given, frozenset({0}), frozenset())
    assert indexed.forward[0].bytes == actual.forward[0].bytes
    picked = call_cost("aten.index_select.default", (A, 0, B), (), given)
    assert picked.forward[0].bytes == actual.forward[0].bytes


@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 9), bias=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_weight_part_of_a_linear_layer_is_one_product(
    m: int, n: int, k: int, bias: bool
) -> None:
    shapes = ((2, m, k), (n, k), *([(n,)] if bias else []))
    args = (A, B, C)[: len(shapes)]
    every = frozenset(range(len(shapes)))
    actual = call_cost("aten.linear.default", args, (), types(*shapes), every, every - {0})
    assert len([kernel for kernel in actual.backward if kernel.flops]) == 2
    assert len([kernel for kernel in actual.weight if kernel.flops]) == 1
    assert flops(actual.forward) == 2.0 * 2 * m * n * k
    assert set(actual.weight) <= set(actual.backward)
    frozen = call_cost("aten.linear.default", args, (), types(*shapes), frozenset({0}))
    assert flops(frozen.backward) == flops(actual.forward)
    assert frozen.weight == ()


def test_without_gradients_nothing_is_saved() -> None:
    actual = cost("aten.linear.default", (A, B), (2, 3), (4, 3), grads="none")
    assert actual.forward
    assert not actual.backward
    assert not actual.saved
    assert not actual.gradients


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_one_kernel(shared: int, causal: bool) -> None:
    batch, heads, rows, size = 2, 4, 16, 8
    shapes = ((batch, heads, rows, size), *[(batch, heads // shared, rows, size)] * 2)
    given = types(*shapes, dtype=HALF)
    args = (A, B, C, None, 0.0, causal)
    options = (("enable_gqa", shared > 1),)
    actual = call_cost(
        "aten.scaled_dot_product_attention.default", args, options, given, frozenset(range(3))
    )
    full = 2 * 2 * batch * heads * rows * rows * size
    part = (rows + 1) / (2 * rows) if causal else 1.0
    assert [k.kind for k in actual.forward] == ["attention"]
    assert actual.forward[0].flops == full * part
    assert actual.forward[0].shape == (batch, heads, rows, rows, size)
    assert flops(actual.backward) == 2.5 * full * part
    sizes = [t.num_bytes for t in given]
    assert sorted(s.num_bytes for s in actual.saved) == sorted(
        [*sizes, sizes[0], batch * heads * rows * 4]
    )


@given(rows=st.integers(1, 20), columns=st.integers(1, 20), tile=st.integers(1, 6))
def test_the_computed_fraction_of_a_causal_mask(rows: int, columns: int, tile: int) -> None:
    seen = sum(min((row // tile + 1) * tile, columns) for row in range(rows))
    assert causal_fraction(rows, columns, tile) == pytest.approx(seen / (rows * columns))
    if tile == 1:
        assert seen == torch.ones(rows, columns).tril().sum().item()


def test_a_call_that_cannot_run_on_meta_is_guessed_with_a_reason() -> None:
    result = types((12, 2), dtype=INT)
    actual = call_cost("aten.nonzero.default", (A,), (), types((3, 4)), results=result)
    assert "nonzero" in actual.note
    assert actual.forward[0].bytes == 12 * 4 + 24 * 8
    unknown = call_cost("nowhere.op.default", (A,), (), types((3, 4)), frozenset({0}))
    assert "not registered" in unknown.note
    assert unknown.forward[0].bytes
    assert unknown.backward[0].bytes
    assert unknown.saved


def test_equal_numbers_of_different_types_are_different_calls() -> None:
    ints = types((3, 4), dtype=INT)
    integer = call_cost("aten.mul.Scalar", (A, 2), (), ints)
    real = call_cost("aten.mul.Scalar", (A, 2.0), (), ints)
    assert (integer.results[0].dtype, real.results[0].dtype) == (INT, FLOAT)


def test_names_do_not_matter_but_repeats_do() -> None:
    shapes = types((3, 4), (3, 4))
    every = frozenset({0, 1})
    first = call_cost("aten.mul.Tensor", (A, B), (), shapes, every)
    assert call_cost("aten.mul.Tensor", (C, D), (), shapes, every) is first
    assert call_cost("aten.mul.Tensor", (D, D), (), shapes, every) is not first


def test_the_cost_of_a_reshape_depends_on_strides() -> None:
    given = types((3, 4))
    view = call_cost("aten.reshape.default", (A, (12,)), (), given)
    copy = call_cost("aten.reshape.default", (A, (12,)), (), given, strides=[(1, 3)])
    assert view.forward == ()
    assert view.aliases == (0,)
    assert sum(k.bytes for k in copy.forward) == 2 * 12 * 4
    assert copy.aliases == (None,)


def test_autocast_casts_operands() -> None:
    given = types((2, 3), (4, 3))
    region = ("cuda", HALF, True)
    every = frozenset({0, 1})
    actual = call_cost("aten.linear.default", (A, B), (), given, every, autocast=region)
    assert [k.op for k in actual.forward] == ["_to_copy", "_to_copy", "mm"]
    assert actual.forward[-1].dtype == "bfloat16"
    assert actual.results[0].dtype == HALF
    assert {s.num_bytes for s in actual.saved} == {2 * 6, 2 * 12}
    assert all(s.operand is None for s in actual.saved)


@pytest.mark.parametrize(
    ("op", "args", "shapes"),
    [
        ("aten.softmax.int", (A, -1), ((3, 4),)),
        ("aten.pow.Tensor_Scalar", (A, 2), ((3, 4),)),
        ("aten.layer_norm.default", (A, (4,), B, C), ((3, 4), (4,), (4,))),
        ("aten.mse_loss.default", (A, B), ((3, 4), (3, 4))),
        ("aten.matmul.default", (A, B), ((3, 4), (4, 5))),
        ("aten.conv1d.default", (A, B), ((2, 3, 8), (4, 3, 3))),
        ("aten.relu.default", (A,), ((3, 4),)),
    ],
)
def test_autocast_dtypes_equal_those_of_a_cpu(op: str, args: Any, shapes: Any) -> None:
    given = types(*shapes, dtype=HALF)
    actual = call_cost(op, args, (), given, autocast=("cpu", HALF, True))
    supply = iter([torch.randn(shape, dtype=HALF) for shape in shapes])
    with torch.autocast("cpu", HALF):
        real = operator(op)(*map_refs(args, lambda _: next(supply)))
    assert actual.results[0].dtype == real.dtype


def test_a_registered_operator_uses_its_own_meta_kernel() -> None:
    @torch.library.custom_op("shardwise_cost_test::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    @cube.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0] ** 2 * 3

    torch.library.register_autograd(cube, backward, setup_context=setup)
    name = "shardwise_cost_test.cube.default"
    actual = call_cost(name, (A,), (), types((3, 4)), frozenset({0}))
    assert [(k.op, k.bytes) for k in actual.forward] == [("shardwise_cost_test.cube", 96.0)]
    assert [k.op for k in actual.backward] == ["pow", "mul", "mul"]
    assert [(s.operand, s.num_bytes) for s in actual.saved] == [(0, 48)]
    assert not actual.note


def test_a_python_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.exp())
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    actual = call_cost(
        "autograd_function.m.Twice", (A,), (), types((3, 4)), frozenset({0}), function=Twice.apply
    )
    assert [k.op for k in actual.forward] == ["exp", "mul"]
    assert [(s.operand, s.result, s.num_bytes) for s in actual.saved] == [(None, None, 48)]


def test_rms_norm_is_one_kernel_on_a_gpu_and_a_composite_on_a_cpu() -> None:
    given, every = types((6, 8), (8,), dtype=HALF), frozenset({0, 1})
    args = (A, (8,), B, 1e-5)
    gpu = call_cost("aten.rms_norm.default", args, (), given, every, frozenset({1}))
    cpu = call_cost("aten.rms_norm.default", args, (), given, every, frozenset({1}), device="cpu")
    assert [(k.op, k.bytes) for k in gpu.forward] == [("_fused_rms_norm", 2 * 96 + 16 + 24)]
    assert len(gpu.backward) == 2
    assert gpu.weight == gpu.backward[1:]
    assert [(s.operand, s.num_bytes) for s in gpu.saved] == [(0, 96), (1, 16), (None, 24)]
    assert len(cpu.forward) > 3
    assert gpu.results == cpu.results
    assert gpu.strides == cpu.strides
    assert gpu.gradients == cpu.gradients
    assert not cpu.note
