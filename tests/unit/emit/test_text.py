"""Names, literals, expressions and line breaks of emitted code."""

from __future__ import annotations

import ast
import keyword
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.emit.expressions import WIDTH, render, wrap
from shardwise.emit.function import Names, wish_for
from shardwise.emit.quote import RESERVED, identifier, literal
from shardwise.ir import Ref


def value(arg: Any) -> str:
    return arg.name if isinstance(arg, Ref) else literal(arg)


@given(st.text(max_size=12))
def test_any_text_becomes_a_name(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert not keyword.iskeyword(name)
    assert name not in RESERVED


@given(st.lists(st.tuples(st.sampled_from(["x", "sum", "x2", "layer.0", ""]), st.booleans())))
def test_live_values_have_different_names(steps: list[tuple[str, bool]]) -> None:
    names, live = Names(("mesh_",)), {}
    for index, (wish, release) in enumerate(steps):
        live[f"v{index}"] = names.bind(f"v{index}", wish)
        assert len(set(live.values())) == len(live)
        assert "mesh_" not in live.values()
        if release:
            oldest = next(iter(live))
            names.release(oldest)
            del live[oldest]


def test_names_of_results() -> None:
    assert wish_for(1, "aten.linear.default", "blocks.0.up", True) == "up"
    assert wish_for(1, "aten.linear.default", "blocks.0", True) == "linear"
    assert wish_for(1, "aten._softmax.default", "", False) == "softmax"


constants = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(constants)
def test_literals_are_read_back(constant: Any) -> None:
    assert eval(literal(constant), {"math": math}) == constant


@pytest.mark.parametrize("constant", [torch.float32, torch.strided, torch.channels_last])
def test_torch_literals(constant: Any) -> None:
    assert eval(literal(constant)) == constant


def test_infinities_and_nan_are_valid_expressions() -> None:
    assert literal((math.nan, -math.inf)) == "(math.nan, -math.inf)"


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        ("aten.add.Tensor", (Ref("x"), Ref("y")), {}, "x + y"),
        ("aten.mul.Tensor", (Ref("x"), -2.0), {}, "x * -2.0"),
        ("aten.view.default", (Ref("x"), (2, 3)), {}, "x.view(2, 3)"),
        ("aten.transpose.int", (Ref("x"), 1, 2), {}, "x.transpose(1, 2)"),
        ("aten.linear.default", (Ref("x"), Ref("w")), {}, "F.linear(x, w)"),
        ("aten.sum.dim_IntList", (Ref("x"), (1,), True), {}, "x.sum(dim=(1,), keepdim=True)"),
        ("rt.reduce", (Ref("x"), Ref("self.tp")), {"op": "max"}, 'rt.reduce(x, self.tp, op="max")'),
        ("mylib.op.default", (Ref("x"),), {}, "torch.ops.mylib.op.default(x)"),
    ],
)
def test_calls_are_written_idiomatically(
    fn: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    assert render(fn, args, kwargs, value) == expected


names = st.sampled_from(["x", "transpose2", "self.layers.weight", "-y", "a + b", "(p, q)"])
strings = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=30)


@st.composite
def expressions(draw: Any, depth: int = 3) -> str:
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(st.one_of(names, strings.map(repr), st.integers(0, 10**9).map(str)))
    arguments = draw(st.lists(expressions(depth - 1), min_size=1, max_size=5))
    if draw(st.booleans()):
        arguments[-1] = f"key={arguments[-1]}"
    function = draw(st.sampled_from(["F.linear", "rt.gather", "x.view", "torch.cat"]))
    return f"{function}({', '.join(arguments)})"


@given(expressions(), st.sampled_from(["value = ", "return ", "first, second = ", ""]))
def test_wrapped_lines_have_the_same_meaning(expression: str, start: str) -> None:
    line = f"    {start}{expression}"
    module = ast.dump(ast.parse(f"def f():\n{line}"))
    assert ast.dump(ast.parse(f"def f():\n{wrap(line)}")) == module


def test_long_calls_are_wrapped() -> None:
    line = f"value = f({', '.join(f'argument_{i}' for i in range(30))})"
    assert max(map(len, wrap(line).splitlines())) <= WIDTH
    assert wrap("short(1)") == "short(1)"
