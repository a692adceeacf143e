"""Plan and price the moves that turn one layout into another.

A move works on one mesh axis (reductions on several at once), and its backward is its dual. Where
several mesh axes shard the same factor, each shards the part that the earlier ones left: an axis
can only change after those nested in it are gathered.

`move_cost` and `work` are relative costs in units of one multiply-add. They order alternatives on
one mesh axis where a strategy leaves a choice; they do not predict time:

- A byte moved between ranks counts as `PER_BYTE` multiply-adds, each transfer as `PER_TRANSFER`.
- A node counts as the size of its iteration space, divided by the ranks if one of its axes is
  sharded.
- Every rank can compute the values that do not depend on anything a batch axis shards. They are
  computed in shards and gathered only where that pays off on most hardware: `PER_MADE_BYTE` and
  `PER_MADE_TRANSFER` lie between the costs of a CPU (about 25 and 2e6) and of a GPU (1e3 and 4e9).
"""

from collections.abc import Mapping, Sequence
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
from shardwise.shares import AxisSize, num_ranks

PER_BYTE = 8.0
PER_TRANSFER = 2_000.0
PER_MADE_BYTE = 256.0
PER_MADE_TRANSFER = 1e7
PER_SLICE = 500.0  # slicing a full value moves nothing, but every rank computed all of it
IMPOSSIBLE = float("inf")


def kind(placement: Placement) -> str:
    """Return `S`, `P`, `R` or `R~`: the letter of the table in `redistribution`."""
    if isinstance(placement, Replicate):
        return "R~" if placement.partial_grad else "R"
    return "S" if isinstance(placement, Shard) else "P"


def same_placement(a: Placement, b: Placement, ranks: AxisSize) -> bool:
    """Return whether placements are equal, or shards that give every rank the same elements."""
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim == b.dim and same_pattern(a.of, b.of, ranks)
    return a == b


def by_expert(placement: Placement) -> bool:
    """Return whether a ragged dim, of experts x tokens, is sharded at its experts."""
    return isinstance(placement, Shard) and placement.dim == 0 and placement.of[0][0] == 1


def may_exchange(value: TensorType, current: Placement, needed: Placement) -> bool:
    """Return whether a ragged value can be moved: rows only change between tokens and experts.

    The order of rows is a rank's own: only their contents can be sent.
    """
    rows = [isinstance(p, Shard) and p.dim == 0 for p in (current, needed)]
    if not any(rows):
        return True
    exchanged = by_expert(current) != by_expert(needed)
    return all(rows) and exchanged and value.dtype.is_floating_point


def move_cost(
    value: TensorType,
    current: Placement,
    needed: Placement,
    ranks: AxisSize,
    carries_grad: bool,
    *,
    per_byte: float = PER_BYTE,
    per_transfer: float = PER_TRANSFER,
) -> float:
    """Return the cost of turning one placement into another, forward and backward."""
    if same_placement(current, needed, ranks):
        return 0.0
    if isinstance(current, Partial) and current.op != "sum" and isinstance(needed, Partial):
        return IMPOSSIBLE
    if value.ragged > 1 and not may_exchange(value, current, needed):
        return IMPOSSIBLE
    kinds = kind(current), kind(needed)
    redistribution = between(*kinds)
    if redistribution is None or kinds[0] == "R~":
        return IMPOSSIBLE
    forward, backward = redistribution.forward.volume, redistribution.backward.volume
    if kinds == ("S", "P"):
        # Padding sends nothing, but the sum that must follow costs as much as a gather.
        forward, backward = 1.0, 1.0
    units = forward + (backward if carries_grad else 0)
    count = num_ranks(ranks)
    share = (count - 1) / count
    transfers = (forward > 0) + (backward > 0 and carries_grad)
    waste = PER_SLICE if isinstance(needed, Shard) and isinstance(current, Replicate) else 1.0
    return units * value.num_bytes * share * per_byte + transfers * per_transfer + waste


