"""Write and read safetensors files tensor by tensor.

A file is written from tensors that are created one by one, so that only the current one is in
memory, together with the checksum of each. It is read by byte ranges instead of mapped, because the
page cache of a mapped file would count as this process's memory.
"""

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

# ------------------------------------------------------------ dtypes
# Complex numbers are stored as pairs of real ones, which every reader supports.

_IN_FILES: dict[torch.dtype, str] = {
    getattr(torch, dtype.name): dtype.file_name for dtype in DTYPES.values() if dtype.file_name
}
_REAL = torch_pairs("real")
_NAMED = {dtype_name(dtype): dtype for dtype in (*_IN_FILES, *_REAL)}
_FROM_FILES = {name: dtype for dtype, name in _IN_FILES.items()}


def dtype_named(name: object, where: str) -> torch.dtype:
    """Return the dtype of a name; only those that can be saved are known."""
    if not isinstance(name, str) or name not in _NAMED:
        close = did_you_mean(name, _NAMED) if isinstance(name, str) else ""
        raise CheckpointError(f"unknown dtype {name!r}{close}", where=where)
    return _NAMED[name]


def file_dtype(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> tuple[str, list[int]]:
    """Return the dtype and shape that a tensor has in a safetensors file."""
    if dtype in _REAL:
        return _IN_FILES[_REAL[dtype]], [*shape, 2]
    if dtype not in _IN_FILES:
        raise CheckpointError(f"{name} is {dtype}, which safetensors files do not support")
    return _IN_FILES[dtype], list(shape)


def from_file_dtype(name: object, where: str) -> torch.dtype:
    """Return the dtype of a tensor in a safetensors file."""
    if not isinstance(name, str) or name not in _FROM_FILES:
        raise CheckpointError(f"tensors of dtype {name!r} are not supported", where=where)
    return _FROM_FILES[name]


# ------------------------------------------------------------ writing
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 28
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWrite:
    """A tensor of a file; `make` returns it contiguous in host memory when it is written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def write_tensors(path: Path, items: Sequence[ToWrite]) -> dict[str, int]:
    """Write a safetensors file and sync it; return the CRC-32 of every tensor's bytes."""
    # Wide dtypes first, so that every tensor is aligned to its dtype.
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in ordered:
        kind, shape = file_dtype(item.dtype, item.shape, item.key)
        header[item.key] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + item.nbytes]}
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
    """Write all data; return its checksum, computed while each chunk is in the CPU's cache."""
    checksum = 0
    for begin in range(0, len(data), _CHUNK_BYTES):
        chunk = data[begin : begin + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        while chunk:
            chunk = chunk[os.write(file, chunk) :]
    return checksum


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------ reading
@dataclass(frozen=True, slots=True)
class FileEntry:
    """A tensor in the header of a file; `begin` is its offset from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file opened for reading, with a validated header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Opening a named pipe would block otherwise.
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
        """Close the file."""
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
                raise self._error(f"cannot be read: {error.strerror}") from error
            if not count:
                raise self._error(f"ends at byte {begin}, {len(out)} bytes too early")
            out, begin = out[count:], begin + count

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name} {problem}", where=str(self.path))

    def _read_header(self) -> dict[str, FileEntry]:
        status = os.fstat(self._handle)
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        if size < _LENGTH.size:
            raise self._error(f"has {size} bytes: it is not a safetensors file")
        prefix = bytearray(_LENGTH.size)
        self.read_into(memoryview(prefix), 0)
        (length,) = _LENGTH.unpack(prefix)
        start = _LENGTH.size + length
        if length > _MAX_HEADER_BYTES or start > size:
            raise self._error(f"is corrupt: a header of {length} bytes in a file of {size}")
        text = bytearray(length)
        self.read_into(memoryview(text), _LENGTH.size)
        try:
            header = parse_json(bytes(text), CheckpointError, where=str(self.path))
        except CheckpointError as error:
            raise self._error(f"has a corrupt header: {error.message}") from error
        if not isinstance(header, dict):
            raise self._error("has a header that is not an object")
        entries = {
            key: self._entry(key, value, start, size)
            for key, value in header.items()
            if key != "__metadata__"
        }
        self._require_disjoint(entries)
        return entries

    def _require_disjoint(self, entries: Mapping[str, FileEntry]) -> None:
        """Refuse entries that share bytes: a small file must not expand to terabytes."""
        ranges = [(e.begin, e.begin + e.nbytes, key) for key, e in entries.items() if e.nbytes]
        for (_, end, key), (begin, _, following) in pairwise(sorted(ranges)):
            if begin < end:
                raise self._error(f"has overlapping entries {key!r} and {following!r}")

    def _entry(self, key: str, value: Any, start: int, size: int) -> FileEntry:
        complete = isinstance(value, dict) and {"dtype", "shape", "data_offsets"} <= set(value)
        if not complete or not (
            _are_sizes(value["shape"]) and _are_sizes(value["data_offsets"], 2)
        ):
            raise self._error(f"has a malformed entry {key!r}")
        begin, end = value["data_offsets"]
        entry = FileEntry(
            from_file_dtype(value["dtype"], f"{self.path}: {key}"),
            tuple(value["shape"]),
            start + begin,
        )
        if start + end > size:
            raise self._error(f"is truncated: it has {size} bytes, {key} ends at {start + end}")
        if end - begin != entry.nbytes:
            raise self._error(
                f"has {end - begin} bytes for {key} of shape {entry.shape}, not {entry.nbytes}"
            )
        return entry


def _are_sizes(value: Any, length: int | None = None) -> bool:
    """Return whether this is a list of integers in the range of sizes."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        return False
    in_range = len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 48 for n in value)
    return in_range and math.prod(n or 1 for n in value) < 1 << 62
