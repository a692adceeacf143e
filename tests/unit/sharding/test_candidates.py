"""Candidates of a node on one mesh axis."""

from __future__ import annotations

from shardwise.sharding.candidates import Cut, candidates
from shardwise.sharding.rule import Axis, NodeRule


def cuts(axis: Axis, structure: tuple[tuple[int, ...], ...]) -> list[str]:
    rule = NodeRule(axes={"v": axis}, operands=((("v",),),), results=((("v",),),))
    found = candidates(rule, {"v": structure})
    return [str(c.choice) for c in found if isinstance(c.choice, Cut)]


def test_an_outermost_axis_is_cut_as_one_range() -> None:
    axis = Axis("v", 12, outermost=True)
    assert cuts(axis, ((3, 4),)) == ["cut v:[3]x4"]
    assert cuts(axis, ((8,), (4,))) == ["cut v"]
    assert cuts(Axis("v", 12), ((8,), (4,))) == ["cut v:[8]|[4]", "cut v"]