def work(call: Call, rule: NodeRule) -> float:
    """Return a node's multiply-adds, from its iteration space; views cost nothing."""
    if rule.size_arg and call.operands:
        return 0.0
    sizes = [axis.size for axis in rule.axes.values() if not axis.joins]
    bound = 64.0 * max(1, *(prod(s) for s in (*call.operands, *call.results)), 1)
    return float(min(prod(sizes), bound * 1e6))


def multiply_adds(call: Call, rule: NodeRule) -> float:
    """Return the `work` of products, and of other nodes the number of elements they touch.

    An iteration space may contain axes that can be sharded although the node does not iterate over
    them, such as the rows of an embedding table or the positions that a slice skips.
    """
    if _is_product(call, rule):
        return work(call, rule)
    return float(max((prod(s) for s in (*call.operands, *call.results)), default=1))


def _is_product(call: Call, rule: NodeRule) -> bool:
    """Return whether the node sums over an axis that two operands share."""
    operand_axes = [
        {axis for dim in dims if not isinstance(dim, Part) for axis in dim}
        for name, dims in zip(call.node.inputs, rule.operands, strict=True)
        if call.types[name].dtype.is_floating_point or call.types[name].dtype.is_complex
    ]
    kept_axes = {
        a for dims in rule.results for dim in dims if not isinstance(dim, Part) for a in dim
    }
    return any(a & b - kept_axes for i, a in enumerate(operand_axes) for b in operand_axes[i + 1 :])


@dataclass(frozen=True, slots=True)
class Move:
    """The redistribution `fn` over `axes`, which changes the layout `before` to `layout`."""

    fn: str
    axes: tuple[str, ...]
    before: Layout
    layout: Layout


def plan_moves(
    current: Layout,
    needed: Layout,
    sizes: Mapping[str, AxisSize],
    carries_grad: bool,
    value: TensorType | None = None,
) -> tuple[Move, ...]:
    """Return the moves from one layout to another; `value` is needed for a ragged one."""
    ragged = value is not None and value.ragged > 1
    if current == needed:
        return ()
    current, needed = _align(current, _relax(current, needed, carries_grad), sizes)
    changed = [a for a, p in current.axes if p != needed[a]]
    changed = _with_nested(current, needed, changed)
    if not changed:
        return ()
    moves: list[Move] = []
    layout = current

    def move(
        axes: tuple[str, ...], targets: Sequence[Placement], source_kind: str | None = None
    ) -> None:
        nonlocal layout
        source = layout[axes[0]]
        redistribution = between(source_kind or kind(source), kind(targets[0]))
        if redistribution is None:
            raise ProgramError(f"no redistribution from {source} to {targets[0]} over {axes}")
        name = redistribution.name
        if ragged and any(isinstance(p, Shard) and p.dim == 0 for p in (source, targets[0])):
            assert value is not None
            if not may_exchange(value, source, targets[0]):
                raise ProgramError(f"no redistribution of {value} from {source} to {targets[0]}")
            name = "to_experts" if by_expert(targets[0]) else "to_tokens"
        after = layout
        for axis, target in zip(axes, targets, strict=True):
            after = after.with_axis(axis, target)
        moves.append(Move(f"rt.{name}", axes, layout, after))
        layout = after

    for axis in reversed(changed):  # un-nest: inner axes first
        placement = current[axis]
        if isinstance(placement, Shard):
            target = needed[axis]
            direct = ragged or _only_shard(current, needed, axis, sizes)
            if isinstance(target, Shard) and not direct:
                target = REPLICATE
            move((axis,), [target])
    partial = [a for a in changed if isinstance(layout[a], Partial)]
    for target in (REPLICATE, PARTIAL_GRAD):
        axes = tuple(a for a in partial if needed[a] == target)
        for op in dict.fromkeys(layout[a] for a in axes):
            summed = tuple(a for a in axes if layout[a] == op)
            move(summed, [target] * len(summed))
    for axis in changed:  # shard: outer axes first
        target = needed[axis]
        if isinstance(target, Shard) and layout[axis] != target:
            # Without a gradient there is nothing to gather in backward: R~ -> S is cheaper.
            free = layout[axis] == REPLICATE and not carries_grad
            move((axis,), [target], "R~" if free else None)
    for kinds in (("R", "R~"), ("R", "P"), ("R~", "P")):
        axes = tuple(a for a in changed if (kind(layout[a]), kind(needed[a])) == kinds)
        if axes:
            move(axes, [needed[a] for a in axes])
    for axis in sizes:
        if not same_on_axis(layout, needed, axis, sizes):
            raise ProgramError(f"no moves from {current} to {needed}: {axis} stays {layout[axis]}")
    return tuple(moves)


