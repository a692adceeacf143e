"""Plain values as JSON and back: numbers, texts, lists, tuples and tensors without dims.

What JSON lacks is a mapping with one key that begins with `$`. Nothing else is ever made of a
file's content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError
from shardwise.training.checkpoint.types import dtype_named

__all__ = ["decode", "encode"]


def encode(value: Any, where: str, keep: Callable[[Tensor, str], None] | None = None) -> Any:
    """A value as JSON. Tensors with dims are given to `keep`, with the path that stands for them.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.95)}, "")
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.95]}}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        if not value.dim() and not value.is_complex():
            number = encode(value.item(), where)
            return {"$tensor": [dtype_name(value.dtype), number]}
        if keep is not None:
            keep(value, where)
            return {"$stored": where}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{where}.{i}" if where else str(i), keep) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: encode(v, f"{where}.{k}" if where else k, keep) for k, v in value.items()}
    raise CheckpointError(
        f"a value of type {type(value).__name__} cannot be saved as JSON or tensor",
        where=where or None,
    )


def decode(value: Any, where: str, stored: Callable[[str], Tensor] | None = None) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(v, where, stored) for v in value]
    if not isinstance(value, dict):
        return value
    special = next((k for k in value if k.startswith("$")), None)
    if special is None:
        return {k: decode(v, where, stored) for k, v in value.items()}
    content = value[special]
    try:
        if special == "$float":
            return float(content)
        if special == "$tuple":
            return tuple(decode(v, where, stored) for v in content)
        if special == "$tensor":
            kind, number = content
            return torch.tensor(decode(number, where), dtype=dtype_named(kind, where))
        if special == "$stored" and stored is not None and isinstance(content, str):
            return stored(content)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"a value {str(value)[:60]} is malformed", where=where) from error
    raise CheckpointError(f"a value {str(value)[:60]} is of no known kind", where=where)
