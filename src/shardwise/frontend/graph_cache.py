"""Store captured graphs on disk for other processes that capture the same step.

The key of an entry is a digest of everything that a capture depends on: versions and files of torch
and Shardwise, the code that may run, the files of the user's own modules, the Python state that
this code may read, the model's structure, the batch's shapes, and torch's settings. An entry also
lists the environment variables that were read during capture, which must have the same values. In
any doubt, nothing is stored or used: see `docs/decisions/0024-batches-and-sizes.md`. `Describe`
writes values and code as text that, unlike a snapshot, outlives the process.

`SHARDWISE_CACHE` names the folder; `SHARDWISE_CACHE=off` turns the cache off.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import random
import re
import sys
import time
import types
from collections import UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.batch import Call
from shardwise.errors import ShardwiseError
from shardwise.files import read_json, write_text
from shardwise.frontend import snapshots
from shardwise.frontend.errors import is_user_code
from shardwise.frontend.fake import has_data
from shardwise.frontend.hooks import MODULE_HOOKS, hooks_of, module_hooks
from shardwise.frontend.objective import Objective, StepFunction
from shardwise.frontend.python_state import Place, Reach, Reads, is_called_by_model, reachable
from shardwise.frontend.tracing import patched
from shardwise.ir import Graph, tensor_bytes
from shardwise.ir.stored import NotStorable, graph_from_json, graph_to_json, qualified_name
from shardwise.version import __version__

FORMAT = 1
MAX_BYTES = 512 << 20  # of all entries; the oldest are removed first
_NAMESPACES = (
    *(torch, torch.Tensor, torch.nn.functional, torch.nn.init, torch.special, torch.linalg),
    *(torch.fft, torch.func, torch.utils.checkpoint),
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_STARTED_NS = time.time_ns()
_ENVIRONMENT = {  # variables that torch may have read when it was imported
    name: value
    for name, value in sorted(os.environ.items())
    if name.startswith(("TORCH", "PYTORCH")) and not name.startswith("TORCHELASTIC_")
}


def cache_folder() -> Path | None:
    """Return the folder of stored graphs, or None if the cache is off."""
    chosen = os.environ.get("SHARDWISE_CACHE", "")
    if chosen.lower() in ("off", "0"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{base}/shardwise").expanduser() / "graphs"


@dataclass(frozen=True, slots=True)
class CachedCapture:
    """The cache file of one capture, and the state that its code may read."""

    file: Path
    reach: Reach

    def load(self, model: nn.Module, reads: Reads | None) -> Graph | None:
        """Return the stored graph, if there is one and it is still valid."""
        try:
            entry = read_json(self.file, NotStorable)
            environment = entry["environment"].items()
            if entry["format"] != FORMAT or any(_variable(k) != v for k, v in environment):
                return None
            attributes, methods = (_places(entry[k], model) for k in ("attributes", "methods"))
            graph = graph_from_json(entry["graph"])
            os.utime(self.file)
        except (ShardwiseError, OSError, KeyError, TypeError, ValueError, AttributeError):
            return None
        if reads is not None:
            reads.add(Reads(attributes, methods, reach=self.reach))
        return graph

    @contextlib.contextmanager
    def storing(self, reads: Reads | None) -> Iterator[_Capture]:
        """Observe a capture, and store its graph."""
        capture = _Capture()
        with capture.observing():
            yield capture
        if reads is not None:
            reads.add(capture.reads)
        impure = capture.is_impure or capture.reads.writes or capture.reads.reach.uses_files
        if capture.graph is None or impure:
            return
        with contextlib.suppress(ShardwiseError, OSError):  # not storable, or the disk is full
            entry = {
                "format": FORMAT,
                "environment": {name: _variable(name) for name in sorted(capture.variables)},
                "attributes": list(capture.reads.attributes),
                "methods": list(capture.reads.methods),
                "graph": graph_to_json(capture.graph),
            }
            write_text(self.file, json.dumps(entry))
            _drop_oldest(self.file.parent)


@dataclass(slots=True)
class _Capture:
    """The result of an observed capture, and what it read from outside of Python."""

    graph: Graph | None = None
    reads: Reads = field(default_factory=Reads)
    variables: set[str] = field(default_factory=set)  # of the environment
    is_impure: bool = False  # whether it read all of the environment

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        environment: Any = type(os.environ)
        get, iterator = environment.__getitem__, environment.__iter__

        def getitem(mapping: Any, key: str) -> str:
            if is_called_by_model(sys._getframe(1)):
                self.variables.add(key)
            return str(get(mapping, key))

        def iterate(mapping: Any) -> Iterator[str]:
            self.is_impure |= is_called_by_model(sys._getframe(1))
            return iter(iterator(mapping))

        with patched((environment, "__getitem__", getitem), (environment, "__iter__", iterate)):
            yield


def cached_capture(
    model: nn.Module, call: Call, chosen: Objective, options: Mapping[str, Any]
) -> CachedCapture | None:
    """Return the cache entry of a capture; None if it cannot be described completely."""
    folder = cache_folder()
    # Models of other frameworks hide their program from the description of modules.
    if folder is None or not all(getattr(m, "is_graph_storable", True) for m in model.modules()):
        return None
    try:
        function = chosen.fn if isinstance(chosen, StepFunction) else chosen
        reach = reachable(model, [] if function is None else [function])
        describe = Describe(model, reach.names)
        parts = [
            *_installation(),
            *_settings(options),
            *_batch(call),
            *_code(reach, describe),
            *_own_files(),
            *_variables(reach, describe),
            *_structure(model, reach, describe),
        ]
    except Exception:  # classes of the user's may raise anything: in doubt, do not cache
        return None
    return CachedCapture(folder / f"{digest(parts)}.json", reach)


@functools.cache
def _installation() -> tuple[str, ...]:
    """Return the versions, and a digest of the files of torch and Shardwise by size and time."""
    files = []
    for package in (Path(torch.__file__).parent, Path(__file__).parents[1]):
        for folder, folders, names in os.walk(package):
            folders[:] = sorted(set(folders) - {"include", "testing", "test", "share", "bin"})
            for name in sorted(names):
                if name.endswith((".py", ".so")):
                    files.append(file_stamp(os.path.join(folder, name)))
    versions = (FORMAT, __version__, torch.__version__, torch.version.git_version, sys.version)
    return (*map(str, versions), np.__version__, digest(files))


def _settings(options: Mapping[str, Any]) -> list[str]:
    """Describe the options of the capture, and settings of torch that affect tracing."""
    if torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        raise NotStorable("a function mode changes torch's functions")
    if any(v for k, v in vars(nn.modules.module).items() if k.startswith("_global_") and v):
        raise NotStorable("hooks on all modules")
    devices = {"cpu", torch.device(options["device"] or "cpu").type}
    cast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(devices)]
    backends: Any = torch.backends
    sdp = backends.cuda
    flags = (
        *(torch.get_default_dtype(), torch.get_default_device(), cast),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        *(backends.mha.get_fastpath_enabled(), backends.cudnn.enabled, backends.mkldnn.enabled),
        *(backends.opt_einsum.enabled, backends.opt_einsum.strategy, backends.cudnn.deterministic),
        *(torch.cuda.is_available(), torch.cuda.device_count(), torch.is_inference_mode_enabled()),
        *(sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()),
    )
    return [repr(sorted(options.items())), repr(flags), repr(_ENVIRONMENT)]


def _batch(call: Call) -> list[str]:
    """Describe the batch, without the contents of its tensors."""
    indices: dict[int, int] = {}
    parts = [call.kind, str(call.spec), repr(call.paths)]
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout is not torch.strided:
                raise NotStorable("a tensor subclass or layout")
            about = (leaf.dtype, leaf.device.type, tuple(leaf.shape), leaf.stride())
            index = indices.setdefault(id(leaf), len(indices))
            parts.append(f"{about} {leaf.requires_grad} {index}")
        else:
            parts.append(f"{type(leaf).__name__} {leaf!r}")
    if any(" at 0x" in part for part in parts):
        raise NotStorable("an object whose repr is its address")
    return parts


def _code(reach: Reach, describe: Describe) -> list[str]:
    """Describe the code that may run, and torch's functions, which a script may have replaced."""
    _require_pure(reach)
    functions = [
        f"{name} {value.__name__} {describe_code(code) if code is not None else ''}"
        for namespace in _NAMESPACES
        for name, value in vars(namespace).items()
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType)
        and name != "manual_seed"  # which torch itself wraps
        for code in [getattr(value, "__code__", None)]
    ]
    codes = sorted(describe_code(code) for code in reach.codes)
    files = {code.co_filename for code in reach.codes if "site-packages" in code.co_filename}
    stamps = [file_stamp(file) for file in sorted(files) if os.path.exists(file)]
    classes = sorted(describe(cls) for cls in reach.classes)
    members = [text for module in _libraries(reach) for text in _members(module, reach.names)]
    return [*map(digest, (sorted(functions), codes, stamps, classes, sorted(set(members))))]


