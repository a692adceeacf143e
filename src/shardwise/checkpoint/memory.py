"""Copies of a training's state in the memory of its ranks, and their use under another plan.

A `Snapshot` is a checkpoint whose boxes are in memory: all ranks have its manifest, and each has
the values of some boxes. A box that several ranks have anyway, as with data parallelism, is copied
by each of them within its own memory. Any other box is sent to a second rank, the buddy of its
owner, so that every box survives the loss of one rank. `restore` fills a module under any plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.box_io import BOX_BYTES, Request, tasks_of
from shardwise.checkpoint.load import Loaded, fill_from
from shardwise.checkpoint.manifest import Manifest, Sections, StoredBox, StoredTensor, key_of
from shardwise.checkpoint.open import Checkpoint
from shardwise.checkpoint.optimizer_state import Optimizers
from shardwise.checkpoint.shards import Box, ParallelState, TensorShards, check_cover, narrow
from shardwise.checkpoint.shards import split_box as split
from shardwise.checkpoint.transfer import Move, Transfer
from shardwise.checkpoint.write import by_section, collect, join
from shardwise.errors import CheckpointError
from shardwise.runtime.failures import naming_failures
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.rendezvous import open_rendezvous
from shardwise.runtime.transport.process_group import ProcessGroupTransport

Tag = tuple[int, int]  # the step, and how often the training had changed its ranks before
Copies = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state of the training: the manifest of all boxes, and the values that this rank has.

    The boxes of the manifest are in no file. `values` are contiguous, on the host, by `key_of`.
    """

    tag: Tag
    manifest: Manifest
    values: Mapping[str, Tensor]

    def __str__(self) -> str:
        count = len(_boxes(self.manifest.sections))
        return f"Snapshot of step {self.tag[0]}: {len(self.values)} of {count} boxes"


def _boxes(sections: Sections) -> dict[str, tuple[StoredTensor, Box]]:
    """Return the boxes of tensors by their keys."""
    return {
        key_of(section, name, box, tensor.shape): (tensor, box)
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
        for box in tensor.boxes
    }


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------ taking snapshots
class Snapshots:
    """Takes snapshots of a parallel module, and keeps the newest that all ranks have.

    Until `settle`, the one before the newest is kept too: a rank may fail before it has the newest.
    """

    def __init__(self, module: ParallelModule, *, generation: int = 0) -> None:
        self.module, self.generation = module, generation
        self.available: tuple[Snapshot, ...] = ()
        self._layout: _Layout | None = None

    @torch.no_grad()
    def take(
        self,
        optimizer: Optimizers | None,
        *,
        step: int,
        extra: Mapping[str, Any],
        copies: Copies | None = None,
        stay: Sequence[int] | None = None,
    ) -> Snapshot:
        """Copy the state after a step; all ranks call it together, and `extra` is rank 0's.

        If only some ranks `stay`, every box is copied to one of them.
        """
        mesh, device = self.module.mesh, self.module.store.device
        rank = mesh.transport.rank
        contents = collect(self.module, optimizer, None, step, extra, copies or {})
        part, views = _local_boxes(contents.sections, rank)
        is_same = self._layout is not None and self._layout.local == (part, stay)
        first = [contents.module, contents.extra] if rank == 0 else None
        facts = [is_same, contents.aliases, contents.optimizer, first]
        gathered = mesh.everyone.gather_objects(facts, device)
        if not all(same for same, *_ in gathered):
            text = Manifest(files={}, sections=part).to_text()
            texts = mesh.everyone.gather_objects(text, device)
            parts = [Manifest.from_text(text, is_part=True).sections for text in texts]
            self._layout = _Layout.of(parts, rank, stay)
        assert self._layout is not None
        boxes = _boxes(self._layout.sections)
        values = {
            key: view.detach().clone(memory_format=torch.contiguous_format).cpu()
            for key, view in views.items()
        }

        def write(move: Move, data: Tensor) -> None:
            values[move.key] = data.clone().view(boxes[move.key][0].dtype).view(move.size)

        self._layout.copies.run(
            mesh.transport, rank, lambda m: _bytes(values[m.key]), write, device
        )
        manifests = [
            Manifest(files={}, sections={}, aliases=aliases, optimizer=numbers)
            for _, aliases, numbers, _ in gathered
        ]
        module, extra = gathered[0][3]
        manifest = join(manifests, dataclasses.replace(contents, module=module, extra=extra))
        manifest = dataclasses.replace(manifest, sections=self._layout.sections)
        snapshot = Snapshot(tag=(step, self.generation), manifest=manifest, values=values)
        self.available = (*self.available[-1:], snapshot)
        return snapshot

    def settle(self) -> None:
        """Release all snapshots but the newest, which every rank is known to have."""
        self.available = self.available[-1:]


