"""Values of Python variables in a form that can be compared later.

A snapshot holds no tensor, module or other large object: those are compared by identity (tensors
also by version), through weak references. Numbers, strings, arrays and containers are compared by
value, iterators by how far they are, other objects by those of their attributes that some code
names.
"""

from __future__ import annotations

import functools
import operator
import random
import types
import warnings
import weakref
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

LARGEST = 256  # elements of a container that are compared one by one
MOST = 8192  # of one that holds numbers and strings alone
LARGEST_ARRAY = 2**20  # bytes of an array that is compared by value
DEPTH = 6
ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, range)
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}
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
        exact = isinstance(value, bool | float | complex)  # True == 1 == 1.0
        return (type(value), repr(value)) if exact else value
    if isinstance(value, torch.Tensor):
        counts = not isinstance(value, nn.Parameter) and not value.is_inference()
        return (Same(value), value._version if counts else 0)
    if isinstance(value, types.MethodType):
        owner = value.__self__  # attributes of modules are compared by themselves
        held = Same(owner) if isinstance(owner, nn.Module) else snapshot(owner, names, depth)
        return (held, Same(value.__func__))
    if isinstance(value, list | tuple | set | frozenset | dict) and depth:
        return _container(value, names, depth - 1)
    if isinstance(value, random.Random):
        return (Same(value), hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return (Same(value), repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return (Same(value), repr(value.get_state()))
    if isinstance(value, np.ndarray):
        small = value.nbytes <= LARGEST_ARRAY
        return (value.shape, value.dtype, value.tobytes()) if small else Same(value)
    if isinstance(value, nn.Module):
        return (Same(value), [_module(module, names) for module in value.modules()])
    if not depth or isinstance(value, (type, types.ModuleType, *_FUNCTIONS)):
        return Same(value)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (Same(value), [snapshot(part, names, depth) for part in parts])
    attributes = [(k, v) for k, v in attributes_of(value).items() if k in names]
    taken = [(k, snapshot(v, names, depth - 1)) for k, v in attributes]
    return (Same(value), taken, _contents(value, names, depth))


def _module(module: nn.Module, names: Set[str]) -> Any:
    """Return the attributes of a module that is no part of the model, and the versions of its
    tensors.
    """
    own = vars(module)
    kept = {k: v for k, v in own.items() if k not in INTERNAL and k != "training"}
    tensors = [t for kind in ("_parameters", "_buffers") for t in own[kind].values()]
    versions = [t._version for t in tensors if t is not None and not t.is_inference()]
    return ([(k, snapshot(v, names, 1)) for k, v in kept.items()], versions)


def _contents(value: Any, names: Set[str], depth: int) -> Any:
    """What an object holds that is no attribute: items of a mapping, the place of an iterator."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lasti, _container(dict(frame.f_locals), names, depth - 1))
    try:
        if isinstance(value, Mapping):
            return _container(dict(value), names, depth - 1)
        if isinstance(value, deque | UserList):
            return _container(list(value), names, depth - 1)
        if isinstance(value, Iterator):
            return _progress(value)
    except Exception:  # of the user's own class: its attributes have to do
        return None
    return None


def _progress(value: Iterator[Any]) -> Any:
    if type(value).__module__ == "itertools":
        with warnings.catch_warnings():  # copies of these are deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            return repr(value.__reduce__())
    return operator.length_hint(value, -1)


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
        return (kind, len(value), _large(value))
    if isinstance(value, dict):
        return (kind, [[snapshot(item, names, depth) for item in pair] for pair in value.items()])
    if isinstance(value, set | frozenset):
        return (kind, sorted(map(repr, value)))
    return (kind, [snapshot(item, names, depth) for item in value])


def _large(value: Any) -> Any:
    if len(value) <= MOST:
        items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        if set(map(type, items)) <= _SCALARS:
            return items
    return Same(value)
