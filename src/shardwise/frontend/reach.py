"""Global variables, closure cells, class attributes and defaults that a model's code may read.

Enters: the model and the functions that run with it. Leaves: `Reach`. Code is not run to find out:
starting from the methods of the model's classes, functions are followed through the names that
they use. What a name may refer to is overestimated, never underestimated, for plain functions,
methods, closures, containers and attributes of objects.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.frontend.fake import has_data
from shardwise.frontend.provenance import is_user_code
from shardwise.frontend.snapshot import ATOMS, DEPTH, INTERNAL, LARGEST, MISSING, attributes_of

_ALWAYS = frozenset({"forward", "__call__", "__getitem__", "__getattr__", "__iter__", "__len__"})
_BY_ANY_NAME = frozenset({"vars", "__dict__", "attrgetter", "asdict", "astuple", "fields"})
_BUILTIN = (types.BuiltinFunctionType, type, types.MethodDescriptorType)
_WRAPPERS = (functools.partial, staticmethod, classmethod, property, functools.cached_property)


@dataclass(frozen=True, slots=True)
class Variable:
    """A global variable, a cell of a closure or a class attribute, and what reads it."""

    name: str
    place: str  # "train.py:12"
    home: Any = field(repr=False)  # the dict of globals, the cell, or the class

    @property
    def kind(self) -> str:
        """What the user calls it."""
        if isinstance(self.home, type):
            return "class attribute"
        return "global variable" if isinstance(self.home, dict) else "enclosing variable"

    def read(self) -> Any:
        """Return the value, or `MISSING`."""
        if isinstance(self.home, types.CellType):
            try:
                return self.home.cell_contents
            except ValueError:
                return MISSING
        home = self.home if isinstance(self.home, dict) else vars(self.home)
        return home.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        """Set the value, for what a capture must undo."""
        if isinstance(self.home, types.CellType):
            self.home.cell_contents = value
        elif isinstance(self.home, type):
            delattr(self.home, self.name) if value is MISSING else setattr(
                self.home, self.name, value
            )
        elif value is MISSING:
            self.home.pop(self.name, None)
        else:
            self.home[self.name] = value


@dataclass(slots=True)
class Reach:
    """What code may read: variables, and the names of attributes."""

    variables: dict[tuple[int, str], Variable] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    writes: dict[str, str] = field(default_factory=dict)  # "name" or ".attribute" -> assignment

    def trained_tensors(self) -> dict[int, tuple[str, str]]:
        """Return the addresses of tensors in variables that want a gradient: name and place."""
        found: dict[int, tuple[str, str]] = {}
        for variable in self.variables.values():
            for name, tensor in _tensors(variable.read()):
                if tensor.requires_grad and has_data(tensor):
                    full = ".".join(filter(None, (variable.name, name)))
                    found[tensor.data_ptr()] = (full, variable.place)
        return found


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module, or of a container of modules and tensors, with names."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        yield from value.named_parameters()
    elif isinstance(value, dict | list | tuple) and len(value) <= LARGEST:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, nn.Module | torch.Tensor):
                yield from ((f"{key}.{name}", tensor) for name, tensor in _tensors(item))


def reachable(model: nn.Module, functions: Iterable[Any]) -> Reach:
    """Return the variables that the model's methods and these functions may read."""
    walk = _Walk()
    for module in model.modules():
        walk.classes.setdefault(type(module))
        for name, value in vars(module).items():
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                walk.value(list(value.values()), DEPTH)
            elif name not in INTERNAL:
                walk.value(value, DEPTH)
    for function in functions:
        holder = {"the function": function}
        walk.reach.variables[id(holder), "the function"] = Variable("the function", "", holder)
        walk.value(function, DEPTH)
    walk.close()
    return walk.reach


