"""Short names for the types of NumPy arrays, and the array fields of a dataclass."""

from functools import cache
from typing import Any, TypeAlias, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def before(values: ArrayLike) -> NDArray[Any]:
    """Return the sum before each position, and the total.

    >>> before([1, 2, 3]).tolist()
    [0, 1, 3, 6]
    """
    return np.concatenate([[0], np.cumsum(values)])


@cache
def float_arrays(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that are declared as `Floats`."""
    return tuple(name for name, hint in get_type_hints(kind).items() if hint == Floats)
