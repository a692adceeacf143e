"""Record the Python state that a capture reads and writes.

A captured graph contains the values that Python variables had. While the model is traced, `Watch`
records which attributes of modules it reads, and compares attributes, global variables and closures
before and after. `Reads` then lists what later steps have to compare; a change that the next step
would see is refused, with the line that makes it.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import io
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.frontend.errors import Frame, is_user_code, running_frame
from shardwise.frontend.fake import has_data
from shardwise.frontend.snapshots import (
    ATOMS,
    DEPTH,
    INTERNAL,
    MAX_ITEMS,
    MISSING,
    attributes_of,
    cell_value,
    class_member,
    snapshot,
)
from shardwise.frontend.tracing import patched
from shardwise.keras_model import KerasSettings

# ---------------------------------------------------------------- what code may read
# Python calls special methods by itself; these do not run in a step, or not on its results.
_NEVER = frozenset(
    {"__repr__", "__str__", "__del__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"}
    | {"__getstate__", "__setstate__", "__getnewargs__", "__init_subclass__", "__dir__", "__hash__"}
)
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_ALL_VARIABLES = frozenset({"globals", "eval", "exec", "f_globals"})
_ALL_MODULES = frozenset({"modules", "import_module", "__import__", "f_globals"})
_BY_ANY_NAME = frozenset({"vars", "__dict__", "attrgetter", "asdict", "astuple", "fields"})
_BUILTIN = (types.BuiltinFunctionType, type, types.MethodDescriptorType)
_WRAPPERS = (functools.partial, staticmethod, classmethod, property, functools.cached_property)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class _Outside(dict[str, Callable[[], object]]):
    """State outside of Python objects, as a namespace of functions that read it."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the state as text, always the same object for the same state."""
        return sys.intern(repr(self[name]()))


_FILES = _Outside()  # files and folders that some forward has looked at, by path
_SETTINGS = _Outside(  # of torch, by the names with which code reads them
    {
        **{
            name: getattr(owner, name)
            for owner, names in (
                (torch, "get_num_threads get_num_interop_threads initial_seed is_anomaly_enabled"),
                (torch, "are_deterministic_algorithms_enabled get_float32_matmul_precision"),
                (torch.backends.cuda, "flash_sdp_enabled math_sdp_enabled cudnn_sdp_enabled"),
                (torch.backends.cuda, "mem_efficient_sdp_enabled"),
                (torch.backends.mha, "get_fastpath_enabled"),
            )
            for name in names.split()
        },
        **{
            name: functools.partial(
                lambda name, owners: [getattr(owner, name) for owner in owners], name, owners
            )
            for name, owners in (
                ("benchmark", (torch.backends.cudnn,)),
                ("deterministic", (torch.backends.cudnn,)),
                ("enabled", (torch.backends.cudnn, torch.backends.mkldnn)),
                ("allow_tf32", (torch.backends.cudnn, torch.backends.cuda.matmul)),
            )
        },
    }
)


def _file_stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = _stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


_stat = os.stat  # not the one that is watched
_LOOKS = ("stat", "lstat", "access", "listdir", "scandir")  # functions of `os` on a path


@dataclass(frozen=True, slots=True)
class Variable:
    """A global variable, a closure cell or a class attribute, and the code that reads it."""

    name: str
    place: str  # "train.py:12"
    home: Any = field(repr=False)  # the dict of globals, the cell, or the class

    @property
    def kind(self) -> str:
        """Return the kind of variable, as users call it."""
        if isinstance(self.home, type):
            return "class attribute"
        return "global variable" if isinstance(self.home, dict) else "enclosing variable"

    def read(self) -> Any:
        """Return the value, or `MISSING`."""
        if isinstance(self.home, types.CellType):
            return cell_value(self.home)
        home = self.home if isinstance(self.home, dict) else vars(self.home)
        return home.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        """Set the value, to undo what a capture changed."""
        if isinstance(self.home, types.CellType):
            self.home.cell_contents = value
        elif isinstance(self.home, type):
            if value is MISSING:
                delattr(self.home, self.name)
            else:
                setattr(self.home, self.name, value)
        elif value is MISSING:
            self.home.pop(self.name, None)
        else:
            self.home[self.name] = value


