"""Relative costs that rank layouts within one mesh axis, in units of one multiply-add.

They order alternatives where a strategy leaves a choice; they do not predict time.

- A byte moved between ranks counts as `PER_BYTE` multiply-adds, and each transfer as
  `PER_TRANSFER`.
- A node counts as the size of its iteration space, divided by the ranks where one of its axes is
  sharded.
- Every rank can compute for itself what does not depend on anything that a batch axis shards. Such
  a value is computed in shards, and these gathered, only where that saves more than it costs on
  most machines: `PER_MADE_BYTE` and `PER_MADE_TRANSFER` lie between those of a CPU (about 25 and
  2e6) and of a GPU (1e3 and 4e9).
"""

from __future__ import annotations

from math import prod

from shardwise.ir import TensorType
from shardwise.redistribution import between
from shardwise.sharding.placements import Partial, Placement, Replicate, Shard, same_cut
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
        return a.dim == b.dim and same_cut(a.of, b.of, ranks)
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
