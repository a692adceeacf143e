"""Running a program on arrays in one process, for tests.

Enters: a `MessageProgram` and every rank's input. Leaves: every rank's result, None for a rank that
the operation leaves without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ProgramError
from shardwise.messages.play import play
from shardwise.messages.program import MessageProgram

Array = NDArray[Any]


def interpret(program: MessageProgram, inputs: Sequence[Array]) -> list[Array | None]:
    """What each rank would have.

    An input is flat: the whole data, but of an all-gather the rank's own elements. Of a
    broadcast, only the root's is looked at.
    """
    if len(inputs) != program.num_ranks:
        raise ProgramError(f"{len(inputs)} inputs for {program.num_ranks} ranks")
    start = [_cut(program, rank, array) for rank, array in enumerate(inputs)]
    played = play(program, start, np.add)
    return [
        _joined(program, rank, mine, inputs[rank].dtype) for rank, mine in enumerate(played.values)
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


def _joined(program: MessageProgram, rank: int, mine: dict[int, Array], dtype: Any) -> Array | None:
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
            result[at : at + chunk.size] = mine[number]
    return result
