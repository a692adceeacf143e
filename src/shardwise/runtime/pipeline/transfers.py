"""Transfer values between stages: layouts, routes, messages of a step, and tied parameters.

The two stages of a transfer hold the value in different layouts: sharded on some mesh axes,
replicated on others. A rank receives each part from one rank that holds it; if several do,
receivers take turns among them. A gradient takes the same route back. A message is the transfer of
one micro-batch, forward (a value) or backward (its gradient); receives are posted ahead, and sends
run in the background.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.runtime.collectives import CommunicationThread, Handle
from shardwise.runtime.mesh import TIME, coordinates
from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.pipeline import PipelineSpec, TiedSpec, TransferSpec
from shardwise.runtime.splits import Runs, Split, local_runs, local_shape
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tracing import Recorder
from shardwise.runtime.transport import Pending, Transport
from shardwise.schedules import Action
from shardwise.shares import AxisSize


@dataclass(frozen=True, slots=True)
class Holding:
    """The layout of a value on the ranks of a mesh; `place` is their micro-batch."""

    ranks: tuple[int, ...]
    axes: Mapping[str, AxisSize]
    shape: tuple[int, ...]
    splits: tuple[Split, ...]
    place: Mapping[str, tuple[int, AxisSize]]  # axis -> index, size

    def runs(self, rank: int) -> tuple[Runs, ...]:
        """Return the ranges that `rank` holds of every dim."""
        return local_runs(self.shape, self.splits, *self._at(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that `rank` holds."""
        return local_shape(self.shape, self.splits, *self._at(rank))

    def _at(self, rank: int) -> tuple[dict[str, int], dict[str, AxisSize]]:
        coords = coordinates(self.axes, self.ranks.index(rank))
        sizes = dict(self.axes)
        for axis, (index, size) in self.place.items():
            coords[axis], sizes[axis] = index, size
        return coords, sizes


Box = tuple[tuple[int, int], ...]  # start in a local tensor and length, for every dim


@dataclass(frozen=True, slots=True)
class Piece:
    """A message between this rank and `peer`: boxes of the local tensor.

    Without boxes it is the full local tensor.
    """

    peer: int
    boxes: tuple[Box, ...] = ()

    def take(self, local: Tensor) -> Tensor:
        """Return the piece as a flat tensor."""
        if not self.boxes:
            return local.contiguous().view(-1)
        return torch.cat([_narrow(local, box).reshape(-1) for box in self.boxes])

    def put(self, local: Tensor, flat: Tensor) -> None:
        """Write a received piece into its place."""
        start = 0
        for box in self.boxes:
            target = _narrow(local, box)
            target.copy_(flat[start : start + target.numel()].view(target.shape))
            start += target.numel()

    def numel(self, local: Tensor) -> int:
        if not self.boxes:
            return local.numel()
        return sum(torch.Size([n for _, n in box]).numel() for box in self.boxes)


def _narrow(local: Tensor, box: Box) -> Tensor:
    for dim, (start, length) in enumerate(box):
        local = local.narrow(dim, start, length)
    return local


class Route:
    """The messages of this rank when a value is transferred from one holding to another."""

    def __init__(self, rank: int, source: Holding, target: Holding) -> None:
        self.rank, self.target = rank, target
        self.receives = _pieces(source, target, rank) if rank in target.ranks else []
        self.sends: list[Piece] = []
        if rank in source.ranks:
            for peer in target.ranks:
                for piece in _pieces(source, target, peer):
                    if piece.peer == rank:
                        self.sends.append(_mirrored(source, target, rank, peer))

    @property
    def is_local(self) -> bool:
        """Whether this rank has all that it needs, and sends nothing to other ranks."""
        full = [Piece(self.rank)]
        return self.receives == full and self.sends == full

    def send(self, transport: Transport, local: Tensor, tag: int) -> list[Pending]:
        """Start to send the pieces that other ranks need."""
        sent = []
        for piece in self.sends:
            if piece.peer != self.rank:
                sent.append(transport.send(piece.take(local.detach()), piece.peer, tag))
        return sent

    def receive(
        self, transport: Transport, dtype: torch.dtype, device: torch.device, tag: int
    ) -> Arrival:
        """Start to receive this rank's part."""
        local = torch.empty(self.target.local_shape(self.rank), dtype=dtype, device=device)
        waiting = []
        for piece in self.receives:
            if piece.peer == self.rank:
                continue
            flat = local.view(-1) if not piece.boxes else local.new_empty(piece.numel(local))
            waiting.append((piece, transport.receive(flat, piece.peer, tag)))
        return Arrival(local, waiting, [p for p in self.receives if p.peer == self.rank])

    def own(self, local: Tensor) -> Tensor:
        """Return this rank's pieces for itself, as one message."""
        own = [piece for piece in self.sends if piece.peer == self.rank]
        return torch.cat([piece.take(local.detach()) for piece in own])


