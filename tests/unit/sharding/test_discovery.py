"""Discovered rules allow what experiments confirm, and are correct."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.ir import TensorType
from shardwise.sharding.candidates import candidates
from shardwise.sharding.discovery import discover
from shardwise.sharding.rule import Call, NodeRule
from tests.support.rules import check_rule, dense_call


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.library.custom_op("discovery_test::swish", mutates_args=())
def swish(x: Tensor, bias: Tensor) -> Tensor:
    return (x + bias) * torch.sigmoid(x + bias)


@torch.library.custom_op("discovery_test::rows", mutates_args=())
def rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    norm = x.norm(dim=-1)
    return x / norm[..., None] * scale, norm


@torch.library.custom_op("discovery_test::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@torch.library.custom_op("discovery_test::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1).clone()


@torch.library.custom_op("discovery_test::tangled", mutates_args=())
def tangled(x: Tensor) -> Tensor:
    return x - x.max() + x.flip(0)


@torch.library.custom_op("discovery_test::clipped", mutates_args=())
def clipped(x: Tensor) -> Tensor:
    return x * (20.0 / x.norm()).clamp(max=1.0)


@torch.library.custom_op("discovery_test::lookup", mutates_args=())
def lookup(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


@torch.library.custom_op("discovery_test::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@torch.library.custom_op("discovery_test::broken", mutates_args=())
def broken(x: Tensor) -> Tensor:
    raise RuntimeError("only on the accelerator")


@torch.library.custom_op("discovery_test::pairs", mutates_args=())
def pairs(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).softmax(-1).flatten(-2)


class Cube(torch.autograd.Function):
    """An element-wise function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


class CoupledBackward(torch.autograd.Function):
    """Element-wise forward, but the gradient is scaled by its norm over everything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def discovered_rule(op: str, *args: Any, run: Any = None) -> NodeRule:
    return discover(dense_call(op, args, run=run).call, run)


def placements(rule: NodeRule) -> list[tuple[list[str], list[str]]]:
    """Return the operand and result placements of every sharding, sorted."""
    return sorted(
        ([str(p) for p in c.operands], [str(p) for p in c.results]) for c in candidates(rule)[1:]
    )


def test_elementwise() -> None:
    rule = discovered_rule("discovery_test.swish.default", f(8, 6), f(6))
    assert rule.discovered
    assert rule.replicated_because is None
    assert placements(rule) == [(["S(0)", "R~"], ["S(0)"]), (["S(1)", "S(0)"], ["S(1)"])]


def test_row_wise_normalization_freezes_the_row() -> None:
    rule = discovered_rule("discovery_test.rows.default", f(8, 4, 6), f(6))
    assert placements(rule) == [
        (["S(0)", "R~"], ["S(0)", "S(0)"]),
        (["S(1)", "R~"], ["S(1)", "S(1)"]),
    ]


def test_product_leaves_a_partial_sum() -> None:
    rule = discovered_rule("discovery_test.product.default", f(8, 6), f(10, 6))
    assert (["S(1)", "S(1)"], ["P"]) in placements(rule)
    assert (["S(0)", "R~"], ["S(0)"]) in placements(rule)
    assert (["R~", "S(0)"], ["S(1)"]) in placements(rule)


def test_permutation_and_equal_sizes() -> None:
    rule = discovered_rule("discovery_test.turn.default", f(4, 4, 4))
    assert placements(rule) == [(["S(0)"], ["S(1)"]), (["S(1)"], ["S(2)"]), (["S(2)"], ["S(0)"])]


@pytest.mark.parametrize("op", ["tangled", "clipped"])
def test_operators_that_couple_elements_stay_replicated(op: str) -> None:
    rule = discovered_rule(f"discovery_test.{op}.default", f(6))
    assert rule.replicated_because
    assert op in rule.replicated_because


def test_integer_operands_stay_in_range() -> None:
    rule = discovered_rule("discovery_test.lookup.default", f(9, 6), torch.tensor([0, 3, 8, 1]))
    assert (["R~", "S(0)"], ["S(0)"]) in placements(rule)
    assert (["S(1)", "R~"], ["S(1)"]) in placements(rule)
    assert all(operands[0] != "S(0)" for operands, _ in placements(rule))


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("noise", "different results"),
        ("broken", "only on the accelerator"),
        ("absent", "not registered"),
    ],
)
def test_operators_that_cannot_be_tried_stay_replicated(op: str, reason: str) -> None:
    call = dense_call("discovery_test.noise.default", (f(4, 6),)).call
    node = call.node.__class__(
        name="n", op=f"discovery_test.{op}.default", args=call.node.args, outputs=("y0",)
    )
    types = {name: TensorType((4, 6), torch.float64) for name in ("x0", "y0")}
    rule = discover(Call.of(node, types))
    assert rule.replicated_because
    assert reason in rule.replicated_because


def test_shapes_that_cannot_shrink_are_tried_unchanged() -> None:
    rule = discovered_rule("discovery_test.pairs.default", f(5, 12), 3)
    assert placements(rule) == [(["S(0)"], ["S(0)"])]


def test_autograd_functions_are_judged_by_their_backward() -> None:
    cube = discovered_rule("autograd_function.m.Cube", f(4, 6), run=Cube.apply)
    assert len(placements(cube)) == 2
    check_rule("autograd_function.m.Cube", (f(4, 6),), run=Cube.apply, rule=cube)
    coupled = discovered_rule("autograd_function.m.Coupled", f(4, 6), run=CoupledBackward.apply)
    assert coupled.replicated_because


def test_discovered_rules_pass_the_check() -> None:
    for op, args in [
        ("swish", (f(8, 6), f(6))),
        ("rows", (f(8, 4, 6), f(6))),
        ("product", (f(8, 6), f(10, 6))),
        ("turn", (f(4, 4, 4),)),
        ("lookup", (f(9, 6), torch.tensor([0, 3, 8, 1]))),
    ]:
        name = f"discovery_test.{op}.default"
        check_rule(name, args, ranks=(2, 5), rule=discovered_rule(name, *args))
