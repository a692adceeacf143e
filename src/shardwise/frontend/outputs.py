"""The leaves of a model's output that a training step keeps.

Caches of keys and values (transformers' `DynamicCache` and its like) are for generating text. In
training they are written and never read, so they are left out as a whole: they are neither results
of the step nor compared with the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def flatten_output(output: Any) -> tuple[list[Any], Any]:
    """Return the leaves of an output and how they nest; a cache is one leaf."""
    leaves, spec = pytree.tree_flatten(output, is_leaf=is_cache)
    return leaves, spec


def kept_leaf(leaf: Any) -> Any:
    """Return what the step gives for a leaf: tensors and plain values, None for other objects."""
    plain = isinstance(leaf, torch.Tensor | bool | int | float | str)
    return leaf if plain else None


def is_cache(value: Any) -> bool:
    """Whether an object is a cache of keys and values, by its class or by its methods."""
    if any(c.__module__.startswith("transformers.cache_utils") for c in type(value).__mro__):
        return True
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
