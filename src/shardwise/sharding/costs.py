"""Relative costs that rank layouts within one mesh axis, in units of one multiply-add.

They order alternatives where a strategy leaves a choice; they are not predictions of time.

- A byte moved between ranks counts as `PER_BYTE` multiply-adds, and each transfer as
  `PER_TRANSFER`.
- A node counts as the size of its iteration space, divided by the ranks where one of its axes is
  cut.
"""

from __future__ import annotations

from math import prod

from shardwise.ir import TensorType
from shardwise.sharding.placements import Partial, Placement, Replicate, Shard, same_cut
from shardwise.sharding.rule import Call, NodeRule

PER_BYTE = 8.0
PER_TRANSFER = 2_000.0
PER_SLICE = 500.0  # cutting a whole value moves nothing, but every rank computed all of it
IMPOSSIBLE = float("inf")

# (all-gather or reduce-scatter, all-reduce) units of the value's size: forward, backward.
_TRANSFERS = {
    ("S", "R"): (1, 0),
    ("S", "R*"): (1, 1),
    ("P", "R"): (2, 0),
    ("P", "R*"): (2, 2),
    ("P", "S"): (1, 1),
    ("R", "S"): (0, 1),
    ("R", "R*"): (0, 2),
    ("R", "P"): (0, 0),
    ("S", "P"): (1, 1),  # moves nothing, but the sum that follows is as large as a gathered value
    ("S", "S"): (0.5, 0.5),
}


def kind(placement: Placement) -> str:
    """`S`, `P`, `R` or `R*`: the letter of the table in `redistribute`."""
    if isinstance(placement, Replicate):
        return "R*" if placement.differs else "R"
    return "S" if isinstance(placement, Shard) else "P"


def same_placement(a: Placement, b: Placement, ranks: int) -> bool:
    """Equal, or cuts that give every rank the same elements."""
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim == b.dim and same_cut(a.of, b.of, ranks)
    return a == b


def move_cost(
    value: TensorType, held: Placement, needed: Placement, ranks: int, carries_grad: bool
) -> float:
    """What turning one placement into another costs, forward and backward."""
    if same_placement(held, needed, ranks):
        return 0.0
    if isinstance(held, Partial) and held.op != "sum" and isinstance(needed, Partial):
        return IMPOSSIBLE
    forward, backward = _TRANSFERS.get((kind(held), kind(needed)), (IMPOSSIBLE, 0))
    if forward == IMPOSSIBLE:
        return IMPOSSIBLE
    units = forward + (backward if carries_grad else 0)
    share = (ranks - 1) / ranks
    transfers = (forward > 0) + (backward > 0 and carries_grad)
    waste = PER_SLICE if isinstance(needed, Shard) and isinstance(held, Replicate) else 1.0
    return units * value.num_bytes * share * PER_BYTE + transfers * PER_TRANSFER + waste


def work(call: Call, rule: NodeRule) -> float:
    """Multiply-adds of a node, from its iteration space; renaming positions costs nothing."""
    if rule.size_arg and call.operands:
        return 0.0
    sizes = [axis.size for axis in rule.axes.values()]
    bound = 64.0 * max(1, *(prod(s) for s in (*call.operands, *call.results)), 1)
    return float(min(prod(sizes), bound * 1e6))
