"""Runs programs of messages on processes.

Enters: a `MessageProgram`, the same on all ranks of a group, and this rank's data, flat. Leaves: a
handle at once; when it is done, the data are the operation's result.

A thread works through this rank's list in order, one program after the other. Receives are posted
up to a window ahead on every edge, so that a sender never waits for a rank that is busy adding;
what is to be added arrives in scratch memory of that window. A wait that takes too long ends with
an error that names its edge.

What was posted ahead may arrive at any moment. So a chunk is received in its own place only when
everything before it in the list that touches the chunk has been done; sends of it may still be
under way if there was one, since a result that holds this rank's part cannot arrive before that
part has left.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ProgramError, RankError
from shardwise.messages import Instruction, MessageProgram

__all__ = ["Handle", "Messenger"]

TIMEOUT_S = 300.0
TAG = 7_012  # apart from other point-to-point messages of the group


class Handle:
    """A program that runs."""

    def __init__(self, limit_s: float) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._limit_s = limit_s

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended; raises what failed."""
        limit = self._limit_s if timeout_s is None else timeout_s
        if not self._over.wait(limit):
            raise RankError(f"a collective is not over after {limit:g} s")
        if self._error is not None:
            raise self._error

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._over.set()


@dataclass(frozen=True, slots=True)
class _Job:
    program: MessageProgram
    data: Tensor
    out: Tensor
    handle: Handle


