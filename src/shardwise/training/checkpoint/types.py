"""Number types by name: torch's, and how safetensors files call them.

Complex numbers lie in files as pairs of real ones, which every reader knows.
"""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError, did_you_mean

__all__ = ["dtype_name", "dtype_named", "file_dtype", "from_file_dtype"]

_IN_FILES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in (*_IN_FILES, *_REAL)}
_FROM_FILES = {name: dtype for dtype, name in _IN_FILES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


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
