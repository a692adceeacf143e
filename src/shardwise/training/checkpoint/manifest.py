"""What `checkpoint.json` says: the tensors by section and name, where their boxes lie, the rest.

Sections are `model`, `optimizer.<key>` and those of further copies; each has tensors by the names
of the single device. A manifest from a file is untrusted: every field is checked before use, and
the whole has a checksum of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError, did_you_mean
from shardwise.files import parse_json, read_text
from shardwise.training.checkpoint.boxes import Box, check_cover
from shardwise.training.checkpoint.types import dtype_name, dtype_named

__all__ = ["MANIFEST", "MODEL", "Manifest", "StoredBox", "StoredTensor", "full_name", "key_of"]

MANIFEST = "checkpoint.json"
MODEL = "model"
VERSION = 1
_FORMAT = "shardwise checkpoint"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_FIELDS = {"format", "version", "step", "files", "sections", "aliases", "optimizer", "module"} | {
    "extra",
    "crc32",
}
_MAX_DIMS = 64
_MAX_BYTES = 1 << 28
_MAX_VALUES = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box, the file that has it, the key it has there, and the CRC-32 of its bytes."""

    box: Box
    file: str
    key: str
    crc32: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A full tensor, as boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Sections = Mapping[str, Mapping[str, StoredTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without its tensors' values.

    `aliases` are further names of the model's tensors. `optimizer` has groups and plain state,
    `module` the loss scale and the step of random numbers, `extra` what the user gave.
    """

    sections: Sections
    files: Mapping[str, int]
    step: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    module: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors: `w`, `optimizer.exp_avg.w`, `ema.w`."""
        return tuple(full_name(s, n) for s, tensors in self.sections.items() for n in tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for tensors in self.sections.values() for t in tensors.values())

    def to_text(self) -> str:
        """The JSON of the file."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": dict(self.files),
            "sections": {
                section: {name: _tensor_json(tensor) for name, tensor in tensors.items()}
                for section, tensors in self.sections.items()
            },
            "aliases": dict(self.aliases),
            "optimizer": self.optimizer,
            "module": dict(self.module),
            "extra": dict(self.extra),
        }
        return _dumps({**body, "crc32": _checksum(body)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint's folder; the files it names have the sizes it says."""
        path = folder / MANIFEST
        text = read_text(path, CheckpointError, what="manifest", max_bytes=_MAX_BYTES)
        try:
            found = cls.from_text(text)
            found.check_files(folder)
        except CheckpointError as error:
            raise CheckpointError(
                error.message, where=error.where or str(path), hint=error.hint
            ) from error
        return found

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Check and understand the JSON of a file."""
        # What a user's own objects saved in `extra` may hold any number.
        body = parse_json(text, CheckpointError, where=MANIFEST, free=True, max_values=_MAX_VALUES)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise CheckpointError(f"{MANIFEST} is not that of a checkpoint of Shardwise")
        if body.get("version") != VERSION:
            raise CheckpointError(
                f"{MANIFEST} is of version {body.get('version')!r}, known is {VERSION}"
            )
        unknown = sorted(set(body) - _FIELDS)
        if unknown:
            close = did_you_mean(unknown[0], _FIELDS)
            raise CheckpointError(f"{MANIFEST} has an unknown field {unknown[0]!r}{close}")
        if body.pop("crc32", None) != _checksum(body):
            raise CheckpointError(f"{MANIFEST} is damaged: its checksum is another one")
        return cls._from_body(body)

    @classmethod
    def _from_body(cls, body: Mapping[str, Any]) -> Manifest:
        step = body.get("step")
        _require(step is None or (type(step) is int and step >= 0), f"a step {step!r}")
        files = _mapping(body.get("files"), "files")
        for name, size in files.items():
            _require(bool(_FILE.fullmatch(name)), f"a file name {name!r}")
            _require(type(size) is int and size >= 0, f"a size {size!r} of {name}")
        aliases = _mapping(body.get("aliases", {}), "aliases")
        _require(all(isinstance(a, str) for a in aliases.values()), "an alias that is no name")
        optimizer = body.get("optimizer")
        return cls(
            sections=_sections(_mapping(body.get("sections"), "sections"), files),
            files=files,
            step=step,
            aliases=aliases,
            optimizer=None if optimizer is None else _mapping(optimizer, "optimizer"),
            module=_mapping(body.get("module", {}), "module"),
            extra=_mapping(body.get("extra", {}), "extra"),
        )

    def check_files(self, folder: Path) -> None:
        """Refuse files that are missing or of another size, or too small for what they hold."""
        needed = dict.fromkeys(self.files, 0)
        for tensors in self.sections.values():
            for tensor in tensors.values():
                for stored in tensor.boxes:
                    needed[stored.file] += stored.box.numel * tensor.dtype.itemsize
        for name, size in self.files.items():
            path = folder / name
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{name} is missing", where=str(path))
            found = os.stat(path).st_size
            if found != size:
                what = "it is cut off" if found < size else "it is damaged"
                raise CheckpointError(
                    f"{name} has {found} bytes instead of {size}: {what}", where=str(path)
                )
            if needed[name] > size:
                raise CheckpointError(
                    f"{name} of {size} bytes cannot have the {needed[name]} bytes it should",
                    where=str(path),
                )


def full_name(section: str, name: str) -> str:
    """The name of a tensor among all of a checkpoint."""
    return name if section == MODEL else f"{section}.{name}"


def key_of(section: str, name: str, box: Box, shape: Sequence[int]) -> str:
    """A box's key in its file: the tensor's name, and where it begins unless it is all of it."""
    full = full_name(section, name)
    return full if box.size == tuple(shape) else f"{full}@{','.join(map(str, box.offset))}"


def _tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "boxes": [
            {"at": list(b.box.offset), "size": list(b.box.size), "file": b.file, "crc32": b.crc32}
            for b in tensor.boxes
        ],
    }


def _sections(
    body: Mapping[str, Any], files: Mapping[str, Any]
) -> dict[str, dict[str, StoredTensor]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for section, tensors in body.items():
        found[section] = {
            name: _tensor(section, name, _mapping(value, full_name(section, name)), files)
            for name, value in _mapping(tensors, section).items()
        }
    return found


def _tensor(
    section: str, name: str, body: Mapping[str, Any], files: Mapping[str, Any]
) -> StoredTensor:
    full = full_name(section, name)
    shape = _counts(body.get("shape"), f"shape of {full}")
    _require(math.prod(n or 1 for n in shape) < 1 << 62, f"a shape {shape} of {full}")
    dtype = dtype_named(body.get("dtype"), full)
    listed = body.get("boxes")
    _require(isinstance(listed, list), f"boxes of {full} that are no list")
    boxes = []
    for value in listed if isinstance(listed, list) else []:
        entry = _mapping(value, f"box of {full}")
        box = Box(_counts(entry.get("at"), f"box of {full}"), _counts(entry.get("size"), full))
        file, crc32 = entry.get("file"), entry.get("crc32")
        _require(isinstance(file, str) and file in files, f"a box of {full} in {file!r}")
        _require(type(crc32) is int and 0 <= crc32 < 1 << 32, f"a checksum {crc32!r} of {full}")
        key = key_of(section, name, box, shape)
        boxes.append(StoredBox(box=box, file=str(file), key=key, crc32=crc32))
    check_cover(full, shape, [stored.box for stored in boxes])
    return StoredTensor(shape=shape, dtype=dtype, boxes=tuple(boxes))


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{MANIFEST}: {what} is no mapping but {str(value)[:40]!r}")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    good = isinstance(value, list) and len(value) <= _MAX_DIMS
    if not good or not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        raise CheckpointError(f"{MANIFEST}: {what} has numbers {str(value)[:60]}")
    return tuple(value)


def _require(good: bool, what: str) -> None:
    if not good:
        raise CheckpointError(f"{MANIFEST} has {what}")


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(_dumps(body).encode())
