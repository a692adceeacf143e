"""Ordinary calls: arguments read, results tracked, views noticed.

Enters: an operator with aliases and constants as arguments. Leaves: aliases of its results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.frontend.aliasing import PARENT, Alias, View
from shardwise.frontend.builder import Builder, tensor_type
from shardwise.ir import Ref, TensorType


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
