"""Build a graph call by call, with types, and turn in-place writes into new values.

Every traced tensor is an `Alias`: its memory (`Storage`), its value at the storage's present
version, and the view that made it from its parent. A write makes a new value, carries it up to the
root through the inverse of each view (`slice` -> `slice_scatter`), and outdates the other aliases,
which are computed from the root again when they are next read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.ir import Node, Ref, TensorType


# ---------------------------------------------------------------- aliases
class NotFunctional(Exception):
    """A write that this module cannot express; torch functionalizes the graph instead.

    `where` is the user's line, if it is known.
    """

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


@dataclass(slots=True, eq=False)
class View:
    """`parent` viewed by `op`: the call, with `PARENT` in the parent's position."""

    parent: Alias
    op: str  # "" for an alias that is the same tensor
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    index: int = 0  # which of the call's outputs
    types: tuple[TensorType, ...] = ()
    grad_enabled: bool = True  # when the view was made


@dataclass(slots=True, eq=False)
class Storage:
    """Memory: a version that counts writes, and the root alias that all others are views of."""

    version: int = 0
    root: Alias | None = None
    replayed: dict[Any, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Alias:
    """One traced tensor."""

    storage: Storage
    name: str
    version: int = 0
    view: View | None = None


PARENT = Ref("<parent>")


def new_root(name: str) -> Alias:
    """Return an alias of new memory whose value is `name`."""
    storage = Storage()
    storage.root = Alias(storage, name)
    return storage.root


# ---------------------------------------------------------------- the builder
SYMBOLIC = "symbolic"  # op of a pseudo-node: a Python number read from a tensor
UNKNOWN_SIZE = -1
# A node without a call, from which appended nodes take their gradient mode, autocast, recompute
# group and origin.
REGION = Node(name="", op="", args=(), outputs=())
_READ_ONLY = {  # sources that forward must not write to: the error, and its hint
    "parameter": (
        "forward modifies {} in place",
        "compute a new tensor from it; the optimizer alone changes parameters",
    ),
    "constant": (
        "forward modifies a tensor that is neither parameter nor buffer ({})",
        "self.register_buffer(...) makes it part of the state",
    ),
    "input": (
        "forward modifies {} in place, which a parallel step would not do to the batch",
        "copy it first: x = x.clone()",
    ),
}
_DETACHED = {
    *("aten.detach.default", "aten.zeros_like.default", "aten.ones_like.default"),
    *("aten.empty_like.default", "aten.full_like.default", "aten.rand_like.default"),
    *("aten.randn_like.default", "aten.new_zeros.default", "aten.new_ones.default"),
    *("aten.new_full.default", "aten.new_empty.default", SYMBOLIC),
}


@dataclass(slots=True)
class Builder:
    """Append calls and track aliases, types and differentiability."""

    nodes: list[Node] = field(default_factory=list)  # with preliminary names
    types: dict[str, TensorType] = field(default_factory=dict)
    differentiable: set[str] = field(default_factory=set)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)  # by address of fake storage
    owners: dict[int, str] = field(default_factory=dict)  # id(root alias) -> "parameter x"
    region: Node = REGION
    warnings: list[str] = field(default_factory=list)

    def source(self, name: str, type_: TensorType, owner: str, *, differentiable: bool) -> Alias:
        """Return the alias of a value from outside: parameter, buffer, input, constant."""
        self.types[name] = type_
        if differentiable:
            self.differentiable.add(name)
        alias = new_root(name)
        self.owners[id(alias)] = owner
        return alias

    def read(self, alias: Alias) -> str:
        """Return the present value of an alias."""
        storage, view = alias.storage, alias.view
        if alias.version == storage.version:
            return alias.name
        if view is None:
            raise NotFunctional("a read of memory whose base is unknown")
        parent = self.read(view.parent)
        if view.op == "":
            alias.name = parent
        else:
            key = (storage.version, view.op, str(view.args), view.kwargs, parent)
            if key not in storage.replayed:
                args = tuple(Ref(parent) if arg is PARENT else arg for arg in view.args)
                with self.inside(grad_enabled=view.grad_enabled):
                    storage.replayed[key] = self.emit(view.op, args, view.types, view.kwargs)
            alias.name = storage.replayed[key][view.index]
        alias.version = storage.version
        return alias.name

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        types: tuple[TensorType, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[str, ...]:
        """Append a call and return the names of its results."""
        outputs = tuple(f"%{len(self.types) + i}" for i in range(len(types)))
        self.types.update(zip(outputs, types, strict=True))
        node = replace(self.region, name="", op=op, args=args, kwargs=kwargs, outputs=outputs)
        tracked = self.region.grad_enabled and op not in _DETACHED
        if tracked and not self.differentiable.isdisjoint(node.inputs):
            typed = zip(outputs, (kind.dtype for kind in types), strict=True)
            self.differentiable |= {n for n, d in typed if d.is_floating_point or d.is_complex}
        self.nodes.append(node)
        return outputs

    @contextlib.contextmanager
    def inside(self, **changes: Any) -> Iterator[None]:
        """Change some properties of the region inside a `with` block."""
        outer, self.region = self.region, replace(self.region, **changes)
        try:
            yield
        finally:
            self.region = outer

    def track(self, name: str, value: torch.Tensor, view: View | None) -> Alias:
        """Return the alias of a call's result: a view if it shares memory, else a new root."""
        address = value.untyped_storage()._cdata
        storage = self.storages.get(address)
        if storage is None:
            alias = new_root(name)
            self.storages[address] = alias.storage
            return alias
        return Alias(storage, name, storage.version, view)

    def same(self, value: torch.Tensor, parent: Alias) -> Alias:
        """Return the alias of a result that equals `parent`, with or without shared memory."""
        name = self.read(parent)
        if self.storages.get(value.untyped_storage()._cdata) is parent.storage:
            return Alias(parent.storage, name, parent.storage.version, View(parent, ""))
        return self.track(name, value, None)

    def write(self, alias: Alias, name: str) -> None:
        """Overwrite `alias` in place with the value `name`; its bases change, other views too."""
        storage = alias.storage
        assert storage.root is not None
        self._check_write(alias, storage.root)
        chain: list[tuple[View, str]] = []
        base = alias
        while base.view is not None:
            chain.append((base.view, self.read(base.view.parent)))
            base = base.view.parent
        if base is not storage.root:
            raise NotFunctional("a write to memory whose base is unknown")
        storage.version += 1
        alias.name, alias.version = name, storage.version
        for view, before in chain:
            name = self._scatter(view, before, name)
            view.parent.name, view.parent.version = name, storage.version

    def _scatter(self, view: View, base: str, source: str) -> str:
        """Return the base with `source` written to the part that `view` shows."""
        if view.op == "":
            return source
        inverse = INVERSES.get(view.op)
        if inverse is None:
            raise NotFunctional(f"a write through {view.op}")
        op, args = inverse(self, view, Ref(base), Ref(source))
        return self.emit(op, args, (self.types[base],))[0] if op else source

    def _check_write(self, alias: Alias, root: Alias) -> None:
        owner = self.owners.get(id(root), "")
        where = self.region.source or None
        message, hint = _READ_ONLY.get(owner.partition(" ")[0], ("", ""))
        if message:
            raise CaptureError(message.format(owner), where=where, hint=hint)
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


# ---------------------------------------------------------------- inverses of views
Call = tuple[str, tuple[Any, ...]]  # an operator and its arguments; "" for none
Inverse = Callable[["Builder", View, Ref, Ref], Call]


def _scatter_op(op: str, *defaults: Any) -> Inverse:
    """Return an inverse that takes the arguments of the view, with these defaults."""

    def inverse(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
        own = view.args[1:]
        return f"aten.{op}.default", (base, source, *own, *defaults[len(own) :])

    return inverse


def _narrow(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    dim, start, length = view.args[1:]
    return "aten.slice_scatter.default", (base, source, dim, start, start + length, 1)


def _reshape(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    shape = builder.types[base.name].shape
    if builder.types[source.name].shape == shape:
        return "", ()
    return "aten.reshape.default", (source, shape)


def _same(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    if builder.types[source.name] != builder.types[base.name]:
        raise NotFunctional(f"a write through {view.op} that changes the shape")
    return "", ()


def _transpose(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    return view.op, (source, *view.args[1:])


def _permute(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    dims = [dim % len(view.args[1]) for dim in view.args[1]]
    return "aten.permute.default", (source, tuple(dims.index(i) for i in range(len(dims))))


def _movedim(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    return view.op, (source, view.args[2], view.args[1])


def _piece(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    """Invert `split` and `chunk`; the sizes of the earlier pieces say where this one starts."""
    dim = _dim(view, position=2)
    rank = len(view.types[0].shape)
    start = sum(t.shape[dim % rank] for t in view.types[: view.index])
    end = start + view.types[view.index].shape[dim % rank]
    return "aten.slice_scatter.default", (base, source, dim, start, end, 1)


def _unbind(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    return "aten.select_scatter.default", (base, source, _dim(view, position=1), view.index)


def _dim(view: View, *, position: int) -> int:
    positional = view.args[position] if len(view.args) > position else 0
    return int(dict(view.kwargs).get("dim", positional))


def _complex(builder: Builder, view: View, base: Ref, source: Ref) -> Call:
    other = "real" if view.op == "aten.view_as_complex.default" else "complex"
    return f"aten.view_as_{other}.default", (source,)


INVERSES: dict[str, Inverse] = {
    f"aten.{op}": inverse
    for inverse, ops in {
        _scatter_op("slice_scatter", 0, None, None, 1): ["slice.Tensor"],
        _scatter_op("select_scatter"): ["select.int"],
        _scatter_op("diagonal_scatter", 0, 0, 1): ["diagonal.default"],
        _narrow: ["narrow.default"],
        _piece: [
            *("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default"),
            *("tensor_split.sections", "tensor_split.indices"),
        ],
        _unbind: ["unbind.int"],
        _transpose: [
            *("transpose.int", "swapaxes.default", "swapdims.default", "t.default"),
            *("numpy_T.default", "mT.default"),
        ],
        _permute: ["permute.default"],
        _movedim: ["movedim.int"],
        _complex: ["view_as_real.default", "view_as_complex.default"],
        _reshape: [
            *("view.default", "reshape.default", "flatten.using_ints", "unflatten.int"),
            *("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims"),
            "_unsafe_view.default",
        ],
        _same: ["expand.default", "contiguous.default", "alias.default", "detach.default"],
    }.items()
    for op in ops
}


# ---------------------------------------------------------------- ordinary calls
def append_call(
    builder: Builder, op: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Append a call and return the aliases of its results; views know their parent."""
    several = isinstance(value, tuple | list)
    values = tuple(value) if several else (value,)
    tensors = tuple(v for v in values if isinstance(v, torch.Tensor))
    types = tuple(tensor_type(v) for v in tensors)
    if not tensors:
        if value is None or isinstance(value, bool | int | float) or value == () or value == []:
            return value
        where = builder.region.source or None
        raise CaptureError(f"{op} returns a {type(value).__name__}", where=where)
    plain = refs(builder, args)
    named = tuple((key, refs(builder, kwargs[key])) for key in sorted(kwargs))
    outputs = builder.emit(op, plain, types, named)
    inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Alias)]

    def view(tensor: torch.Tensor, index: int) -> View | None:
        """Return the view of a result that shares memory with an argument."""
        storage = builder.storages.get(tensor.untyped_storage()._cdata)
        for parent in inputs:
            if parent.storage is storage:
                marked = tuple(PARENT if arg is parent else plain[i] for i, arg in enumerate(args))
                return View(parent, op, marked, named, index, types, builder.region.grad_enabled)
        return None

    aliases = iter(
        builder.track(name, tensor, view(tensor, index))
        for index, (name, tensor) in enumerate(zip(outputs, tensors, strict=True))
    )
    results = tuple(next(aliases) if isinstance(v, torch.Tensor) else v for v in values)
    return results if several else results[0]


def refs(builder: Builder, value: Any) -> Any:
    """Return an argument with aliases replaced by `Ref`s; lists become tuples."""
    if isinstance(value, Alias):
        return Ref(builder.read(value))
    if isinstance(value, tuple | list):
        return tuple(refs(builder, item) for item in value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError("a size depends on data", where=builder.region.source or None)
    return value


def fitted(builder: Builder, name: str, target: TensorType) -> str:
    """Cast and broadcast the value `name` to another type."""
    present = builder.types[name]
    if present.dtype != target.dtype:
        present = TensorType(present.shape, target.dtype)
        (name,) = builder.emit("aten.to.dtype", (Ref(name), target.dtype), (present,))
    if present.shape != target.shape:
        (name,) = builder.emit("aten.expand.default", (Ref(name), target.shape), (target,))
    return name
