"""Running a program without processes, over any kind of values.

Enters: a `MessageProgram`, a value per chunk and rank, and how two values are added. Leaves: the
values at the end, and how much was under way. Every rank runs its list in order and waits where it
must; in which order ranks take their turns changes nothing, because each message has one sender,
one receiver and a fixed place in both lists. So if one order blocks, all do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwise.errors import ProgramError
from shardwise.messages.program import Instruction, MessageProgram

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Generic[V]):
    """What each rank holds at the end; the most elements that it held for others meanwhile."""

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
        """Until all lists are done, or nobody can go on."""
        ready = deque(range(self.program.num_ranks))
        waiting = [True] * self.program.num_ranks
        while ready:
            rank = ready.popleft()
            waiting[rank] = False
            mine = self.program.instructions[rank]
            while self.at[rank] < len(mine) and self.step(rank, mine[self.at[rank]]):
                peer = mine[self.at[rank]].peer
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
        """Of ranks that cannot go on: one whose peer has no answer left, or all of them."""
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
        """Whether the instruction could be done now; it is, then."""
        edge = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
        queue = self.under_way.setdefault(edge, deque())
        where = f"rank {rank}, instruction {self.at[rank]}: {step}"
        mine = self.values[rank]
        chunks = range(step.first, step.stop)
        if step.kind == "send":
            if len(queue) >= self.program.window:
                return False
            for chunk in chunks:
                if chunk not in mine:
                    raise ProgramError(f"chunk {chunk} is sent before it is there", where=where)
            queue.append((step, [mine[chunk] for chunk in chunks]))
            self._passed_on(rank, chunks)
            return True
        if not queue:
            return False
        sent, values = queue.popleft()
        if (sent.first, sent.stop) != (step.first, step.stop):
            raise ProgramError(f"rank {step.peer} sends {sent}", where=where)
        for chunk, value in zip(chunks, values, strict=True):
            if step.kind == "reduce":
                if chunk not in mine:
                    raise ProgramError(f"chunk {chunk} is added to nothing", where=where)
                try:
                    value = self.add(mine[chunk], value)
                except ValueError as error:
                    raise ProgramError(f"chunk {chunk}: {error}", where=where) from None
            elif chunk not in self.own[rank] | self.keeps[rank]:
                self.passing[rank] += self.program.chunks[chunk].size
                self.most_passing = max(self.most_passing, self.passing[rank])
            mine[chunk] = value
        return True

    def _passed_on(self, rank: int, chunks: range) -> None:
        """What a rank neither brought nor keeps leaves it when it is sent."""
        if self.program.operation != "all_to_all":
            return
        for chunk in chunks:
            if chunk not in self.own[rank] and chunk not in self.keeps[rank]:
                self.passing[rank] -= self.program.chunks[chunk].size
                del self.values[rank][chunk]


def play(
    program: MessageProgram, values: list[dict[int, V]], add: Callable[[V, V], V]
) -> Played[V]:
    """Run the program on `values[rank][chunk]`; a `ValueError` of `add` says what is wrong."""
    return _Run(program, [dict(mine) for mine in values], add).play()
