"""The table of redistributions: how the placement of a value along one mesh axis can change.

Along a mesh axis a value is sharded (S), a partial sum (P), replicated for work that is the same
on every rank (R), or replicated for work that differs between ranks (R~). The gradient of S is S,
that of P is R, that of R is R and that of R~ is P, so each forward determines its backward:

    gather          S  -> R    all-gather           | slice
    gather_fanout   S  -> R~   all-gather           | reduce-scatter
    reduce          P  -> R    all-reduce           | nothing
    reduce_fanout   P  -> R~   all-reduce           | all-reduce
    reduce_scatter  P  -> S    reduce-scatter       | all-gather
    shard           R  -> S    slice                | all-gather
    take            R~ -> S    slice                | zero-pad
    fanout          R  -> R~   nothing              | all-reduce
    as_partial      R  -> P    keep on first rank   | nothing
    pad             S  -> P    zero-pad             | slice
    all_to_all      S  -> S'   all-to-all           | all-to-all
    once            R~ -> P    keep on first rank   | keep on first rank
    to_experts      S  -> S'   all-to-all           | all-to-all
    to_tokens       S  -> S'   all-to-all           | all-to-all

The last two exchange the rows of a ragged dim: between ranks that have the rows of their own tokens
and ranks that have those of their own experts (see `routing`).

To add one, add its entry here and its function to `runtime/redistribute.py` (with new primitives in
`runtime/primitives.py`), and make `layouts/moves.py` use it. Verification, the cost model, the
simulator and the layout search read this table.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """One direction of a redistribution: a function of `runtime/primitives.py`.

    `copies` is the memory it allocates, as a multiple of its result: 0 if the result is a view of
    the operand, 2 if shards of inner dims are sent as flat copies. `volume` is the amount that each
    rank sends, in units of the value's size times (ranks - 1) / ranks.
    """

    name: str
    copies: int = 0
    volume: float = 0.0

    @property
    def collective(self) -> str:
        """The name of the collective, or "" if ranks do not communicate."""
        return self.name if self.volume else ""


ALL_GATHER = Primitive(name="all_gather", copies=2, volume=1)
REDUCE_SCATTER = Primitive(name="reduce_scatter", copies=2, volume=1)
ALL_REDUCE = Primitive(name="all_reduce", copies=1, volume=2)
ALL_TO_ALL = Primitive(name="all_to_all", copies=2, volume=0.5)
SLICE = Primitive(name="slice", copies=1)  # contiguous: local code may call `view` on it
VIEW = Primitive(name="slice_view")
ZERO_PAD = Primitive(name="zero_pad", copies=1)
KEEP_FIRST = Primitive(name="keep_first")
IDENTITY = Primitive(name="identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """The function `rt.<name>`: the kinds of placement before and after it, and its two passes."""

    name: str
    source: str
    target: str
    forward: Primitive
    backward: Primitive

    @property
    def is_local(self) -> bool:
        """Whether neither pass communicates."""
        return not self.forward.collective and not self.backward.collective

    def num_bytes(self, before: float, after: float) -> float:
        """Return the size for which collectives are priced, given a rank's bytes on both sides.

        This is the size of the full value, and for an all-to-all that of the rank's shard.
        """
        return before if self.source == self.target else max(before, after)


REDISTRIBUTIONS: dict[str, Redistribution] = {}  # by the name that generated code calls
_BY_KINDS: dict[tuple[str, str], Redistribution] = {}


def register(name: str, source: str, target: str, forward: Primitive, backward: Primitive) -> None:
    """Add a redistribution to the table; the first one between two kinds is the general one."""
    entry = Redistribution(
        name=name, source=source, target=target, forward=forward, backward=backward
    )
    REDISTRIBUTIONS[f"rt.{name}"] = entry
    _BY_KINDS.setdefault((source, target), entry)


def between(source: str, target: str) -> Redistribution | None:
    """Return the redistribution from one kind of placement to another, if there is one."""
    return _BY_KINDS.get((source, target))


register("gather", "S", "R", ALL_GATHER, VIEW)
register("gather_fanout", "S", "R~", ALL_GATHER, REDUCE_SCATTER)
register("reduce", "P", "R", ALL_REDUCE, IDENTITY)
register("reduce_fanout", "P", "R~", ALL_REDUCE, ALL_REDUCE)
register("reduce_scatter", "P", "S", REDUCE_SCATTER, ALL_GATHER)
register("shard", "R", "S", SLICE, ALL_GATHER)
register("take", "R~", "S", SLICE, ZERO_PAD)
register("fanout", "R", "R~", IDENTITY, ALL_REDUCE)
register("as_partial", "R", "P", KEEP_FIRST, IDENTITY)
register("pad", "S", "P", ZERO_PAD, VIEW)
register("all_to_all", "S", "S", ALL_TO_ALL, ALL_TO_ALL)
register("once", "R~", "P", KEEP_FIRST, KEEP_FIRST)
register("to_experts", "S", "S", ALL_TO_ALL, ALL_TO_ALL)
register("to_tokens", "S", "S", ALL_TO_ALL, ALL_TO_ALL)
