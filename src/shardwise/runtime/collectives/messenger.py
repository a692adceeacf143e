"""Run programs of messages on processes.

A thread runs this rank's programs one after the other over gloo, message by message. Over NCCL a
program is started in rounds (see `script`) by the thread that asks for it, because all ranks must
start the operations of a communicator in the same order; the messenger's thread only watches it. A
wait that takes too long ends with an error that names the edge at fault, on every waiting rank.
"""

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
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
    Rounds,
    Script,
    batches,
    run_rounds,
    write_rounds,
    write_script,
)
from shardwise.runtime.failures import StallDetector, Wait

# Running a rank's script over gloo, message by message. A rank knows only its own waits;
# `StallDetector` finds the edge at fault together with the other ranks.


TAG = 7_012
_HANG_UP_TAG = 7_013  # of a message that is never sent


class Links(Protocol):
    """The sends and receives of a gloo process group."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any: ...


class EdgeLost(Exception):
    """A message of one of a rank's instructions was not transferred in time."""

    def __init__(self, wait: Wait, number: int) -> None:
        super().__init__(f"edge {wait.edge[0]} -> {wait.edge[1]}, instruction {number}")
        self.wait, self.number = wait, number


def run_script(
    script: Script, memory: Mapping[str, Tensor], links: Links, rank: int, timeout_s: float
) -> None:
    """Run all acts, then wait for the sends that are still in flight."""
    posted: defaultdict[int, deque[Any]] = defaultdict(deque)
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
            elif (send := sends[order]) is not None:
                send[0].wait(limit)
                sends[order] = None
        begun = len(script.acts)
        for send in sends:
            if send is not None:
                request, at = send
                request.wait(limit)
    except (RuntimeError, ValueError) as error:
        raise _lost(script, rank, at, begun) from error


def _lost(script: Script, rank: int, at: int, ended: int) -> EdgeLost:
    """Return the error of a wait of act `at`, when the acts before `ended` had begun."""
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


# Running rounds of messages on a GPU's stream, over NCCL. All rounds are enqueued at once; then
# a thread polls the progress of the stream. NCCL does not report which message it waits for: if
# a round does not finish in time, the error names its first receive, else its first send.


POLL_S = 100e-6
Ends = list[tuple[tuple[Act, ...], torch.cuda.Event]]

TIMEOUT_S = 300.0
MEET_S = 60.0  # ranks may create a messenger at more different times than they use it
MAX_SCRIPTS = 256  # in the cache of prepared programs
BACKENDS = ("gloo", "nccl")
_num_messengers: Counter[str] = Counter()  # of each group, so that each has a unique name


