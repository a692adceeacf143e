"""Message programs: collectives as lists of sends, receives and reductions for each rank.

Data are divided into chunks, which are ranges of elements. A rank executes its list in order:

    send 3 -> 1      send the present value of chunk 3 to rank 1
    receive 3 <- 1   replace chunk 3 by the one that rank 1 sends
    reduce 3 <- 1    add the chunk that rank 1 sends: local + received

Between two ranks, messages arrive in the order in which they were sent; up to `window` of them may
be in flight before the sender waits. A message may hold several neighbouring chunks: `3:5`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from shardwise.errors import PlanError, ProgramError
from shardwise.files import read_json, write_text
from shardwise.schema import Form, OneOf, Reader, Stored, Writer, check_fields

FORMAT_VERSION = 1
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
SUMMING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")
SHARDED = ("reduce_scatter", "all_gather")  # each rank has its own elements
KINDS = ("send", "receive", "reduce")
_INSTRUCTION = re.compile(r"(send|receive|reduce) (\d+)(?::(\d+))? (->|<-) (\d+)")


class Chunk(NamedTuple):
    """Elements `start` to `stop` of every rank's buffer."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Instruction(NamedTuple):
    """One step of a rank: send chunks `first` to `stop` to rank `peer`, or receive them."""

    kind: str
    peer: int
    first: int
    stop: int

    def __str__(self) -> str:
        chunks = str(self.first) if self.stop == self.first + 1 else f"{self.first}:{self.stop}"
        return f"{self.kind} {chunks} {'->' if self.kind == 'send' else '<-'} {self.peer}"

    @staticmethod
    def parse(text: str) -> Instruction:
        """Return the instruction of a text that `str` wrote."""
        match = _INSTRUCTION.fullmatch(text.strip())
        if match is None or (match[1] == "send") != (match[4] == "->"):
            raise ProgramError(
                f"{text[:80]!r} is not an instruction", hint="send 3 -> 1, reduce 3:5 <- 1"
            )
        first = int(match[2])
        stop = int(match[3]) if match[3] else first + 1
        return Instruction(match[1], int(match[5]), first, stop)


