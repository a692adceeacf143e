"""What each rank does in a collective over shared memory.

Enters: an operation and its sizes. Leaves: for each rank and each piece of the data, what others
must see of its memory, and the part of the work that it does in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from shardwise.errors import ProgramError, did_you_mean
from shardwise.runtime.sums import OPERATORS, Bytes, add_up, is_summed

__all__ = ["Call"]

_LINE_BYTES = 64  # parts of a sum begin at cache lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective of `numel` elements; equal on all ranks."""

    name: str
    op: str
    dtype: torch.dtype
    numel: int
    root: int
    counts: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.op and self.op not in OPERATORS:
            raise ProgramError(
                f"no operator {self.op!r}{did_you_mean(self.op, OPERATORS)}",
                hint=", ".join(OPERATORS),
            )
        if self.op and not is_summed(self.dtype, self.op):
            raise ProgramError(f"no {self.op} of {self.dtype}", hint="tensor.to(torch.float32)")
        if not 0 <= self.root < self.num_ranks:
            raise ProgramError(f"{self.name}: root {self.root} of {self.num_ranks} ranks")
        cut = self.name in ("reduce_scatter", "all_gather")
        if cut and (
            len(self.counts) != self.num_ranks
            or min(self.counts) < 0
            or sum(self.counts) != self.numel
        ):
            raise ProgramError(
                f"{self.name}: counts {self.counts} for {self.numel} elements on "
                f"{self.num_ranks} ranks",
                hint="a count for each rank, all elements together",
            )

    def __str__(self) -> str:
        how = f" ({self.op})" if self.op else ""
        root = f" with root {self.root}" if self.name in ("reduce", "broadcast") else ""
        cut = f" in {list(self.counts)}" if self.counts else ""
        return f"{self.name}{how} of {self.numel} {str(self.dtype)[6:]}{root}{cut}"

    def shown(self, rank: int, piece: range) -> list[tuple[int, int]]:
        """The ranges of a piece that others read of a rank's memory."""
        if self.name == "all_gather":
            return [self._owned(rank, piece)]
        if self.name == "broadcast":
            return [(piece.start, piece.stop)] if rank == self.root else []
        return _others(self._summed(rank, piece), piece)

    def pushed(self, rank: int, piece: range) -> list[tuple[int, int]]:
        """The ranges of a piece that others write to a rank's memory."""
        if self.name == "all_reduce" or (self.name == "reduce" and rank == self.root):
            return _others(self._summed(rank, piece), piece)
        return []

    def work(self, rank: int, piece: range, views: Sequence[Bytes], mine: Bytes) -> None:
        """This rank's part of a piece, in everyone's memory; `mine` is this rank's."""
        if self.name == "all_gather":
            for other, view in enumerate(views):
                if other != rank:
                    theirs = self.bytes_of(self._owned(other, piece), piece)
                    mine[theirs] = view[theirs]
        elif self.name == "broadcast":
            if rank != self.root:
                mine[:] = views[self.root]
        else:
            part = self.bytes_of(self._summed(rank, piece), piece)
            parts = [(mine if r == rank else view)[part] for r, view in enumerate(views)]
            to = {"all_reduce": range(self.num_ranks), "reduce": [self.root]}.get(self.name, [rank])
            add_up(parts, [parts[other] for other in to], self.dtype, self.op)

    def bytes_of(self, elements: tuple[int, int], piece: range) -> slice:
        """Where a range of elements is in the bytes of a piece."""
        size = self.dtype.itemsize
        return slice((elements[0] - piece.start) * size, (elements[1] - piece.start) * size)

    def _summed(self, rank: int, piece: range) -> tuple[int, int]:
        """The elements of a piece that a rank adds up."""
        if self.name == "reduce_scatter":
            return self._owned(rank, piece)
        line = _LINE_BYTES // self.dtype.itemsize
        lines = -(-len(piece) // line)
        first, last = (lines * r // self.num_ranks * line for r in (rank, rank + 1))
        return piece.start + min(first, len(piece)), piece.start + min(last, len(piece))

    def _owned(self, rank: int, piece: range) -> tuple[int, int]:
        """The elements of a piece that belong to a rank by `counts`."""
        ends = list(accumulate(self.counts, initial=0))
        start = min(max(ends[rank], piece.start), piece.stop)
        return start, max(start, min(ends[rank + 1], piece.stop))


def _others(part: tuple[int, int], piece: range) -> list[tuple[int, int]]:
    """What is left of a piece without a part of it."""
    return [(piece.start, part[0]), (part[1], piece.stop)]
