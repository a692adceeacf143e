"""Python values and code as text that is equal in another process only if they are equal.

This is what graphs are stored under: unlike a snapshot it outlives the process. Whatever has no
such text (iterators, random generators, objects with state that Python cannot see, modules outside
the model) raises `NotStorable`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import random
import re
import sys
import types
from collections import UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.frontend.fake import has_data
from shardwise.frontend.python_state import ATOMS, LARGEST_ARRAY, MISSING, MOST, attributes_of
from shardwise.ir.stored import NotStorable

__all__ = ["Describe", "describe_file", "digest"]

DEPTH = 12
_NATIVE = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, np.ufunc),
)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_HIDDEN_STATE = (Iterator, random.Random, torch.Generator, io.IOBase, nn.Module)
_HEAP_TYPE = 1 << 9  # a class that was made by Python code


class Describe:
    """Describes values; of objects, the attributes in `names`, and parts of `model` by path."""

    def __init__(self, model: nn.Module, names: Set[str]) -> None:
        self._names = names
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._known: dict[int, tuple[Any, str]] = {}  # with the values, so that ids stay theirs
        self._open: list[int] = []  # values that are being described

    def __call__(self, value: Any) -> str:
        """Return the text of a value."""
        if isinstance(value, Enum):
            return f"{_name(type(value))}.{value.name}"
        if isinstance(value, ATOMS):
            return f"{type(value).__name__} {value!r}"
        if value is MISSING:
            return "missing"
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._open:
            return f"value {len(self._open) - self._open.index(id(value))} above"
        if len(self._open) >= DEPTH:
            raise NotStorable("values are nested too deep")
        self._open.append(id(value))
        try:
            text = digest(self._parts(value))
        finally:
            self._open.pop()
        self._known[id(value)] = (value, text)
        return text

    def _all(self, values: Iterable[Any]) -> list[str]:
        return [self(value) for value in values]

    def _parts(self, value: Any) -> list[str]:
        """The kind of a value, and the texts that tell it from others of its kind."""
        kind = _name(type(value))
        if id(value) in self._paths:
            return ["part", self._paths[id(value)]]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return [kind, *self._all((value.__self__, value.__func__))]
        if isinstance(value, _NATIVE):
            return [kind, str(getattr(value, "__module__", "")), value.__name__]
        if isinstance(value, type):
            return self.class_parts(value)
        if isinstance(value, types.ModuleType):
            top = sys.modules.get(value.__name__.partition(".")[0])
            return [value.__name__, str(getattr(top, "__version__", "")), describe_file(value)]
        if isinstance(value, _WRAPPERS):
            names = ("__func__", "fget", "fset", "func")
            return [kind, *(self(getattr(value, name, None)) for name in names)]
        if isinstance(value, functools.partial):
            return [kind, *self._all((value.func, value.args, value.keywords))]
        if isinstance(value, functools._lru_cache_wrapper):
            return [kind, self(value.__wrapped__)]
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            if value.nbytes > LARGEST_ARRAY or value.dtype.hasobject:
                raise NotStorable("a large array")
            return [kind, str(value.shape), str(value.dtype), _sha(value.tobytes())]
        if isinstance(value, re.Pattern):
            return [kind, repr(value.pattern), str(value.flags)]
        if isinstance(value, logging.Logger):
            return [kind, value.name, str(value.getEffectiveLevel())]
        return [kind, *self._object(value)]

    def _object(self, value: Any) -> list[str]:
        """The items and attributes of any other object."""
        if isinstance(value, _HIDDEN_STATE):
            raise NotStorable(f"a {type(value).__name__} has state that cannot be described")
        native = [c for c in type(value).__mro__ if not c.__flags__ & _HEAP_TYPE]
        if any(c not in (*_CONTAINERS, deque, object) for c in native):
            raise NotStorable(f"a {type(value).__name__} may have state that cannot be seen")
        attributes = attributes_of(value)
        texts = [f"{k}: {self(attributes[k])}" for k in sorted(attributes) if k in self._names]
        if isinstance(value, (*_CONTAINERS, deque, UserList, Mapping)):
            if len(value) > MOST:
                raise NotStorable("a large container")
            if isinstance(value, Mapping):
                texts += [f"{self(key)} = {self(item)}" for key, item in value.items()]
            else:
                items = self._all(value)
                texts += sorted(items) if isinstance(value, set | frozenset) else items
        elif type(value).__flags__ & _HEAP_TYPE == 0 and type(value) is not object:
            raise NotStorable(f"a {type(value).__name__}")
        return texts

    def _function(self, function: types.FunctionType) -> list[str]:
        if (function.__module__ or "").startswith("torch."):  # it may mark its own functions
            return ["function", function.__module__, describe_code(function.__code__)]
        held = [_contents(cell) for cell in function.__closure__ or ()]
        defaults = (function.__defaults__, function.__kwdefaults__)
        own = {k: v for k, v in vars(function).items() if k != "__wrapped__"}
        parts = self._all((*defaults, *held, own, getattr(function, "__wrapped__", None)))
        return ["function", function.__module__ or "", describe_code(function.__code__), *parts]

    def class_parts(self, cls: type) -> list[str]:
        """The members of a class that are code or plain values, and those of its bases."""
        parts = ["class", _name(cls)]
        if cls.__module__.startswith("torch.") and not issubclass(cls, nn.Module):
            return parts
        for base in cls.__mro__:
            if base.__flags__ & _HEAP_TYPE:
                parts.append(_name(base))
                for name, member in sorted(vars(base).items()):
                    if isinstance(member, (types.FunctionType, *_WRAPPERS, *ATOMS)):
                        parts.append(f"{name}: {self(member)}")
        return parts


def digest(parts: Iterable[str]) -> str:
    """Return a short text for a list of texts."""
    hashed = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="backslashreplace")
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.hexdigest()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _tensor(value: torch.Tensor) -> list[str]:
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    if not plain or not has_data(value) or value.nbytes > LARGEST_ARRAY:
        raise NotStorable("a tensor that is large, without data, or of a type of its own")
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    about = (value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad)
    return ["tensor", *map(str, about), _sha(content)]


@functools.lru_cache(maxsize=65536)
def describe_code(code: types.CodeType) -> str:
    """Return a text for the instructions, constants, names and lines of a function."""
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    place = (code.co_filename, code.co_firstlineno, code.co_qualname)
    binary = (code.co_code, code.co_exceptiontable, code.co_linetable)
    constants = [_constant(constant) for constant in code.co_consts]
    return digest([repr(numbers), repr(names), repr(place), *map(_sha, binary), *constants])


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return describe_code(value)
    if isinstance(value, frozenset):
        return repr(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return repr([_constant(item) for item in value])
    return f"{type(value).__name__} {value!r}"


def describe_file(module: types.ModuleType) -> str:
    """Return a text that changes with the file of a module of a library."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    try:
        status = os.stat(file)
    except OSError:
        raise NotStorable(f"{module.__name__} has no file") from None
    return f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