def _libraries(reach: Reach) -> list[types.ModuleType]:
    """Return the libraries whose modules code has in variables, each once."""
    values = {id(v): v for loads in reach.loads.values() for v in loads.values()}
    modules = [v for v in values.values() if isinstance(v, types.ModuleType)]
    return [m for m in modules if m.__name__.partition(".")[0] in ("torch", "numpy", "math")]


def _members(module: types.ModuleType, names: Set[str], depth: int = 3) -> Iterator[str]:
    """Describe the members of a library that code may name: a script may have set any of them."""
    for name in sorted(names & vars(module).keys()):
        value, place = vars(module)[name], f"{module.__name__}.{name}"
        if isinstance(value, types.ModuleType):
            if depth and value.__name__.startswith(f"{module.__name__}."):
                yield from _members(value, names, depth - 1)
        elif isinstance(value, types.FunctionType):
            yield f"{place} {describe_code(value.__code__)}"
        elif isinstance(value, snapshots.ATOMS):
            yield f"{place} {value!r}"
        elif type(value).__module__.partition(".")[0] not in (*_LIBRARY_CLASSES, "builtins"):
            raise NotStorable(f"{place} is an object of {type(value).__module__}")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A graph is stored only if everything that the user's code uses outside of itself is known to
# depend on arguments alone. Model libraries are followed like the user's code, other modules not.
_PURE = _words(
    "abc builtins cmath collections contextlib copy dataclasses enum fractions functools heapq "
    "itertools logging math numbers numpy operator re string torch types typing warnings "
    "_collections _functools _operator __future__"
)
_MODEL_LIBRARIES = ("diffusers", "einops", "lightning", "timm", "torchvision", "transformers")
_LIBRARY_CLASSES = ("torch", "numpy", "typing", "functools", "abc", "enum", "logging")
_PURE_OF = {  # the members of modules with state that depend on their arguments alone
    "os": _words("os sys environ getenv get path join sep basename dirname splitext"),
    "sys": _words("maxsize float_info byteorder version_info platform"),
}
_STATE_OF = {
    "torch": _words(
        "backends distributed load from_file hub initial_seed seed get_rng_state get_num_threads "
        "get_num_interop_threads _tensor_str get_printoptions memory_allocated mem_get_info "
        "current_device get_device_properties get_device_capability get_device_name"
    ),
    "os": frozenset({"_data"}),
    "numpy": _words("load fromfile memmap loadtxt genfromtxt get_printoptions"),
}
_STATE_BUILTINS = _words(
    "globals locals eval exec compile open input id hash dir breakpoint __import__"
)
_METACLASSES = ("builtins", "abc", "enum", "torch", "typing")


