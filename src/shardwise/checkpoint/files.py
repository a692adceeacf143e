"""Safetensors files, written and read piece by piece.

A file is written from tensors that are made one after the other, so that none but the current one
need be in memory, with the checksum of each. It is read by ranges of bytes: the page cache of a
mapped file would count as this process's memory.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.dtypes import DTYPES, dtype_name, torch_pairs
from shardwise.errors import CheckpointError, did_you_mean
from shardwise.files import parse_json

__all__ = [
    "FileEntry",
    "TensorFile",
    "ToWrite",
    "bytes_of",
    "dtype_named",
    "file_dtype",
    "from_file_dtype",
    "sync_folder",
    "write_tensors",
]


# Number types by name: torch's, and how safetensors files call them.
#
# Complex numbers lie in files as pairs of real ones, which every reader knows.


_IN_FILES: dict[torch.dtype, str] = {
    getattr(torch, dtype.name): dtype.file_name for dtype in DTYPES.values() if dtype.file_name
}
_REAL = torch_pairs("real")
_NAMED = {dtype_name(dtype): dtype for dtype in (*_IN_FILES, *_REAL)}
_FROM_FILES = {name: dtype for dtype, name in _IN_FILES.items()}


def dtype_named(name: object, where: str) -> torch.dtype:
    """The type of a name; only names of number types that can be saved are known."""
    found = _NAMED.get(name) if isinstance(name, str) else None
    if found is None:
        close = did_you_mean(name, _NAMED) if isinstance(name, str) else ""
        raise CheckpointError(f"no number type {name!r}{close}", where=where)
    return found


def file_dtype(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> tuple[str, list[int]]:
    """A tensor's type and shape in a safetensors file."""
    if dtype in _REAL:
        return _IN_FILES[_REAL[dtype]], [*shape, 2]
    if dtype not in _IN_FILES:
        raise CheckpointError(f"{name} of {dtype} cannot be saved in a safetensors file")
    return _IN_FILES[dtype], list(shape)


def from_file_dtype(name: object, where: str) -> torch.dtype:
    """The type of a tensor in a safetensors file."""
    found = _FROM_FILES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"tensors of type {name!r} cannot be read", where=where)
    return found


_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 28
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWrite:
    """A tensor of a file; `make` gives it in host memory, contiguous, when its turn has come."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def write_tensors(path: Path, items: Sequence[ToWrite]) -> dict[str, int]:
    """Write a safetensors file and have it on the disk; the CRC-32 of every tensor's bytes."""
    # Wide types first: then every tensor is aligned to its type.
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in ordered:
        kind, shape = file_dtype(item.dtype, item.shape, item.key)
        header[item.key] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [end, end + item.nbytes],
        }
        end += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums: dict[str, int] = {}
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(_LENGTH.pack(len(text)) + text))
        for item in ordered:
            data = bytes_of(item.make())
            assert len(data) == item.nbytes, item
            checksums[item.key] = _write_all(file.fileno(), data)
        os.fsync(file.fileno())
    return checksums


def _write_all(file: int, data: memoryview) -> int:
    """Write all of it; its checksum, taken while it is in the processor's cache."""
    checksum = 0
    for begin in range(0, len(data), _CHUNK_BYTES):
        chunk = data[begin : begin + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        while chunk:
            chunk = chunk[os.write(file, chunk) :]
    return checksum


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One tensor of a file, as its header says; `begin` is counted from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file that is open for reading; its header has been checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not blocking: a pipe of that name would be waited for.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(
                f"{path.name} cannot be read: {error.strerror}", where=str(path)
            ) from error
        try:
            self.entries: Mapping[str, FileEntry] = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the file back; it cannot be read any more."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def read_into(self, out: memoryview, begin: int) -> None:
        """Fill `out` with the bytes from `begin` on."""
        while out:
            try:
                count = os.preadv(self._handle, [out], begin)
            except OSError as error:
                raise self._damaged(f"cannot be read: {error.strerror}") from error
            if not count:
                raise self._damaged(f"ends at byte {begin}, {len(out)} bytes too early")
            out, begin = out[count:], begin + count

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name} {what}", where=str(self.path))

    def _read_header(self) -> dict[str, FileEntry]:
        kind = os.fstat(self._handle)
        size = kind.st_size if stat.S_ISREG(kind.st_mode) else 0
        if size < _LENGTH.size:
            raise self._damaged(f"has {size} bytes, which is no safetensors file")
        first = bytearray(_LENGTH.size)
        self.read_into(memoryview(first), 0)
        (length,) = _LENGTH.unpack(first)
        start = _LENGTH.size + length
        if length > _MAX_HEADER_BYTES or start > size:
            raise self._damaged(f"has a header of {length} bytes in {size}: it is damaged")
        text = bytearray(length)
        self.read_into(memoryview(text), _LENGTH.size)
        try:
            header = parse_json(bytes(text), CheckpointError, where=str(self.path))
        except CheckpointError as error:
            raise self._damaged(f"has a damaged header: {error.message}") from error
        if not isinstance(header, dict):
            raise self._damaged("has a header that is not an object")
        found = {
            key: self._entry(key, value, start, size)
            for key, value in header.items()
            if key != "__metadata__"
        }
        self._require_disjoint(found)
        return found

    def _require_disjoint(self, entries: Mapping[str, FileEntry]) -> None:
        """Refuse entries that share bytes: a small file must not stand for terabytes."""
        filled = [(e.begin, e.begin + e.nbytes, key) for key, e in entries.items() if e.nbytes]
        for (_, end, key), (begin, _, following) in pairwise(sorted(filled)):
            if begin < end:
                raise self._damaged(f"has entries {key!r} and {following!r} that overlap")

    def _entry(self, key: str, value: Any, start: int, size: int) -> FileEntry:
        known = isinstance(value, dict) and {"dtype", "shape", "data_offsets"} <= set(value)
        if not known or not (_counts(value["shape"]) and _counts(value["data_offsets"], 2)):
            raise self._damaged(f"has an entry {key!r} that is not as it should be")
        begin, end = value["data_offsets"]
        entry = FileEntry(
            from_file_dtype(value["dtype"], f"{self.path}: {key}"),
            tuple(value["shape"]),
            start + begin,
        )
        if start + end > size:
            raise self._damaged(f"has {size} bytes; {key} ends at {start + end}: it is cut off")
        if end - begin != entry.nbytes:
            raise self._damaged(
                f"has {end - begin} bytes for {key} of shape {entry.shape}, not {entry.nbytes}"
            )
        return entry


def _counts(value: Any, length: int | None = None) -> bool:
    """Whether this is a list of numbers that can be sizes."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        return False
    sizes = len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 48 for n in value)
    return sizes and math.prod(n or 1 for n in value) < 1 << 62
