"""A graph under construction: appended calls, their types, and the region they are in."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.frontend import aliasing
from shardwise.frontend.aliasing import PARENT, Alias, Storage, View
from shardwise.ir import Ref, TensorType, iter_refs

# Where a node came from: the user's module and source line.


ROOT = "model"  # the attribute of the exported step that holds the user's model

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(?!File ")([^\n]*))?')
_TORCH = str(Path(torch.__file__).parent) + "/"
_PACKAGE = str(Path(__file__).parents[1]) + "/"
_PYTHON = sysconfig.get_path("stdlib") + "/"


@dataclass(frozen=True, slots=True)
class Origin:
    """`module` as in `named_modules()`, its class, `file.py:line` and the line's text."""

    module: str = ""
    module_class: str = ""
    source: str = ""
    source_text: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack trace."""

    file: str
    line: int
    function: str
    text: str

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place


def origin_of(meta: dict[str, Any]) -> Origin:
    """Return the origin of a node, from its fx meta."""
    module, module_class = "", ""
    stack = meta.get("nn_module_stack")
    if stack:
        path, qualified = list(stack.values())[-1]
        module, module_class = _strip_root(path), _class_name(qualified)
        if path == "":  # the step itself: loss code outside the model
            module_class = ""
    frame = user_frame(meta.get("stack_trace") or "")
    if frame is None:
        return Origin(module, module_class)
    return Origin(module, module_class, frame.place, frame.text)


@functools.lru_cache(maxsize=65536)
def user_frame(trace: str) -> Frame | None:
    """Return the innermost `forward` outside torch; else the innermost such frame of any name."""
    frames = [frame for frame in parse_frames(trace) if is_user_file(frame.file)]
    for frame in reversed(frames):
        if frame.function.rsplit(".", 1)[-1] == "forward":
            return frame
    return frames[-1] if frames else None


def parse_frames(trace: str) -> list[Frame]:
    """Return the frames of a printed stack, outermost first."""
    return [
        Frame(file, int(line), function, (text or "").strip())
        for file, line, function, text in _FRAME.findall(trace)
    ]


def is_user_file(file: str) -> bool:
    """Whether a source file is neither torch's nor ours."""
    generated = file == "<string>" or file.startswith(("<frozen", "<eval_with_key>"))
    return not generated and not file.startswith((_TORCH, _PACKAGE))


