"""A collective as messages: what each rank sends, receives and adds, in order.

Enters: what the solver makes, or a file. Leaves: `MessageProgram`, data that the runtime runs.

Data are cut into chunks, ranges of elements. A rank runs its list in order:

    send 3 -> 1      chunk 3, as it is now, to rank 1
    receive 3 <- 1   the chunk that rank 1 sends takes the place of mine
    reduce 3 <- 1    the chunk that rank 1 sends is added to mine: mine + theirs

Between two ranks, messages arrive in the order in which they were sent; `window` of them may be
under way before the sender must wait. A message may hold several neighbouring chunks: `3:5`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ProgramError, did_you_mean
from shardwise.files import read_json, write_text

FORMAT_VERSION = 1
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
KINDS = ("send", "receive", "reduce")
FIELDS = (
    "version",
    "operation",
    "num_ranks",
    "numel",
    "counts",
    "root",
    "window",
    "chunks",
    "ranks",
)
_INSTRUCTION = re.compile(r"(send|receive|reduce) (\d+)(?::(\d+))? (->|<-) (\d+)")


class Chunk(NamedTuple):
    """Elements `start` to `stop` of every rank's buffer.

    Of an all-to-all: those of rank `source`'s input, which become elements from `place` on of rank
    `target`'s output.
    """

    start: int
    stop: int
    source: int = -1
    target: int = -1
    place: int = -1

    @property
    def size(self) -> int:
        return self.stop - self.start


class Instruction(NamedTuple):
    """One step of a rank: chunks `first` to `stop` to or from rank `peer`."""

    kind: str
    peer: int
    first: int
    stop: int

    def __str__(self) -> str:
        chunks = str(self.first) if self.stop == self.first + 1 else f"{self.first}:{self.stop}"
        return f"{self.kind} {chunks} {'->' if self.kind == 'send' else '<-'} {self.peer}"

    @staticmethod
    def parse(text: object, where: str) -> Instruction:
        """The instruction that `str` wrote."""
        found = _INSTRUCTION.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or (found[1] == "send") != (found[4] == "->"):
            raise ProgramError(
                f"{text!r} is no instruction", where=where, hint="send 3 -> 1, reduce 3:5 <- 1"
            )
        first = int(found[2])
        stop = int(found[3]) if found[3] else first + 1
        return Instruction(found[1], int(found[5]), first, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageProgram:
    """The lists of all ranks. `counts` are the elements of each rank: what it is left with of a
    reduce-scatter, brings to an all-gather, or gets from each rank of an all-to-all; empty else.
    """

    operation: str
    num_ranks: int
    numel: int
    chunks: tuple[Chunk, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    counts: tuple[int, ...] = ()
    root: int = -1
    window: int = 1

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ProgramError(
                f"no operation {self.operation!r}{did_you_mean(self.operation, OPERATIONS)}",
                hint=", ".join(OPERATIONS),
            )
        if len(self.instructions) != self.num_ranks:
            raise ProgramError(f"{len(self.instructions)} lists for {self.num_ranks} ranks")
        if self.window < 1:
            raise ProgramError(f"a window of {self.window} messages", hint="window: 1")
        rooted = self.operation in ("broadcast", "reduce")
        if not (0 <= self.root < self.num_ranks if rooted else self.root == -1):
            raise ProgramError(
                f"{self.operation} of {self.num_ranks} ranks with root {self.root}",
                hint="root: 0" if rooted else "root: -1",
            )
        self._check_counts()
        ranks, chunks = self.num_ranks, len(self.chunks)
        for rank, mine in enumerate(self.instructions):
            for number, (kind, peer, first, stop) in enumerate(mine):
                known = kind in KINDS and 0 <= first < stop <= chunks and 0 <= peer < ranks
                if not known or peer == rank:
                    raise self._wrong_step(rank, number)

    def _check_counts(self) -> None:
        cut = self.operation in ("reduce_scatter", "all_gather", "all_to_all")
        if cut != bool(self.counts) or (cut and len(self.counts) != self.num_ranks):
            raise ProgramError(f"{len(self.counts)} counts for {self.operation}")
        if cut and (min(self.counts) < 0 or sum(self.counts) != self.numel):
            raise ProgramError(f"counts {self.counts} do not add up to {self.numel} elements")
        for number, chunk in enumerate(self.chunks):
            if not 0 <= chunk.start <= chunk.stop <= self.numel:
                raise ProgramError(
                    f"chunk {number} is {chunk.start}:{chunk.stop} of {self.numel} elements"
                )

    def _wrong_step(self, rank: int, number: int) -> ProgramError:
        step = self.instructions[rank][number]
        where = f"rank {rank}, instruction {number}"
        if step.peer == rank:
            return ProgramError(f"{step}: to itself", where=where)
        return ProgramError(
            f"{step}: {len(self.chunks)} chunks, {self.num_ranks} ranks", where=where
        )

    # ------------------------------------------------------------ what follows

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each rank's elements begin."""
        return tuple(accumulate(self.counts, initial=0))[:-1]

    @property
    def num_messages(self) -> int:
        return sum(step.kind == "send" for mine in self.instructions for step in mine)

    def begins_with(self, rank: int) -> list[int]:
        """The chunks that a rank has something of before the first message."""
        return [c for c, chunk in enumerate(self.chunks) if self._has(rank, chunk)]

    def ends_with(self, rank: int) -> list[int]:
        """The chunks whose result a rank must have after the last message."""
        return [c for c, chunk in enumerate(self.chunks) if self._wants(rank, chunk)]

    def _has(self, rank: int, chunk: Chunk) -> bool:
        if self.operation == "all_to_all":
            return chunk.source == rank
        if self.operation == "broadcast":
            return rank == self.root
        return self.operation != "all_gather" or self._owns(rank, chunk)

    def _wants(self, rank: int, chunk: Chunk) -> bool:
        if self.operation == "all_to_all":
            return chunk.target == rank
        if self.operation == "reduce":
            return rank == self.root
        return self.operation != "reduce_scatter" or self._owns(rank, chunk)

    def _owns(self, rank: int, chunk: Chunk) -> bool:
        first = self.offsets[rank]
        return first <= chunk.start and chunk.stop <= first + self.counts[rank]

    # ------------------------------------------------------------ files and text

    def to_json(self) -> dict[str, Any]:
        """Plain data with a version."""
        return {
            "version": FORMAT_VERSION,
            "operation": self.operation,
            "num_ranks": self.num_ranks,
            "numel": self.numel,
            "counts": list(self.counts),
            "root": self.root,
            "window": self.window,
            "chunks": [list(c if self.operation == "all_to_all" else c[:2]) for c in self.chunks],
            "ranks": [[str(step) for step in mine] for mine in self.instructions],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "the program") -> MessageProgram:
        """The program that `to_json` wrote."""
        with placed(where):
            return _from_json(data)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        hint = "-o with a folder that you may write to"
        write_text(path, json.dumps(self.to_json()) + "\n", ProgramError, hint=hint)

    @staticmethod
    def load(path: str | Path) -> MessageProgram:
        """Read what `save` wrote."""
        return MessageProgram.from_json(read_json(path, ProgramError, what="program"), str(path))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, ranks: Iterable[int] | None = None) -> list[str]:
        """As text: the chunks, then the list of each rank, or of some."""
        found = [
            f"{self.operation} of {self.numel} elements on {self.num_ranks} ranks: "
            f"{len(self.chunks)} chunks, {self.num_messages} messages"
        ]
        for number, chunk in enumerate(self.chunks):
            ends = f" of rank {chunk.source} -> {chunk.target}" if chunk.source >= 0 else ""
            found.append(f"chunk {number}: elements {chunk.start}:{chunk.stop}{ends}")
        for rank in range(self.num_ranks) if ranks is None else ranks:
            found.append(f"rank {rank}:")
            found += [f"  {step}" for step in self.instructions[rank]]
        return found


