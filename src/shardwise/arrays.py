"""Short names for the types of NumPy arrays, and the array fields of a dataclass."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Floats", "Ints", "float_arrays"]

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def float_arrays(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that are declared as `Floats`."""
    return tuple(field.name for field in fields(kind) if field.type == "Floats")
