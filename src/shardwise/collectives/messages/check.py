"""Check symbolically that a message program is correct.

Chunks must cover the data, each element once. Every rank must end with its result, which contains
every contribution exactly once. All ranks must add in the same order, so that their results are
bitwise equal. No rank may wait forever with `window` messages in flight on each edge. A
`ProgramError` names the rank and instruction; the `Facts` of a correct program include the memory
that messages need besides the data. `interpret` runs a program on arrays, as a reference in tests.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.collectives.messages.program import SUMMING, Instruction, MessageProgram
from shardwise.errors import ProgramError

V = TypeVar("V")


class _Executor(Generic[V]):
    """Run a message program in one process on `values[rank][chunk]` of any type.

    Every rank runs its list in order and waits where it must. The order in which ranks take turns
    does not matter, because each message has one sender, one receiver and a fixed place in both
    lists: if one order blocks, all do. A `ValueError` from `add` describes the mistake.
    """

    def __init__(
        self, program: MessageProgram, values: list[dict[int, V]], add: Callable[[V, V], V]
    ) -> None:
        self.program, self.values, self.add = program, values, add
        self.position = [0] * program.num_ranks  # index of each rank's next instruction
        self.in_flight: dict[tuple[int, int], deque[tuple[Instruction, list[V]]]] = {}

    def run(self) -> None:
        """Run until all lists are done or no rank can continue."""
        lists = self.program.instructions
        ready = deque(range(self.program.num_ranks))
        is_ready = [True] * self.program.num_ranks
        while ready:
            rank = ready.popleft()
            is_ready[rank] = False
            steps = lists[rank]
            while self.position[rank] < len(steps) and self.step(rank, steps[self.position[rank]]):
                peer = steps[self.position[rank]].peer
                self.position[rank] += 1
                if not is_ready[peer]:
                    is_ready[peer] = True
                    ready.append(peer)
        stuck = [r for r, position in enumerate(self.position) if position < len(lists[r])]
        if stuck:
            raise self._stuck(stuck)
        for (a, b), queue in self.in_flight.items():
            if queue:
                raise ProgramError(f"{queue[0][0]} of rank {a} is never received by rank {b}")

    def _stuck(self, stuck: list[int]) -> ProgramError:
        """Return an error about one rank whose peer never answers, or about a deadlock of all."""
        lists = self.program.instructions
        steps = {rank: lists[rank][self.position[rank]] for rank in stuck}
        places = {r: f"rank {r}, instruction {self.position[r]}: {steps[r]}" for r in stuck}
        for rank, step in steps.items():
            sends = step.kind == "send"
            remaining = lists[step.peer][self.position[step.peer] :]
            if not any(s.peer == rank and (s.kind == "send") != sends for s in remaining):
                failure = "never receives this" if sends else f"sends nothing more to rank {rank}"
                return ProgramError(f"rank {step.peer} {failure}", where=places[rank])
        return ProgramError(
            f"{len(stuck)} ranks wait for each other",
            where="; ".join(list(places.values())[:4]),
            hint=f"another order, or a window of more than {self.program.window}",
        )

    def step(self, rank: int, step: Instruction) -> bool:
        """Execute the next instruction if possible; return whether it was."""
        edge = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
        queue = self.in_flight.setdefault(edge, deque())
        where = f"rank {rank}, instruction {self.position[rank]}: {step}"
        local = self.values[rank]
        chunks = range(step.first, step.stop)
        if step.kind == "send":
            if len(queue) >= self.program.window:
                return False
            for chunk in chunks:
                if chunk not in local:
                    raise ProgramError(f"chunk {chunk} is sent before it arrives", where=where)
            queue.append((step, [local[chunk] for chunk in chunks]))
            return True
        if not queue:
            return False
        sent, values = queue.popleft()
        if (sent.first, sent.stop) != (step.first, step.stop):
            raise ProgramError(f"rank {step.peer} sends {sent}", where=where)
        for chunk, value in zip(chunks, values, strict=True):
            if step.kind == "reduce":
                if chunk not in local:
                    raise ProgramError(
                        f"chunk {chunk} is reduced into a rank that does not have it", where=where
                    )
                try:
                    value = self.add(local[chunk], value)
                except ValueError as error:
                    raise ProgramError(f"chunk {chunk}: {error}", where=where) from None
            local[chunk] = value
        return True


Term = tuple[int, int]  # contributing ranks as bits; an id of the order of summation


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The messages and memory of a correct program.

    `scratch_elements` is the buffer for received messages that are not yet added.
    """

    num_messages: int
    largest_message: int
    scratch_elements: int