def _require_pure(reach: Reach) -> None:
    """Raise if code may use state of Python, the system or a library that is not described."""
    for cls in reach.classes:
        if type(cls).__module__.partition(".")[0] not in _METACLASSES:
            raise NotStorable(f"{cls.__name__} has a metaclass")
    for code, loads in reach.loads.items():
        if "site-packages" in code.co_filename:  # of a library below, or called by one
            continue
        names = frozenset(code.co_names)
        for name, value in loads.items():
            if value is snapshots.MISSING and name not in ("__class__", "__name__"):
                raise NotStorable(f"{name} is not known yet")
            if name in _STATE_BUILTINS and value is vars(builtins).get(name):
                raise NotStorable(f"{code.co_name} calls {name}")
            _require_pure_value(value, names)


def _require_pure_value(value: Any, names: Set[str]) -> None:
    """Raise if a global variable gives code with these names access to other state."""
    if isinstance(value, types.ModuleType):
        full = value.__name__
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        full = value.__module__ or "builtins"
    else:
        full = type(value).__module__
    top = full.partition(".")[0]
    if full.startswith(("torch.distributed", "torch.backends", "torch.utils.data")):
        raise NotStorable(f"{full} has state")
    if not _STATE_OF.get(top, frozenset()).isdisjoint(names):
        raise NotStorable(f"state of {top}")
    if top in _PURE_OF and isinstance(value, types.ModuleType):
        members = {*dir(value), *(dir(os.path) if top == "os" else ())}
        if members & names <= _PURE_OF[top]:
            return
    file = getattr(sys.modules.get(full), "__file__", None) or ""
    if top in _PURE or full == "__main__":
        return
    library = "site-packages" in file and top not in _MODEL_LIBRARIES
    if library or not is_user_code(file) or not file.endswith(".py"):
        raise NotStorable(f"{full} may have state")


