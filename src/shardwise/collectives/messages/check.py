"""Check symbolically that a message program is correct.

Chunks must cover the data, each element once. Every rank must end with its result, which contains
every contribution exactly once. All ranks must add in the same order, so that their results are
bitwise equal. Nobody may wait forever with `window` messages in flight on each edge. A
`ProgramError` names the rank and instruction; the `Facts` of a correct program include the memory
that messages need besides the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.collectives.messages.program import Instruction, MessageProgram
from shardwise.errors import ProgramError

# Run a message program in one process over any kind of values.
#
# Every rank runs its list in order and waits where it must. The order in which ranks take turns
# does not matter, because each message has one sender, one receiver and a fixed place in both
# lists: if one order blocks, all do.


V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Generic[V]):
    """The values of each rank at the end, and the most elements that it stored for others
    meanwhile.
    """

    values: tuple[dict[int, V], ...]
    most_passing: int


class _Run(Generic[V]):
    def __init__(
        self, program: MessageProgram, values: list[dict[int, V]], add: Callable[[V, V], V]
    ) -> None:
        self.program, self.values, self.add = program, values, add
        self.at = [0] * program.num_ranks
        self.under_way: dict[tuple[int, int], deque[tuple[Instruction, list[V]]]] = {}
        self.keeps = [set(program.ends_with(r)) for r in range(program.num_ranks)]
        self.own = [set(program.begins_with(r)) for r in range(program.num_ranks)]
        self.passing = [0] * program.num_ranks
        self.most_passing = 0

    def play(self) -> Played[V]:
        """Run until all lists are done or no rank can continue."""
        ready = deque(range(self.program.num_ranks))
        waiting = [True] * self.program.num_ranks
        while ready:
            rank = ready.popleft()
            waiting[rank] = False
            steps = self.program.instructions[rank]
            while self.at[rank] < len(steps) and self.step(rank, steps[self.at[rank]]):
                peer = steps[self.at[rank]].peer
                self.at[rank] += 1
                if not waiting[peer]:
                    waiting[peer] = True
                    ready.append(peer)
        stuck = [r for r in range(len(self.at)) if self.at[r] < len(self.program.instructions[r])]
        if stuck:
            raise self._stuck(stuck)
        for (a, b), left in self.under_way.items():
            if left:
                raise ProgramError(f"{left[0][0]} of rank {a} is never received by rank {b}")
        return Played(values=tuple(self.values), most_passing=self.most_passing)

    def _stuck(self, stuck: list[int]) -> ProgramError:
        """Return the error for ranks that cannot continue: one whose peer never answers, or all of
        them.
        """
        lists = self.program.instructions
        places = {r: f"rank {r}, instruction {self.at[r]}: {lists[r][self.at[r]]}" for r in stuck}
        for rank, place in places.items():
            step = lists[rank][self.at[rank]]
            sends = step.kind == "send"
            rest = lists[step.peer][self.at[step.peer] :]
            if not any(s.peer == rank and (s.kind == "send") != sends for s in rest):
                lacks = "never receives this" if sends else f"sends nothing more to rank {rank}"
                return ProgramError(f"rank {step.peer} {lacks}", where=place)
        return ProgramError(
            f"{len(stuck)} ranks wait for each other",
            where="; ".join(list(places.values())[:4]),
            hint=f"another order, or a window of more than {self.program.window}",
        )

    def step(self, rank: int, step: Instruction) -> bool:
        """Execute the next instruction if possible; return whether it was."""
        edge = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
        queue = self.under_way.setdefault(edge, deque())
        where = f"rank {rank}, instruction {self.at[rank]}: {step}"
        local = self.values[rank]
        chunks = range(step.first, step.stop)
        if step.kind == "send":
            if len(queue) >= self.program.window:
                return False
            for chunk in chunks:
                if chunk not in local:
                    raise ProgramError(f"chunk {chunk} is sent before it arrives", where=where)
            queue.append((step, [local[chunk] for chunk in chunks]))
            self._passed_on(rank, chunks)
            return True
        if not queue:
            return False
        sent, values = queue.popleft()
        if (sent.first, sent.stop) != (step.first, step.stop):
            raise ProgramError(f"rank {step.peer} sends {sent}", where=where)
        for chunk, value in zip(chunks, values, strict=True):
            if step.kind == "reduce":
                if chunk not in local:
                    raise ProgramError(f"chunk {chunk} is added to nothing", where=where)
                try:
                    value = self.add(local[chunk], value)
                except ValueError as error:
                    raise ProgramError(f"chunk {chunk}: {error}", where=where) from None
            elif chunk not in self.own[rank] | self.keeps[rank]:
                self.passing[rank] += self.program.chunks[chunk].size
                self.most_passing = max(self.most_passing, self.passing[rank])
            local[chunk] = value
        return True

    def _passed_on(self, rank: int, chunks: range) -> None:
        """Drop chunks that a rank neither contributed nor keeps once they are sent."""
        if self.program.operation != "all_to_all":
            return
        for chunk in chunks:
            if chunk not in self.own[rank] and chunk not in self.keeps[rank]:
                self.passing[rank] -= self.program.chunks[chunk].size
                del self.values[rank][chunk]


def play(
    program: MessageProgram, values: list[dict[int, V]], add: Callable[[V, V], V]
) -> Played[V]:
    """Run the program on `values[rank][chunk]`; a `ValueError` from `add` names the mistake."""
    return _Run(program, [dict(mine) for mine in values], add).play()


Term = tuple[int, int]  # contributing ranks as bits; an id of the order of summation


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Resources of a correct program; `scratch_elements` holds received messages not yet added or
    forwarded.
    """

    num_messages: int
    sent_elements: tuple[int, ...]
    largest_message: int
    scratch_elements: int