# ------------------------------------------------------------ reading


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Errors of a program are of this place, as a file."""
    try:
        yield
    except ProgramError as error:
        place = f"{where}: {error.where}" if error.where else where
        raise ProgramError(error.message, where=place, hint=error.hint) from None


def _from_json(data: object) -> MessageProgram:
    if not isinstance(data, Mapping) or _is_other(data.get("version")):
        raise ProgramError(
            f"no program of version {FORMAT_VERSION}",
            hint="shardwise collective solve CLUSTER -o FILE writes one",
        )
    for name in data:
        if name not in FIELDS:
            raise ProgramError(
                f"unknown field {name!r}{did_you_mean(str(name), FIELDS)}", hint=", ".join(FIELDS)
            )
    for name in FIELDS:
        if name not in data:
            raise ProgramError(f"field {name!r} is missing", hint=", ".join(FIELDS))
    return MessageProgram(
        operation=str(data["operation"]),
        num_ranks=_whole(data["num_ranks"], "num_ranks"),
        numel=_whole(data["numel"], "numel"),
        counts=tuple(_wholes(data["counts"], "counts")),
        root=_whole(data["root"], "root"),
        window=_whole(data["window"], "window"),
        chunks=tuple(
            _chunk(chunk, f"chunks[{i}]", data["operation"])
            for i, chunk in enumerate(_list(data["chunks"], "chunks"))
        ),
        instructions=tuple(
            tuple(
                Instruction.parse(step, f"rank {rank}, instruction {number}")
                for number, step in enumerate(_list(mine, f"rank {rank}"))
            )
            for rank, mine in enumerate(_list(data["ranks"], "ranks"))
        ),
    )


def _is_other(version: object) -> bool:
    return isinstance(version, bool) or version != FORMAT_VERSION


def _chunk(value: object, place: str, operation: object) -> Chunk:
    ends = _wholes(value, place)
    names = Chunk._fields if operation == "all_to_all" else Chunk._fields[:2]
    if len(ends) != len(names):
        raise ProgramError(
            f"a chunk of {len(ends)} numbers", where=place, hint=f"[{', '.join(names)}]"
        )
    return Chunk(*ends)


def _wholes(value: object, place: str) -> list[int]:
    return [_whole(item, f"{place}[{i}]") for i, item in enumerate(_list(value, place))]


def _list(value: object, place: str) -> list[object]:
    if not isinstance(value, list):
        raise ProgramError(f"{value!r} is no list", where=place, hint="[…]")
    return value


def _whole(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProgramError(f"{value!r} is no whole number", where=place)
    return value
