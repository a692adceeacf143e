"""Run programs of messages on processes.

A thread works through this rank's programs one after the other: over gloo message by message
(`script`), over NCCL in rounds (`rounds`). A wait that takes too long ends with an error that names
the edge which is the cause, on every rank that waits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.messages import MessageProgram
from shardwise.errors import LinkError, ProgramError, RankError
from shardwise.runtime.collectives import CommunicationThread, Handle
from shardwise.runtime.collectives.script import (
    Act,
    Exchange,
    Rounds,
    Script,
    batches,
    run_rounds,
    write_rounds,
    write_script,
)
from shardwise.runtime.failures import StallDetector, Wait

# Running a rank's script over gloo, message by message. Only this rank's own waits are known here;
# which edge is the cause, `StallDetector` finds together with the other ranks.


TAG = 7_012
_HANG_UP_TAG = 7_013  # of a message that nobody sends


class Links(Protocol):
    """Sends and receives between ranks, as gloo has them."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


class EdgeLost(Exception):
    """What a rank waited for, for one of its instructions, neither left nor came."""

    def __init__(self, wait: Wait, number: int) -> None:
        super().__init__(f"edge {wait.edge[0]} -> {wait.edge[1]}, instruction {number}")
        self.wait, self.number = wait, number


def run_script(
    script: Script,
    memory: Mapping[str, Tensor],
    links: Links,
    rank: int,
    timeout_s: float,
) -> None:
    """Run all acts, then wait for the sends that are still in flight."""
    posted: dict[int, deque[Any]] = {peer: deque() for peer in script.peers}
    sends: list[tuple[Any, int] | None] = []
    limit = timedelta(seconds=timeout_s)
    at = begun = 0
    try:
        for begun, act in enumerate(script.acts):
            at = begun
            kind, _, peer, (where, start, stop), place, order = act
            if kind == "take":
                posted[peer].popleft().wait(limit)
                if place is not None:
                    own = memory[place.memory][place.start : place.stop]
                    own.add_(memory[where][start:stop])
            elif kind == "post":
                posted[peer].append(links.recv([memory[where][start:stop]], peer, TAG))
            elif kind == "send":
                sends.append((links.send([memory[where][start:stop]], peer, TAG), at))
            elif (result := sends[order]) is not None:
                result[0].wait(limit)
                sends[order] = None
        begun = len(script.acts)
        for result in sends:
            if result is not None:
                work, at = result
                work.wait(limit)
    except (RuntimeError, ValueError) as error:
        raise _lost(script, rank, at, begun) from error


def _lost(script: Script, rank: int, at: int, ended: int) -> EdgeLost:
    """Return what act `at` waited for when the acts before `ended` had begun."""
    act, begun = script.acts[at], script.acts[:ended]
    sent = dict(Counter(a.peer for a in begun if a.kind == "send"))
    posted = dict(Counter(a.peer for a in begun if a.kind == "post"))
    if act.kind in ("send", "settle"):
        edge = rank, act.peer
        earlier = [a for a in script.acts if a.kind == "send" and a.order < act.order]
    else:
        edge = act.peer, rank
        earlier = [a for a in script.acts[:at] if a.kind == "take"]
    message = sum(a.peer == act.peer for a in earlier)
    return EdgeLost(Wait(edge=edge, message=message, sent=sent, posted=posted), act.number)


def hang_up(links: Links) -> None:
    """Close this rank's connections, so that nobody waits for it any longer.

    gloo has no call for that, but closes all connections when one wait is too long.
    """
    try:
        work = links.recv([torch.empty(1)], (links.rank() + 1) % links.size(), _HANG_UP_TAG)
        work.wait(timedelta(milliseconds=1))
    except (RuntimeError, ValueError):
        return


# Running rounds of messages on a GPU's stream, over NCCL. All rounds are enqueued at once; then
# this thread polls how far the stream has come. NCCL does not say which message it waits for: of a
# round that does not finish in time, the first receive is named, else the first send.


POLL_S = 100e-6


