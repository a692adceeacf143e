"""Candidates of a node on one mesh axis."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shardwise.sharding.candidates import ShardAxis, candidates, match_choice
from shardwise.sharding.rule import Axis, NodeRule


def cuts(axis: Axis, structure: tuple[tuple[int, ...], ...]) -> list[str]:
    rule = NodeRule(axes={"v": axis}, operands=((("v",),),), results=((("v",),),))
    found = candidates(rule, {"v": structure})
    return [str(c.choice) for c in found if isinstance(c.choice, ShardAxis)]


def test_an_outermost_axis_is_cut_as_one_range() -> None:
    axis = Axis("v", 12, outermost=True)
    assert cuts(axis, ((3, 4),)) == ["shard v:[3]x4"]
    assert cuts(axis, ((8,), (4,))) == ["shard v"]
    assert cuts(Axis("v", 12), ((8,), (4,))) == ["shard v:[8]|[4]", "shard v"]


@pytest.mark.parametrize(
    ("sizes", "text", "chosen"),
    [
        ((8, 128), "shard v:[8]x128", ["shard v:[8]x128"]),
        ((6, 128), "shard v:[8]x128", ["shard v:[6]x128"]),  # another batch
        ((6, 64), "shard v:8x[128]", ["shard v:6x[64]"]),  # other lengths besides
        ((6, 4, 16), "shard v:8x[4]x16", ["shard v:6x[4]x16"]),
        ((6, 5, 4, 16), "shard v:40x[4]x16", ["shard v:30x[4]x16"]),  # of two inside the outer one
        ((6, 5, 4, 16), "shard v:99x[9]x99", []),  # either
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
def test_a_choice_is_found_again_with_other_sizes(
    sizes: tuple[int, ...], text: str, chosen: list[str]
) -> None:
    axis = Axis("v", math.prod(sizes))
    rule = NodeRule(axes={"v": axis}, operands=((("v",),),), results=((("v",),),))
    found = candidates(rule, {"v": (sizes,)})
    assert [str(c.choice) for c in match_choice(rule, found, text)] == chosen


def test_axes_of_a_reshape_that_are_gone_leave_it_free() -> None:
    axes = {"g0_0": Axis("g0_0", 16)}
    rule = NodeRule(axes=axes, operands=(((), ("g0_0",)),), results=((("g0_0",),),), by_size=True)
    found = candidates(rule)
    assert match_choice(rule, found, "shard g0_1") == found
    other = dataclasses.replace(rule, by_size=False)
    assert match_choice(other, found, "shard g0_1") == ()
