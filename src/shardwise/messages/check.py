"""That a program is right, without any numbers.

Enters: a `MessageProgram`. Leaves: `Facts`, or a `ProgramError` that names rank and instruction.
Checked: chunks cover the data, each element once; every rank ends with what it must, every
contribution in it exactly once; the sums of all ranks are added in the same order, so that their
bits are equal; nobody waits for ever with `window` messages under way on each edge; how much
memory messages need beside the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.messages.play import play
from shardwise.messages.program import MessageProgram

Term = tuple[int, int]  # whose contributions, as bits; a number for the order of their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a right program uses: `scratch_elements` of a rank for messages that are received
    but not yet added or passed on.
    """

    num_messages: int
    sent_elements: tuple[int, ...]
    largest_message: int
    scratch_elements: int


def check(program: MessageProgram) -> Facts:
    """Return the facts of a program that does what its operation says."""
    _check_cover(program)
    numbers: dict[tuple[int, ...], int] = {}

    def number(*key: int) -> int:
        return numbers.setdefault(key, len(numbers))

    def add(mine: Term, theirs: Term) -> Term:
        both = mine[0] & theirs[0]
        if both:
            raise ValueError(f"the part of rank {both.bit_length() - 1} is added twice")
        # a + b and b + a have the same bits; (a + b) + c and a + (b + c) have not.
        return mine[0] | theirs[0], number(*sorted((mine[1], theirs[1])))

    start = [
        {chunk: (1 << rank, number(rank)) for chunk in program.begins_with(rank)}
        for rank in range(program.num_ranks)
    ]
    played = play(program, start, add)
    _check_results(program, played.values)
    return _facts(program, played.most_passing)


def _check_cover(program: MessageProgram) -> None:
    """Every element is in exactly one chunk; of an all-to-all, for every pair of ranks."""
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
    for rank, mine in enumerate(values):
        for chunk in program.ends_with(rank):
            if not program.chunks[chunk].size:
                continue
            if chunk not in mine:
                raise ProgramError(f"rank {rank} never gets chunk {chunk}")
            held, order = mine[chunk]
            needed = everyone if sums else 1 << owner[chunk]
            if held != needed:
                lost = (needed & ~held).bit_length() - 1
                raise ProgramError(f"rank {rank}'s chunk {chunk} lacks the part of rank {lost}")
            first, known = seen.setdefault(chunk, (rank, order))
            if known != order:
                raise ProgramError(
                    f"chunk {chunk} is added in different orders on ranks {first} and {rank}: "
                    "their bits may differ"
                )


def _facts(program: MessageProgram, most_passing: int) -> Facts:
    sent, scratch, largest = [], 0, 0
    for mine in program.instructions:
        sizes: dict[int, int] = {}
        total = 0
        for step in mine:
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
