"""x"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwise.errors import ProgramError
from shardwise.ir import TensorType
from shardwise.redistribution import between
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    DimShards,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    same_on_axis,
    same_pattern,
    same_shards,
)
from shardwise.sharding.rule import Call, NodeRule, Part

PER_BYTE = 8.0
PER_TRANSFER = 2_000.0
PER_MADE_BYTE = 256.0
PER_MADE_TRANSFER = 1e7
PER_SLICE = 500.0  # cutting a whole value moves nothing, but every rank computed all of it
IMPOSSIBLE = float("inf")


def kind(placement: Placement) -> str:
    """Return `S`, `P`, `R` or `R~`: the letter of the table in `redistribution`."""
    if isinstance(placement, Replicate):
        return "R~" if placement.partial_grad else "R"
    return "S" if isinstance(placement, Shard) else "P"


def same_placement(a: Placement, b: Placement, ranks: int) -> bool:
    """Equal, or cuts that give every rank the same elements."""
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim == b.dim and same_pattern(a.of, b.of, ranks)
    return a == b


def move_cost(
    value: TensorType,
    held: Placement,
    needed: Placement,
    ranks: int,
    carries_grad: bool,
    *,
    per_byte: float = PER_BYTE,
    per_transfer: float = PER_TRANSFER,
) -> float:
    """Return what turning one placement into another costs, forward and backward."""
    if same_placement(held, needed, ranks):
        return 0.0
    if isinstance(held, Partial) and held.op != "sum" and isinstance(needed, Partial):
        return IMPOSSIBLE
    kinds = kind(held), kind(needed)
    found = between(*kinds)
    if found is None or kinds[0] == "R~":
        return IMPOSSIBLE
    forward, backward = found.forward.volume, found.backward.volume
    if kinds == ("S", "P"):
        # Nothing is sent, but the sum that follows is as large as a gathered value.
        forward, backward = 1.0, 1.0
    units = forward + (backward if carries_grad else 0)
    share = (ranks - 1) / ranks
    transfers = (forward > 0) + (backward > 0 and carries_grad)
    waste = PER_SLICE if isinstance(needed, Shard) and isinstance(held, Replicate) else 1.0
    return units * value.num_bytes * share * per_byte + transfers * per_transfer + waste


def work(call: Call, rule: NodeRule) -> float:
    """Multiply-adds of a node, from its iteration space; renaming positions costs nothing."""
    if rule.size_arg and call.operands:
        return 0.0
    sizes = [axis.size for axis in rule.axes.values()]
    bound = 64.0 * max(1, *(prod(s) for s in (*call.operands, *call.results)), 1)
    return float(min(prod(sizes), bound * 1e6))


def multiply_adds(call: Call, rule: NodeRule) -> float:
    """`work` of products; of everything else the elements that it reads or writes.

    An iteration space may have axes that are there to be cut, not to be walked: the rows of a table
    of which some are looked up, the positions of which some are sliced.
    """
    if _is_product(call, rule):
        return work(call, rule)
    return float(max((prod(s) for s in (*call.operands, *call.results)), default=1))


def _is_product(call: Call, rule: NodeRule) -> bool:
    """Return whether an axis of two operands is summed over."""
    floats = [
        {axis for dim in dims if not isinstance(dim, Part) for axis in dim}
        for name, dims in zip(call.node.inputs, rule.operands, strict=True)
        if call.types[name].dtype.is_floating_point or call.types[name].dtype.is_complex
    ]
    given = {a for dims in rule.results for dim in dims if not isinstance(dim, Part) for a in dim}
    return any(a & b - given for i, a in enumerate(floats) for b in floats[i + 1 :])


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
        mine, theirs = held.dim_shards(dim), needed.dim_shards(dim)
        if same_shards(mine, theirs, sizes):
            needed = _replace_cuts(needed, held, mine)
        elif len(mine) == 1 and same_shards(mine, _of_axes(theirs, mine), sizes):
            held = _replace_cuts(held, needed, mine)
        elif len(theirs) == 1 and same_shards(_of_axes(mine, theirs), theirs, sizes):
            needed = _replace_cuts(needed, held, theirs)
    return held, needed


def _of_axes(cuts: DimShards, like: DimShards) -> DimShards:
    names = {name for name, _ in like}
    return tuple((name, of) for name, of in cuts if name in names)


def _replace_cuts(layout: Layout, source: Layout, cuts: DimShards) -> Layout:
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