def _own_files() -> list[str]:
    """Describe the files of all modules that are neither Python's nor a library's."""
    parts = []
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__")
        if isinstance(file, str) and is_user_code(file) and "site-packages" not in file:
            if os.stat(file).st_mtime_ns > _STARTED_NS:  # the running code may be the old one
                raise NotStorable(f"{file} has changed since this process started")
            parts.append(f"{file} {_sha(Path(file).read_bytes())}")
    return sorted(set(parts))


def _variables(reach: Reach, describe: Describe) -> list[str]:
    """Describe variables that code may read; the environment is observed instead."""
    environment = vars(os.environ)
    return sorted(
        f"{variable.kind} {variable.name} {variable.place} {describe(variable.read())}"
        for variable in reach.variables.values()
        if variable.home is not environment
    )


def _structure(model: nn.Module, reach: Reach, describe: Describe) -> list[str]:
    """Describe modules, their attributes and hooks, and tensors without their values."""
    if any(hooks_of(parameter) for parameter in model.parameters()):
        raise NotStorable("hooks on gradients")
    tensors: dict[int, int] = {}
    parts = []
    for path, module in model.named_modules():
        own = vars(module)
        parts += [path, describe(type(module)), str(module.training)]
        for name in sorted(own.keys() - _OF_EVERY_MODULE):
            try:
                parts.append(f"{name}: {describe(own[name])}")
            except NotStorable:
                if name in reach.names or type(module).__module__.startswith("torch."):
                    raise
        for kind in MODULE_HOOKS:
            parts.append(f"{kind}: {describe(module_hooks(module, kind))}")
        parts.append(f"children: {[(n, describe(c)) for n, c in own['_modules'].items()]}")
        parts.append(f"temporary: {sorted(own['_non_persistent_buffers_set'])}")
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is None:
                    parts.append(f"{kind} {name}: None")
                    continue
                place = tensors.setdefault(id(tensor), len(tensors))
                about = (type(tensor).__qualname__, tensor.dtype, tuple(tensor.shape))
                layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
                parts.append(f"{kind} {name}: {place} {about} {layout} {tensor.requires_grad}")
    return parts


def _variable(name: str) -> str | None:
    """Return the digest of an environment variable: entries must not reveal secrets."""
    value = os.environ.get(name)
    return None if value is None else digest([value])


def _places(data: Any, model: nn.Module) -> dict[Place, None]:
    places = {(str(path), str(name)): None for path, name in data}
    for path, _ in places:
        model.get_submodule(path)  # raises if it does not exist
    return places


def _drop_oldest(folder: Path) -> None:
    """Remove the least recently used entries beyond the size limit."""
    entries = []
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError):  # another process may have removed it
            status = file.stat()
            entries.append((status.st_mtime_ns, status.st_size, file))
    excess = sum(size for _, size, _ in entries) - MAX_BYTES
    for _, size, file in sorted(entries):
        if excess <= 0:
            break
        file.unlink(missing_ok=True)
        excess -= size


# ---------------------------------------------------------------- values and code as text
DEPTH = 12
_NATIVE = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, np.ufunc),
)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NUMBERS = (int, float, complex, str, bytes)
_HIDDEN_STATE = (Iterator, random.Random, torch.Generator, io.IOBase, nn.Module)
_HEAP_TYPE = 1 << 9  # flag of a class defined in Python code