def check(program: MessageProgram) -> Facts:
    """Return the facts of a program after checking that it computes its operation."""
    _check_cover(program)
    numbers: dict[tuple[int, ...], int] = {}

    def number(*key: int) -> int:
        return numbers.setdefault(key, len(numbers))

    def add(left: Term, right: Term) -> Term:
        both = left[0] & right[0]
        if both:
            raise ValueError(f"the part of rank {both.bit_length() - 1} is added twice")
        # a + b equals b + a bitwise, but (a + b) + c may differ from a + (b + c).
        return left[0] | right[0], number(*sorted((left[1], right[1])))

    start = [
        {chunk: (1 << rank, number(rank)) for chunk in program.begins_with(rank)}
        for rank in range(program.num_ranks)
    ]
    played = play(program, start, add)
    _check_results(program, played.values)
    return _facts(program, played.most_passing)


def _check_cover(program: MessageProgram) -> None:
    """Raise unless every element is in exactly one chunk; in an all-to-all, for every pair of
    ranks.
    """
    if program.operation == "all_to_all":
        for a in range(program.num_ranks):
            ranges = [chunk[:2] for chunk in program.chunks if chunk.source == a]
            _tile(ranges, program.numel, f"the input of rank {a}")
        for b in range(program.num_ranks):
            placed = [(c.place, c.place + c.size) for c in program.chunks if c.target == b]
            _tile(placed, program.counts[b] * program.num_ranks, f"the output of rank {b}")
        return
    _tile([chunk[:2] for chunk in program.chunks], program.numel, "the data")
    if program.counts:
        ends = {0, *(first + n for first, n in zip(program.offsets, program.counts, strict=True))}
        for chunk in program.chunks:
            if any(chunk.start < end < chunk.stop for end in ends):
                raise ProgramError(f"a chunk {chunk.start}:{chunk.stop} belongs to two ranks")


def _tile(ranges: list[tuple[int, int]], numel: int, what: str) -> None:
    at = 0
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if start != at:
            raise ProgramError(f"{what}: chunks meet {at} with {start}", hint="each element once")
        at = stop
    if at != numel:
        raise ProgramError(f"{what}: chunks cover {at} of {numel} elements")