@dataclass(slots=True)
class Reach:
    """Everything that code may read: variables, and the names of attributes."""

    variables: dict[tuple[int, str], Variable] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    writes: dict[str, str] = field(default_factory=dict)  # "name" or ".attribute" -> assignment
    codes: set[types.CodeType] = field(default_factory=set)  # code that may run
    loads: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # global names
    classes: dict[type, None] = field(default_factory=dict)  # classes whose methods may run
    caches: list[Any] = field(default_factory=list)  # functions under functools.lru_cache

    @property
    def uses_files(self) -> bool:
        """Return whether a capture has looked at files."""
        return any(variable.home is _FILES for variable in self.variables.values())

    def trained_tensors(self) -> dict[int, tuple[str, str]]:
        """Return name and place of tensors in variables that require a gradient, by address."""
        trained: dict[int, tuple[str, str]] = {}
        for variable in self.variables.values():
            for name, tensor in _tensors(variable.read()):
                if tensor.requires_grad and has_data(tensor):
                    full = ".".join(filter(None, (variable.name, name)))
                    trained[tensor.data_ptr()] = (full, variable.place)
        return trained


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module, or of a container of modules and tensors, with names."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        yield from value.named_parameters()
    elif isinstance(value, dict | list | tuple) and len(value) <= MAX_ITEMS:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, nn.Module | torch.Tensor):
                yield from ((f"{key}.{name}", tensor) for name, tensor in _tensors(item))


