"""Values of Python variables in a form that can be compared later.

A snapshot holds no tensor, module or other large object: those are compared by identity (tensors
also by version), through weak references. Numbers, strings and containers are compared by value,
other objects by those of their attributes that some code names.
"""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Callable, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

LARGEST = 256  # elements of a container that are compared one by one
DEPTH = 6
ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
INTERNAL = (frozenset(vars(nn.Module())) | frozenset(vars(nn.Module))) - {"training"}


class Missing:
    """Stands for a variable that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class Same:
    """An object that is compared by identity and not kept alive."""

    __slots__ = ("_get",)

    def __init__(self, value: Any) -> None:
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # of a type without weak references: small, or builtin
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return isinstance(other, Same) and mine is not None and mine is other._get()

    __hash__ = None  # type: ignore[assignment]


def snapshot(value: Any, names: Set[str], depth: int = DEPTH) -> Any:
    """Return what to compare `value` with later; of objects, the attributes in `names`."""
    if isinstance(value, ATOMS):
        return (type(value), repr(value)) if isinstance(value, float | complex) else value
    if isinstance(value, torch.Tensor):
        counts = not isinstance(value, nn.Parameter) and not value.is_inference()
        return (Same(value), value._version if counts else 0)
    if isinstance(value, types.MethodType):
        return (Same(value.__self__), Same(value.__func__))
    if isinstance(value, list | tuple | set | frozenset | dict) and depth:
        return _container(value, names, depth - 1)
    if isinstance(value, random.Random):
        return (Same(value), hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return (Same(value), repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return (Same(value), repr(value.get_state()))
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes()) if value.size <= LARGEST else Same(value)
    if isinstance(value, nn.Module):
        kept = {k: v for k, v in vars(value).items() if k not in INTERNAL and k != "training"}
        return (Same(value), [(k, snapshot(v, names, 0)) for k, v in kept.items()])
    if not depth or isinstance(value, (type, types.ModuleType, *_FUNCTIONS)):
        return Same(value)
    attributes = [(k, v) for k, v in attributes_of(value).items() if k in names]
    return (Same(value), [(k, snapshot(v, names, depth - 1)) for k, v in attributes])


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in `__dict__` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _container(value: Any, names: Set[str], depth: int) -> Any:
    kind = type(value)
    if len(value) > LARGEST:
        return (kind, len(value), Same(value))
    if isinstance(value, dict):
        return (kind, [[snapshot(item, names, depth) for item in pair] for pair in value.items()])
    if isinstance(value, set | frozenset):
        return (kind, sorted(map(repr, value)))
    return (kind, [snapshot(item, names, depth) for item in value])
