"""Errors in the one-line notation quote the rule and the mistake."""

from __future__ import annotations

import pytest

from shardwise.errors import RuleError
from shardwise.ir import Node, Ref, TensorType
from shardwise.sharding.registry import from_notation, parse
from shardwise.sharding.rule import Call


def call(*shapes: tuple[int, ...], result: tuple[int, ...]) -> Call:
    import torch

    names = [f"x{i}" for i in range(len(shapes))]
    node = Node(name="y", op="mylib.op.default", args=tuple(Ref(n) for n in names), outputs=("y",))
    types = {n: TensorType(s, torch.float32) for n, s in zip(names, shapes, strict=True)}
    return Call(node=node, types={**types, "y": TensorType(result, torch.float32)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b k+, n k+ b n", "has no '->'"),
        ("b k -> b n", "axis 'n' is in no operand"),
        ("b (h e -> b h", "'(' without ')'"),
        ("b h) -> b h", "')' without '('"),
        ("b % -> b", "cannot read '%'"),
        ("b 2 -> b", "cannot read '2'"),
        ("b k -> b k -> b", "cannot read"),
        ("(b (h e)) -> b", "'(' inside '('"),
    ],
)
def test_malformed_rules_are_rejected(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shapes", "result", "message"),
    [
        (
            "b k -> b k",
            ((2, 3, 4),),
            (2, 3),
            "an operand has 2 dims, the tensor's shape is (2, 3, 4)",
        ),
        ("b k -> b k", ((2, 3), (2, 3)), (2, 3), "has 1 operands"),
        ("b k+, n k+ -> b n", ((2, 3), (5, 4)), (2, 5), "dim k has size 4, expected 3"),
        ("b (h e) -> b h e", ((2, 12),), (2, 5, 3), "12"),
    ],
)
def test_rules_that_do_not_match_a_call_are_rejected(
    text: str, shapes: tuple[tuple[int, ...], ...], result: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RuleError) as caught:
        from_notation(text)(call(*shapes, result=result))
    assert message in str(caught.value)
    assert text in str(caught.value)


def test_notation_determines_axes_and_linear_operands() -> None:
    rule = from_notation("~b... k+, ~n k+, +n -> b... n")(
        call((2, 3, 4), (5, 4), (5,), result=(2, 3, 5))
    )
    assert {name: axis.size for name, axis in rule.axes.items()} == {
        "b2": 2,
        "b1": 3,
        "k": 4,
        "n": 5,
    }
    assert not any(axis.frozen for axis in rule.axes.values())
    assert rule.additive == {2}
    assert rule.linear == (frozenset({0, 2}), frozenset({1, 2}))


def test_an_axis_that_is_reduced_without_a_mark_is_frozen() -> None:
    rule = from_notation("b k -> b")(call((2, 3), result=(2,)))
    assert rule.axes["k"].frozen
    assert not rule.axes["b"].frozen
    assert from_notation("b k^ -> b k^")(call((2, 3), result=(2, 3))).axes["k"].frozen
