"""Plan the moves that turn one layout into another.

A move works on one mesh axis (reductions on several at once), and its backward is its dual. Where
several mesh axes shard the same factor, the later ones shard the earlier ones' part: an axis can
only change after those nested in it are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.layouts.costs import kind
from shardwise.redistribution import between
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Cuts,
    Layout,
    Partial,
    Placement,
    Shard,
    same_cuts,
    same_on_axis,
)


@dataclass(frozen=True, slots=True)
class Move:
    """`fn` over `axes`, after which the value lies as `layout`."""

    fn: str
    axes: tuple[str, ...]
    before: Layout
    layout: Layout


def plan_moves(
    held: Layout, needed: Layout, sizes: Mapping[str, int], carries_grad: bool
) -> tuple[Move, ...]:
    """Return the moves from one layout to another; empty when nothing has to be done."""
    if held == needed:
        return ()
    held, needed = _align(held, _relax(held, needed, sizes, carries_grad), sizes)
    changed = [a for a, p in held.axes if p != needed[a]]
    changed = _with_nested(held, needed, changed)
    if not changed:
        return ()
    moves: list[Move] = []
    now = held

    def move(
        axes: tuple[str, ...], target: Placement | Layout, held_kind: str | None = None
    ) -> None:
        nonlocal now
        first = axes[0]
        given = kind(target[first] if isinstance(target, Layout) else target)
        found = between(held_kind or kind(now[first]), given)
        if found is None:
            raise ProgramError(f"no redistribution from {now[first]} to {given} over {axes}")
        if isinstance(target, Layout):
            after = Layout(tuple((n, target[n] if n in axes else p) for n, p in now.axes))
        else:
            after = Layout(tuple((n, target if n in axes else p) for n, p in now.axes))
        moves.append(Move(f"rt.{found.name}", axes, now, after))
        now = after

    for axis in reversed(changed):  # un-nest: inner axes first
        placement = held[axis]
        if isinstance(placement, Shard):
            target = needed[axis]
            if isinstance(target, Shard) and not _alone(held, needed, axis, sizes):
                target = REPLICATE
            move((axis,), target)
    partial = [a for a in changed if isinstance(now[a], Partial)]
    for target in (REPLICATE, PARTIAL_GRAD):
        axes = tuple(a for a in partial if needed[a] == target)
        for op in dict.fromkeys(now[a] for a in axes):
            move(tuple(a for a in axes if now[a] == op), target)
    for axis in changed:  # cut: outer axes first
        target = needed[axis]
        if isinstance(target, Shard) and now[axis] != target:
            # Without a gradient nothing has to be gathered in backward.
            move((axis,), target, "R~" if now[axis] == REPLICATE and not carries_grad else None)
    for held_kind, last in (("R", "R~"), ("R", "P"), ("R~", "P")):
        axes = tuple(a for a in changed if (kind(now[a]), kind(needed[a])) == (held_kind, last))
        if axes:
            move(axes, needed)
    for axis in sizes:
        if not same_on_axis(now, needed, axis, sizes):
            raise ProgramError(f"no moves from {held} to {needed}: {axis} stays {now[axis]}")
    return tuple(moves)


def _relax(held: Layout, needed: Layout, sizes: Mapping[str, int], carries_grad: bool) -> Layout:
    """Need the kind of replication that is held wherever no gradient flows: they are one there."""
    axes: list[tuple[str, Placement]] = []
    for axis, need in needed.axes:
        has = held[axis]
        if not carries_grad and kind(need) == "R~":
            need = has if kind(has) in ("R", "R~") else REPLICATE
        if kind(has) == "R~" and kind(need) == "R":
            need = has  # only work that is itself counted as different uses such a value
        axes.append((axis, need))
    return Layout(tuple(axes))


def _align(held: Layout, needed: Layout, sizes: Mapping[str, int]) -> tuple[Layout, Layout]:
    """Return the layouts with one pattern for cuts that give every rank the same elements.

    Alone on a dim, `[2]x16` and `[32]` are the same cut in two. With another axis inside they are
    not: that axis would cut one head, or 16 positions. So all axes of a dim are compared together.
    """
    for dim in sorted({s.dim for _, s in (*held.shards, *needed.shards)}):
        mine, theirs = held.cuts(dim), needed.cuts(dim)
        if same_cuts(mine, theirs, sizes):
            needed = _replace_cuts(needed, held, mine)
        elif len(mine) == 1 and same_cuts(mine, _of_axes(theirs, mine), sizes):
            held = _replace_cuts(held, needed, mine)
        elif len(theirs) == 1 and same_cuts(_of_axes(mine, theirs), theirs, sizes):
            needed = _replace_cuts(needed, held, theirs)
    return held, needed


def _of_axes(cuts: Cuts, like: Cuts) -> Cuts:
    names = {name for name, _ in like}
    return tuple((name, of) for name, of in cuts if name in names)


def _replace_cuts(layout: Layout, source: Layout, cuts: Cuts) -> Layout:
    for name, _ in cuts:
        layout = layout.with_axis(name, source[name])
    return layout


def _with_nested(held: Layout, needed: Layout, changed: list[str]) -> list[str]:
    """Add the axes that cut the same factor inside one that changes."""
    result = set(changed)
    names = [name for name, _ in held.axes]
    for position, axis in enumerate(names):
        mine = held[axis]
        if axis in result or not isinstance(mine, Shard):
            continue
        for other in names[:position]:
            for theirs in (held[other], needed[other]):
                if other in result and isinstance(theirs, Shard) and _shares(theirs, mine):
                    result.add(axis)
    return [name for name in names if name in result]


def _shares(a: Shard, b: Shard) -> bool:
    return a.dim == b.dim and any(x == y for x, y in zip(a.of, b.of, strict=False))


def _alone(held: Layout, needed: Layout, axis: str, sizes: Mapping[str, int]) -> bool:
    """Whether no other axis cuts a dim that this axis leaves or enters; one rank cuts nothing."""
    mine, target = held[axis], needed[axis]
    assert isinstance(mine, Shard)
    assert isinstance(target, Shard)
    dims = {mine.dim, target.dim}
    others = [p for layout in (held, needed) for n, p in layout.axes if n != axis and sizes[n] > 1]
    return not any(isinstance(p, Shard) and p.dim in dims for p in others)