def _local_boxes(
    sections: Mapping[str, Sequence[TensorShards]], rank: int
) -> tuple[Sections, dict[str, Tensor]]:
    """Return the tensors with the boxes that this rank has, and their memory by their keys."""
    part: dict[str, dict[str, StoredTensor]] = {}
    views: dict[str, Tensor] = {}
    for section, tensors in sections.items():
        for shards in tensors:
            local = shards.boxes if rank in shards.ranks else ()
            pieces = [piece for box in local for piece in split(box, BOX_BYTES)]
            boxes = tuple(StoredBox(p.box.offset, p.box.size, "", None) for p in pieces)
            tensor = StoredTensor(shape=shards.shape, dtype=shards.dtype, boxes=boxes)
            part.setdefault(section, {})[shards.name] = tensor
            views |= {key_of(section, shards.name, p.box, shards.shape): p.view for p in pieces}
    return part, views


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The boxes of all ranks, and the copies of some that each rank sends to its buddy."""

    local: tuple[Sections, Sequence[int] | None]  # this rank's boxes, and the ranks that stay
    sections: Sections
    copies: Transfer

    @classmethod
    def of(cls, parts: Sequence[Sections], rank: int, stay: Sequence[int] | None) -> _Layout:
        """Join the parts of all ranks; refuse boxes that do not cover their tensors."""
        ranks = range(len(parts))
        sections = by_section(
            (section, name, tensor)
            for part in parts
            for section, tensors in part.items()
            for name, tensor in tensors.items()
        )
        for tensors in sections.values():
            for name, tensor in tensors.items():
                check_cover(name, tensor.shape, tensor.boxes)
        holders: dict[str, list[int]] = {}
        for holder, part in enumerate(parts):
            for key in _boxes(part):
                holders.setdefault(key, []).append(holder)
        places: list[list[tuple[int, ...]]] = [[] for _ in ranks]
        moves: list[Move] = []
        staying, boxes = set(ranks if stay is None else stay), _boxes(sections)
        for key, (tensor, box) in boxes.items():
            owner = holders[key][0]
            # The buddy is the next rank that stays.
            others = sorted(staying.difference(holders[key]), key=lambda r: (r < owner, r))
            if len(staying.intersection(holders[key])) > 1 or not others:
                continue
            buddy, origin = others[0], (0,) * len(box.size)
            move = Move(
                key=key,
                offset=origin,
                size=box.size,
                nbytes=box.numel * tensor.dtype.itemsize,
                source=owner,
                target=buddy,
                place=len(places[buddy]),
                at=origin,
            )
            moves.append(move)
            places[buddy].append(box.size)
        copies = Transfer(places=tuple(map(tuple, places)), moves=tuple(moves))
        copies.verify({key: box for key, (_, box) in boxes.items()}, holders)
        return cls(local=(parts[rank], stay), sections=sections, copies=copies)


# ------------------------------------------------------------ restoring
def restore(
    available: Sequence[Snapshot],
    module: ParallelModule,
    optimizer: Optimizers | None,
    *,
    copies: Copies | None = None,
    timeout_s: float = 60.0,
) -> tuple[Tag, Loaded] | None:
    """Fill a module from the newest state of which its ranks together have every box.

    All ranks call it, with the snapshots that each of them has, and choose the same state. The
    ranks and the plan may differ from those of the snapshots. Return None if no state is complete;
    the module is then unchanged.
    """
    mesh, device = module.mesh, module.store.device
    own = {snapshot.tag: snapshot for snapshot in available}
    rows = [[s.tag, len(_boxes(s.manifest.sections)), sorted(s.values)] for s in available]
    holders: dict[Tag, dict[str, list[int]]] = {}
    num_boxes: dict[Tag, int] = {}
    for rank, rank_rows in enumerate(mesh.everyone.gather_objects(rows, device)):
        for (step, generation), count, keys in rank_rows:
            num_boxes[step, generation] = count
            for key in keys:
                by_key = holders.setdefault((step, generation), {})
                by_key.setdefault(key, []).append(rank)
    complete = [tag for tag, by_key in holders.items() if len(by_key) == num_boxes[tag]]
    if not complete:
        return None
    tag = max(complete)
    text = own[tag].manifest.to_text() if tag in own else None
    texts = mesh.everyone.gather_objects(text, device)
    manifest = Manifest.from_text(next(text for text in texts if text), is_part=True)
    memory = _Memory(module, manifest, own[tag].values if tag in own else {}, holders[tag])
    checkpoint, state = Checkpoint(folder=Path("memory"), manifest=manifest), ParallelState(module)
    transport = mesh.transport if isinstance(mesh.transport, ProcessGroupTransport) else None
    with naming_failures(timeout_s, transport):
        rendezvous = open_rendezvous("restore", CheckpointError)
        loaded: Loaded = rendezvous.run(
            lambda: fill_from(checkpoint, memory.fill, state, optimizer, copies or {}), timeout_s
        )
    return tag, loaded


@dataclass(frozen=True, slots=True)
class _Memory:
    """Fills requests from the memories of all ranks, as a `Reader` does from files."""

    module: ParallelModule
    manifest: Manifest
    values: Mapping[str, Tensor]  # of this rank
    holders: Mapping[str, Sequence[int]]

    @torch.no_grad()
    def fill(self, requests: Sequence[Request]) -> None:
        """Fill all targets of this rank; all ranks call it."""
        mesh, device = self.module.mesh, self.module.store.device
        rank, boxes = mesh.transport.rank, _boxes(self.manifest.sections)
        targets = [target for request in requests for target in request.targets]
        numbers = {id(target): number for number, target in enumerate(targets)}
        needs = []
        for task in (task for request in requests for task in tasks_of(self.manifest, request)):
            sources = self.holders[task.key]
            # The same box goes to different ranks from different holders.
            source = rank if rank in sources else sources[rank % len(sources)]
            for item, target in task.copies:
                nbytes = item.lengths.numel() * task.tensor.dtype.itemsize
                part = [task.key, item.storage_offsets, item.lengths, nbytes]
                needs.append([*part, source, rank, numbers[id(target)], item.dest_offsets])
        gathered = mesh.everyone.gather_objects([[t.box.size for t in targets], needs], device)
        fields = [field.name for field in dataclasses.fields(Move)]
        moves: Iterator[Any] = (
            [tuple(value) if isinstance(value, list) else value for value in row]
            # The ranks' moves take turns, so that all of them send and receive in every round.
            for turn in itertools.zip_longest(*(rows for _, rows in gathered))
            for row in turn
            if row is not None
        )
        transfer = Transfer(
            places=tuple(tuple(tuple(size) for size in sizes) for sizes, _ in gathered),
            moves=tuple(Move(**dict(zip(fields, move, strict=True))) for move in moves),
        )
        transfer.verify({key: box for key, (_, box) in boxes.items()}, self.holders)

        def read(move: Move) -> Tensor:
            return _bytes(narrow(self.values[move.key], move.offset, move.size))

        def write(move: Move, data: Tensor) -> None:
            value = data.clone().view(boxes[move.key][0].dtype).view(move.size)
            narrow(targets[move.place].view, move.at, move.size).copy_(value)

        transfer.run(mesh.transport, rank, read, write, device)
