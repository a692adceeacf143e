"""Prepare one rank's list of messages for execution.

Everything here follows from the list alone, so it is computed once, however often the program runs.

Receives are posted up to a window ahead on every edge, so that a sender never waits for a rank that
is busy adding; operands of additions arrive in scratch memory of that window. Sends wait for
nobody: they leave when the other side has posted its receive.

A message that was posted ahead may arrive at any moment. So a chunk is received in its final place
only when everything before it in the list that touches the chunk is done; a send of it may still be
in flight if there was one, since a result that contains this rank's part cannot arrive before that
part has left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.messages import Instruction, MessageProgram

__all__ = ["Act", "Script", "Span", "write_script"]


class Span(NamedTuple):
    """Elements of "data", the result "out", or "scratch"."""

    memory: str
    start: int
    stop: int


class Act(NamedTuple):
    """One thing to do for instruction `number`.

    post     begin to receive into `span`
    take     wait for what was posted first; add `span` to `place`, if there is one
    send     begin to send `span`
    settle   wait for the send that was number `order` of all
    """

    kind: str
    number: int
    peer: int
    span: Span
    place: Span | None = None
    order: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """All acts of a rank, and how many elements of scratch they need."""

    acts: tuple[Act, ...]
    peers: tuple[int, ...]
    scratch_numel: int


def write_script(program: MessageProgram, rank: int) -> Script:
    """Return what a rank does, in order."""
    writer = _Writer(program, rank)
    for number in range(len(writer.steps)):
        writer.step(number)
    return Script(
        acts=tuple(writer.acts),
        peers=tuple(sorted({step.peer for step in writer.steps})),
        scratch_numel=writer.scratch_numel,
    )


@dataclass(slots=True)
class _Incoming:
    """One edge that leads here: its instructions, how many are posted, and its scratch."""

    steps: list[int] = field(default_factory=list)
    posted: deque[Span] = field(default_factory=deque)
    next_step: int = 0
    scratch: int = -1
    width: int = 0


class _Writer:
    def __init__(self, program: MessageProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        self.steps = program.instructions[rank]
        self.acts: list[Act] = []
        self.num_sends = 0
        self.scratch_numel = 0
        self.unsettled: dict[int, list[Act]] = {}  # sends by chunk
        self.passing: dict[int, Span] = {}  # what is here only on its way to others
        self.leaving: dict[int, deque[Act]] = {}  # sends of it, by peer
        self.free: dict[int, list[Span]] = {}  # scratch of what has passed, by size
        self.after, self.alone = _touched_before(self.steps)
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
            place = self.place(step)
        self.acts.append(Act("take", number, step.peer, span, place))

    # ------------------------------------------------------------ sends

    def send(self, number: int, step: Instruction) -> None:
        """Add a send; forwarded messages wait for a full window, which bounds their memory."""
        span = self.passing.pop(step.first, None)
        act = Act("send", number, step.peer, span or self.place(step), None, self.num_sends)
        self.num_sends += 1
        if span is not None:
            leaving = self.leaving.setdefault(step.peer, deque())
            if len(leaving) >= self.program.window:
                gone = leaving.popleft()
                self.acts.append(gone._replace(kind="settle"))
                self.free.setdefault(gone.span.stop - gone.span.start, []).append(gone.span)
            leaving.append(act)
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

    # ------------------------------------------------------------ receives

    def post(self, at: int, peer: int, edge: _Incoming) -> None:
        """Receives from a rank, as far ahead as the window and earlier instructions allow."""
        while edge.next_step < len(edge.steps) and len(edge.posted) < self.program.window:
            number = edge.steps[edge.next_step]
            step = self.steps[number]
            if step.kind == "receive":
                if self.after[number] >= at or not (self.alone[number] or number == at):
                    return
                if not self.alone[number]:
                    self.settle(number, step)
                span = self.arriving(step)
            else:
                span = self.slot(edge, step)
            self.acts.append(Act("post", number, peer, span))
            edge.posted.append(span)
            edge.next_step += 1

    def slot(self, edge: _Incoming, step: Instruction) -> Span:
        """Return scratch for a message that will be added."""
        if edge.scratch < 0:
            sums = [n for n in edge.steps if self.steps[n].kind == "reduce"]
            edge.width = max(self.size(self.steps[number]) for number in sums)
            edge.scratch = self.more_scratch(edge.width * self.program.window).start
        first = edge.scratch + edge.next_step % self.program.window * edge.width
        return Span("scratch", first, first + self.size(step))

    def arriving(self, step: Instruction) -> Span:
        """Return where a message's elements belong; scratch if they are only forwarded."""
        if self.program.operation != "all_to_all":
            return self.place(step)
        chunk = self.program.chunks[step.first]
        if chunk.target == self.rank:
            return Span("out", chunk.place, chunk.place + chunk.size)
        free = self.free.get(chunk.size)
        self.passing[step.first] = free.pop() if free else self.more_scratch(chunk.size)
        return self.passing[step.first]

    def more_scratch(self, numel: int) -> Span:
        first, self.scratch_numel = self.scratch_numel, self.scratch_numel + numel
        return Span("scratch", first, first + numel)

    # ------------------------------------------------------------ elements

    def place(self, step: Instruction) -> Span:
        """Return the elements of an instruction's chunks."""
        chunks = self.program.chunks
        return Span("data", chunks[step.first].start, chunks[step.stop - 1].stop)

    def size(self, step: Instruction) -> int:
        return self.place(step).stop - self.place(step).start


def _touched_before(steps: tuple[Instruction, ...]) -> tuple[list[int], list[bool]]:
    """Find for each instruction the last earlier one that touches its chunks, or -1.

    The second list says whether those chunks were sent at most once before.
    """
    last: dict[int, int] = {}
    sent: dict[int, int] = {}
    after, alone = [], []
    for number, step in enumerate(steps):
        chunks = range(step.first, step.stop)
        after.append(max(last.get(chunk, -1) for chunk in chunks))
        alone.append(all(sent.get(chunk, 0) <= 1 for chunk in chunks))
        for chunk in chunks:
            last[chunk] = number
            sent[chunk] = sent.get(chunk, 0) + (step.kind == "send")
    return after, alone