def run_on_stream(
    rounds: Rounds,
    memory: Mapping[str, Tensor],
    exchange: Exchange,
    *,
    rank: int,
    timeout_s: float,
) -> None:
    """Run all rounds after the current stream's work; return when the device has finished them."""
    device = memory["data"].device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ends: list[tuple[tuple[Act, ...], torch.cuda.Event]] = []
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run_rounds(
            rounds,
            memory,
            exchange,
            after=lambda acts: ends.append((acts, stream.record_event())),
        )
    for acts, end in ends:
        deadline = time.monotonic() + timeout_s
        while not end.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise lost_edge(acts, rank)
            time.sleep(POLL_S)


def lost_edge(acts: Sequence[Act], rank: int) -> EdgeLost:
    """Return the edge to name when a round does not finish."""
    act = next((act for act in acts if act.kind == "take"), acts[0])
    ends = (act.peer, rank) if act.kind == "take" else (rank, act.peer)
    return EdgeLost(Wait(edge=ends, sent={}, posted={}), act.number)


TIMEOUT_S = 300.0
MEET_S = 60.0  # ranks may come later to make a messenger than to use it
KEPT_SCRIPTS = 256
BACKENDS = ("gloo", "nccl")
_made: Counter[str] = Counter()  # messengers of each group, so that each has a name