def _read_chunk(numbers: tuple[int, ...]) -> Chunk:
    if len(numbers) != 2:
        raise ProgramError(f"a chunk has {len(numbers)} numbers", hint="[start, stop]")
    return Chunk(*numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageProgram:
    """The instructions of all ranks.

    `counts` are the elements of each rank: its result of a reduce-scatter, or its input of an
    all-gather; empty for other operations.
    """

    operation: Annotated[str, OneOf(OPERATIONS)]
    num_ranks: int
    numel: int
    counts: Annotated[tuple[int, ...], Stored(always=True)] = ()
    root: Annotated[int, Stored(always=True)] = -1
    window: Annotated[int, Stored(always=True)] = 1
    chunks: tuple[Annotated[Chunk, Form(_read_chunk, list, tuple[int, ...])], ...]
    instructions: Annotated[
        tuple[tuple[Annotated[Instruction, Form(Instruction.parse, str)], ...], ...],
        Stored("ranks"),
    ]

    def __post_init__(self) -> None:
        check_fields(self, ProgramError)
        if len(self.instructions) != self.num_ranks:
            raise ProgramError(
                f"{len(self.instructions)} instruction lists for {self.num_ranks} ranks"
            )
        if self.window < 1:
            raise ProgramError(f"a window of {self.window} messages, must be at least 1")
        rooted = self.operation in ROOTED
        if not (0 <= self.root < self.num_ranks if rooted else self.root == -1):
            raise ProgramError(
                f"{self.operation} of {self.num_ranks} ranks with root {self.root}",
                hint="root: 0" if rooted else "root: -1",
            )
        self._check_counts()
        ranks, chunks = self.num_ranks, len(self.chunks)
        for rank, steps in enumerate(self.instructions):
            for number, step in enumerate(steps):
                valid = 0 <= step.first < step.stop <= chunks and 0 <= step.peer < ranks
                if not valid or step.kind not in KINDS or step.peer == rank:
                    sizes = f"{chunks} chunks, {ranks} ranks"
                    problem = "a rank cannot send to itself" if step.peer == rank else sizes
                    where = f"rank {rank}, instruction {number}"
                    raise ProgramError(f"{step}: {problem}", where=where)

    def _check_counts(self) -> None:
        sharded = self.operation in SHARDED
        if sharded != bool(self.counts) or (sharded and len(self.counts) != self.num_ranks):
            raise ProgramError(f"{len(self.counts)} counts for {self.operation}")
        if sharded and (min(self.counts) < 0 or sum(self.counts) != self.numel):
            raise ProgramError(f"counts {self.counts} do not add up to {self.numel} elements")
        for number, chunk in enumerate(self.chunks):
            if not 0 <= chunk.start <= chunk.stop <= self.numel:
                raise ProgramError(
                    f"chunk {number} is {chunk.start}:{chunk.stop} of {self.numel} elements"
                )

    # ------------------------------------------------------------ derived facts
    @property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each rank."""
        return tuple(accumulate(self.counts, initial=0))[:-1]

    @property
    def num_messages(self) -> int:
        return sum(step.kind == "send" for steps in self.instructions for step in steps)

    def begins_with(self, rank: int) -> list[int]:
        """Return the chunks that a rank contributes to before the first message."""
        return self._chunks_of(rank, at_root="broadcast", own="all_gather")

    def ends_with(self, rank: int) -> list[int]:
        """Return the chunks whose result a rank must have after the last message."""
        return self._chunks_of(rank, at_root="reduce", own="reduce_scatter")

    def _chunks_of(self, rank: int, *, at_root: str, own: str) -> list[int]:
        """Return all chunks, those of the root alone, or those of the rank's own elements."""
        if self.operation == at_root and rank != self.root:
            return []
        if self.operation != own:
            return list(range(len(self.chunks)))
        first = self.offsets[rank]
        end = first + self.counts[rank]
        return [c for c, (start, stop) in enumerate(self.chunks) if first <= start and stop <= end]

    # ------------------------------------------------------------ files and text
    def to_json(self) -> dict[str, Any]:
        """Return plain data with a version."""
        return {"version": FORMAT_VERSION, **Writer().fields(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "the program") -> MessageProgram:
        """Read a program from plain data."""
        hint = "shardwise collective solve CLUSTER -o FILE writes one"
        reader = Reader(ProgramError, where, hint=hint)
        version = data.get("version") if isinstance(data, Mapping) else None
        if isinstance(version, bool) or version != FORMAT_VERSION:
            reader.fail(f"version {version!r} of a message program, must be {FORMAT_VERSION}", ())
        body = {name: value for name, value in data.items() if name != "version"}
        fields = reader.fields(MessageProgram, body, required=True)
        return reader.construct(MessageProgram, (), **fields)

    def save(self, path: str | Path) -> None:
        """Write the program to a JSON file."""
        hint = "-o in a folder that you may write to"
        write_text(path, json.dumps(self.to_json()) + "\n", ProgramError, hint=hint)

    @staticmethod
    def load(path: str | Path) -> MessageProgram:
        """Read a program file."""
        return MessageProgram.from_json(read_json(path, ProgramError, what="program"), str(path))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Return the chunks, then the instructions of each rank, or of some, as text."""
        lines = [
            f"{self.operation} of {self.numel} elements on {self.num_ranks} ranks: "
            f"{len(self.chunks)} chunks, {self.num_messages} messages"
        ]
        for number, chunk in enumerate(self.chunks):
            lines.append(f"chunk {number}: elements {chunk.start}:{chunk.stop}")
        for rank in range(self.num_ranks) if ranks is None else ranks:
            lines.append(f"rank {rank}:")
            lines += [f"  {step}" for step in self.instructions[rank]]
        return lines


# ------------------------------------------------------------ ranks as text
Ranks = tuple[int, ...]
MAX_RANKS = 1 << 20  # as in a cluster: a short text in a file must not expand without limit
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,8}))?)?", re.ASCII)


def format_ranks(ranks: Ranks) -> str:
    """Return ranks as ranges.

    >>> format_ranks((0, 1, 2, 5))
    '0-2,5'
    """
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def format_steps(ranks: Ranks) -> str:
    """Return ranks as ranges, or as one range with a step if they are evenly spaced.

    >>> format_steps((0, 1, 2, 5)), format_steps((0, 4, 8, 12))
    ('0-2,5', '0-12/4')
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and next(iter(steps)) > 1:
        return f"{ranks[0]}-{ranks[-1]}/{next(iter(steps))}"
    return format_ranks(ranks)


def parse_ranks(text: str, where: str | None = None) -> Ranks:
    """Return the ranks of a text that `format_ranks` or `format_steps` wrote.

    >>> parse_ranks("0-2,5"), parse_ranks("0-12/4")
    ((0, 1, 2, 5), (0, 4, 8, 12))
    """
    ranks: list[int] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        first, last, step = match.groups() if match is not None else ("1", "0", "1")
        span = range(int(first), int(last or first) + 1, int(step or 1))
        if not span or len(ranks) + len(span) > MAX_RANKS:
            message = f"ranks {text[:80]!r} are not ranges of at most {MAX_RANKS:,} ranks"
            raise PlanError(message, where=where, hint='"0-3", "0,2" or "0-12/4"')
        ranks += span
    return tuple(ranks)