def check(program: MessageProgram) -> Facts:
    """Return the facts of a program after checking that it computes its operation."""
    _check_cover(program)
    ids: dict[tuple[int, ...], int] = {}

    def order_id(*key: int) -> int:
        return ids.setdefault(key, len(ids))

    def add(left: Term, right: Term) -> Term:
        both = left[0] & right[0]
        if both:
            raise ValueError(f"the contribution of rank {both.bit_length() - 1} is added twice")
        # a + b equals b + a bitwise, but (a + b) + c may differ from a + (b + c).
        return left[0] | right[0], order_id(*sorted((left[1], right[1])))

    start = [
        {chunk: (1 << rank, order_id(rank)) for chunk in program.begins_with(rank)}
        for rank in range(program.num_ranks)
    ]
    executor = _Executor(program, start, add)
    executor.run()
    _check_results(program, executor.values)
    return _facts(program)


def _check_cover(program: MessageProgram) -> None:
    """Raise unless every element of every input and output is in exactly one chunk."""
    end = 0
    for start, stop in sorted(chunk for chunk in program.chunks if chunk.size > 0):
        if start != end:
            raise ProgramError(
                f"a chunk ends at element {end}, the next one starts at {start}",
                hint="each element in one chunk",
            )
        end = stop
    if end != program.numel:
        raise ProgramError(f"chunks cover {end} of {program.numel} elements")
    if program.counts:
        ends = {0, *(first + n for first, n in zip(program.offsets, program.counts, strict=True))}
        for chunk in program.chunks:
            if any(chunk.start < end < chunk.stop for end in ends):
                raise ProgramError(f"a chunk {chunk.start}:{chunk.stop} belongs to two ranks")


def _check_results(program: MessageProgram, values: list[dict[int, Term]]) -> None:
    everyone = (1 << program.num_ranks) - 1
    first_orders: dict[int, tuple[int, int]] = {}  # chunk -> rank, order of summation
    owner = {c: r for r in range(program.num_ranks) for c in program.begins_with(r)}
    for rank, local in enumerate(values):
        for chunk in program.ends_with(rank):
            if not program.chunks[chunk].size:
                continue
            if chunk not in local:
                raise ProgramError(f"rank {rank} never gets chunk {chunk}")
            contributions, order = local[chunk]
            needed = everyone if program.operation in SUMMING else 1 << owner[chunk]
            if contributions != needed:
                lost = (needed & ~contributions).bit_length() - 1
                raise ProgramError(
                    f"rank {rank}'s chunk {chunk} lacks the contribution of rank {lost}"
                )
            first, first_order = first_orders.setdefault(chunk, (rank, order))
            if first_order != order:
                raise ProgramError(
                    f"chunk {chunk} is added in different orders on ranks {first} and {rank}: "
                    "their results may differ bitwise"
                )


def _facts(program: MessageProgram) -> Facts:
    scratch, largest = 0, 0
    for steps in program.instructions:
        sizes: dict[int, int] = {}
        for step in steps:
            size = sum(chunk.size for chunk in program.chunks[step.first : step.stop])
            if step.kind == "send":
                largest = max(largest, size)
            elif step.kind == "reduce":
                sizes[step.peer] = max(sizes.get(step.peer, 0), size)
        scratch = max(scratch, program.window * sum(sizes.values()))
    return Facts(
        num_messages=program.num_messages, largest_message=largest, scratch_elements=scratch
    )


Array = NDArray[Any]


def interpret(program: MessageProgram, inputs: Sequence[Array]) -> list[Array | None]:
    """Run a program on arrays in one process; return each rank's result, or None if it has none.

    An input is flat: all data, or for an all-gather the rank's own elements. For a broadcast, only
    the root's input is used.
    """
    if len(inputs) != program.num_ranks:
        raise ProgramError(f"{len(inputs)} inputs for {program.num_ranks} ranks")
    start = [_split_input(program, rank, array) for rank, array in enumerate(inputs)]
    executor = _Executor(program, start, np.add)
    executor.run()
    return [
        _join_output(program, rank, chunks, inputs[rank].dtype)
        for rank, chunks in enumerate(executor.values)
    ]


def _split_input(program: MessageProgram, rank: int, array: Array) -> dict[int, Array]:
    first, numel = 0, program.numel
    if program.operation == "all_gather":
        first, numel = program.offsets[rank], program.counts[rank]
    if array.shape != (numel,):
        raise ProgramError(f"rank {rank} has an input of shape {array.shape}, not ({numel},)")
    return {
        c: array[program.chunks[c].start - first : program.chunks[c].stop - first].copy()
        for c in program.begins_with(rank)
    }


def _join_output(
    program: MessageProgram, rank: int, values: dict[int, Array], dtype: Any
) -> Array | None:
    if program.operation == "reduce" and rank != program.root:
        return None
    size, first = program.numel, 0
    if program.operation == "reduce_scatter":
        size, first = program.counts[rank], program.offsets[rank]
    output = np.zeros(size, dtype=dtype)
    for number in program.ends_with(rank):
        chunk = program.chunks[number]
        start = chunk.start - first
        if chunk.size:
            output[start : start + chunk.size] = values[number]
    return output
