"""Number types by name: torch's, and how safetensors files call them.

Complex numbers lie in files as pairs of real ones, which every reader knows.
"""

from __future__ import annotations

import torch

from shardwise.dtypes import DTYPES, dtype_name, torch_pairs
from shardwise.errors import CheckpointError, did_you_mean

__all__ = ["dtype_named", "file_dtype", "from_file_dtype"]

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
