"""Who writes what, and who reads what: the planning of `torch.distributed.checkpoint`.

Which ranks have the same boxes follows from the plan of the model, so that every rank finds its own
`SavePlan` without asking. The first rank joins them (`join_plans`) with torch's planner, which also
drops what two stages wrote. Reading is planned by torch's resharding of boxes. What travels between
ranks and lies in files is JSON; torch's pickled metadata is never made.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.checkpoint.files import FileEntry, TensorFile, bytes_of, dtype_named
from shardwise.checkpoint.manifest import Manifest, StoredBox, StoredTensor, full_name
from shardwise.checkpoint.shards import Box, Held, Placed, narrow, split_box
from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError

__all__ = [
    "BOX_BYTES",
    "Portion",
    "Reader",
    "Request",
    "join_plans",
    "plan_of",
    "portions",
    "read_plan",
]


BOX_BYTES = 32 << 20  # what has one checksum, and is read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """A box that this rank writes."""

    section: str
    held: Held
    placed: Placed


def portions(sections: Mapping[str, Iterable[Held]], rank: int) -> list[Portion]:
    """What this rank writes of what it holds: its share of what others hold as well.

    All holders have the same boxes in the same order, and so agree on the shares: the largest box
    goes to who has least so far.
    """
    by_holders: dict[tuple[int, ...], list[Portion]] = {}
    for section, tensors in sections.items():
        for held in tensors:
            found = by_holders.setdefault(held.holders, [])
            for placed in held.placed:
                found += [
                    Portion(section=section, held=held, placed=part)
                    for part in split_box(placed, BOX_BYTES)
                ]
    mine: list[Portion] = []
    for holders, found in by_holders.items():
        loads = [(0, number) for number in range(len(holders))]
        for portion in sorted(found, key=lambda p: -p.placed.view.nbytes):
            load, number = heapq.heappop(loads)
            heapq.heappush(loads, (load + portion.placed.view.nbytes, number))
            if holders[number] == rank:
                mine.append(portion)
    return mine


def plan_of(mine: Sequence[Portion]) -> SavePlan:
    """This rank's plan."""
    return SavePlan([_write_item(p.section, p.held, p.placed.box) for p in mine])


def _write_item(section: str, held: Held, box: Box) -> WriteItem:
    # Not the full name: a model may have an `ema.w` of its own.
    return _item(f"{section}:{held.name}", held.shape, held.dtype, box)


def _item(name: str, shape: Sequence[int], dtype: torch.dtype, box: Box) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(shape),
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


