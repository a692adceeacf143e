"""Captured graphs on disk, for the next process that captures the same step.

An entry is looked up by a digest of everything that a capture depends on: versions and files of
torch and Shardwise, the code that may run and the files of the user's own modules, the Python state
that this code may read, the model's structure, the batch's shapes, and torch's settings. It also
names the environment variables that were read while it was captured, which must not have changed.
Any doubt means that nothing is stored or used: see `docs/decisions/0024-batches-and-sizes.md`.

`SHARDWISE_CACHE` names the folder; `SHARDWISE_CACHE=off` turns the cache off.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import json
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.batch import Call
from shardwise.errors import ShardwiseError
from shardwise.files import read_json, write_text
from shardwise.frontend.builder import is_user_code
from shardwise.frontend.describe import Describe, describe_code, digest
from shardwise.frontend.hooks import hooks_of
from shardwise.frontend.objective import Objective, StepFunction
from shardwise.frontend.python_state import Place, Reach, Reads, reachable
from shardwise.ir import Graph
from shardwise.ir.stored import NotStorable, graph_from_json, graph_to_json
from shardwise.version import __version__

__all__ = ["CachedCapture", "cache_folder", "cached_capture"]

FORMAT = 1
MAX_BYTES = 512 << 20  # of all entries; the oldest are removed first
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_STARTED_NS = time.time_ns()
_ENVIRONMENT = {  # what torch may have read when it was imported
    name: value
    for name, value in sorted(os.environ.items())
    if name.startswith(("TORCH", "PYTORCH")) and not name.startswith("TORCHELASTIC_")
}


def cache_folder() -> Path | None:
    """Return where graphs are stored, or None if they are not."""
    chosen = os.environ.get("SHARDWISE_CACHE", "")
    if chosen.lower() in ("off", "0"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{base}/shardwise").expanduser() / "graphs"


@dataclass(frozen=True, slots=True)
class CachedCapture:
    """One capture's place in the cache, and what the code of its step may read."""

    file: Path
    reach: Reach

    def load(self, model: nn.Module, reads: Reads | None) -> Graph | None:
        """Return the stored graph, if there is one that holds now."""
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
            reads.add_places(attributes, methods, self.reach)
        return graph

    @contextlib.contextmanager
    def storing(self, reads: Reads | None) -> Iterator[_Capture]:
        """Observe a capture, and store what it gives."""
        capture = _Capture()
        with capture.observing():
            yield capture
        if reads is not None:
            reads.merge(capture.reads)
        if capture.graph is None or capture.is_impure or capture.reads.writes:
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
    """What is seen of a capture: its result, and what it reads from outside of Python."""

    graph: Graph | None = None
    reads: Reads = field(default_factory=Reads)
    variables: set[str] = field(default_factory=set)  # of the environment
    is_impure: bool = False  # whether it read files, or the environment as a whole

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        environment: Any = type(os.environ)
        get, each, opened = environment.__getitem__, environment.__iter__, builtins.open

        def getitem(mapping: Any, key: str) -> str:
            if _is_for_the_model(sys._getframe(1)):
                self.variables.add(key)
            value: str = get(mapping, key)
            return value

        def iterate(mapping: Any) -> Iterator[str]:
            self.is_impure |= _is_for_the_model(sys._getframe(1))
            return iter(each(mapping))

        def open_(file: Any, *args: Any, **kwargs: Any) -> Any:
            is_code = str(file).endswith((".py", ".pyc"))
            self.is_impure |= not is_code and _is_for_the_model(sys._getframe(1))
            return opened(file, *args, **kwargs)

        environment.__getitem__, environment.__iter__ = getitem, iterate
        builtins.open = io.open = open_
        try:
            yield
        finally:
            environment.__getitem__, environment.__iter__ = get, each
            builtins.open = io.open = opened


def _is_for_the_model(frame: types.FrameType | None) -> bool:
    """Whether the model's code asks, be it through a library: not torch, nor what torch imports."""
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


