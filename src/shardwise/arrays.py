"""Short names for the types of NumPy arrays, and the array fields of a dataclass."""

from functools import cache
from typing import Any, TypeAlias, get_type_hints

import numpy as np
from numpy.typing import NDArray

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@cache
def float_arrays(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that are declared as `Floats`."""
    return tuple(name for name, hint in get_type_hints(kind).items() if hint == Floats)
