"""Prepare one rank's list of messages for execution: as a script, or in rounds.

The result depends only on the list, so it is computed once, however often the program runs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.messages import Instruction, MessageProgram
from shardwise.errors import ProgramError


class Span(NamedTuple):
    """Elements of "data" or "scratch"."""

    memory: str
    start: int
    stop: int


class Act(NamedTuple):
    """One action of instruction `number`.

    post     begin to receive into `span`
    take     wait for the oldest posted receive; add `span` to `place`, if there is one
    send     begin to send `span`
    settle   wait for the send with number `order`
    """

    kind: str
    number: int
    peer: int
    span: Span
    place: Span | None = None
    order: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """All acts of a rank, and the number of scratch elements that they need."""

    acts: tuple[Act, ...]
    scratch_numel: int


def write_script(program: MessageProgram, rank: int) -> Script:
    """Return the acts of a rank, in order."""
    writer = _Writer(program, rank)
    for number in range(len(writer.steps)):
        writer.step(number)
    return Script(acts=tuple(writer.acts), scratch_numel=writer.scratch_numel)


@dataclass(slots=True)
class _Incoming:
    """One edge to this rank: its instructions, its posted receives, and its scratch."""

    steps: list[int] = field(default_factory=list)
    posted: deque[Span] = field(default_factory=deque)
    next_step: int = 0
    scratch: int = -1
    width: int = 0


def _place(program: MessageProgram, step: Instruction) -> Span:
    """Return the elements of an instruction's chunks."""
    return Span("data", program.chunks[step.first].start, program.chunks[step.stop - 1].stop)


class _Writer:
    """Write a script, for libraries that match receives with sends in any order.

    Receives are posted up to a window ahead on every edge, so that a sender never waits for a rank
    that is busy adding; operands of additions are received into scratch memory of that window.
    Sends do not wait: they leave when the other side has posted its receive.

    A message that was posted ahead may arrive at any moment. So a chunk is received in its final
    place only after all earlier instructions that touch the chunk; one send of it may still be in
    flight, since a result that contains this rank's part cannot arrive before that part has left.
    """

    def __init__(self, program: MessageProgram, rank: int) -> None:
        self.program, self.steps = program, program.instructions[rank]
        self.scratch_numel = 0
        self.acts: list[Act] = []
        self.num_sends = 0
        self.unsettled: dict[int, list[Act]] = {}  # sends by chunk
        self.after, self.sent_once = _touched_before(self.steps)
        self.incoming: dict[int, _Incoming] = {}
        for number, step in enumerate(self.steps):
            if step.kind != "send":
                self.incoming.setdefault(step.peer, _Incoming()).steps.append(number)

    def step(self, number: int) -> None:
        """Post the receives that are possible now, then add the instruction itself."""
        for peer, edge in self.incoming.items():
            self.post(number, peer, edge)
        step = self.steps[number]
        if step.kind == "send":
            self.send(number, step)
            return
        span = self.incoming[step.peer].posted.popleft()
        place = None
        if step.kind == "reduce":
            self.settle(number, step)
            place = _place(self.program, step)
        self.acts.append(Act("take", number, step.peer, span, place))

    def send(self, number: int, step: Instruction) -> None:
        """Add a send."""
        span = _place(self.program, step)
        act = Act("send", number, step.peer, span, None, self.num_sends)
        self.num_sends += 1
        self.acts.append(act)
        for chunk in range(step.first, step.stop):
            self.unsettled.setdefault(chunk, []).append(act)

    def settle(self, number: int, step: Instruction) -> None:
        """Wait for sends of chunks that are about to change."""
        waiting = {
            act.order: act
            for chunk in range(step.first, step.stop)
            for act in self.unsettled.pop(chunk, [])
        }
        for _, act in sorted(waiting.items()):
            self.acts.append(act._replace(kind="settle", number=number))

    def post(self, at: int, peer: int, edge: _Incoming) -> None:
        """Post receives from a rank, as far ahead as window and earlier instructions allow."""
        while edge.next_step < len(edge.steps) and len(edge.posted) < self.program.window:
            number = edge.steps[edge.next_step]
            step = self.steps[number]
            if step.kind == "receive":
                if self.after[number] >= at or not (self.sent_once[number] or number == at):
                    return
                if not self.sent_once[number]:
                    self.settle(number, step)
                span = _place(self.program, step)
            else:
                span = self.slot(edge, step)
            self.acts.append(Act("post", number, peer, span))
            edge.posted.append(span)
            edge.next_step += 1

    def slot(self, edge: _Incoming, step: Instruction) -> Span:
        """Return scratch for the operand of an addition."""
        if edge.scratch < 0:
            sums = [n for n in edge.steps if self.steps[n].kind == "reduce"]
            edge.width = max(self.size(self.steps[number]) for number in sums)
            edge.scratch = self.scratch_numel
            self.scratch_numel += edge.width * self.program.window
        first = edge.scratch + edge.next_step % self.program.window * edge.width
        return Span("scratch", first, first + self.size(step))

    def size(self, step: Instruction) -> int:
        _, start, stop = _place(self.program, step)
        return stop - start