class Messenger:
    """Runs programs on a gloo group; all ranks start the same ones in the same order."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="messenger", daemon=True)
        self._thread.start()

    def start(self, program: MessageProgram, data: Tensor, out: Tensor | None = None) -> Handle:
        """Begin; `data` is this rank's, flat, and is changed in place.

        Of an all-gather it is the whole result, with this rank's elements in their place; of an
        all-to-all, `out` gets the result.
        """
        out = _checked(program, self.rank, self.num_ranks, data, out)
        handle = Handle(self.timeout_s * (1 + len(program.instructions[self.rank])))
        if self._failed is not None:
            handle._finish(self._failed)  # connections are in an unknown state
            return handle
        self._jobs.put(_Job(program, data, out, handle))
        return handle

    def run(self, program: MessageProgram, data: Tensor, out: Tensor | None = None) -> None:
        """Start, and wait until it is done."""
        self.start(program, data, out).wait()

    def close(self) -> None:
        """End the thread after what was started."""
        self._jobs.put(None)
        self._thread.join(self.timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            error: BaseException | None = self._failed
            if error is None:
                try:
                    _Run(self, job).run()
                except BaseException as problem:
                    error = self._failed = problem
            job.handle._finish(error)


@dataclass(slots=True)
class _Incoming:
    """One edge that leads here: its instructions, what is posted of them, and scratch."""

    steps: list[int] = field(default_factory=list)
    posted: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    next_step: int = 0
    scratch: Tensor | None = None


class _Run:
    """This rank's list of one program."""

    def __init__(self, messenger: Messenger, job: _Job) -> None:
        self.messenger, self.program = messenger, job.program
        self.data, self.out = job.data, job.out
        self.steps = job.program.instructions[messenger.rank]
        self.at = 0
        self.passing: dict[int, Tensor] = {}
        self.sending: dict[int, deque[tuple[Any, Instruction]]] = {}
        self.incoming: dict[int, _Incoming] = {}
        self.after, self.alone = _touched_before(self.steps)
        for number, step in enumerate(self.steps):
            if step.kind != "send":
                self.incoming.setdefault(step.peer, _Incoming()).steps.append(number)

    def run(self) -> None:
        """All instructions, then the sends that are still under way."""
        for number, step in enumerate(self.steps):
            self.at = number
            for peer in self.incoming:
                self.post(peer)
            if step.kind == "send":
                self.send(step)
            else:
                self.take(step)
        for peer, under_way in self.sending.items():
            while under_way:
                self.wait(under_way.popleft()[0], self.messenger.rank, peer)

    # ------------------------------------------------------------ sends

    def send(self, step: Instruction) -> None:
        """Start to send; before, wait for the first of a full window."""
        under_way = self.sending.setdefault(step.peer, deque())
        if len(under_way) >= self.program.window:
            self.wait(under_way.popleft()[0], self.messenger.rank, step.peer)
        view = self.passing.pop(step.first, None)
        if view is None:
            view = self.place(step, self.data)
        under_way.append((self.link(dist.isend, view, step.peer), step))

    def settle(self, step: Instruction) -> None:
        """Wait for sends of chunks that are about to change."""
        for peer, under_way in self.sending.items():
            last = 0
            for index, (_, sent) in enumerate(under_way, start=1):
                if sent.first < step.stop and step.first < sent.stop:
                    last = index
            for _ in range(last):
                self.wait(under_way.popleft()[0], self.messenger.rank, peer)

    # ------------------------------------------------------------ receives

    def post(self, peer: int) -> None:
        """Post receives from a rank, as far ahead as the window and earlier instructions allow."""
        edge = self.incoming[peer]
        while edge.next_step < len(edge.steps) and len(edge.posted) < self.program.window:
            number = edge.steps[edge.next_step]
            step = self.steps[number]
            if step.kind == "receive":
                if self.after[number] >= self.at or not (self.alone[number] or number == self.at):
                    return
                if not self.alone[number]:
                    self.settle(step)
                view = self.arriving(step)
            else:
                view = self.slot(edge, step)
            edge.posted.append((self.link(dist.irecv, view, peer), view))
            edge.next_step += 1

    def take(self, step: Instruction) -> None:
        """Wait for a message, and add it if it is to be added."""
        edge = self.incoming[step.peer]
        work, view = edge.posted.popleft()
        self.wait(work, step.peer, self.messenger.rank)
        if step.kind == "reduce":
            self.settle(step)
            self.place(step, self.data).add_(view)

    def slot(self, edge: _Incoming, step: Instruction) -> Tensor:
        """Scratch for a message that will be added."""
        window = self.program.window
        if edge.scratch is None:
            largest = max(self.size(self.steps[number]) for number in edge.steps)
            edge.scratch = self.data.new_empty(window * largest)
        width = edge.scratch.numel() // window
        first = edge.next_step % window * width
        return edge.scratch[first : first + self.size(step)]

    def arriving(self, step: Instruction) -> Tensor:
        """Where a message's elements belong; memory of its own if they are only passed on."""
        chunk = self.program.chunks[step.first]
        if self.program.operation != "all_to_all":
            return self.place(step, self.data)
        if chunk.target == self.messenger.rank:
            return self.out[chunk.place : chunk.place + chunk.size]
        self.passing[step.first] = self.data.new_empty(chunk.size)
        return self.passing[step.first]

    # ------------------------------------------------------------ elements and edges

    def place(self, step: Instruction, tensor: Tensor) -> Tensor:
        """The elements of an instruction's chunks."""
        chunks = self.program.chunks
        return tensor[chunks[step.first].start : chunks[step.stop - 1].stop]

    def size(self, step: Instruction) -> int:
        chunks = self.program.chunks
        return chunks[step.stop - 1].stop - chunks[step.first].start

    def link(self, function: Any, view: Tensor, peer: int) -> Any:
        group = self.messenger.group
        there = peer if group is None else dist.get_global_rank(group, peer)
        return function(view, there, group=group, tag=TAG)

    def wait(self, work: Any, sender: int, receiver: int) -> None:
        """Until a message has left or come; else the edge is named."""
        limit = self.messenger.timeout_s
        try:
            work.wait(timedelta(seconds=limit))
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"{self.program.operation}: no message from rank {sender} to rank {receiver} "
                f"within {limit:g} s, or their connection was lost",
                where=f"edge {sender} -> {receiver}, instruction {self.at} of {len(self.steps)} of "
                f"rank {self.messenger.rank}: {self.steps[self.at]}",
                hint=f"whether ranks {sender} and {receiver} still run, and reach each other",
            ) from error


def _touched_before(steps: tuple[Instruction, ...]) -> tuple[list[int], list[bool]]:
    """The last instruction before each that touches its chunks, or -1; whether those were sent
    at most once before.
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


def _checked(
    program: MessageProgram, rank: int, num_ranks: int, data: Tensor, out: Tensor | None
) -> Tensor:
    """The tensor for the result, if everything has its size."""
    if program.num_ranks != num_ranks:
        raise ProgramError(f"a program of {program.num_ranks} ranks on a group of {num_ranks}")
    if data.dim() != 1 or not data.is_contiguous() or data.numel() != program.numel:
        raise ProgramError(
            f"data of shape {tuple(data.shape)}, needs {program.numel} elements in a row",
            hint="tensor.view(-1)",
        )
    if program.operation != "all_to_all":
        return data
    needed = program.counts[rank] * num_ranks
    if out is None or out.shape != (needed,) or out.dtype != data.dtype:
        raise ProgramError(f"all_to_all needs `out` of {needed} elements of {data.dtype}")
    for chunk in program.chunks:
        if chunk.source == chunk.target == rank:
            out[chunk.place : chunk.place + chunk.size] = data[chunk.start : chunk.stop]
    return out
