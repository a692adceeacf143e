"""The manifest of a checkpoint, `checkpoint.json`: its tensors, their files, and other state.

Sections are `model`, `optimizer.<key>` and those of further copies; each has tensors by their names
on a single device. A tensor is stored as boxes. A manifest read from a file is untrusted: every
field is checked before use, and the file has its own checksum.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from shardwise.checkpoint.files import dtype_named
from shardwise.checkpoint.shards import Box, check_cover
from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError
from shardwise.files import parse_json, read_text
from shardwise.schema import Form, Match, Range, Reader, Stored, Writer

MANIFEST = "checkpoint.json"
MODEL = "model"
VERSION = 1
_FORMAT = "shardwise checkpoint"
_MAX_DIMS = 64
_MAX_BYTES = 1 << 28
_MAX_VALUES = 20_000_000

Size = Annotated[int, Range(0)]
FileName = Annotated[
    str, Match(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", "the name of a .safetensors file")
]


def _dims(dims: tuple[int, ...]) -> tuple[int, ...]:
    if len(dims) > _MAX_DIMS or not all(0 <= n < 1 << 48 for n in dims):
        raise CheckpointError(f"invalid dims {str(list(dims))[:60]}")
    return dims


Dims = Annotated[tuple[int, ...], Form(_dims, list, tuple[int, ...])]
Dtype = Annotated[torch.dtype, Form(partial(dtype_named, where=MANIFEST), dtype_name)]
# Boxes in memory and in files of Hugging Face have no checksum.
Checksum = Annotated[int | None, Range(0, 2**32 - 1)]


@dataclass(frozen=True, slots=True)
class StoredBox(Box):
    """A box with its file, and the CRC-32 of its bytes."""

    offset: Annotated[Dims, Stored("at")]
    size: Dims
    file: str
    crc32: Checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A full tensor, stored as boxes."""

    shape: Dims
    dtype: Dtype
    boxes: tuple[StoredBox, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Sections = Mapping[str, Mapping[str, StoredTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without the values of its tensors.

    `aliases` are further names of the model's tensors. `optimizer` has parameter groups and
    non-tensor state, `module` the loss scale and the step of random numbers, `extra` the user's
    values.
    """

    format: Annotated[str, Stored(always=True)] = _FORMAT
    version: Annotated[int, Stored(always=True)] = VERSION
    step: Annotated[int | None, Range(0), Stored(always=True)] = None
    files: Mapping[FileName, Size]
    sections: Sections
    aliases: Annotated[Mapping[str, str], Stored(always=True)] = field(default_factory=dict)
    optimizer: Annotated[Mapping[str, Any] | None, Stored(always=True)] = None
    module: Annotated[Mapping[str, Any], Stored(always=True)] = field(default_factory=dict)
    extra: Annotated[Mapping[str, Any], Stored(always=True)] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors: `w`, `optimizer.exp_avg.w`, `ema.w`."""
        return tuple(full_name(s, n) for s, tensors in self.sections.items() for n in tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for tensors in self.sections.values() for t in tensors.values())

    def to_text(self) -> str:
        """Return the JSON of the file."""
        body = Writer().fields(self)
        return _dumps({**body, "crc32": _checksum(body)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest in a folder; the files that it names must have the sizes it states."""
        path = folder / MANIFEST
        text = read_text(path, CheckpointError, what="manifest", max_bytes=_MAX_BYTES)
        manifest = cls.from_text(text, str(path))
        manifest.check_files(folder)
        return manifest

    @classmethod
    def from_text(cls, text: str, where: str = MANIFEST, *, is_part: bool = False) -> Manifest:
        """Read the JSON of a file; that of one rank's part has some boxes of each tensor."""
        # Objects that a user saved in `extra` may contain any number.
        body = parse_json(text, CheckpointError, where=where, free=True, max_values=_MAX_VALUES)
        reader = Reader(CheckpointError, where)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            reader.fail("not the manifest of a Shardwise checkpoint", ())
        if body.get("version") != VERSION:
            reader.fail(
                f"unsupported manifest version {body.get('version')!r}, expected {VERSION}", ()
            )
        if body.pop("crc32", None) != _checksum(body):
            reader.fail("the manifest is corrupt: checksum mismatch", ())
        manifest: Manifest = reader.read(cls, body)
        for section, tensors in manifest.sections.items():
            for name, tensor in tensors.items() if not is_part else ():
                reader.construct(
                    manifest._check, ("sections", section, name), section, name, tensor
                )
        return manifest

    def _check(self, section: str, name: str, tensor: StoredTensor) -> None:
        """Refuse a tensor that is too large or not covered, and boxes in unknown files."""
        full, shape = full_name(section, name), tensor.shape
        if math.prod(n or 1 for n in shape) >= 1 << 62:
            raise CheckpointError(f"{full} has an invalid shape {shape}")
        for stored in tensor.boxes:
            if stored.file not in self.files:
                raise CheckpointError(f"{full} has a box in an unknown file {stored.file[:80]!r}")
        check_cover(full, shape, tensor.boxes)

    def check_files(self, folder: Path) -> None:
        """Refuse files that are missing, have the wrong size, or are too small for their boxes."""
        needed = dict.fromkeys(self.files, 0)
        for tensors in self.sections.values():
            for tensor in tensors.values():
                for stored in tensor.boxes:
                    needed[stored.file] += stored.numel * tensor.dtype.itemsize
        for name, size in self.files.items():
            path = folder / name
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{name} is missing", where=str(path))
            actual = os.stat(path).st_size
            if actual != size:
                problem = "truncated" if actual < size else "corrupt"
                raise CheckpointError(
                    f"{name} is {problem}: it has {actual} bytes instead of {size}", where=str(path)
                )
            if needed[name] > size:
                raise CheckpointError(
                    f"{name} has {size} bytes, but its boxes need {needed[name]}", where=str(path)
                )


def full_name(section: str, name: str) -> str:
    """Return the name of a tensor among all those of a checkpoint."""
    return name if section == MODEL else f"{section}.{name}"


def key_of(section: str, name: str, box: Box, shape: Sequence[int]) -> str:
    """Return a box's key in its file: the tensor's name, and the offset unless it is all of it."""
    full = full_name(section, name)
    return full if box.size == tuple(shape) else f"{full}@{','.join(map(str, box.offset))}"


# ------------------------------------------------------------ values as JSON
# Values that JSON lacks are mappings with one key that begins with `$`. Nothing else is ever
# created from the content of a file.


def encode(
    value: Any,
    where: str = "",
    store: Callable[[Tensor, str], None] | None = None,
    *,
    partial: bool = False,
) -> Any:
    """Return a value as JSON; pass tensors that are not scalars to `store`, with their paths.

    With `partial`, entries of mappings that cannot be saved are left out, and tensors of one
    element are numbers.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.95)})
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.95]}}
    """
    if partial and isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        if not value.dim() and not value.is_complex():
            return {"$tensor": [dtype_name(value.dtype), encode(value.item(), where)]}
        if store is not None:
            store(value, where)
            return {"$stored": where}
    inside = f"{where}." if where else ""
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{inside}{i}", store, partial=partial) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            try:
                own = encode(item, f"{inside}{key}", store, partial=partial)
                pairs.append((encode(key, where), own))
            except CheckpointError:
                if not partial:
                    raise
        if not isinstance(value, Counter) and all(isinstance(key, str) for key, _ in pairs):
            return dict(pairs)
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    raise CheckpointError(
        f"a value of type {type(value).__name__} cannot be saved", where=where or None
    )


def decode(value: Any, where: str, load: Callable[[str], Tensor] | None = None) -> Any:
    """Return the value that `encode` converted; `load` returns the tensor of a path."""
    if isinstance(value, list):
        return [decode(v, where, load) for v in value]
    if not isinstance(value, dict):
        return value
    special = next((k for k in value if k.startswith("$")), None)
    if special is None:
        return {k: decode(v, where, load) for k, v in value.items()}
    content = value[special]
    try:
        if special == "$float":
            return float(content)
        if special == "$tuple":
            return tuple(decode(v, where, load) for v in content)
        if special in ("$dict", "$counter"):
            pairs = {decode(k, where): decode(v, where, load) for k, v in content}
            return Counter(pairs) if special == "$counter" else pairs
        if special == "$tensor":
            kind, number = content
            return torch.tensor(decode(number, where), dtype=dtype_named(kind, where))
        if special == "$stored" and load is not None and isinstance(content, str):
            return load(content)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"malformed value {str(value)[:60]}", where=where) from error
    raise CheckpointError(f"unknown kind of value {str(value)[:60]}", where=where)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(_dumps(body).encode())
