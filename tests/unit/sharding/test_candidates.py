"""Candidates of a node on one mesh axis."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shardwise.sharding.candidates import ShardAxis, candidates, match_choice
from shardwise.sharding.rule import Axis, NodeRule


def shard_choices(axis: Axis, structure: tuple[tuple[int, ...], ...]) -> list[str]:
    rule = NodeRule(axes={"v": axis}, operands=((("v",),),), results=((("v",),),))
    options = candidates(rule, {"v": structure})
    return [str(c.choice) for c in options if isinstance(c.choice, ShardAxis)]


def test_an_outermost_axis_is_sharded_as_one_range() -> None:
    axis = Axis("v", 12, outermost=True)
    assert shard_choices(axis, ((3, 4),)) == ["shard v:[3]x4"]
    assert shard_choices(axis, ((8,), (4,))) == ["shard v"]
    assert shard_choices(Axis("v", 12), ((8,), (4,))) == ["shard v:[8]|[4]", "shard v"]


@pytest.mark.parametrize(
    ("sizes", "text", "chosen"),
    [
        ((8, 128), "shard v:[8]x128", ["shard v:[8]x128"]),
        ((6, 128), "shard v:[8]x128", ["shard v:[6]x128"]),  # another batch
        ((6, 64), "shard v:8x[128]", ["shard v:6x[64]"]),  # another batch and another length
        ((6, 4, 16), "shard v:8x[4]x16", ["shard v:6x[4]x16"]),
        ((6, 5, 4, 16), "shard v:40x[4]x16", ["shard v:30x[4]x16"]),  # the inner of two factors
        ((6, 5, 4, 16), "shard v:99x[9]x99", []),  # ambiguous
        ((128,), "shard v:[8]x128", ["shard v:[1]x128"]),  # one row: a factor of one
        ((128,), "shard v:128x[8]", ["shard v:128x[1]"]),
        ((128,), "shard v:2x[8]x64", []),
        ((), "shard v", ["shard v"]),
        ((8, 128), "shard v", []),
        ((8, 128), "shard w:[8]x128", []),
        ((8, 128), "shard v:[8", []),
        ((8, 128), "all", []),
        ((8, 128), "same", ["same"]),
    ],
)
def test_choices_match_up_to_sizes(sizes: tuple[int, ...], text: str, chosen: list[str]) -> None:
    axis = Axis("v", math.prod(sizes))
    rule = NodeRule(axes={"v": axis}, operands=((("v",),),), results=((("v",),),))
    options = candidates(rule, {"v": (sizes,)})
    assert [str(c.choice) for c in match_choice(rule, options, text)] == chosen


def test_a_reshape_without_the_axis_matches_all_candidates() -> None:
    axes = {"g0_0": Axis("g0_0", 16)}
    rule = NodeRule(axes=axes, operands=(((), ("g0_0",)),), results=((("g0_0",),),), by_size=True)
    options = candidates(rule)
    assert match_choice(rule, options, "shard g0_1") == options
    other = dataclasses.replace(rule, by_size=False)
    assert match_choice(other, options, "shard g0_1") == ()