class _Walk:
    def __init__(self) -> None:
        self.reach = Reach()
        self.classes: dict[type, None] = {}
        self.modules: dict[int, types.ModuleType] = {}
        self.libraries: dict[int, types.ModuleType] = {}  # whose functions may be replaced
        self._attributes: set[str] = set()  # of objects
        self._is_dynamic = False  # whether code reads attributes by names that it computes
        self._is_user: dict[type, bool] = {}
        self._codes: set[types.CodeType] = set()
        self._values: dict[int, Any] = {}  # holds them, so that ids stay theirs

    def value(self, value: Any, depth: int) -> None:
        """Follow a value that code may use."""
        if isinstance(value, ATOMS) or id(value) in self._values or not depth:
            return
        self._values[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, depth)
            self.value(value.__func__, depth)
        elif isinstance(value, (*_WRAPPERS, functools._lru_cache_wrapper)):
            inner = ("func", "args", "keywords", "__func__", "fget", "__wrapped__")
            for name in inner:
                self.value(getattr(value, name, None), depth)
        elif isinstance(value, types.ModuleType):
            own = "site-packages" not in (getattr(value, "__file__", None) or "")
            (self.modules if own and _is_user(value) else self.libraries)[id(value)] = value
        elif isinstance(value, type):
            self.classes.setdefault(value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            if len(value) <= LARGEST:
                for item in value.values() if isinstance(value, dict) else value:
                    self.value(item, depth)
        elif not isinstance(value, nn.Module) and _is_user_class(type(value)):
            self.classes.setdefault(type(value))
            for name, item in attributes_of(value).items():
                self._attributes.add(name)
                self.value(item, depth - 1)

    def close(self) -> None:
        """Follow attributes by name until nothing new is found."""
        done: set[tuple[int, str]] = set()
        size = -1
        while size != len(done):
            size = len(done)
            names = self.reach.names | _ALWAYS
            for cls in list(self.classes):
                for base in cls.__mro__:
                    if base not in self._is_user:
                        self._is_user[base] = _is_user_class(base)
                    if self._is_user[base]:
                        self._members(base, names, done)
            for module in list(self.modules.values()):
                self._members(module, names, done)
        if self._is_dynamic:
            self.reach.names |= self._attributes
        if not {"environ", "getenv"}.isdisjoint(self.reach.names):  # a mapping without identity
            held = vars(os.environ)
            self.reach.variables[id(held), "_data"] = Variable("_data", "os.environ", held)
        for library in self.libraries.values():
            members = vars(library)
            for name in sorted(self.reach.names & members.keys()):
                if isinstance(members[name], (*ATOMS, types.FunctionType, *_BUILTIN)):
                    found = Variable(name, library.__name__, members)
                    self.reach.variables.setdefault((id(members), name), found)

    def _members(self, owner: Any, names: set[str], done: set[tuple[int, str]]) -> None:
        members = vars(owner)
        for name in names & members.keys():
            if (id(owner), name) in done:
                continue
            done.add((id(owner), name))
            if isinstance(owner, types.ModuleType):
                self._variable(name, owner.__name__, members)
            elif not hasattr(type(members[name]), "__get__") and _is_own(owner, members[name]):
                found = Variable(name, f"class {owner.__name__}", owner)
                self.reach.variables.setdefault((id(owner), name), found)
            self.value(members[name], DEPTH)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        user = _is_user_function(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            found = Variable(name, _place(code), cell)
            watched = "site-packages" not in code.co_filename or isinstance(found.read(), ATOMS)
            if user and watched and name != "__class__":
                self.reach.variables[id(cell), name] = found
            self.value(found.read(), DEPTH)
        own = user and "site-packages" not in code.co_filename
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for number, default in enumerate(defaults):
            if own and not isinstance(default, ATOMS):
                name = f"default {number} of {function.__name__}"
                holder = {name: default}
                self.reach.variables[id(default), name] = Variable(name, _place(code), holder)
            self.value(default, DEPTH)
        for name in vars(function):
            if own and name != "__wrapped__":
                found = Variable(name, _place(code), vars(function))
                self.reach.variables[id(vars(function)), name] = found
            self.value(vars(function)[name], DEPTH)
        if user:
            self._code(code, function.__globals__)

    def _code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        if code in self._codes:
            return
        self._codes.add(code)
        used, attributes, written = names_in(code)
        self.reach.names |= attributes
        self._is_dynamic = self._is_dynamic or _reads_any_name(code)
        for name, line in written.items():
            self.reach.writes.setdefault(name, f"{Path(code.co_filename).name}:{line}")
        for name in used:
            if name in namespace:
                self._variable(name, _place(code), namespace)
                self.value(namespace[name], DEPTH)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, namespace)

    def _variable(self, name: str, place: str, namespace: dict[str, Any]) -> None:
        library = "site-packages" in str(namespace.get("__file__", ""))
        if not library or isinstance(namespace[name], ATOMS):
            self.reach.variables.setdefault((id(namespace), name), Variable(name, place, namespace))


@functools.lru_cache(maxsize=65536)
def names_in(
    code: types.CodeType,
) -> tuple[tuple[str, ...], frozenset[str], dict[str, int]]:
    """Return global names, attribute names and lines that assign either, of one code object."""
    used: dict[str, None] = {}
    written: dict[str, int] = {}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line if sys.version_info < (3, 13) else _line(instruction)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            used[instruction.argval] = None
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            used[instruction.argval] = None
            written.setdefault(instruction.argval, line)
        elif instruction.opname == "STORE_ATTR":
            written.setdefault(f".{instruction.argval}", line)
    texts = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    return tuple(used), frozenset(code.co_names) | texts, written


@functools.lru_cache(maxsize=65536)
def _reads_any_name(code: types.CodeType) -> bool:
    """Whether code reads attributes by names that it computes: `vars(x)`, `getattr(x, name)`."""
    if not _BY_ANY_NAME.isdisjoint(code.co_names):
        return True
    if "getattr" not in code.co_names:
        return False
    plain: bool | None = None  # of the call of getattr that is being read
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name == "LOAD_GLOBAL" and value == "getattr":
            plain = False
        elif plain is None:
            continue
        elif name == "LOAD_CONST" and isinstance(value, str) and value.isidentifier():
            plain = True
        elif name.startswith(("FORMAT_", "BINARY_OP", "BUILD_STRING")):
            return True
        elif name.startswith("CALL") and value in (2, 3):
            if not plain:
                return True
            plain = None
    return False


def _is_own(cls: type, value: Any) -> bool:
    """Whether to compare a class attribute: in libraries, only plain ones change."""
    module = sys.modules.get(cls.__module__)
    library = "site-packages" in (getattr(module, "__file__", None) or "")
    return not library or isinstance(value, ATOMS)


def _line(instruction: Any) -> int:
    return instruction.line_number or 0


def _place(code: types.CodeType) -> str:
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_user(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else is_user_code(file)


def _is_user_class(cls: type) -> bool:
    """Whether a class is the user's: by its module, or in notebooks and `exec` by its methods."""
    module = sys.modules.get(cls.__module__)
    if module is not None and _is_user(module):
        return True
    members = list(vars(cls).values())
    return any(isinstance(m, types.FunctionType) and _is_user_function(m) for m in members)


def _is_user_function(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    if file != "<string>":
        return is_user_code(file)
    module = sys.modules.get(function.__globals__.get("__name__", ""))  # python -c, exec
    return module is None or module.__name__ == "builtins" or _is_user(module)
