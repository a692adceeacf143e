"""Which values share memory, and how a write through one is seen by the others.

Enters: views and in-place writes in program order. Leaves: names of values that never change.
Every traced tensor is an `Alias`: its memory (`Storage`), the value it holds at the storage's
present version, and the view that made it from its parent. A write makes a new value, carries it
up to the root through the inverse of each view (`slice` -> `slice_scatter`), and outdates the
other aliases, which are made again from the root when they are next read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwise.ir import Ref, TensorType


class NotFunctional(Exception):
    """A write that this analysis cannot express; the graph is functionalized by torch instead.

    `where` is the user's line, if it is known.
    """

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


class Emitter(Protocol):
    """What aliasing needs from the builder: append one call, get its result's names."""

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        types: tuple[TensorType, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[str, ...]: ...

    def inside(self, *, grad_enabled: bool) -> AbstractContextManager[None]: ...

    def type_of(self, name: str) -> TensorType: ...


@dataclass(slots=True, eq=False)
class View:
    """`parent` viewed by `op`: the whole call with the parent's place marked by `PARENT`."""

    parent: Alias
    op: str  # "" for an alias that is the same tensor
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    index: int = 0  # which of the call's outputs
    types: tuple[TensorType, ...] = ()
    grad_enabled: bool = True  # as it was when the view was made


@dataclass(slots=True, eq=False)
class Storage:
    """Memory: a version that counts writes, and the alias that all others are views of."""

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
    """Return an alias of new memory that holds the value `name`."""
    storage = Storage()
    storage.root = Alias(storage, name)
    return storage.root


def read(alias: Alias, emitter: Emitter) -> str:
    """Return the value `alias` holds now."""
    storage = alias.storage
    if alias.version == storage.version:
        return alias.name
    view = alias.view
    if view is None:
        raise NotFunctional("a read of memory whose base is unknown")
    parent = read(view.parent, emitter)
    if view.op == "":
        alias.name = parent
    else:
        key = (storage.version, view.op, str(view.args), view.kwargs, parent)
        if key not in storage.replayed:
            args = tuple(Ref(parent) if arg is PARENT else arg for arg in view.args)
            with emitter.inside(grad_enabled=view.grad_enabled):
                storage.replayed[key] = emitter.emit(view.op, args, view.types, view.kwargs)
        alias.name = storage.replayed[key][view.index]
    alias.version = storage.version
    return alias.name


def write(alias: Alias, name: str, emitter: Emitter) -> None:
    """`alias` now holds the value `name`; its bases follow, other views are outdated."""
    storage = alias.storage
    chain: list[tuple[View, str]] = []
    here = alias
    while here.view is not None:
        chain.append((here.view, read(here.view.parent, emitter)))
        here = here.view.parent
    if here is not storage.root:
        raise NotFunctional("a write to memory whose base is unknown")
    storage.version += 1
    alias.name, alias.version = name, storage.version
    for view, base in chain:
        name = _scatter(view, base, name, emitter)
        view.parent.name, view.parent.version = name, storage.version


def _scatter(view: View, base: str, source: str, emitter: Emitter) -> str:
    """Return the base with `source` written where `view` looks."""
    if view.op == "":
        return source
    inverse = INVERSES.get(view.op)
    if inverse is None:
        raise NotFunctional(f"a write through {view.op}")
    op, args = inverse(view, Ref(base), Ref(source), emitter)
    if op == "":
        return source
    return emitter.emit(op, args, (emitter.type_of(base),))[0]


Inverse = Callable[[View, Ref, Ref, Emitter], tuple[str, tuple[Any, ...]]]


def _rest(view: View, *defaults: Any) -> tuple[Any, ...]:
    """Return the view's arguments after the parent, with defaults filled in."""
    given = view.args[1:]
    return (*given, *defaults[len(given) :])


def _slice(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    return "aten.slice_scatter.default", (base, source, *_rest(view, 0, None, None, 1))


def _select(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    return "aten.select_scatter.default", (base, source, *view.args[1:])


def _narrow(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    dim, start, length = view.args[1:]
    return "aten.slice_scatter.default", (base, source, dim, start, start + length, 1)


def _diagonal(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    return "aten.diagonal_scatter.default", (base, source, *_rest(view, 0, 0, 1))


def _reshape(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    shape = emitter.type_of(base.name).shape
    if emitter.type_of(source.name).shape == shape:
        return "", ()
    return "aten.reshape.default", (source, shape)


def _same(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    if emitter.type_of(source.name) != emitter.type_of(base.name):
        raise NotFunctional(f"a write through {view.op} that changes the shape")
    return "", ()


def _transpose(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    return view.op, (source, *view.args[1:])


def _permute(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    dims = [dim % len(view.args[1]) for dim in view.args[1]]
    return "aten.permute.default", (source, tuple(dims.index(i) for i in range(len(dims))))


def _movedim(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    return view.op, (source, view.args[2], view.args[1])


def _piece(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    """`split`, `chunk`: one piece along the dim; where it starts follows from the others."""
    dim = _dim(view, default=0, position=2)
    rank = len(view.types[0].shape)
    start = sum(t.shape[dim % rank] for t in view.types[: view.index])
    end = start + view.types[view.index].shape[dim % rank]
    return "aten.slice_scatter.default", (base, source, dim, start, end, 1)


def _unbind(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    dim = _dim(view, default=0, position=1)
    return "aten.select_scatter.default", (base, source, dim, view.index)


def _dim(view: View, *, default: int, position: int) -> int:
    given = view.args[position] if len(view.args) > position else default
    return int(dict(view.kwargs).get("dim", given))


def _complex(view: View, base: Ref, source: Ref, emitter: Emitter) -> tuple[str, tuple[Any, ...]]:
    other = "real" if view.op == "aten.view_as_complex.default" else "complex"
    return f"aten.view_as_{other}.default", (source,)


INVERSES: dict[str, Inverse] = {
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow.default": _narrow,
    "aten.diagonal.default": _diagonal,
    "aten.split.Tensor": _piece,
    "aten.split.sizes": _piece,
    "aten.split_with_sizes.default": _piece,
    "aten.chunk.default": _piece,
    "aten.tensor_split.sections": _piece,
    "aten.tensor_split.indices": _piece,
    "aten.unbind.int": _unbind,
    "aten.transpose.int": _transpose,
    "aten.swapaxes.default": _transpose,
    "aten.swapdims.default": _transpose,
    "aten.t.default": _transpose,
    "aten.numpy_T.default": _transpose,
    "aten.mT.default": _transpose,
    "aten.permute.default": _permute,
    "aten.movedim.int": _movedim,
    "aten.view_as_real.default": _complex,
    "aten.view_as_complex.default": _complex,
}
for _op in (
    *("view.default", "reshape.default", "flatten.using_ints", "unflatten.int"),
    *(
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "_unsafe_view.default",
    ),
):
    INVERSES[f"aten.{_op}"] = _reshape
for _op in ("expand.default", "contiguous.default", "alias.default", "detach.default"):
    INVERSES[f"aten.{_op}"] = _same