@contextlib.contextmanager
def keeping_user_frames() -> Iterator[None]:
    """While a step is traced, keep the user's frames that are not called `forward`.

    torch keeps frames of that name alone: of a loss function, of a step that is a function, or of
    a `training_step` nothing would be left.
    """
    tracer: Any = torch.fx.proxy.TracerBase
    original = getattr(tracer, "_filter_traceback_frames", None)
    if original is None:
        yield
        return

    def kept(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        found: traceback.StackSummary = original(self, summary)
        if any(frame.name == "forward" and is_user_file(frame.filename) for frame in found):
            return found
        inside = False
        users: list[traceback.FrameSummary] = []
        for frame in summary:
            inside = inside or frame.filename.startswith(_PACKAGE)
            if inside and is_user_code(frame.filename):
                users.append(frame)
        return traceback.StackSummary.from_list([*found, *users])

    tracer._filter_traceback_frames = kept
    try:
        yield
    finally:
        tracer._filter_traceback_frames = original


def running_frame() -> Frame | None:
    """Return the innermost frame of the user's code that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_code(code.co_filename):
            line = frame.f_lineno
            text = linecache.getline(code.co_filename, line).strip()
            return Frame(code.co_filename, line, code.co_name, text)
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Whether a source file is the user's or a library's of models: not torch, Python or ours."""
    library = file.startswith(_PYTHON) and "site-packages" not in file
    return is_user_file(file) and not library and not file.startswith(_PACKAGE)


@functools.lru_cache(maxsize=65536)
def _strip_root(path: str) -> str:
    path = re.sub(r"@\d+", "", path)
    return "" if path == ROOT else path.removeprefix(f"{ROOT}.")


def _class_name(qualified: Any) -> str:
    name = qualified if isinstance(qualified, str) else qualified.__qualname__
    return str(name).rsplit(".", 1)[-1]


SYMBOLIC = "symbolic"  # op of a pseudo-node: a Python number read from a tensor
UNKNOWN_SIZE = -1
_DETACHED = {
    *("aten.detach.default", "aten.zeros_like.default", "aten.ones_like.default"),
    *("aten.empty_like.default", "aten.full_like.default", "aten.rand_like.default"),
    *("aten.randn_like.default", "aten.new_zeros.default", "aten.new_ones.default"),
    *("aten.new_full.default", "aten.new_empty.default", SYMBOLIC),
}


@dataclass(frozen=True, slots=True)
class Region:
    """What surrounds a node: gradient mode, autocast, recompute group, origin."""

    grad_enabled: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    recompute: str | None = None
    origin: Origin = field(default_factory=Origin)


@dataclass(slots=True)
class RawNode:
    """A node before renaming."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]
    region: Region


@dataclass(slots=True)
class Builder:
    """Appends calls and keeps track of aliases, types and differentiability."""

    device: torch.device
    nodes: list[RawNode] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    differentiable: set[str] = field(default_factory=set)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)  # by address of fake storage
    owners: dict[int, str] = field(default_factory=dict)  # id(root alias) -> "parameter x"
    region: Region = field(default_factory=Region)
    warnings: list[str] = field(default_factory=list)

    # ------------------------------------------------------------ values

    def source(self, name: str, type_: TensorType, owner: str, *, differentiable: bool) -> Alias:
        """Return a value from outside: parameter, buffer, input, constant."""
        self.types[name] = type_
        if differentiable:
            self.differentiable.add(name)
        alias = aliasing.new_root(name)
        self.owners[id(alias)] = owner
        return alias

    def type_of(self, name: str) -> TensorType:
        return self.types[name]

    def read(self, alias: Alias) -> str:
        return aliasing.read(alias, self)

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        types: tuple[TensorType, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[str, ...]:
        """Append a call; the names of its results."""
        outputs = tuple(f"%{len(self.types) + i}" for i in range(len(types)))
        self.types.update(zip(outputs, types, strict=True))
        if self.region.grad_enabled and op not in _DETACHED:
            used = (*iter_refs(args), *iter_refs(tuple(v for _, v in kwargs)))
            if any(ref.name in self.differentiable for ref in used):
                self.differentiable.update(o for o in outputs if _can_differ(self.types[o].dtype))
        self.nodes.append(RawNode(op, args, kwargs, outputs, self.region))
        return outputs

    @contextlib.contextmanager
    def inside(self, **changes: Any) -> Iterator[None]:
        """A region with some properties changed."""
        outer, self.region = self.region, replace(self.region, **changes)
        try:
            yield
        finally:
            self.region = outer

    # ------------------------------------------------------------ aliases

    def track(self, name: str, value: torch.Tensor, view: View | None) -> Alias:
        """Return the alias of a call's result: a view if it shares memory, else its own root."""
        address = value.untyped_storage()._cdata
        storage = self.storages.get(address)
        if storage is None:
            alias = aliasing.new_root(name)
            self.storages[address] = alias.storage
            return alias
        return Alias(storage, name, storage.version, view)

    def same(self, value: torch.Tensor, parent: Alias) -> Alias:
        """Return the alias of a result that equals `parent`; shares its memory or not."""
        name = self.read(parent)
        if self.storages.get(value.untyped_storage()._cdata) is parent.storage:
            return Alias(parent.storage, name, parent.storage.version, View(parent, ""))
        return self.track(name, value, None)

    def write(self, alias: Alias, name: str) -> None:
        """`alias` is overwritten in place by the value `name`."""
        root = alias.storage.root
        assert root is not None
        self._check_write(alias, root)
        aliasing.write(alias, name, self)

    def _check_write(self, alias: Alias, root: Alias) -> None:
        owner = self.owners.get(id(root), "")
        where = self.region.origin.source or None
        if owner.startswith("parameter"):
            raise CaptureError(
                f"forward modifies {owner} in place",
                where=where,
                hint="compute a new tensor from it; the optimizer alone changes parameters",
            )
        if owner.startswith("constant"):
            raise CaptureError(
                f"forward modifies a tensor that is neither parameter nor buffer ({owner})",
                where=where,
                hint="self.register_buffer(...) makes it part of the state",
            )
        if owner.startswith("input"):
            self.warnings.append(f"forward modifies {owner} in place; the batch stays as given")
        hidden = not self.region.grad_enabled
        here = alias
        while here.view is not None:
            hidden |= here.view.op == "aten.detach.default"
            here = here.view.parent
        if hidden and root.name in self.differentiable:
            raise CaptureError(
                "forward changes a value in place without autograd noticing (no_grad or detach), "
                "although gradients flow through it",
                where=where,
                hint="write it as a new value: x = x + (new - x).detach()",
            )


def tensor_type(value: torch.Tensor) -> TensorType:
    """Return the type of a fake tensor; sizes that depend on data are `UNKNOWN_SIZE`."""
    shape = tuple(size if type(size) is int else _size(size) for size in value.shape)
    return TensorType(shape, value.dtype)


def _size(size: Any) -> int:
    constant = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else int(size)
    return UNKNOWN_SIZE if constant is None else int(constant)


def _can_differ(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# Ordinary calls: arguments read, results tracked, views noticed.


def append_call(
    builder: Builder, op: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Append a call; aliases of its results, views among them."""
    several = isinstance(value, tuple | list)
    values = tuple(value) if several else (value,)
    tensors = tuple(v for v in values if isinstance(v, torch.Tensor))
    types = tuple(tensor_type(v) for v in tensors)
    if not tensors:
        return _without_result(builder, op, value)
    plain = refs(builder, args)
    named = tuple((key, refs(builder, kwargs[key])) for key in sorted(kwargs))
    outputs = builder.emit(op, plain, types, named)
    inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Alias)]
    aliases = iter(
        builder.track(name, v, _view(builder, op, v, i, args, plain, named, types, inputs))
        for i, (name, v) in enumerate(zip(outputs, tensors, strict=True))
    )
    results = tuple(next(aliases) if isinstance(v, torch.Tensor) else v for v in values)
    return results if several else results[0]


def _without_result(builder: Builder, op: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float) or value == () or value == []:
        return value
    raise CaptureError(
        f"{op} returns a {type(value).__name__}", where=builder.region.origin.source or None
    )


def _view(
    builder: Builder,
    op: str,
    value: torch.Tensor,
    index: int,
    args: tuple[Any, ...],
    plain: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    types: tuple[TensorType, ...],
    inputs: list[Alias],
) -> View | None:
    """Return the view that made this result, if it shares memory with an argument."""
    storage = builder.storages.get(value.untyped_storage()._cdata)
    if storage is None:
        return None
    for parent in inputs:
        if parent.storage is storage:
            marked = tuple(PARENT if arg is parent else plain[i] for i, arg in enumerate(args))
            return View(parent, op, marked, kwargs, index, types, builder.region.grad_enabled)
    return None


def refs(builder: Builder, value: Any) -> Any:
    """Return an argument with aliases read as `Ref`s; lists become tuples."""
    if isinstance(value, Alias):
        return Ref(builder.read(value))
    if isinstance(value, tuple | list):
        return tuple(refs(builder, item) for item in value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError("a size depends on data", where=builder.region.origin.source or None)
    return value


def fitted(builder: Builder, name: str, own: TensorType) -> str:
    """Return the value `name` cast and broadcast to another type."""
    have = builder.types[name]
    if have.dtype != own.dtype:
        have = TensorType(have.shape, own.dtype)
        (name,) = builder.emit("aten.to.dtype", (Ref(name), own.dtype), (have,))
    if have.shape != own.shape:
        (name,) = builder.emit("aten.expand.default", (Ref(name), own.shape), (own,))
    return name
