"""Arguments by schema name, and local calls of rules."""

from __future__ import annotations

import pytest
import torch

from shardwise.ir import Node, Ref, TensorType
from shardwise.sharding import rules  # noqa: F401 - registers the table
from shardwise.sharding.candidates import axis_structures, candidates
from shardwise.sharding.registry import rule_for
from shardwise.sharding.rule import Call
from tests.support.local_calls import Arrangement, dense_call, localized


def test_position_of_a_value_that_is_used_twice() -> None:
    x = Ref("x")
    node = Node(name="n", op="aten.where.self", args=(Ref("mask"), x, x), outputs=("y",))
    types = {name: TensorType((4,), torch.float32) for name in ("mask", "x", "y")}
    call = Call.of(node, types)
    assert [call.position(name) for name in ("condition", "self", "other")] == [0, 1, 2]
    rule = rule_for(call)
    assert rule is not None
    assert rule.linear == (frozenset({1, 2}),)


def test_parts_of_an_axis_are_its_segments() -> None:
    call = dense_call("aten.split_with_sizes.default", (torch.ones(12), (8, 2, 2))).call
    rule = rule_for(call)
    assert rule is not None
    assert axis_structures(rule)["d0"] == ((8,), (2,), (2,))
    (sharded,) = [c for c in candidates(rule) if str(c.choice).startswith("shard")]
    assert [str(p) for p in sharded.results] == ["S(0)", "S(0)", "S(0)"]
    assert str(sharded.operands[0]) == "S(0:[8]|[2]|[2])"


def local_text(op: str, *args: object, choice: str, ranks: int = 2) -> str:
    """Return the local call of the last rank if one axis is sharded."""
    call = dense_call(op, args).call
    rule = rule_for(call)
    assert rule is not None
    candidate = next(c for c in candidates(rule) if str(c.choice) == choice)
    local = localized(call, rule, Arrangement({"x": ranks}, {"x": candidate}), (ranks - 1,))
    return f"{local.fn}{local.args}"


x = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("op", "args", "choice", "expected"),
    [
        ("view.default", (x, (4, 2, 3)), "shard g0_0", "aten.reshape.default(x0, (2, 2, 3))"),
        ("expand.default", (x[:, :1], (4, 6)), "shard d1", "aten.expand.default(x0, (4, 3))"),
        ("slice.Tensor", (x, 1, 3), "shard d1:2x[3]", "aten.slice.Tensor(x0, 1, 1)"),
        ("squeeze.dim", (x, 0), "shard d0", "aten.alias.default(x0,)"),
        ("repeat.default", (x, (4, 1)), "shard r0", "aten.repeat.default(x0, (2, 1))"),
        ("pad.default", (x, (2, 2)), "shard d1:[2]|[6]|[2]", "aten.pad.default(x0, (1, 1))"),
        ("chunk.default", (x, 2, 1), "shard d1:2x[3]", "aten.chunk.default(x0, 2, 1)"),
        (
            "split.Tensor",
            (x, 4, 1),
            "shard d1:[4]|[2]",
            "aten.split_with_sizes.default(x0, (2, 1), 1)",
        ),
    ],
)
def test_sizes_become_local(op: str, args: tuple[object, ...], choice: str, expected: str) -> None:
    text = local_text(f"aten.{op}", *args, choice=choice)
    assert text.replace("Ref(name='x0')", "x0") == expected


@pytest.mark.parametrize(
    ("op", "dtype", "linear"),
    [
        ("aten.neg.default", torch.float32, True),
        ("aten.neg.default", torch.int64, False),
        ("aten.clone.default", torch.bool, False),
        ("aten.exp.default", torch.float32, False),
    ],
)
def test_partial_sums_pass_linear_operators_on_floats(
    op: str, dtype: torch.dtype, linear: bool
) -> None:
    rule = rule_for(dense_call(op, (torch.ones(4).to(dtype),)).call)
    assert rule is not None
    assert bool(rule.linear) == linear


def test_partial_sums_do_not_pass_a_narrowing_cast() -> None:
    wide, narrow = torch.ones(4), torch.ones(4).half()
    down = rule_for(dense_call("aten.to.dtype", (wide, torch.float16)).call)
    up = rule_for(dense_call("aten.to.dtype", (narrow, torch.float32)).call)
    assert down is not None
    assert up is not None
    assert not down.linear
    assert up.linear
