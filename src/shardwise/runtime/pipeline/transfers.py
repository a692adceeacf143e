"""Transfer values between stages: layouts, routes, messages of a step, and tied parameters.

The two stages of a transfer hold the value in different layouts: sharded on some mesh axes,
replicated on others. A rank receives each part from one rank that holds it; if several do,
receivers take turns among them. A gradient takes the same route back. A message is the transfer of
one micro-batch, forward (a value) or backward (its gradient). Messages have no tags: all ranks
exchange them in the rounds of `schedules.messages`.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.runtime.collectives import CommunicationThread
from shardwise.runtime.mesh import TIME, coordinates
from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.pipeline import PipelineSpec, TiedSpec, TransferSpec
from shardwise.runtime.splits import Split, local_runs, local_shape, narrow, offsets
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tracing import Recorder
from shardwise.runtime.transport import Flat, Group, Pending, Transport
from shardwise.schedules import Action, Round
from shardwise.schedules import Message as StageMessage
from shardwise.shares import AxisSize, Runs


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


Poll = Callable[[], bool]
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
        return torch.cat([narrow(local, box).reshape(-1) for box in self.boxes])

    def put(self, local: Tensor, flat: Tensor) -> None:
        """Write a received piece into its place."""
        start = 0
        for box in self.boxes:
            target = narrow(local, box)
            target.copy_(flat[start : start + target.numel()].view(target.shape))
            start += target.numel()

    def numel(self, local: Tensor) -> int:
        if not self.boxes:
            return local.numel()
        return sum(torch.Size([n for _, n in box]).numel() for box in self.boxes)


class Route:
    """The messages of this rank when a value is transferred from one holding to another."""

    def __init__(self, rank: int, source: Holding, target: Holding) -> None:
        self.rank, self.target = rank, target
        self.receives = _pieces(source, target, rank) if rank in target.ranks else []
        self.sends = [
            _mirrored(source, target, rank, peer)
            for peer in (target.ranks if rank in source.ranks else ())
            for piece in _pieces(source, target, peer)
            if piece.peer == rank
        ]

    @property
    def is_local(self) -> bool:
        """Whether this rank has all that it needs, and sends nothing to other ranks."""
        full = [Piece(self.rank)]
        return self.receives == full and self.sends == full

    def outgoing(self, local: Tensor) -> list[Flat]:
        """Return the pieces that other ranks need, with their ranks."""
        return [(p.take(local.detach()), p.peer) for p in self.sends if p.peer != self.rank]

    def incoming(self, dtype: torch.dtype, device: torch.device) -> Arrival:
        """Return memory for this rank's part."""
        local = torch.empty(self.target.local_shape(self.rank), dtype=dtype, device=device)
        pieces = [p for p in self.receives if p.peer != self.rank]
        flats = [local.new_empty(p.numel(local)) if p.boxes else local.view(-1) for p in pieces]
        return Arrival(local, pieces, flats, [p for p in self.receives if p.peer == self.rank])

    def own(self, local: Tensor) -> Tensor:
        """Return this rank's pieces for itself, as one message."""
        own = [piece for piece in self.sends if piece.peer == self.rank]
        return torch.cat([piece.take(local.detach()) for piece in own])


@dataclass(slots=True)
class Arrival:
    """A local tensor and the memory into which its pieces are received."""

    local: Tensor
    pieces: list[Piece]
    flats: list[Tensor]
    own: list[Piece]
    pending: Sequence[Pending] = ()

    @property
    def expected(self) -> list[Flat]:
        """The memory for every piece from another rank, with that rank."""
        return [(flat, p.peer) for p, flat in zip(self.pieces, self.flats, strict=True)]

    def wait(self, own: Tensor | None = None) -> Tensor:
        """Wait for all pieces and return the tensor; `own` is this rank's message to itself."""
        for piece, pending in zip(self.pieces, self.pending, strict=True):
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
    for (start, in_a, length), (begin, in_b, size) in itertools.product(offsets(a), offsets(b)):
        low, high = max(start, begin), min(start + length, begin + size)
        if low < high:
            result.append((in_a + low - start, in_b + low - begin, high - low))
    return result


# The next action releases the memory of completed sends. Sends of NCCL are polled. Those of gloo
# cannot be, and waiting for them in the order of actions could block a rank that others wait for:
# a thread waits for them. The memory is released in the thread that allocated it, because profilers
# miss other frees.


