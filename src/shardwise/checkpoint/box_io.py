"""Plan which rank writes and reads which boxes, and read them.

Which ranks have the same boxes follows from the plan of the model, so that ranks divide the writing
without communication. Reading is planned by `torch.distributed.checkpoint`, which computes the
overlap of stored and local boxes; its pickled metadata is never created.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.checkpoint.files import FileEntry, TensorFile, bytes_of
from shardwise.checkpoint.manifest import Manifest, StoredBox, StoredTensor, full_name, key_of
from shardwise.checkpoint.shards import Box, LocalBox, TensorShards, narrow, split_box
from shardwise.errors import CheckpointError

BOX_BYTES = 32 << 20  # at most, of a box, which has one checksum and is read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """A box that this rank writes."""

    section: str
    shards: TensorShards
    local: LocalBox


def local_portions(sections: Mapping[str, Iterable[TensorShards]], rank: int) -> list[Portion]:
    """Return the boxes that this rank writes; ranks with the same boxes share the work.

    All of these ranks have the same boxes in the same order, and therefore agree on the division:
    the largest box goes to the rank with the least bytes so far.
    """
    by_ranks: dict[tuple[int, ...], list[Portion]] = {}
    for section, tensors in sections.items():
        for shards in tensors:
            by_ranks.setdefault(shards.ranks, []).extend(
                Portion(section=section, shards=shards, local=part)
                for box in shards.boxes
                for part in split_box(box, BOX_BYTES)
            )
    result: list[Portion] = []
    for ranks, portions in by_ranks.items():
        loads = [(0, number) for number in range(len(ranks))]
        for portion in sorted(portions, key=lambda p: -p.local.view.nbytes):
            load, number = heapq.heappop(loads)
            heapq.heappush(loads, (load + portion.local.view.nbytes, number))
            if ranks[number] == rank:
                result.append(portion)
    return result


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


def read_plan(name: str, stored: StoredTensor, targets: Sequence[LocalBox]) -> LoadPlan:
    """Return the parts of a stored tensor's boxes to read for the target boxes.

    In each item, `storage_index.index` is that of a stored box, `dest_index.index` of a target.
    """
    metadata = TensorStorageMetadata(
        properties=TensorProperties(dtype=stored.dtype),
        size=torch.Size(stored.shape),
        chunks=[_chunk(box) for box in stored.boxes],
    )
    chunks = [_chunk(target.box) for target in targets]
    return LoadPlan(create_read_items_for_chunk_list(name, metadata, chunks))


# ------------------------------------------------------------ reading
# A box with a checksum is read in full, at most `BOX_BYTES`, and checked before any of it is used.
# Files without checksums (of Hugging Face) are read by the byte ranges that are needed.

_MAX_OPEN_FILES = 128
_RUN_BYTES = 4096  # shorter runs are read together with the gaps between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A stored tensor, and the boxes to fill from it."""

    section: str
    name: str
    targets: Sequence[LocalBox]


@dataclass(frozen=True, slots=True)
class Task:
    """One stored box with its key, and the parts of it to copy into targets."""

    tensor: StoredTensor
    stored: StoredBox
    key: str
    copies: list[tuple[ReadItem, LocalBox]]


def tasks_of(manifest: Manifest, request: Request) -> list[Task]:
    """Return the stored boxes that a request needs parts of."""
    tensor = manifest.sections[request.section][request.name]
    name = full_name(request.section, request.name)
    for target in request.targets:
        _require_kind(name, tensor.dtype, target.view.dtype)
    tasks: dict[int, Task] = {}
    for item in read_plan(name, tensor, request.targets).items:
        source, destination = item.storage_index.index, item.dest_index.index
        assert source is not None
        assert destination is not None
        stored = tensor.boxes[source]
        key = key_of(request.section, request.name, stored, tensor.shape)
        task = tasks.setdefault(source, Task(tensor, stored, key, []))
        task.copies.append((item, request.targets[destination]))
    return list(tasks.values())


class Reader:
    """Reads the files of a checkpoint; a context manager that closes them."""

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
        """Fill all targets, in the order of the files."""
        tasks = [task for request in requests for task in tasks_of(self.manifest, request)]
        placed = [(t.stored.file, self._entry(t.tensor, t.stored, t.key).begin, t) for t in tasks]
        for name, begin, task in sorted(placed, key=lambda place: place[:2]):
            stored, dtype = task.stored, task.tensor.dtype
            box = None
            if stored.crc32 is not None:
                box = self.checked(task.tensor, stored, task.key)
            for item, target in task.copies:
                view = narrow(target.view, item.dest_offsets, item.lengths)
                if box is not None:
                    view.copy_(narrow(box, item.storage_offsets, item.lengths))
                    continue
                file = self._file(name)
                self._ranges(file, begin, dtype, stored.size, item.storage_offsets, view)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def _entry(self, tensor: StoredTensor, stored: StoredBox, key: str) -> FileEntry:
        """Return the entry of a box in its file, which must agree with the manifest."""
        file = self._file(stored.file)
        entry = file.entries.get(key)
        nbytes = stored.numel * tensor.dtype.itemsize
        if entry is None or entry.nbytes != nbytes:
            actual = 0 if entry is None else entry.nbytes
            raise CheckpointError(
                f"{stored.file} is corrupt: it has {actual} bytes for {key}, not {nbytes}",
                where=str(file.path),
            )
        return entry

    def _read(self, file: TensorFile, begin: int, nbytes: int) -> Tensor:
        """Return some bytes, in a buffer that the next read overwrites."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        data = self._buffer[:nbytes]
        file.read_into(bytes_of(data), begin)
        self.bytes_read += nbytes
        return data

    def checked(self, tensor: StoredTensor, stored: StoredBox, key: str) -> Tensor:
        """Return one box, in a buffer that the next read overwrites; verify its checksum."""
        file, entry = self._file(stored.file), self._entry(tensor, stored, key)
        data = self._read(file, entry.begin, entry.nbytes)
        if stored.crc32 is not None and zlib.crc32(bytes_of(data)) != stored.crc32:
            raise CheckpointError(
                f"{stored.file} is corrupt: checksum mismatch in {entry.nbytes} bytes of "
                f"{key} from byte {entry.begin} on",
                where=str(file.path),
            )
        return data.view(tensor.dtype).view(stored.size)

    def _ranges(
        self,
        file: TensorFile,
        begin: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        offset: Sequence[int],
        target: Tensor,
    ) -> None:
        """Copy the part at `offset` with the target's shape from a row-major tensor at `begin`."""
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
            part = narrow(rows.view(count, *inner), (0, *offset[1:]), (count, *target.shape[1:]))
            target.narrow(0, first, count).copy_(part)


def _require_kind(name: str, saved: torch.dtype, target: torch.dtype) -> None:
    """Allow conversions that round, but not to another kind of number."""

    def kind(dtype: torch.dtype) -> str:
        if dtype.is_complex:
            return "complex"
        if dtype.is_floating_point:
            return "floating-point"
        return "boolean" if dtype is torch.bool else "integer"

    if kind(saved) != kind(target):
        raise CheckpointError(
            f"{name} was saved as {kind(saved)} ({saved}), but is {kind(target)} here ({target})"
        )