def _touched_before(steps: tuple[Instruction, ...]) -> tuple[list[int], list[bool]]:
    """Return for each instruction the last earlier one that touches its chunks, or -1.

    The second list tells whether those chunks were sent at most once before.
    """
    last: dict[int, int] = {}
    num_sent: dict[int, int] = {}
    after, sent_once = [], []
    for number, step in enumerate(steps):
        chunks = range(step.first, step.stop)
        after.append(max(last.get(chunk, -1) for chunk in chunks))
        sent_once.append(all(num_sent.get(chunk, 0) <= 1 for chunk in chunks))
        for chunk in chunks:
            last[chunk] = number
            num_sent[chunk] = num_sent.get(chunk, 0) + (step.kind == "send")
    return after, sent_once


# Rounds, for libraries whose messages wait for each other. NCCL runs operations in order, and a
# send blocks until its receive: lists that are free of deadlock when receives are posted ahead are
# not so here. So each message gets a round, the same at both ends, and a rank passes the messages
# of a round to the library together: when every rank is in round k, all of its messages can
# proceed. A message comes in a later round than the messages that it is computed from, and than a
# send of memory that it overwrites; on an edge, a round has at most as many messages as the
# program's window. Operands of additions are received into scratch memory and added after the
# round, in the order of the list.


Exchange = Callable[[Sequence[tuple[str, Tensor, int]]], None]  # "send" or "take", tensor, peer
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
    raise ProgramError("messages wait for each other in a circle")


def _messages(program: MessageProgram) -> list[_Message]:
    """Pair the ends of every message: the n-th send of an edge is its n-th receive."""
    sends: dict[tuple[int, int], list[Place]] = {}
    receives: dict[tuple[int, int], list[Place]] = {}
    for rank, steps in enumerate(program.instructions):
        for number, step in enumerate(steps):
            if step.kind == "send":
                sends.setdefault((rank, step.peer), []).append((rank, number))
            else:
                receives.setdefault((step.peer, rank), []).append((rank, number))
    result = []
    for edge, places in sends.items():
        count = len(receives.get(edge, []))
        if len(places) != count:
            raise ProgramError(f"{len(places)} sends and {count} receives on edge {edge}")
        result += [_Message(*ends) for ends in zip(places, receives[edge], strict=True)]
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
    """Return the order constraints of messages on an edge, and the limit per round."""
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
    rounds = tuple(_write_round(program, rank, own[number]) for number in sorted(own))
    spans = [act.span for acts in rounds for act in acts if act.span.memory == "scratch"]
    return Rounds(rounds=rounds, scratch_numel=max((span.stop for span in spans), default=0))


def _write_round(program: MessageProgram, rank: int, numbers: Sequence[int]) -> tuple[Act, ...]:
    """Return the acts of a round; its operands of additions share scratch with other rounds."""
    acts: list[Act] = []
    used = 0
    for number in numbers:
        step = program.instructions[rank][number]
        place = _place(program, step)
        if step.kind == "reduce":
            span = Span("scratch", used, used + place.stop - place.start)
            used = span.stop
            acts.append(Act("take", number, step.peer, span, place))
        else:
            acts.append(Act("send" if step.kind == "send" else "take", number, step.peer, place))
    return tuple(acts)


def run_rounds(
    rounds: Rounds,
    memory: Mapping[str, Tensor],
    exchange: Exchange,
    after: Callable[[tuple[Act, ...]], None] = lambda acts: None,
) -> None:
    """Exchange each round's messages and add operands; call `after` after each round."""
    for acts in rounds.rounds:
        views = [memory[act.span.memory][act.span.start : act.span.stop] for act in acts]
        exchange([(act.kind, view, act.peer) for act, view in zip(acts, views, strict=True)])
        for act, view in zip(acts, views, strict=True):
            if act.place is not None:
                memory[act.place.memory][act.place.start : act.place.stop].add_(view)
        after(acts)


def batches(group: dist.ProcessGroup) -> Exchange:
    """Return an exchange by batches of sends and receives of `torch.distributed`."""
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