def _check_results(program: MessageProgram, values: tuple[dict[int, Term], ...]) -> None:
    sums = program.operation in ("all_reduce", "reduce_scatter", "reduce")
    everyone = (1 << program.num_ranks) - 1
    seen: dict[int, tuple[int, int]] = {}
    owner = {c: r for r in range(program.num_ranks) for c in program.begins_with(r)}
    for rank, chunks_of_rank in enumerate(values):
        for chunk in program.ends_with(rank):
            if not program.chunks[chunk].size:
                continue
            if chunk not in chunks_of_rank:
                raise ProgramError(f"rank {rank} never gets chunk {chunk}")
            contributions, order = chunks_of_rank[chunk]
            needed = everyone if sums else 1 << owner[chunk]
            if contributions != needed:
                lost = (needed & ~contributions).bit_length() - 1
                raise ProgramError(f"rank {rank}'s chunk {chunk} lacks the part of rank {lost}")
            first, known = seen.setdefault(chunk, (rank, order))
            if known != order:
                raise ProgramError(
                    f"chunk {chunk} is added in different orders on ranks {first} and {rank}: "
                    "their results may differ bitwise"
                )


def _facts(program: MessageProgram, most_passing: int) -> Facts:
    sent, scratch, largest = [], 0, 0
    for steps in program.instructions:
        sizes: dict[int, int] = {}
        total = 0
        for step in steps:
            size = sum(program.chunks[c].size for c in range(step.first, step.stop))
            if step.kind == "send":
                total += size
                largest = max(largest, size)
            elif step.kind == "reduce":
                sizes[step.peer] = max(sizes.get(step.peer, 0), size)
        sent.append(total)
        scratch = max(scratch, program.window * sum(sizes.values()))
    return Facts(
        num_messages=program.num_messages,
        sent_elements=tuple(sent),
        largest_message=largest,
        scratch_elements=scratch + most_passing,
    )


# Run a message program on arrays in one process, for tests: every rank's input to every rank's
# result, None for a rank that has no result.


Array = NDArray[Any]


def interpret(program: MessageProgram, inputs: Sequence[Array]) -> list[Array | None]:
    """Return the result of each rank.

    An input is flat: all data, or for an all-gather the rank's own elements. For a broadcast, only
    the root's input is used.
    """
    if len(inputs) != program.num_ranks:
        raise ProgramError(f"{len(inputs)} inputs for {program.num_ranks} ranks")
    start = [_cut(program, rank, array) for rank, array in enumerate(inputs)]
    played = play(program, start, np.add)
    return [
        _joined(program, rank, chunks, inputs[rank].dtype)
        for rank, chunks in enumerate(played.values)
    ]


def _cut(program: MessageProgram, rank: int, array: Array) -> dict[int, Array]:
    first = program.offsets[rank] if program.operation == "all_gather" else 0
    needed = program.counts[rank] if program.operation == "all_gather" else program.numel
    if array.shape != (needed,):
        raise ProgramError(f"rank {rank} has an input of shape {array.shape}, not ({needed},)")
    return {
        c: array[program.chunks[c].start - first : program.chunks[c].stop - first].copy()
        for c in program.begins_with(rank)
    }


def _joined(
    program: MessageProgram, rank: int, chunks: dict[int, Array], dtype: Any
) -> Array | None:
    wanted = program.ends_with(rank)
    if program.operation == "reduce" and rank != program.root:
        return None
    size, first = program.numel, 0
    if program.operation == "reduce_scatter":
        size, first = program.counts[rank], program.offsets[rank]
    elif program.operation == "all_to_all":
        size = program.counts[rank] * program.num_ranks
    result = np.zeros(size, dtype=dtype)
    for number in wanted:
        chunk = program.chunks[number]
        at = (chunk.place if program.operation == "all_to_all" else chunk.start) - first
        if chunk.size:
            result[at : at + chunk.size] = chunks[number]
    return result