class Messenger:
    """Run programs on the ranks of a group, which all start the same ones in the same order.

    Over gloo it has separate connections, which are lost with the first error. All ranks of the
    group create their messengers at the same time.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.backend = str(dist.get_backend(group))
        if self.backend not in BACKENDS:
            raise RankError(
                f"messages over {self.backend!r} are not supported",
                hint=f"a group of {' or '.join(BACKENDS)}: dist.new_group(backend='gloo')",
            )
        self.timeout_s = timeout_s
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.num_ranks = len(self.ranks)
        self.group = group
        _num_messengers[group.group_name] += 1
        name = f"{group.group_name}/{_num_messengers[group.group_name]}"
        is_gloo = self.backend == "gloo"
        self._links = _connect(name, self.rank, self.ranks, timeout_s) if is_gloo else None
        self._stalls = StallDetector(name, self.rank, self.num_ranks)
        # Keyed by identity, which is fast; the program is stored so that its id stays unique.
        self._prepared: dict[int, tuple[MessageProgram, Script | Rounds]] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # of all programs
        self._thread = CommunicationThread("messenger")
        self._stream: torch.cuda.Stream | None = None
        if not is_gloo:
            # NCCL creates a communicator when all of its ranks use it, a round has only some.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    def start(self, program: MessageProgram, data: Tensor) -> Handle:
        """Start a program on this rank's `data`, which has any shape and is changed in place.

        For an all-gather it is the full result, with this rank's elements in place. It must not be
        used until the handle is done.
        """
        self._check(program, data)
        limit = self.timeout_s * (3 + len(program.instructions[self.rank]))
        if self.backend == "gloo":
            return self._thread.start(lambda: self._run(program, data), limit)
        if self._stream is None:
            self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        if self._thread.failed is None:
            ends, memory = self._enqueue(program, data, self._stream)
        else:  # the thread raises the earlier error
            ends, memory = [], {}
        return self._thread.start(lambda: self._watch(program, ends, memory), limit)

    def run(self, program: MessageProgram, data: Tensor) -> None:
        """Start a program and wait until it is done."""
        self.start(program, data).wait()

    def close(self) -> None:
        """End after the programs started so far, and release the connections."""
        if self._thread.close(self.timeout_s):
            self._links = None

    @torch.no_grad()
    def _run(self, program: MessageProgram, data: Tensor) -> None:
        prepared, memory = self._memory(program, data)
        assert isinstance(prepared, Script)
        assert self._links is not None
        try:
            run_script(prepared, memory, self._links, self.rank, self.timeout_s)
        except EdgeLost as lost:
            raise self._link_error(program, lost) from lost.__cause__
        _copy_back(memory["data"], data)

    @torch.no_grad()
    def _enqueue(
        self, program: MessageProgram, data: Tensor, stream: torch.cuda.Stream
    ) -> tuple[Ends, dict[str, Tensor]]:
        """Enqueue a program after the current stream's work.

        Return the end of each round, and the memory to keep until then.
        """
        prepared, memory = self._memory(program, data)
        assert isinstance(prepared, Rounds)
        ends: Ends = []
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            exchange = batches(self.group)
            run_rounds(
                prepared, memory, exchange, lambda acts: ends.append((acts, stream.record_event()))
            )
            _copy_back(memory["data"], data)
            ends += [(acts, stream.record_event()) for acts, _ in ends[-1:]]
        return ends, memory

    def _watch(self, program: MessageProgram, ends: Ends, memory: Mapping[str, Tensor]) -> None:
        """Wait for the ends of a program, whose memory stays allocated until then."""
        for acts, end in ends:
            deadline = time.monotonic() + self.timeout_s
            while not end.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    act = next((act for act in acts if act.kind == "take"), acts[0])
                    edge = (act.peer, self.rank) if act.kind == "take" else (self.rank, act.peer)
                    wait = Wait(edge=edge, sent={}, posted={})
                    raise self._link_error(program, EdgeLost(wait, act.number))
                time.sleep(POLL_S)

    def _memory(
        self, program: MessageProgram, data: Tensor
    ) -> tuple[Script | Rounds, dict[str, Tensor]]:
        """Return the prepared program, and its memory by name."""
        if id(program) not in self._prepared:
            while len(self._prepared) >= MAX_SCRIPTS:
                del self._prepared[next(iter(self._prepared))]
            write = write_script if self.backend == "gloo" else write_rounds
            self._prepared[id(program)] = program, write(program, self.rank)
        prepared = self._prepared[id(program)][1]
        scratch = self._scratch.get((data.dtype, data.device))
        if scratch is None or scratch.numel() < prepared.scratch_numel:
            scratch = data.new_empty(prepared.scratch_numel)
            self._scratch[data.dtype, data.device] = scratch
        return prepared, {"data": data.detach().contiguous().view(-1), "scratch": scratch}

    def _link_error(self, program: MessageProgram, lost: EdgeLost) -> LinkError:
        """Return the error that all waiting ranks raise, with the edge at fault."""
        edge = lost.wait.edge
        cause = self._stalls.find_edge(lost.wait, self._hang_up)
        sender, receiver = (self.ranks[end] for end in cause)
        steps = program.instructions[self.rank]
        own = f"edge {self.ranks[edge[0]]} -> {self.ranks[edge[1]]}, " if cause != edge else ""
        return LinkError(
            f"{program.operation}: no message from rank {sender} to rank {receiver} "
            f"within {self.timeout_s:g} s, or their connection was lost",
            edges=[(sender, receiver)],
            where=f"rank {self.ranks[self.rank]} waited at {own}instruction {lost.number} of "
            f"{len(steps)}: {steps[lost.number]}",
            hint=f"check that ranks {sender} and {receiver} run and can reach each other",
        )

    def _hang_up(self) -> None:
        """Close this rank's connections, so that other ranks stop waiting for it.

        gloo has no call for that, but closes all connections when a wait times out.
        """
        if self._links is not None:
            peer = (self.rank + 1) % self.num_ranks
            with contextlib.suppress(RuntimeError, ValueError):
                work = self._links.recv([torch.empty(1)], peer, _HANG_UP_TAG)
                work.wait(timedelta(milliseconds=1))

    def _check(self, program: MessageProgram, data: Tensor) -> None:
        """Check sizes, device and dtype of the tensors."""
        if program.num_ranks != self.num_ranks:
            raise ProgramError(
                f"a program for {program.num_ranks} ranks on a group of {self.num_ranks}"
            )
        if data.numel() != program.numel:
            raise ProgramError(
                f"data of shape {tuple(data.shape)} for a program of {program.numel} elements"
            )
        kind = "cuda" if self.backend == "nccl" else "cpu"
        if data.device.type != kind:
            raise ProgramError(
                f"data on {data.device} over {self.backend}", hint=f"tensor.to({kind!r})"
            )
        sums = program.operation in ("all_reduce", "reduce_scatter", "reduce")
        if sums and data.dtype.is_floating_point and data.dtype.itemsize < 2:
            raise ProgramError(f"cannot sum {data.dtype}", hint="tensor.to(torch.float32)")


def _copy_back(flat: Tensor, data: Tensor) -> None:
    """Write the result into tensors that are not contiguous."""
    if flat.data_ptr() != data.data_ptr():
        data.detach().copy_(flat.view(data.shape))


def _connect(name: str, rank: int, ranks: list[int], timeout_s: float) -> Links:
    """Open gloo connections between these ranks that nobody else uses."""
    limit_s = max(timeout_s, MEET_S)
    c10d: Any = torch.distributed.distributed_c10d
    store = c10d._get_default_store().clone()  # a connection serves one request at a time
    store.set_timeout(timedelta(seconds=limit_s))
    prefixed = c10d.PrefixStore(f"shardwise/messenger/{name}", store)
    try:
        links: Links = c10d.ProcessGroupGloo(prefixed, rank, len(ranks), timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise RankError(
            f"ranks {ranks} did not connect within {limit_s:g} s: {str(error).splitlines()[0]}",
            hint="create the messenger on all ranks of the group at the same time",
        ) from error
    return links