def reachable(model: nn.Module, functions: Iterable[Any]) -> Reach:
    """Return the variables that the model's methods and these functions may read.

    No code runs: starting from the methods of the model's classes, functions are followed through
    the names that they use. The result may include too much, but for plain functions, methods,
    closures, containers and attributes of objects it misses nothing.
    """
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
    """Follow the names that code uses, starting from some values."""

    def __init__(self) -> None:
        self.reach = Reach()
        self.classes = self.reach.classes
        self.modules: dict[int, types.ModuleType] = {}
        self.libraries: dict[int, types.ModuleType] = {}  # whose functions a script may replace
        self._called: set[type] = set()  # classes of which code may make objects
        self._attributes: set[str] = set()  # of objects
        self._is_dynamic = False  # whether code reads attributes by names that it computes
        self._is_user_class = functools.cache(_is_user_class)
        self._values: dict[int, Any] = {}  # alive, so that no id is reused

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
            if isinstance(value, functools._lru_cache_wrapper):
                self.reach.caches.append(value)
            for name in ("func", "args", "keywords", "__func__", "fget", "__wrapped__"):
                self.value(getattr(value, name, None), depth)
        elif isinstance(value, types.ModuleType):
            own = "site-packages" not in (getattr(value, "__file__", None) or "")
            (self.modules if own and _is_user(value) else self.libraries)[id(value)] = value
        elif isinstance(value, type):
            self.classes.setdefault(value)
            self._called.add(value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            if _is_user_class(type(value)):
                self.classes.setdefault(type(value))
            if len(value) <= MAX_ITEMS:
                for item in value.values() if isinstance(value, dict) else value:
                    self.value(item, depth)
        elif not isinstance(value, nn.Module) and _is_user_class(type(value)):
            self.classes.setdefault(type(value))
            for name, item in attributes_of(value).items():
                self._attributes.add(name)
                self.value(item, depth - 1)

    def close(self) -> None:
        """Follow attributes by name until there are no new ones."""
        done: set[tuple[int, str]] = set()
        size = -1
        while size != len(done):
            size = len(done)
            names = self.reach.names | {"forward"}
            for cls in list(self.classes):
                bases: tuple[type, ...] = (*cls.__mro__, *type.mro(type(cls)))
                for base in bases:
                    if self._is_user_class(base):
                        special = _special_methods(base, called=cls in self._called)
                        self._members(base, names | special, done)
            for module in list(self.modules.values()):
                self._members(module, names, done)
        if self._is_dynamic:
            self.reach.names |= self._attributes
        if not {"environ", "getenv"}.isdisjoint(self.reach.names):  # compared by content
            data = vars(os.environ)
            self.reach.variables[id(data), "_data"] = Variable("_data", "os.environ", data)
        for name in sorted(self.reach.names & _SETTINGS.keys()):
            self.reach.variables[id(_SETTINGS), name] = Variable(name, "torch", _SETTINGS)
        for library in self.libraries.values():
            members = vars(library)
            for name in sorted(self.reach.names & members.keys()):
                kinds = (*ATOMS, types.FunctionType, *_BUILTIN)
                if isinstance(members[name], kinds) or (library, name) == (sys, "argv"):
                    variable = Variable(name, library.__name__, members)
                    self.reach.variables.setdefault((id(members), name), variable)

    def _members(self, owner: Any, names: set[str], done: set[tuple[int, str]]) -> None:
        members = vars(owner)
        for name in names & members.keys():
            if (id(owner), name) in done:
                continue
            done.add((id(owner), name))
            if isinstance(owner, types.ModuleType):
                self._variable(name, owner.__name__, members)
            elif not hasattr(type(members[name]), "__get__") and _is_own(owner, members[name]):
                variable = Variable(name, f"class {owner.__name__}", owner)
                self.reach.variables.setdefault((id(owner), name), variable)
            self.value(members[name], DEPTH)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        user = _is_user_function(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            variable = Variable(name, _place(code), cell)
            watched = "site-packages" not in code.co_filename or isinstance(variable.read(), ATOMS)
            if user and watched and name != "__class__":
                self.reach.variables[id(cell), name] = variable
            self.value(variable.read(), DEPTH)
        own = user and "site-packages" not in code.co_filename
        defaults = [*(function.__defaults__ or ()), function.__kwdefaults__]
        for number, default in enumerate(defaults):
            if own and not isinstance(default, ATOMS):
                name = f"default {number} of {function.__name__}"
                holder = {name: default}
                self.reach.variables[id(default), name] = Variable(name, _place(code), holder)
            self.value(default, DEPTH)
        for name in vars(function):
            if own and name != "__wrapped__":
                variable = Variable(name, _place(code), vars(function))
                self.reach.variables[id(vars(function)), name] = variable
            self.value(vars(function)[name], DEPTH)
        if user:
            self._code(code, function.__globals__)

    def _code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        if code in self.reach.codes:
            return
        self.reach.codes.add(code)
        used, attributes, written = names_in(code)
        self.reach.names |= attributes
        self._is_dynamic = self._is_dynamic or _reads_any_name(code)
        for name, line in written.items():
            self.reach.writes.setdefault(name, f"{Path(code.co_filename).name}:{line}")
        own = "site-packages" not in code.co_filename
        if own and not _ALL_VARIABLES.isdisjoint(code.co_names):
            names = dict.fromkeys((*used, *namespace, *sorted(attributes)))
            used = tuple(name for name in names if not name.startswith("__"))
        if own and not _ALL_MODULES.isdisjoint(code.co_names):
            for module in list(sys.modules.values()):
                file = getattr(module, "__file__", None) or ""
                is_module = isinstance(module, types.ModuleType) and "site-packages" not in file
                if is_module and _is_user(module):
                    self.value(module, DEPTH)
        loads = self.reach.loads[code] = {}
        for name in used:
            home = namespace if name in namespace else vars(builtins)
            loads[name] = home.get(name, sys.modules.get(name, MISSING))
            is_builtin = getattr(loads[name], "__module__", "") == "builtins"
            if name in home and (home is namespace or not is_builtin):
                self._variable(name, _place(code), home)
                self.value(home[name], DEPTH)
            elif own and loads[name] is MISSING:  # read under try, or by a name in a text
                self._variable(name, _place(code), namespace)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, namespace)

    def _variable(self, name: str, place: str, namespace: dict[str, Any]) -> None:
        library = "site-packages" in str(namespace.get("__file__", ""))
        if not library or isinstance(namespace.get(name), ATOMS):
            self.reach.variables.setdefault((id(namespace), name), Variable(name, place, namespace))


def _special_methods(cls: type, *, called: bool) -> set[str]:
    """Return the methods of a class that Python calls by itself, as for `a * b` and `with a`."""
    kinds = (types.FunctionType, *_WRAPPERS)
    members = [name for name, value in vars(cls).items() if isinstance(value, kinds)]
    names = {name for name in members if name.startswith("__") and name.endswith("__")} - _NEVER
    library = "site-packages" in (getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    is_made = called and not library and not issubclass(cls, nn.Module)
    return names if is_made else names - _CONSTRUCTORS


@functools.lru_cache(maxsize=65536)
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str], dict[str, int]]:
    """Return the global names and attribute names of a code object, and lines that assign them."""
    used: dict[str, None] = {}
    written: dict[str, int] = {}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if sys.version_info >= (3, 13):
            line = instruction.line_number or 0
        else:
            line = instruction.starts_line or line
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
    """Return whether code computes names of attributes that it reads, as `vars(x)` does."""
    if not _BY_ANY_NAME.isdisjoint(code.co_names):
        return True
    if "getattr" not in code.co_names:
        return False
    plain: bool | None = None  # whether the present call of getattr has a constant name
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
    """Return whether to compare a class attribute: in libraries, only plain values change."""
    module = sys.modules.get(cls.__module__)
    library = "site-packages" in (getattr(module, "__file__", None) or "")
    return not library or isinstance(value, ATOMS)


