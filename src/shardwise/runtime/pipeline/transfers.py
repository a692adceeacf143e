"""Transfer values from the ranks of one stage to those of another, and keep tied parameters equal.

Each side holds the value in a different layout: sharded on some mesh axes, replicated on others.
A rank receives each part from one rank that holds it; if several do, receivers take turns among
them. A gradient takes the same route back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.runtime.mesh import coordinates
from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.splits import Runs, Split, local_runs, local_shape
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport import Pending, Transport
from shardwise.shares import AxisSize

if TYPE_CHECKING:
    from shardwise.runtime.pipeline import PipelineSpec, TiedSpec


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