class Messenger:
    """Runs programs on the ranks of a group; all of them start the same ones in the same order.

    Over gloo it has connections of its own, which are lost with the first error. All ranks of the
    group make one at the same time.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.backend = _backend(group)
        self.timeout_s = timeout_s
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.num_ranks = len(self.ranks)
        self.group = group
        _made[group.group_name] += 1
        name = f"{group.group_name}/{_made[group.group_name]}"
        self._links: Links | None = None
        if self._is_gloo:
            self._links = _connect(name, self.rank, self.ranks, timeout_s)
        self._stalls = StallDetector(name, self.rank, self.num_ranks)
        self._ready: dict[int, tuple[MessageProgram, Script | Rounds]] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._thread = CommunicationThread("messenger")

    @property
    def _is_gloo(self) -> bool:
        return self.backend == "gloo"

    def start(self, program: MessageProgram, data: Tensor, out: Tensor | None = None) -> Handle:
        """Begin; `data` is this rank's, in any shape, and is changed in place.

        Of an all-gather it is the whole result, with this rank's elements in their place; of an
        all-to-all, `out` gets the result. Both must be left alone until the handle is done.
        """
        self._check(program, data, out)
        begun = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        limit = self.timeout_s * (3 + len(program.instructions[self.rank]))
        return self._thread.start(lambda: self._do(program, data, out, begun), limit)

    def run(self, program: MessageProgram, data: Tensor, out: Tensor | None = None) -> None:
        """Start, and wait until it is done."""
        self.start(program, data, out).wait()

    def close(self) -> None:
        """End after what was started, and give its connections back."""
        if self._thread.close(self.timeout_s):
            self._links = None

    @torch.no_grad()
    def _do(
        self,
        program: MessageProgram,
        data: Tensor,
        out: Tensor | None,
        begun: torch.cuda.Event | None,
    ) -> None:
        if begun is not None:
            begun.synchronize()
        flat = data.detach().contiguous().view(-1)
        result = flat if out is None else out.detach().view(-1)
        if program.operation == "all_to_all":
            _keep_own(program, self.rank, flat, result)
        ready = self._made_ready(program)
        scratch = self._some_scratch(flat, ready.scratch_numel)
        memory = {"data": flat, "out": result, "scratch": scratch}
        try:
            if isinstance(ready, Script):
                assert self._links is not None
                run_script(ready, memory, self._links, self.rank, self.timeout_s)
            else:
                run_on_stream(
                    ready,
                    memory,
                    batches(self.group),
                    rank=self.rank,
                    timeout_s=self.timeout_s,
                )
        except EdgeLost as lost:
            raise self._named(program, lost) from lost.__cause__
        if flat.data_ptr() != data.data_ptr():
            data.detach().copy_(flat.view(data.shape))
            if data.is_cuda:
                torch.cuda.current_stream(data.device).synchronize()

    def _made_ready(self, program: MessageProgram) -> Script | Rounds:
        result = self._ready.get(id(program))
        if result is None:
            while len(self._ready) >= KEPT_SCRIPTS:
                del self._ready[next(iter(self._ready))]
            write = write_script if self._is_gloo else write_rounds
            result = self._ready[id(program)] = program, write(program, self.rank)
        return result[1]

    def _some_scratch(self, like: Tensor, numel: int) -> Tensor:
        key = like.dtype, like.device
        held = self._scratch.get(key)
        if held is None or held.numel() < numel:
            held = self._scratch[key] = like.new_empty(numel)
        return held

    def _named(self, program: MessageProgram, lost: EdgeLost) -> LinkError:
        """Return the error that all waiting ranks raise, with the edge that is the cause."""
        edge = lost.wait.edge
        cause = self._stalls.find_edge(lost.wait, self._hang_up)
        sender, receiver = (self.ranks[end] for end in cause)
        steps = program.instructions[self.rank]
        saw = f"edge {self.ranks[edge[0]]} -> {self.ranks[edge[1]]}, " if cause != edge else ""
        return LinkError(
            f"{program.operation}: no message from rank {sender} to rank {receiver} "
            f"within {self.timeout_s:g} s, or their connection was lost",
            edges=[(sender, receiver)],
            where=f"rank {self.ranks[self.rank]} waited at {saw}instruction {lost.number} of "
            f"{len(steps)}: {steps[lost.number]}",
            hint=f"whether ranks {sender} and {receiver} still run, and reach each other",
        )

    def _hang_up(self) -> None:
        if self._links is not None:
            hang_up(self._links)

    def _check(self, program: MessageProgram, data: Tensor, out: Tensor | None) -> None:
        """Check sizes, device and dtype of the tensors."""
        if program.num_ranks != self.num_ranks:
            raise ProgramError(
                f"a program of {program.num_ranks} ranks on a group of {self.num_ranks}"
            )
        if data.numel() != program.numel:
            raise ProgramError(f"data of shape {tuple(data.shape)}, needs {program.numel} elements")
        kind = "cuda" if self.backend == "nccl" else "cpu"
        if data.device.type != kind:
            raise ProgramError(
                f"data on {data.device} over {self.backend}", hint=f"tensor.to({kind!r})"
            )
        sums = program.operation in ("all_reduce", "reduce_scatter", "reduce")
        if sums and data.dtype.is_floating_point and data.dtype.itemsize < 2:
            raise ProgramError(f"no sums of {data.dtype}", hint="tensor.to(torch.float32)")
        if program.operation == "all_to_all":
            needed = program.counts[self.rank] * self.num_ranks
            if out is None or out.numel() != needed or out.dtype != data.dtype:
                raise ProgramError(f"all_to_all needs `out` of {needed} elements of {data.dtype}")
            if not out.is_contiguous():
                raise ProgramError("`out` is not contiguous", hint="torch.empty(numel)")


def _backend(group: dist.ProcessGroup) -> str:
    result = str(dist.get_backend(group))
    if result not in BACKENDS:
        raise RankError(
            f"messages over {result!r} are not known",
            hint=f"a group of {' or '.join(BACKENDS)}: dist.new_group(backend='gloo')",
        )
    return result


def _connect(name: str, rank: int, ranks: list[int], timeout_s: float) -> Links:
    """Open gloo connections between these ranks that nobody else uses."""
    limit_s = max(timeout_s, MEET_S)
    c10d: Any = torch.distributed.distributed_c10d
    store = c10d._get_default_store().clone()  # another user's wait would hold this one up
    store.set_timeout(timedelta(seconds=limit_s))
    meeting = c10d.PrefixStore(f"shardwise/messenger/{name}", store)
    try:
        made: Links = c10d.ProcessGroupGloo(meeting, rank, len(ranks), timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise RankError(
            f"ranks {ranks} did not connect within {limit_s:g} s: {str(error).splitlines()[0]}",
            hint="all ranks of the group make their messenger at the same time",
        ) from error
    return made


def _keep_own(program: MessageProgram, rank: int, data: Tensor, out: Tensor) -> None:
    """Copy the elements of an all-to-all that stay on this rank."""
    for chunk in program.chunks:
        if chunk.source == chunk.target == rank:
            out[chunk.place : chunk.place + chunk.size] = data[chunk.start : chunk.stop]