def _place(code: types.CodeType) -> str:
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_user(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else is_user_code(file)


def _is_user_class(cls: type) -> bool:
    """Return whether a class is the user's: by module or, in notebooks and `exec`, by methods."""
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


# ---------------------------------------------------------------- watching a model
def is_called_by_model(frame: types.FrameType | None) -> bool:
    """Return whether the model's code is the caller, perhaps through a library other than torch."""
    before = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARIES):
            return before not in ("", "import")
        if is_user_code(file):
            before = "model"
            if "site-packages" not in file:
                return True
        elif file.startswith("<frozen importlib"):
            before = "import"
        frame = frame.f_back
    return False


_MODULE_FILE = nn.modules.module.__file__
Place = tuple[str, str]  # path of a module, name of an attribute
_HINT = (
    "state that forward changes belongs in a buffer: self.register_buffer({name!r}, tensor), "
    "changed in place; or pass the value in the batch"
)


@dataclass(frozen=True, slots=True)
class Write:
    """An attribute that forward assigns and does not read.

    With `is_known`, every captured step assigns `value`. Tensors and other objects that exist only
    inside a step are not known. With `is_asked`, forward has looked for it before it existed.
    """

    value: Any
    is_known: bool
    frame: Frame | None
    is_asked: bool = False

    def merge(self, other: Write) -> Write:
        """Combine with the assignment of the same attribute in another capture."""
        same = snapshot(self.value, frozenset()) == snapshot(other.value, frozenset())
        known, asked = self.is_known and other.is_known and same, self.is_asked or other.is_asked
        return Write(other.value, known, other.frame, asked)


@dataclass(slots=True)
class Reads:
    """The Python state that captures of one model read, and attributes that they only write."""

    attributes: dict[Place, None] = field(default_factory=dict)
    methods: dict[Place, None] = field(default_factory=dict)
    writes: dict[Place, Write] = field(default_factory=dict)
    reach: Reach = field(default_factory=Reach)

    def add(self, other: Reads) -> None:
        """Add the state that other captures read and wrote."""
        self.attributes.update(other.attributes)
        self.methods.update(other.methods)
        self.reach.variables.update(other.reach.variables)
        self.reach.names |= other.reach.names
        for place, write in other.writes.items():
            known = self.writes.get(place)
            self.writes[place] = write if known is None else known.merge(write)


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute that forward reads and then changes."""

    place: Place
    before: Any
    after: Any
    frame: Frame | None

    @property
    def name(self) -> str:
        return ".".join(filter(None, self.place))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of its new value, unless it was a tensor before."""
        if isinstance(self.before, torch.Tensor):
            return []
        return [t for t in pytree.tree_leaves(self.after) if isinstance(t, FakeTensor)]

    def refusal(self, reason: str) -> CaptureError:
        """Return an error with the attribute, the line that changes it, and a hint."""
        return CaptureError(
            f"forward changes the attribute {self.name}, which it also reads: {reason}",
            where=str(self.frame) if self.frame else None,
            hint=_HINT.format(name=self.place[1]),
        )


def _is_ours(frame: types.FrameType) -> bool:
    """Return whether code that reads `__dict__` belongs to `nn.Module` or to an integration."""
    name = frame.f_globals.get("__name__", "")
    return frame.f_code.co_filename == _MODULE_FILE or str(name).startswith("shardwise.")


