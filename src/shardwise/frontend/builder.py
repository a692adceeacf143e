"""A graph under construction: appended calls, their types, and the region they are in.

Enters: calls in program order, from `convert` and its normalizations. Leaves: `RawNode`s over
temporary value names, which `finish` prunes and renames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.errors import CaptureError
from shardwise.frontend import aliasing
from shardwise.frontend.aliasing import Alias, Storage, View
from shardwise.frontend.provenance import Origin
from shardwise.ir import TensorType, iter_refs

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