def _relax(current: Layout, needed: Layout, carries_grad: bool) -> Layout:
    """Accept either kind of replication where no gradient distinguishes them."""
    axes: list[tuple[str, Placement]] = []
    for axis, need in needed.axes:
        placement = current[axis]
        if not carries_grad and kind(need) == "R~":
            need = placement if kind(placement) in ("R", "R~") else REPLICATE
        if kind(placement) == "R~" and kind(need) == "R":
            need = placement  # a use of an R~ value always does different work on each rank
        axes.append((axis, need))
    return Layout(tuple(axes))


def _align(current: Layout, needed: Layout, sizes: Mapping[str, AxisSize]) -> tuple[Layout, Layout]:
    """Return the layouts with equal patterns for shards that give every rank the same elements.

    If a single axis of two ranks shards a dim, `[2]x16` and `[32]` are the same. With another axis
    nested inside they are not: it would shard one head, or 16 positions. So all axes of a dim are
    compared together.
    """
    for dim in sorted({s.dim for _, s in (*current.shards, *needed.shards)}):
        before, after = current.dim_shards(dim), needed.dim_shards(dim)
        if same_shards(before, after, sizes):
            needed = _copy_axes(needed, current, before)
        elif len(before) == 1 and same_shards(before, _of_axes(after, before), sizes):
            current = _copy_axes(current, needed, before)
        elif len(after) == 1 and same_shards(_of_axes(before, after), after, sizes):
            needed = _copy_axes(needed, current, after)
    return current, needed


def _of_axes(shards: DimShards, axes: DimShards) -> DimShards:
    names = {name for name, _ in axes}
    return tuple((name, of) for name, of in shards if name in names)


def _copy_axes(layout: Layout, source: Layout, axes: DimShards) -> Layout:
    for name, _ in axes:
        layout = layout.with_axis(name, source[name])
    return layout


def _with_nested(current: Layout, needed: Layout, changed: list[str]) -> list[str]:
    """Add the axes that shard the same factor inside one that changes."""
    result = set(changed)
    names = [name for name, _ in current.axes]
    for position, axis in enumerate(names):
        inner = current[axis]
        if axis in result or not isinstance(inner, Shard):
            continue
        for other in names[:position]:
            for outer in (current[other], needed[other]):
                if other in result and isinstance(outer, Shard) and outer.dim == inner.dim:
                    equal = (x == y for x, y in zip(outer.of, inner.of, strict=False))
                    result |= {axis} if any(equal) else set()
    return [name for name in names if name in result]


def _only_shard(current: Layout, needed: Layout, axis: str, sizes: Mapping[str, AxisSize]) -> bool:
    """Return whether the ranks of an axis can exchange shards among themselves.

    Other axes of several ranks may shard the dims before and after if they are outside, and stay.
    """
    dims = {p.dim for p in (current[axis], needed[axis]) if isinstance(p, Shard)}
    names = [name for name, _ in current.axes]
    outside = names[: names.index(axis)]
    return not any(
        isinstance(p, Shard)
        and p.dim in dims
        and name != axis
        and sizes[name] != 1
        and not (name in outside and current[name] == needed[name])
        for layout in (current, needed)
        for name, p in layout.axes
    )