class Watch:
    """Record reads and writes of a model's Python state while it runs."""

    def __init__(self, model: nn.Module, functions: Iterable[Any]) -> None:
        self.modules = dict(model.named_modules())
        self._carries_growth = getattr(type(model), "carries_growth", False)
        # Integrations update metrics after the step: their state is not captured.
        is_carried = getattr(type(model), "carries_state_of", lambda module: False)
        self._paths = {id(vars(m)): path for path, m in self.modules.items() if not is_carried(m)}
        self.reach = reachable(model, functions)
        self.first: dict[Place, Any] = {}  # snapshots of attributes when they were first read
        self._values: dict[Place, Any] = {}  # the same, as values
        self._frames: dict[Place, Frame | None] = {}  # the last use that may have been a write
        self._assigned: dict[Place, Any] = {}  # values before a write without a read
        self.methods: dict[Place, None] = {}  # methods that were called or otherwise read
        self._missing: set[Place] = set()  # attributes that did not exist when they were read
        self.changes: list[Change] = []
        self.writes: dict[Place, Write] = {}
        # Whether a class attribute is a value, not a method or property.
        self._is_plain: Callable[[type, str], bool] = functools.cache(
            lambda cls, name: not hasattr(type(class_member(cls, name)), "__get__")
        )

    @property
    def reads(self) -> Reads:
        """The state that the capture read and wrote, and attributes that it did not find."""
        missing = sorted(self._missing - self._assigned.keys())
        absent = [place for place in missing if not hasattr(self.modules[place[0]], place[1])]
        attributes = dict.fromkeys((*self.first, *absent))
        return Reads(attributes, self.methods, self.writes, self.reach)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Patch the attribute access of modules; compare variables before and after."""
        before = self._variables()
        misses = [cache.cache_info().misses for cache in self.reach.caches]
        get, put = object.__getattribute__, nn.Module.__setattr__
        opened = builtins.open

        def looking(function: Callable[..., Any]) -> Callable[..., Any]:
            def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
                self._record_file(path, sys._getframe(1))
                return function(path, *args, **kwargs)

            return look

        def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "r" in mode or "+" in mode:
                self._record_file(path, sys._getframe(1))
            return opened(path, mode, *args, **kwargs)

        def getattribute(module: nn.Module, name: str) -> Any:
            try:
                value = get(module, name)
            except AttributeError:
                path = self._paths.get(id(get(module, "__dict__")))
                if path is not None and not name.startswith("__"):
                    self._missing.add((path, name))
                raise
            if name == "__dict__" and not _is_ours(sys._getframe(1)):
                self._record_all(value)
            elif name == "forward" or (name not in INTERNAL and not name.startswith("__")):
                owner = get(module, "__dict__")
                path = self._paths.get(id(owner))
                if path is None:
                    return value
                if name != "forward" and (name in owner or self._is_plain(type(module), name)):
                    self._record_read((path, name), value)
                elif name == "forward" or isinstance(value, types.MethodType):
                    self.methods[path, name] = None
            return value

        def setattr_(module: nn.Module, name: str, value: Any) -> None:
            owner = get(module, "__dict__")
            path = self._paths.get(id(owner))
            if path is not None and name not in INTERNAL:
                self._record_write((path, name), owner.get(name, MISSING))
            put(module, name, value)

        try:
            with patched(
                (nn.Module, "__getattribute__", getattribute),
                (nn.Module, "__setattr__", setattr_),
                *((os, name, looking(getattr(os, name))) for name in _LOOKS),
                *((module, "open", open_) for module in (builtins, io)),
            ):
                yield
        finally:
            changed = self._restore(before)
            for cache, count in zip(self.reach.caches, misses, strict=True):
                if cache.cache_info().misses != count:
                    cache.cache_clear()  # of tensors without data
        if changed:
            raise changed[0]

    def _is_torch_module(self, place: Place) -> bool:
        """Return whether a module is one of torch's, which manage their own state."""
        return type(self.modules[place[0]]).__module__.startswith("torch.nn.")

    def _record_read(self, place: Place, value: Any) -> None:
        if place in self._assigned:
            return
        plain = (*ATOMS, tuple, types.FunctionType, types.BuiltinFunctionType)
        if self._is_torch_module(place) and not isinstance(value, plain):
            return
        if type(value).__module__.startswith("shardwise.") and not isinstance(value, KerasSettings):
            return
        if place not in self.first:
            self.first[place] = snapshot(value, self.reach.names)
            self._values[place] = value
        if not isinstance(value, (*ATOMS, torch.Tensor, nn.Module, types.FunctionType)):
            self._frames[place] = running_frame()  # it may be changed in place

    def _record_all(self, owner: dict[str, Any]) -> None:
        """Record a read of every attribute, as code has taken the `__dict__` of a module."""
        path = self._paths.get(id(owner))
        if path is not None and is_user_code(sys._getframe(2).f_code.co_filename):
            self._missing.add((path, "__dict__"))  # perhaps to ask for an attribute
            self.first.setdefault((path, "__dict__"), None)
            for name in owner.keys() - INTERNAL - {"training"}:
                self._record_read((path, name), owner[name])

    def _record_file(self, path: Any, frame: types.FrameType) -> None:
        """Compare a file or folder that the model has looked at before every step."""
        if isinstance(path, (str, os.PathLike)) and is_called_by_model(frame):
            name = os.path.abspath(path)
            if not name.endswith((".py", ".pyc")):
                _FILES[name] = functools.partial(_file_stamp, name)
                self.reach.variables[id(_FILES), name] = Variable(name, "a file", _FILES)

    def _record_write(self, place: Place, before: Any) -> None:
        if self._is_torch_module(place):
            return
        if place not in self.first and place not in self._assigned:
            self._assigned[place] = before
        self._frames[place] = running_frame()

    def _now(self, place: Place) -> Any:
        module = self.modules[place[0]]
        owner = vars(module)
        return owner[place[1]] if place[1] in owner else getattr(type(module), place[1], MISSING)

    def compare(self) -> None:
        """Find attributes that were read before they changed.

        Export restores attributes afterwards, so this runs before forward returns to it. A model
        with `carries_growth` repeats the growth of its containers after every step; their contents
        are then not part of the captured state.
        """
        if self._carries_growth:
            carried = [place for place in self.first if isinstance(self._now(place), list | dict)]
            for place in carried:
                del self.first[place]
        for place, before in self.first.items():
            now = self._now(place)
            if place in self._frames and snapshot(now, self.reach.names) != before:
                self.changes.append(Change(place, self._values[place], now, self._frames[place]))
        for place, old in self._assigned.items():
            now = self._now(place)
            if now is not old and now is not MISSING:
                known = all(isinstance(leaf, ATOMS) for leaf in pytree.tree_leaves(now))
                asked = place in self._missing or (place[0], "__dict__") in self._missing
                value = now if known else None
                self.writes[place] = Write(value, known, self._frames[place], asked)

    def warnings(self) -> list[str]:
        """Return a line for each attribute that forward writes and parallel steps leave unset."""
        return [
            f"forward assigns the attribute {'.'.join(filter(None, place))} ({write.frame}), which "
            "parallel steps do not: return the value from forward to see it"
            for place, write in self.writes.items()
            if not write.is_known
        ]

    def _variables(self) -> dict[tuple[int, str], tuple[Any, Any, Any]]:
        """Return value, shallow copy and snapshot of every variable that code may read."""
        variables = {}
        for key, variable in self.reach.variables.items():
            value = variable.read()
            copied = value.copy() if isinstance(value, list | dict | set) else None
            variables[key] = (value, copied, snapshot(value, self.reach.names))
        return variables

    def _restore(self, before: dict[tuple[int, str], tuple[Any, Any, Any]]) -> list[CaptureError]:
        """Undo changes of variables and return the errors that refuse them."""
        errors = []
        for key, (value, copied, old) in before.items():
            variable = self.reach.variables[key]
            now = variable.read()
            if now is value and snapshot(now, self.reach.names) == old:
                continue
            if now is not value:
                variable.write(value)
            elif isinstance(value, list) and copied is not None:
                value[:] = copied
            elif isinstance(value, dict | set) and copied is not None:
                value.clear()
                value.update(copied)
            name = f".{variable.name}" if isinstance(variable.home, type) else variable.name
            errors.append(
                CaptureError(
                    f"forward changes the {variable.kind} {variable.name}; a captured step would "
                    "not repeat the change",
                    where=self.reach.writes.get(name, variable.place) or None,
                    hint="return the value from forward (train_step(batch, outputs=True)), or "
                    "keep it in a buffer of the model",
                )
            )
        return errors
