"""Arrange messages in rounds, for libraries whose messages wait for each other.

NCCL runs operations in order, and a send takes as long as its receiver: lists that are free of
deadlock when receives are posted ahead are not so here. So each message gets a round, the same at
both ends, and a rank passes the messages of a round to the library together: when every rank is in
round k, all of its messages can proceed. A message comes in a later round than what it is made of,
and than a send of memory that it overwrites; on an edge, a round has as many messages as the
program's window. Operands of additions arrive in scratch memory and are added after the round, in
the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.messages import Instruction, MessageProgram
from shardwise.runtime.collectives.script import Act, Span

__all__ = ["Exchange", "Rounds", "batches", "message_rounds", "run_rounds", "write_rounds"]


Exchange = Callable[[Sequence[tuple[str, Tensor, int]]], None]  # "send" or "take", what, peer
Place = tuple[int, int]  # a rank and the number of one of its instructions


class _Message(NamedTuple):
    sender: Place
    receiver: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A rank's sends and receives, round by round, and the scratch that they need."""

    rounds: tuple[tuple[Act, ...], ...]
    scratch_numel: int


def message_rounds(program: MessageProgram) -> dict[Place, int]:
    """Return the round of every instruction of every rank."""
    messages = _messages(program)
    of = {place: number for number, message in enumerate(messages) for place in message}
    later = [(of[a], of[b], wait) for a, b, wait in _constraints(program) if of[a] != of[b]]
    later += _windows(program, messages)
    rounds = [0] * len(messages)
    for _ in range(len(messages) + 1):
        changed = False
        for first, second, wait in later:
            if rounds[second] < rounds[first] + wait:
                rounds[second] = rounds[first] + wait
                changed = True
        if not changed:
            return {place: rounds[number] for place, number in of.items()}
    raise ProgramError("messages wait for each other, in any number of rounds")


def _messages(program: MessageProgram) -> list[_Message]:
    """Pair the ends of every message: the n-th send of an edge is its n-th receive."""
    sent: dict[tuple[int, int], list[Place]] = {}
    taken: dict[tuple[int, int], list[Place]] = {}
    for rank, steps in enumerate(program.instructions):
        for number, step in enumerate(steps):
            if step.kind == "send":
                sent.setdefault((rank, step.peer), []).append((rank, number))
            else:
                taken.setdefault((step.peer, rank), []).append((rank, number))
    result = []
    for edge, places in sent.items():
        if len(places) != len(taken.get(edge, [])):
            raise ProgramError(f"{len(places)} sends and other receives on edge {edge}")
        result += [_Message(*ends) for ends in zip(places, taken[edge], strict=True)]
    return sorted(result, key=lambda message: (message.sender[1], message.sender[0]))


def _constraints(program: MessageProgram) -> Iterator[tuple[Place, Place, int]]:
    """Return the order constraints on one rank, with the minimum distance in rounds."""
    for rank, steps in enumerate(program.instructions):
        last_write: dict[int, Place] = {}
        last_sends: dict[int, list[Place]] = {}
        for number, step in enumerate(steps):
            here = rank, number
            for chunk in range(step.first, step.stop):
                written = last_write.get(chunk)
                if written is not None:
                    sums = step.kind == steps[written[1]].kind == "reduce"
                    yield written, here, 0 if sums else 1
                if step.kind == "send":
                    last_sends.setdefault(chunk, []).append(here)
                    continue
                for sent in last_sends.pop(chunk, []):
                    yield sent, here, 0 if step.kind == "reduce" else 1
                last_write[chunk] = here


def _windows(program: MessageProgram, messages: Sequence[_Message]) -> list[tuple[int, int, int]]:
    """Return the order constraints of messages on an edge, and limits per round."""
    edges: dict[tuple[int, int], list[int]] = {}
    for number, (sender, receiver) in enumerate(messages):
        edges.setdefault((sender[0], receiver[0]), []).append(number)
    result = []
    for numbers in edges.values():
        numbers.sort(key=lambda number: messages[number].sender[1])
        result += [(a, b, 0) for a, b in pairwise(numbers)]
        ahead = numbers[program.window :]
        result += [(a, b, 1) for a, b in zip(numbers, ahead, strict=False)]
    return result


def write_rounds(program: MessageProgram, rank: int) -> Rounds:
    """Return a rank's batches, without empty ones."""
    number_of = message_rounds(program)
    own: dict[int, list[int]] = {}
    for number in range(len(program.instructions[rank])):
        own.setdefault(number_of[rank, number], []).append(number)
    places = _Places(program, rank)
    rounds = tuple(places.round(own[number]) for number in sorted(own))
    return Rounds(rounds=rounds, scratch_numel=places.scratch_numel)


class _Places:
    """Where the messages of one round after the other lie."""

    def __init__(self, program: MessageProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        self.steps = program.instructions[rank]
        self.scratch_numel = 0
        self.passing: dict[int, Span] = {}

    def round(self, numbers: Sequence[int]) -> tuple[Act, ...]:
        """Return the acts of a round, whose scratch is then free but for forwarded messages."""
        acts: list[Act] = []
        used = max((span.stop for span in self.passing.values()), default=0)
        for number in numbers:
            step = self.steps[number]
            place, kind = self.place(step), "send" if step.kind == "send" else "take"
            if step.kind == "send":
                span = self.passing.pop(step.first, place)
            elif step.kind == "reduce":
                span = Span("scratch", used, used + place.stop - place.start)
            else:
                span = self.arriving(step, used)
            if span.memory == "scratch":
                used = max(used, span.stop)
                self.scratch_numel = max(self.scratch_numel, used)
            sums = place if step.kind == "reduce" else None
            acts.append(Act(kind, number, step.peer, span, sums))
        return tuple(acts)

    def arriving(self, step: Instruction, used: int) -> Span:
        if self.program.operation != "all_to_all":
            return self.place(step)
        chunk = self.program.chunks[step.first]
        if chunk.target == self.rank:
            return Span("out", chunk.place, chunk.place + chunk.size)
        self.passing[step.first] = Span("scratch", used, used + chunk.size)
        return self.passing[step.first]

    def place(self, step: Instruction) -> Span:
        chunks = self.program.chunks
        return Span("data", chunks[step.first].start, chunks[step.stop - 1].stop)


def run_rounds(
    rounds: Rounds,
    memory: Mapping[str, Tensor],
    exchange: Exchange,
    after: Callable[[tuple[Act, ...]], None] = lambda acts: None,
) -> None:
    """Exchange each round's messages and add what arrived; call `after` after each round."""
    for acts in rounds.rounds:
        views = [memory[act.span.memory][act.span.start : act.span.stop] for act in acts]
        exchange([(act.kind, view, act.peer) for act, view in zip(acts, views, strict=True)])
        for act, view in zip(acts, views, strict=True):
            if act.place is not None:
                memory[act.place.memory][act.place.start : act.place.stop].add_(view)
        after(acts)


def batches(group: dist.ProcessGroup) -> Exchange:
    """Exchange by `torch.distributed`'s batches of sends and receives."""
    ranks = dist.get_process_group_ranks(group)
    functions: dict[str, Any] = {"send": dist.isend, "take": dist.irecv}

    def exchange(messages: Sequence[tuple[str, Tensor, int]]) -> None:
        batch = [
            dist.P2POp(functions[kind], view, ranks[peer], group)
            for kind, view, peer in messages
            if view.numel()
        ]
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()

    return exchange
