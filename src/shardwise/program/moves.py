"""The moves that turn one layout into another.

Enters: the layout a value has and the one a node needs. Leaves: a list of `Move`s, one mesh axis at
a time (reductions over several axes at once), whose backward is the dual.

Where several mesh axes cut the same factor, the later ones cut the earlier ones' part: an axis
can only change after those nested in it are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.sharding.costs import kind, same_placement
from shardwise.sharding.placements import FANOUT, REPLICATE, Layout, Partial, Placement, Shard


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
    """The moves from one layout to another; empty when nothing has to be done."""
    needed = _relax(held, needed, sizes, carries_grad)
    changed = [a for a, p in held.axes if not same_placement(p, needed[a], sizes[a])]
    changed = _with_nested(held, needed, changed)
    if not changed:
        return ()
    moves: list[Move] = []
    now = held

    def move(fn: str, axes: tuple[str, ...], target: Placement | Layout) -> None:
        nonlocal now
        if isinstance(target, Layout):
            after = Layout(tuple((n, target[n] if n in axes else p) for n, p in now.axes))
        else:
            after = Layout(tuple((n, target if n in axes else p) for n, p in now.axes))
        moves.append(Move(fn, axes, now, after))
        now = after

    for axis in reversed(changed):  # un-nest: inner axes first
        placement = held[axis]
        if isinstance(placement, Shard):
            target = needed[axis]
            if isinstance(target, Shard) and _alone(held, needed, axis):
                move("rt.all_to_all", (axis,), target)
            elif isinstance(target, Partial):
                move("rt.pad", (axis,), target)
            elif target == FANOUT:
                move("rt.gather_fanout", (axis,), FANOUT)
            else:
                move("rt.gather", (axis,), REPLICATE)
    partial = [a for a in changed if isinstance(now[a], Partial)]
    for fn, target in (("rt.reduce", REPLICATE), ("rt.reduce_fanout", FANOUT)):
        axes = tuple(a for a in partial if needed[a] == target)
        for op in dict.fromkeys(now[a] for a in axes):
            move(fn, tuple(a for a in axes if now[a] == op), target)
    for axis in changed:  # cut: outer axes first
        target = needed[axis]
        if isinstance(target, Shard) and not same_placement(now[axis], target, sizes[axis]):
            fn = {"P": "rt.reduce_scatter", "R": "rt.shard", "R*": "rt.take"}[kind(now[axis])]
            move("rt.take" if fn == "rt.shard" and not carries_grad else fn, (axis,), target)
    for fn, target in (("rt.fanout", FANOUT), ("rt.as_partial", needed)):
        axes = tuple(
            a
            for a in changed
            if kind(now[a]) == "R" and kind(needed[a]) == ("R*" if target is FANOUT else "P")
        )
        if axes:
            move(fn, axes, target)
    for axis in needed.axes:
        if not same_placement(now[axis[0]], axis[1], sizes[axis[0]]):
            raise ProgramError(f"no moves from {held} to {needed}: {axis[0]} stays {now[axis[0]]}")
    return tuple(moves)


def _relax(
    held: Layout, needed: Layout, sizes: Mapping[str, int], carries_grad: bool
) -> Layout:
    """Where no gradient flows the two kinds of whole are one: need the one that is held."""
    axes: list[tuple[str, Placement]] = []
    for axis, need in needed.axes:
        has = held[axis]
        if not carries_grad and kind(need) == "R*":
            need = has if kind(has) in ("R", "R*") else REPLICATE
        if kind(has) == "R*" and kind(need) == "R":
            need = has  # only work that is itself counted as different uses such a value
        axes.append((axis, need))
    return Layout(tuple(axes))


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


def _alone(held: Layout, needed: Layout, axis: str) -> bool:
    """Whether no other axis cuts a dim that this axis leaves or enters."""
    mine, target = held[axis], needed[axis]
    assert isinstance(mine, Shard) and isinstance(target, Shard)
    dims = {mine.dim, target.dim}
    others = [p for layout in (held, needed) for n, p in layout.axes if n != axis]
    return not any(isinstance(p, Shard) and p.dim in dims for p in others)