class Describe:
    """Describe values by text that is equal in another process only if they are equal.

    Objects are described by their attributes in `names`, modules of `model` by path. A value
    without such a text (an iterator, a random generator, an object with hidden state, a module
    outside the model) raises `NotStorable`.
    """

    def __init__(self, model: nn.Module, names: Set[str]) -> None:
        self._names = names
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._memo: dict[int, tuple[Any, str]] = {}  # with the values, so that no id is reused
        self._open: list[int] = []  # values that are being described

    def __call__(self, value: Any) -> str:
        """Return the text of a value."""
        if isinstance(value, Enum):
            return f"{qualified_name(type(value))}.{value.name} {self(value.value)}"
        if value is NotImplemented or value is Ellipsis:
            return repr(value)
        if isinstance(value, snapshots.ATOMS) and type(value).__flags__ & _HEAP_TYPE == 0:
            return f"{type(value).__name__} {value!r}"
        if value is snapshots.MISSING:
            return "missing"
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        if id(value) in self._open:
            return f"value {len(self._open) - self._open.index(id(value))} above"
        if len(self._open) >= DEPTH:
            raise NotStorable("values are nested too deep")
        self._open.append(id(value))
        try:
            text = digest(self._parts(value))
        finally:
            self._open.pop()
        self._memo[id(value)] = (value, text)
        return text

    def _all(self, values: Iterable[Any]) -> list[str]:
        return [self(value) for value in values]

    def _parts(self, value: Any) -> list[str]:
        """Return the kind of a value, and texts that distinguish it from others of its kind."""
        kind = qualified_name(type(value))
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
            if value.nbytes > snapshots.MAX_ARRAY_BYTES or value.dtype.hasobject:
                raise NotStorable("a large array")
            return [kind, str(value.shape), str(value.dtype), _sha(value.tobytes())]
        if isinstance(value, re.Pattern):
            return [kind, repr(value.pattern), str(value.flags)]
        if isinstance(value, logging.Logger):
            return [kind, value.name, str(value.getEffectiveLevel())]
        return [kind, *self._object(value)]

    def _object(self, value: Any) -> list[str]:
        """Return the items and attributes of any other object."""
        if isinstance(value, _HIDDEN_STATE):
            raise NotStorable(f"a {type(value).__name__} has state that cannot be described")
        native = [c for c in type(value).__mro__ if _is_native(c)]
        known = (*_CONTAINERS, *_NUMBERS, deque, types.MappingProxyType, object)
        if any(c not in known for c in native):
            raise NotStorable(f"a {type(value).__name__} may have hidden state")
        # Methods of Python's and torch's classes are not followed: they may read any attribute.
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
        followed = is_user_code(file) or isinstance(value, ContextDecorator)
        attributes = snapshots.attributes_of(value)
        texts = [
            f"{name}: {self(attributes[name])}"
            for name in sorted(attributes)
            if name in self._names or not followed
        ]
        if isinstance(value, _NUMBERS):
            base = next(c for c in native if c in _NUMBERS)
            texts.append(base.__repr__(value))
        if isinstance(value, (*_CONTAINERS, deque, UserList, Mapping)):
            if len(value) > snapshots.MAX_PLAIN_ITEMS:
                raise NotStorable("a large container")
            if isinstance(value, Mapping):
                texts += [f"{self(key)} = {self(item)}" for key, item in value.items()]
            else:
                items = self._all(value)
                texts += sorted(items) if isinstance(value, set | frozenset) else items
        return texts

    def _function(self, function: types.FunctionType) -> list[str]:
        if (function.__module__ or "").startswith("torch."):  # whose attributes torch may change
            return ["function", function.__module__, describe_code(function.__code__)]
        closure = [snapshots.cell_value(cell) for cell in function.__closure__ or ()]
        defaults = (function.__defaults__, function.__kwdefaults__)
        own = {k: v for k, v in vars(function).items() if k != "__wrapped__"}
        parts = self._all((*defaults, *closure, own, getattr(function, "__wrapped__", None)))
        return ["function", function.__module__ or "", describe_code(function.__code__), *parts]

    def class_parts(self, cls: type) -> list[str]:
        """Return the members of a class and its bases that are code or plain values."""
        parts = ["class", qualified_name(cls)]
        if cls.__module__.startswith("torch.") and not issubclass(cls, nn.Module):
            return parts
        if issubclass(cls, Enum):
            parts += self._all(cls)
        for base in cls.__mro__:
            if base.__flags__ & _HEAP_TYPE:
                parts.append(qualified_name(base))
                for name, member in sorted(vars(base).items()):
                    if isinstance(member, (types.FunctionType, *_WRAPPERS, *snapshots.ATOMS)):
                        parts.append(f"{name}: {self(member)}")
        return parts


def _is_native(cls: type) -> bool:
    """Return whether a class is written in C, whose objects may have state besides attributes."""
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    own = vars(cls)
    larger = cls.__base__ is not None and cls.__basicsize__ > cls.__base__.__basicsize__
    return larger and "__dict__" not in own and "__slots__" not in own


def digest(parts: Iterable[str]) -> str:
    """Return the SHA-256 of a list of texts."""
    hashed = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="backslashreplace")
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.hexdigest()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _tensor(value: torch.Tensor) -> list[str]:
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    if not plain or not has_data(value) or value.nbytes > snapshots.MAX_ARRAY_BYTES:
        raise NotStorable("a tensor that is large, without data, or of a subclass")
    about = (value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad)
    return ["tensor", *map(str, about), _sha(tensor_bytes(value))]


@functools.lru_cache(maxsize=65536)
def describe_code(code: types.CodeType) -> str:
    """Describe the instructions, constants, names and lines of a function."""
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
    """Return a text that changes with the file of a library's module."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    try:
        return file_stamp(file)
    except OSError:
        raise NotStorable(f"{module.__name__} has no file") from None


def file_stamp(file: str) -> str:
    """Return a text that changes with a file: its name, size and times."""
    status = os.stat(file)
    return f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
