"""Point-to-point messages of a step: routes, receives posted ahead, sends in the background.

A message is a `Transfer` of one micro-batch, forward (a value) or backward (its gradient).
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.runtime.collectives import CommunicationThread, Handle
from shardwise.runtime.mesh import TIME
from shardwise.runtime.parameters import torch_dtype
from shardwise.runtime.pipeline import PipelineSpec, TransferSpec
from shardwise.runtime.pipeline.transfers import Arrival, Holding, Route
from shardwise.runtime.tracing import Recorder
from shardwise.runtime.transport import Pending, Transport
from shardwise.schedules import Action

# A thread waits for sends, and the next action releases their memory. Sends of gloo cannot be
# polled, and waiting for them in the order of actions could block a rank that others wait for. The
# memory is released in the thread that allocated it, because profilers miss other frees.


class PendingSends:
    """Wait for sends in the background; `finish` waits for all of them."""

    def __init__(self) -> None:
        self._sends: deque[tuple[Handle, Sequence[Pending]]] = deque()
        self._thread: CommunicationThread | None = None

    def add(self, sends: Sequence[Pending], done: Callable[[], None] | None = None) -> None:
        """Take over some sends; call `done` after them."""

        def wait() -> None:
            for send in sends:
                send.wait()
            if done is not None:
                done()

        if all(send.is_done for send in sends):
            wait()
            return
        if self._thread is None:
            self._thread = CommunicationThread("sends")
        # No limit: the sends have the timeout of the process group.
        self._sends.append((self._thread.start(wait, math.inf), sends))

    def release(self) -> None:
        """Release the memory of completed sends, and raise the error of a failed one."""
        while self._sends and self._sends[0][0].done():
            self._sends.popleft()[0].wait()

    def finish(self) -> None:
        """Wait for all sends, and raise the error of a failed one."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def abandon(self) -> None:
        """Stop waiting after an error; open sends end with their timeout."""
        self._sends.clear()
        self._thread = None


LOOKAHEAD = 1  # actions whose receives are posted ahead of the one being computed
Message = tuple[int, int, bool]  # transfer, micro-batch, whether it goes back


class Exchange:
    """This rank's messages of one step after another."""

    def __init__(
        self,
        spec: PipelineSpec,
        rank: int,
        transport: Transport,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.spec, self.rank, self.transport = spec, rank, transport
        self.device, self.recorder = device, recorder
        self.into = _by_stage(spec.transfers, "target")
        self.out_of = _by_stage(spec.transfers, "source")
        self.sends = PendingSends()
        self._routes: dict[Message, Route] = {}
        self._arrivals: dict[Message, tuple[Arrival, int]] = {}
        self._local: dict[Message, Tensor] = {}  # messages to this rank itself
        self._steps = 0

    def begin(self) -> None:
        """Start a step."""
        self._steps += 1

    def finish(self) -> None:
        """Wait for all sends of a step."""
        self.sends.finish()

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._arrivals.clear()
        self._local.clear()
        self.sends.abandon()

    def post(self, actions: Sequence[Action], index: int) -> None:
        """Post the receives of an action and the next ones; release completed sends."""
        self.sends.release()
        for action in actions[index : index + 1 + LOOKAHEAD]:
            if action.kind == "W":
                continue
            back = action.kind != "F"
            transfers = (self.out_of if back else self.into).get(action.stage, ())
            for number, transfer in transfers:
                message = (number, action.microbatch, back)
                if (back and not transfer.gradient) or message in self._arrivals:
                    continue
                if not self._route(message).is_local:
                    self._arrivals[message] = self._receive(message)

    def send(self, tensor: Tensor, message: Message) -> None:
        """Start to send; a message to this rank itself is stored."""
        route = self._route(message)
        if route.is_local:
            self._local[message] = tensor.detach()
            return
        if any(piece.peer == self.rank for piece in route.sends):
            self._local[message] = route.own(tensor)
        start, done = time.perf_counter_ns(), None
        sends = route.send(self.transport, tensor, self._tag(message))
        if sends and self.recorder.enabled:
            done = functools.partial(self._record, "send", message, start)
        self.sends.add(sends, done)

    def arrived(self, message: Message) -> Tensor:
        """Wait for a message and return it."""
        route = self._route(message)
        own = self._local.pop(message, None)
        if route.is_local:
            assert own is not None
            return own
        arrival, start = self._arrivals.pop(message)
        arrived = arrival.wait(own)
        if self.recorder.enabled and route.receives:
            self._record("receive", message, start)
        return arrived

    def share(
        self,
        stage: int,
        tensor: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        number: int,
    ) -> Tensor:
        """Return a full tensor of one stage on all ranks; `number` identifies the message."""
        tag = 2 * len(self.spec.transfers) * self.spec.num_microbatches + number
        holders = self.spec.stages[stage].ranks
        others = [r for ranks in self.spec.groups for r in ranks if r not in holders]
        if self.rank not in holders:
            out = torch.empty(shape, dtype=dtype, device=self.device)
            source = holders[others.index(self.rank) % len(holders)]
            return self.transport.receive(out.view(-1), source, tag).wait().view(shape)
        assert tensor is not None
        flat = tensor.detach().to(dtype).reshape(-1).contiguous()
        for turn, other in enumerate(others):
            if holders[turn % len(holders)] == self.rank:
                self.sends.add([self.transport.send(flat, other, tag)])
        return tensor.detach()

    def _route(self, message: Message) -> Route:
        if message not in self._routes:
            index, k, back = message
            transfer = self.spec.transfers[index]
            place = {TIME: (k, self.spec.num_microbatches)} if self.spec.timed else {}
            pair = ((transfer.source, transfer.sent), (transfer.target, transfer.received))
            ends = []
            for stage, splits in reversed(pair) if back else pair:
                ranks, axes = self.spec.stages[stage].ranks, self.spec.stages[stage].axes
                ends.append(Holding(ranks, axes, transfer.shape, splits, place))
            self._routes[message] = Route(self.rank, *ends)
        return self._routes[message]

    def _tag(self, message: Message) -> int:
        index, k, back = message
        return (2 * index + back) * self.spec.num_microbatches + k

    def _receive(self, message: Message) -> tuple[Arrival, int]:
        start = time.perf_counter_ns()
        dtype = torch_dtype(self.spec.transfers[message[0]].dtype)
        route = self._route(message)
        return route.receive(self.transport, dtype, self.device, self._tag(message)), start

    def _record(self, what: str, message: Message, start: int) -> None:
        """Record a send or receive that began at `start` and ends now."""
        index, k, back = message
        self.recorder.add(
            "communication",
            f"{what} {'gradient of ' * back}{self.spec.transfers[index].value}",
            start,
            time.perf_counter_ns(),
            microbatch=k,
            transfer=f"{self._steps}.{self._tag(message)}",
        )


def _by_stage(
    transfers: Sequence[TransferSpec], end: str
) -> dict[int, list[tuple[int, TransferSpec]]]:
    result: dict[int, list[tuple[int, TransferSpec]]] = {}
    for index, transfer in enumerate(transfers):
        result.setdefault(getattr(transfer, end), []).append((index, transfer))
    return result