def join_plans(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """All ranks' plans without repeats, after torch has checked that they make up all tensors."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    try:
        joined, _ = planner.create_global_plan(list(plans))
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' parts do not make up the model: {error}") from error
    return joined


def plan_to_json(plan: SavePlan) -> list[list[Any]]:
    """A plan as another rank can read it."""
    rows: list[list[Any]] = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, item
        kind = dtype_name(data.properties.dtype)
        box = [list(data.chunk.offsets), list(data.chunk.sizes)]
        rows.append([item.index.fqn, list(data.size), kind, *box])
    return rows


def plan_from_json(rows: Sequence[Sequence[Any]]) -> SavePlan:
    """The plan of another rank."""
    items = []
    for name, shape, kind, offset, size in rows:
        dtype = dtype_named(kind, str(name))
        items.append(_item(name, shape, dtype, Box(tuple(offset), tuple(size))))
    return SavePlan(items)


def read_plan(name: str, stored: StoredTensor, wanted: Sequence[Placed]) -> LoadPlan:
    """What to read of a stored tensor for the boxes wanted.

    In each item, `storage_index.index` counts the stored boxes and `dest_index.index` the wanted.
    """
    metadata = TensorStorageMetadata(
        properties=TensorProperties(dtype=stored.dtype),
        size=torch.Size(stored.shape),
        chunks=[_chunk(b.box) for b in stored.boxes],
    )
    chunks = [_chunk(placed.box) for placed in wanted]
    return LoadPlan(create_read_items_for_chunk_list(name, metadata, chunks))


# Reading boxes of stored tensors into memory that wants them, and nothing else.
#
# A box with a checksum is read as a whole, at most `BOX_BYTES`, and checked before any of it is
# used. Files without checksums (of Hugging Face) are read by the ranges of bytes that are wanted.


_OPEN_FILES = 128
_RUN_BYTES = 4096  # shorter runs are read with what lies between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A stored tensor, and where its boxes shall go."""

    section: str
    name: str
    wanted: Sequence[Placed]


@dataclass(frozen=True, slots=True)
class _Task:
    """One stored box, and what of it goes where."""

    name: str
    tensor: StoredTensor
    stored: StoredBox
    copies: list[tuple[ReadItem, Placed]]


class Reader:
    """The files of a checkpoint that is open; closed by `with`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, TensorFile] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.bytes_read = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, requests: Iterable[Request]) -> None:
        """Read what is wanted, in the order of the files."""
        tasks = [task for request in requests for task in self._tasks(request)]
        for task in sorted(tasks, key=self._place):
            entry = self._entry(task.tensor, task.stored)
            if task.stored.crc32 is None:
                self._copy_ranges(task, entry)
            else:
                box = self._checked(task, entry)
                for item, placed in task.copies:
                    source = narrow(box, item.storage_offsets, item.lengths)
                    narrow(placed.view, item.dest_offsets, item.lengths).copy_(source)

    def check(self, tensor: StoredTensor, stored: StoredBox, name: str) -> None:
        """Read one box and compare its checksum."""
        self._checked(_Task(name, tensor, stored, []), self._entry(tensor, stored))

    def _tasks(self, request: Request) -> list[_Task]:
        tensor = self.manifest.sections[request.section][request.name]
        name = full_name(request.section, request.name)
        for placed in request.wanted:
            _require_kind(name, tensor.dtype, placed.view.dtype)
        found: dict[int, _Task] = {}
        for item in read_plan(name, tensor, request.wanted).items:
            at, to = item.storage_index.index, item.dest_index.index
            assert at is not None
            assert to is not None
            task = found.setdefault(at, _Task(name, tensor, tensor.boxes[at], []))
            task.copies.append((item, request.wanted[to]))
        return list(found.values())

    def _place(self, task: _Task) -> tuple[str, int]:
        return task.stored.file, self._entry(task.tensor, task.stored).begin

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if len(self._files) == _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def _entry(self, tensor: StoredTensor, stored: StoredBox) -> FileEntry:
        """Where a box is in its file, which must say the same of it as the manifest."""
        file = self._file(stored.file)
        entry = file.entries.get(stored.key)
        nbytes = stored.box.numel * tensor.dtype.itemsize
        if entry is None or entry.nbytes != nbytes:
            found = "nothing" if entry is None else f"{entry.nbytes} bytes"
            raise CheckpointError(
                f"{stored.file} has {found} for {stored.key}, not {nbytes} bytes: it is damaged",
                where=str(file.path),
            )
        return entry

    def _read(self, file: TensorFile, begin: int, nbytes: int) -> Tensor:
        """Some bytes, in memory that the next read uses again."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        found = self._buffer[:nbytes]
        file.read_into(bytes_of(found), begin)
        self.bytes_read += nbytes
        return found

    def _checked(self, task: _Task, entry: FileEntry) -> Tensor:
        stored, file = task.stored, self._file(task.stored.file)
        data = self._read(file, entry.begin, entry.nbytes)
        if stored.crc32 is not None and zlib.crc32(bytes_of(data)) != stored.crc32:
            raise CheckpointError(
                f"{stored.file} is damaged: {entry.nbytes} bytes of {stored.key} from byte "
                f"{entry.begin} on have another checksum than when they were written",
                where=str(file.path),
            )
        return data.view(task.tensor.dtype).view(stored.box.size)

    def _copy_ranges(self, task: _Task, entry: FileEntry) -> None:
        file, dtype = self._file(task.stored.file), task.tensor.dtype
        for item, placed in task.copies:
            target = narrow(placed.view, item.dest_offsets, item.lengths)
            self._ranges(
                file, entry.begin, dtype, task.stored.box.size, item.storage_offsets, target
            )

    def _ranges(
        self,
        file: TensorFile,
        begin: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        offset: Sequence[int],
        target: Tensor,
    ) -> None:
        """Copy the part at `offset`, of the target's shape, of a row-major tensor at `begin`."""
        if not shape:
            target.copy_(self._read(file, begin, dtype.itemsize).view(dtype).view(()))
            return
        inner = tuple(shape[1:])
        row = math.prod(inner) * dtype.itemsize
        start = begin + offset[0] * row
        full = tuple(target.shape[1:]) == inner
        run = math.prod(target.shape[1:]) * dtype.itemsize
        if (not full and run >= _RUN_BYTES) or (inner and row > BOX_BYTES):
            for index in range(target.shape[0]):
                self._ranges(file, start + index * row, dtype, inner, offset[1:], target[index])
            return
        step = max(1, BOX_BYTES // max(row, 1))
        for first in range(0, target.shape[0], step):
            count = min(step, target.shape[0] - first)
            rows = self._read(file, start + first * row, count * row).view(dtype)
            rows = rows.view(count, *inner)
            part = narrow(rows, (0, *offset[1:]), (count, *target.shape[1:]))
            target.narrow(0, first, count).copy_(part)


def _require_kind(name: str, saved: torch.dtype, wanted: torch.dtype) -> None:
    """Numbers may be rounded, not turned into another kind."""

    def kind(dtype: torch.dtype) -> str:
        if dtype.is_complex:
            return "complex"
        if dtype.is_floating_point:
            return "floating-point"
        return "true or false" if dtype is torch.bool else "whole"

    if kind(saved) != kind(wanted):
        raise CheckpointError(
            f"{name} was saved as {kind(saved)} numbers ({saved}), and is {kind(wanted)} here "
            f"({wanted})"
        )