def cached_capture(
    model: nn.Module, call: Call, chosen: Objective, options: Mapping[str, Any]
) -> CachedCapture | None:
    """Return the place of a capture's graph; None if no text tells it from all others."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        function = chosen.fn if isinstance(chosen, StepFunction) else chosen
        reach = reachable(model, [] if function is None else [function])
        describe = Describe(model, reach.names)
        parts = [
            *_installation(),
            *_settings(call, options),
            *_batch(call),
            *_code(reach, describe),
            *_own_files(),
            *_variables(reach, describe),
            *_structure(model, reach, describe),
        ]
    except Exception:  # also of the user's own classes: any doubt means no cache
        return None
    return CachedCapture(folder / f"{digest(parts)}.json", reach)


@functools.cache
def _installation() -> tuple[str, ...]:
    """Versions, and the files of torch and Shardwise by size and times."""
    files = []
    for package in (Path(torch.__file__).parent, Path(__file__).parents[1]):
        for folder, folders, names in os.walk(package):
            folders[:] = sorted(set(folders) - {"include", "testing", "test", "share", "bin"})
            for name in sorted(names):
                if name.endswith((".py", ".so")):
                    files.append(_stamp(os.path.join(folder, name)))
    versions = (FORMAT, __version__, torch.__version__, torch.version.git_version, sys.version)
    return (*map(str, versions), np.__version__, digest(files))


def _stamp(file: str) -> str:
    status = os.stat(file)
    return f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _settings(call: Call, options: Mapping[str, Any]) -> list[str]:
    """Options of the capture, and settings of torch that tracing follows."""
    if torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        raise NotStorable("a mode changes what functions of torch do")
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
        *(sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()),
    )
    return [repr(sorted(options.items())), repr(flags), repr(_ENVIRONMENT)]


def _batch(call: Call) -> list[str]:
    """The batch but for the contents of its tensors."""
    seen: dict[int, int] = {}
    parts = [call.kind, str(call.spec), repr(call.paths)]
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout is not torch.strided:
                raise NotStorable("a tensor of a type of its own")
            about = (leaf.dtype, leaf.device.type, tuple(leaf.shape), leaf.stride())
            parts.append(f"{about} {leaf.requires_grad} {seen.setdefault(id(leaf), len(seen))}")
        else:
            parts.append(f"{type(leaf).__name__} {leaf!r}")
    if any(" at 0x" in part for part in parts):
        raise NotStorable("an object without a text")
    return parts


def _code(reach: Reach, describe: Describe) -> list[str]:
    """The code that may run, and functions of torch, which a script may have replaced."""
    patched = [
        f"{name} {value.__name__} {describe_code(code) if code is not None else ''}"
        for namespace in (torch, torch.nn.functional, torch.Tensor)
        for name, value in vars(namespace).items()
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType)
        and name != "manual_seed"  # which torch wraps by itself
        for code in [getattr(value, "__code__", None)]
    ]
    codes = sorted(describe_code(code) for code in reach.codes)
    files = {code.co_filename for code in reach.codes if "site-packages" in code.co_filename}
    stamps = [_stamp(file) for file in sorted(files) if os.path.exists(file)]
    classes = sorted(describe(cls) for cls in reach.classes)
    return [digest(sorted(patched)), digest(codes), digest(stamps), digest(classes)]


def _own_files() -> list[str]:
    """The contents of all modules that are neither Python's nor a library's."""
    parts = []
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__")
        if isinstance(file, str) and is_user_code(file) and "site-packages" not in file:
            try:
                changed = os.stat(file).st_mtime_ns
                content = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            except OSError:
                raise NotStorable(f"{file} cannot be read") from None
            if changed > _STARTED_NS:  # what runs may be what it was before
                raise NotStorable(f"{file} has changed since this process started")
            parts.append(f"{file} {content}")
    return sorted(set(parts))


def _variables(reach: Reach, describe: Describe) -> list[str]:
    """Global variables, closures, class attributes and defaults; the environment is observed."""
    environment = vars(os.environ)
    return sorted(
        f"{variable.kind} {variable.name} {variable.place} {describe(variable.read())}"
        for variable in reach.variables.values()
        if variable.home is not environment
    )


def _structure(model: nn.Module, reach: Reach, describe: Describe) -> list[str]:
    """Modules, their attributes and hooks, and tensors by everything but their values."""
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
        for kind in _HOOKS:
            hooks = [h for h in own[kind].values() if not _is_ours(h)]
            parts.append(f"{kind}: {describe(hooks)}")
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


def _is_ours(hook: Any) -> bool:
    return type(hook).__module__.startswith("shardwise.")


def _variable(name: str) -> str | None:
    """The digest of an environment variable: entries do not show secrets."""
    value = os.environ.get(name)
    return None if value is None else digest([value])


def _places(data: Any, model: nn.Module) -> dict[Place, None]:
    places = {(str(path), str(name)): None for path, name in data}
    for path, _ in places:
        model.get_submodule(path)  # raises if there is none
    return places


def _drop_oldest(folder: Path) -> None:
    """Keep the size of all entries within its limit."""
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