class PendingSends:
    """Wait for sends in the background; `finish` waits for all of them."""

    def __init__(self, *, polled: bool) -> None:
        # How to poll and how to wait for some sends, and the sends, which hold their memory.
        self._sends: deque[tuple[Poll, Callable[[], None], Sequence[Pending]]] = deque()
        self._thread: CommunicationThread | None = None
        self._polled = polled

    def add(self, sends: Sequence[Pending], done: Callable[[], None] | None = None) -> None:
        """Take over some sends; call `done` after them."""

        def wait() -> None:
            for send in sends:
                send.wait()
            if done is not None:
                done()

        def is_done() -> bool:
            return all(send.is_done for send in sends)

        if is_done():
            wait()
        elif self._polled:
            self._sends.append((is_done, wait, sends))
        else:
            self._thread = self._thread or CommunicationThread("sends")
            # No limit: the sends have the timeout of the process group.
            handle = self._thread.start(wait, math.inf)
            self._sends.append((handle.done, handle.wait, sends))

    def release(self) -> None:
        """Release the memory of completed sends, and raise the error of a failed one."""
        while self._sends and self._sends[0][0]():
            self._sends.popleft()[1]()

    def finish(self) -> None:
        """Wait for all sends, and raise the error of a failed one."""
        while self._sends:
            self._sends.popleft()[1]()

    def abandon(self) -> None:
        """Stop waiting after an error; open sends end with their timeout."""
        self._sends.clear()
        self._thread = None


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
        self.sends = PendingSends(polled=transport.in_order)
        self._routes: dict[Message, Route] = {}
        self._ready: dict[Message, tuple[list[Flat], int]] = {}  # until their round
        self._arrivals: dict[Message, tuple[Arrival, int]] = {}
        self._local: dict[Message, Tensor] = {}  # messages to this rank itself
        self._steps = 0
        ranks = tuple(sorted(r for ranks in spec.groups for r in ranks))
        if transport.in_order and len(ranks) > 1:
            # NCCL creates a communicator when all of its ranks use it, a round has only some.
            flat = torch.zeros(1, device=device)
            transport.all_reduce(flat, "sum", Group(ranks, ranks.index(rank))).wait()

    def begin(self) -> None:
        """Start a step."""
        self._steps += 1

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._ready.clear()
        self._arrivals.clear()
        self._local.clear()
        self.sends.abandon()

    def look_ahead(self, items: Sequence[Action | Round], index: int) -> None:
        """Release completed sends; post the receives of the action after that at `index`.

        Only transports that match a receive whenever its send comes can receive ahead of a round.
        """
        self.sends.release()
        for item in itertools.islice(items, index + 1, None) if not self.transport.in_order else ():
            if not isinstance(item, Round):
                break
            self._start(self._receives(item), {})

    def start(self, messages: Round) -> None:
        """Start the sends and receives of a round as one operation."""
        ready = {m: self._ready.pop(m) for m in self._messages(messages.sends) if m in self._ready}
        self._start(self._receives(messages), ready)

    def _start(
        self, arrivals: Mapping[Message, Arrival], ready: Mapping[Message, tuple[list[Flat], int]]
    ) -> None:
        sends = [flat for flats, _ in ready.values() for flat in flats]
        receives = [flat for arrival in arrivals.values() for flat in arrival.expected]
        start = time.perf_counter_ns()
        sent, received = self.transport.exchange(sends, receives)
        for message, arrival in arrivals.items():
            count = len(arrival.pieces)
            arrival.pending, received = received[:count], received[count:]
            self._arrivals[message] = arrival, start
        for message, (flats, begun) in ready.items():
            pending, sent = sent[: len(flats)], sent[len(flats) :]
            done = functools.partial(self._record, "send", message, begun)
            self.sends.add(pending, done if flats and self.recorder.enabled else None)

    def _receives(self, messages: Round) -> dict[Message, Arrival]:
        """Return memory for the messages of a round that are not being received yet."""
        return {
            m: self._route(m).incoming(torch_dtype(self.spec.transfers[m[0]].dtype), self.device)
            for m in self._messages(messages.receives)
            if m not in self._arrivals and not self._route(m).is_local
        }

    def received(self, messages: Round) -> Iterator[StageMessage]:
        """Yield the message of each tensor that a round receives, in the order of receives."""
        for message in messages.receives:
            for transfer in self._messages([message]):
                pieces = self._route(transfer).receives
                yield from (message for piece in pieces if piece.peer != self.rank)

    def _messages(self, messages: Sequence[StageMessage]) -> Iterator[Message]:
        """Iterate over the transfers of messages between stages."""
        for message in messages:
            sender, back = message.result.stage, message.result.kind != "F"
            for index, transfer in (self.into if back else self.out_of).get(sender, ()):
                receiver = transfer.source if back else transfer.target
                if receiver == message.target and (transfer.gradient or not back):
                    yield index, message.result.microbatch, back

    def send(self, tensor: Tensor, message: Message) -> None:
        """Prepare a message for its round; one to this rank itself is stored."""
        route = self._route(message)
        if route.is_local:
            self._local[message] = tensor.detach()
            return
        if any(piece.peer == self.rank for piece in route.sends):
            self._local[message] = route.own(tensor)
        self._ready[message] = route.outgoing(tensor), time.perf_counter_ns()

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
        self, stage: int, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return a full tensor of one stage on all ranks, which call this together."""
        holders = self.spec.stages[stage].ranks
        others = [r for ranks in self.spec.groups for r in ranks if r not in holders]
        if self.rank not in holders:
            out = torch.empty(shape, dtype=dtype, device=self.device)
            source = holders[others.index(self.rank) % len(holders)]
            _, (pending,) = self.transport.exchange([], [(out.view(-1), source)])
            return pending.wait().view(shape)
        assert tensor is not None
        flat = tensor.detach().to(dtype).reshape(-1).contiguous()
        readers = [o for turn, o in enumerate(others) if holders[turn % len(holders)] == self.rank]
        self.sends.add(self.transport.exchange([(flat, reader) for reader in readers], [])[0])
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

    def _record(self, what: str, message: Message, start: int) -> None:
        """Record a send or receive that began at `start` and ends now."""
        index, k, back = message
        self.recorder.add(
            "communication",
            f"{what} {'gradient of ' * back}{self.spec.transfers[index].value}",
            start,
            time.perf_counter_ns(),
            microbatch=k,
            transfer=f"{self._steps}.{(2 * index + back) * self.spec.num_microbatches + k}",
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


class TiedParameters:
    """Exchange the gradients and values of parameters of several stages."""

    def __init__(self, spec: PipelineSpec, store: ParameterStore, rank: int) -> None:
        self.store, self.rank = store, rank
        self._links: list[tuple[TiedSpec, Holding, Holding]] = []
        for tied in spec.tied:
            groups: dict[tuple[int, ...], Holding] = {}
            for stage, splits in zip(tied.stages, tied.splits, strict=True):
                ranks, axes = spec.stages[stage].ranks, spec.stages[stage].axes
                groups.setdefault(ranks, Holding(ranks, axes, tied.shape, splits, {}))
            owner, *others = groups.values()
            self._links += [(tied, owner, other) for other in others]
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

        links = [(t, other, owner) for t, owner, other in self._links if t.trained]
        self._exchange(links, gradient, self.store.add_to_gradient)

    @torch.no_grad()
    def share_values(self) -> None:
        """Send the values of owners to replicas; all ranks call it after an update."""

        def value(entry: Entry, dtype: torch.dtype) -> Tensor:
            return self.store.local_value(entry).to(dtype).contiguous()

        self._exchange(self._links, value, self.store.set_local)

    def _exchange(
        self,
        links: Sequence[tuple[TiedSpec, Holding, Holding]],
        read: Callable[[Entry, torch.dtype], Tensor],
        write: Callable[[Entry, Tensor], object],
    ) -> None:
        """Send what `read` returns from each link's first holding; `write` it on the second.

        All links are one round. Tensors that gradients and values replace stay allocated until
        their sends are done.
        """
        store, sends, arrivals = self.store, [], []
        for tied, source, target in links:
            route = Route(self.rank, source, target)
            dtype = torch_dtype(tied.dtype)
            if self.rank in source.ranks:
                sends += route.outgoing(read(store.entry(tied.name), dtype))
            elif self.rank in target.ranks:
                arrivals.append((store.entry(tied.name), route.incoming(dtype, store.device)))
        expected = [flat for _, arrival in arrivals for flat in arrival.expected]
        sent, received = store.mesh.transport.exchange(sends, expected)
        for entry, arrival in arrivals:
            count = len(arrival.pieces)
            arrival.pending, received = received[:count], received[count:]
            write(entry, arrival.wait())
        for send in sent:
            send.wait()
