"""The table of dtypes and their uses. Importing it does not import torch.

To add a dtype, add its entry here; a device that multiplies it needs rates in
`cluster/presets.yaml` or a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """A dtype of torch.

    `widened` is the dtype in which sums and statistics are computed, `exact` the one in which a
    plan is verified; "" stands for the dtype itself.
    """

    name: str
    num_bytes: int
    short: str = ""  # as in `precision="bf16"`
    widened: str = ""
    exact: str = ""
    can_train: bool = False  # parameters and gradients may have it, and gradients are summed in it
    can_multiply: bool = False  # devices may have a rate of matrix products for it
    can_reduce: bool = False  # gloo can reduce it
    needs_loss_scale: bool = False
    file_name: str = ""  # in safetensors files
    real: str = ""  # for a complex dtype: its numbers are saved as pairs of these


def _number(name: str, num_bytes: int, **more: Any) -> DType:
    return DType(name=name, num_bytes=num_bytes, can_multiply=True, **more)


_TRAINED: dict[str, Any] = {"can_train": True, "can_reduce": True}
_HALF: dict[str, Any] = {**_TRAINED, "widened": "float32", "exact": "float64"}
_LIST = (  # a profile measures trained dtypes in this order
    _number("float32", 4, short="fp32", exact="float64", file_name="F32", **_TRAINED),
    _number("bfloat16", 2, short="bf16", file_name="BF16", **_HALF),
    _number("float64", 8, file_name="F64", **_TRAINED),
    _number("float16", 2, short="fp16", file_name="F16", needs_loss_scale=True, **_HALF),
    _number("float8_e4m3fn", 1, file_name="F8_E4M3"),
    _number("float8_e4m3fnuz", 1),
    _number("float8_e5m2", 1, file_name="F8_E5M2"),
    _number("float8_e5m2fnuz", 1),
    _number("float8_e8m0fnu", 1),
    _number("float4_e2m1fn_x2", 1),
    _number("complex128", 16, real="float64"),
    _number("complex64", 8, real="float32", exact="complex128"),
    DType(name="complex32", num_bytes=4, exact="complex128"),
    _number("int64", 8, file_name="I64", can_reduce=True),
    _number("int32", 4, file_name="I32", can_reduce=True),
    _number("int16", 2, file_name="I16"),
    _number("int8", 1, file_name="I8", can_reduce=True),
    _number("uint8", 1, file_name="U8", can_reduce=True),
    DType(name="uint16", num_bytes=2, file_name="U16"),
    DType(name="uint32", num_bytes=4, file_name="U32"),
    DType(name="uint64", num_bytes=8, file_name="U64"),
    DType(name="bool", num_bytes=1, file_name="BOOL"),
)
DTYPES = {dtype.name: dtype for dtype in _LIST}


def dtype_name(dtype: torch.dtype) -> str:
    """Return `"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def itemsize(name: str, default: int) -> int:
    """Return the bytes of an element of the dtype `name`, or `default` if it is ""."""
    return DTYPES[name].num_bytes if name else default


def torch_dtypes(**uses: bool) -> tuple[torch.dtype, ...]:
    """Return the torch dtypes with these uses, for example `can_train=True`."""
    import torch

    chosen = (d for d in DTYPES.values() if all(getattr(d, u) == v for u, v in uses.items()))
    return tuple(getattr(torch, dtype.name) for dtype in chosen)


def torch_pairs(field: str) -> dict[torch.dtype, torch.dtype]:
    """Map torch dtypes to the dtypes in one of their fields, for example "widened"."""
    import torch

    named = ((d.name, getattr(d, field)) for d in DTYPES.values())
    return {getattr(torch, name): getattr(torch, to) for name, to in named if to}