@dataclass(slots=True)
class Arrival:
    """A local tensor whose pieces are in flight."""

    local: Tensor
    waiting: list[tuple[Piece, Pending]]
    own: list[Piece]

    def wait(self, own: Tensor | None = None) -> Tensor:
        """Wait for all pieces and return the tensor; `own` is this rank's message to itself."""
        for piece, pending in self.waiting:
            flat = pending.wait()
            if piece.boxes:
                piece.put(self.local, flat)
        for piece in self.own:
            assert own is not None
            if piece.boxes:
                piece.put(self.local, own)
            else:
                self.local.view(-1).copy_(own)
        return self.local


def _pieces(source: Holding, target: Holding, rank: int) -> list[Piece]:
    """Return the pieces of `rank`'s part, in coordinates of its local tensor."""
    own = target.runs(rank)
    holders: dict[tuple[Runs, ...], list[int]] = {}
    for other in source.ranks:
        holders.setdefault(source.runs(other), []).append(other)
    turn = target.ranks.index(rank)
    pieces = []
    for remote, ranks in holders.items():
        peer = rank if rank in ranks else ranks[turn % len(ranks)]
        if remote == own:
            empty = any(not dim for dim in own)
            return [] if empty else [Piece(peer)]
        boxes = _overlap(remote, own)[1]
        if boxes:
            pieces.append(Piece(peer, boxes))
    return pieces


def _mirrored(source: Holding, target: Holding, rank: int, peer: int) -> Piece:
    """Return the piece that `rank` sends to `peer`, in coordinates of its local tensor."""
    remote, own = target.runs(peer), source.runs(rank)
    if remote == own:
        return Piece(peer)
    return Piece(peer, _overlap(own, remote)[0])


def _overlap(a: Sequence[Runs], b: Sequence[Runs]) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """Return the boxes that both hold, in the local coordinates of either, in the same order."""
    dims = [_common(x, y) for x, y in zip(a, b, strict=True)]
    boxes = list(itertools.product(*dims))
    return (
        tuple(tuple((p, n) for p, _, n in box) for box in boxes),
        tuple(tuple((q, n) for _, q, n in box) for box in boxes),
    )


def _common(a: Runs, b: Runs) -> list[tuple[int, int, int]]:
    """Return (offset in a, offset in b, length) of the ranges that two lists of runs share."""
    result = []
    offset_a = 0
    for start, length in a:
        offset_b = 0
        for begin, size in b:
            low, high = max(start, begin), min(start + length, begin + size)
            if low < high:
                result.append((offset_a + low - start, offset_b + low - begin, high - low))
            offset_b += size
        offset_a += length
    return result


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


# The first stage that uses a parameter owns it; the others hold replicas. After a backward they
# send their gradients to the owner, which adds them; after an optimizer step the owner sends the
# new value.


_TAGS = 1 << 20  # above the tags of micro-batches


class TiedParameters:
    """Exchange the gradients and values of parameters of several stages."""

    def __init__(self, spec: PipelineSpec, store: ParameterStore, rank: int) -> None:
        self.store, self.rank = store, rank
        self._links: list[tuple[TiedSpec, Holding, Holding, int]] = []
        number = 0
        for tied in spec.tied:
            groups: dict[tuple[int, ...], Holding] = {}
            for stage, splits in zip(tied.stages, tied.splits, strict=True):
                ranks, axes = spec.stages[stage].ranks, spec.stages[stage].axes
                groups.setdefault(ranks, Holding(ranks, axes, tied.shape, splits, {}))
            owner, *others = groups.values()
            for other in others:
                self._links.append((tied, owner, other, _TAGS + 2 * number))
                number += 1
        if self._links:
            store.after_update.append(self.share_values)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of replicas to those of owners; all ranks call it after a step."""

        def gradient(entry: Entry, dtype: torch.dtype) -> Tensor:
            grad = self.store.gradient(entry)
            if grad is None:
                return torch.zeros(entry.local_shape, dtype=dtype, device=self.store.device)
            return grad.to(dtype)

        links = [(t, other, owner, tag) for t, owner, other, tag in self._links if t.trained]
        self._exchange(links, gradient, self.store.add_to_gradient)

    @torch.no_grad()
    def share_values(self) -> None:
        """Send the values of owners to replicas; all ranks call it after an update."""

        def value(entry: Entry, dtype: torch.dtype) -> Tensor:
            return self.store.local_value(entry).to(dtype).contiguous()

        links = [(t, owner, other, tag + 1) for t, owner, other, tag in self._links]
        self._exchange(links, value, self.store.set_local)

    def _exchange(
        self,
        links: Sequence[tuple[TiedSpec, Holding, Holding, int]],
        read: Callable[[Entry, torch.dtype], Tensor],
        write: Callable[[Entry, Tensor], object],
    ) -> None:
        """Send what `read` returns from each link's first holding; `write` it on the second."""
        store, sends, arrivals = self.store, [], []
        for tied, source, target, tag in links:
            if self.rank not in (*source.ranks, *target.ranks):
                continue
            route = Route(self.rank, source, target)
            entry, dtype = store.entry(tied.name), torch_dtype(tied.dtype)
            if self.rank in source.ranks:
                sends += route.send(store.mesh.transport, read(entry, dtype), tag)
            else:
                arrival = route.receive(store.mesh.transport, dtype, store.device, tag)
                arrivals.append((entry, arrival))
        for entry, arrival in arrivals:
            write(entry, arrival.wait())
        for send in sends:
            send.wait()
