"""What the runtime knows of each parameter and buffer, and how generated modules declare them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.splits import Split

__all__ = [
    "BufferSpec",
    "ParameterSpec",
    "Scope",
    "attach",
    "declare",
    "declare_buffer",
    "locate",
    "needed_axes",
    "torch_dtype",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter: its full shape, how it is cut for use, and how it is stored and synchronized.

    `splits` cut the tensor that the forward uses out of the full one. Its gradient arrives as a
    partial sum on the axes of `sync`, over which `zero` shards the optimizer state (1), the
    gradient too (2), and the parameter too (3). `unit` is the path of the module before whose
    forward a parameter of zero 3 is gathered; "" is the root.

    The forward uses it in `dtype`. It is stored and optimized in `master`; the gradients of
    micro-batches are added up in `gradient` and summed over ranks in `reduce`. "" means: `master`
    as `dtype`, `gradient` as `master`, `reduce` as `gradient`.

    A `borrowed` one is a copy of a parameter whose home is on other ranks (a weight tied between
    pipeline stages); its gradient is that of the last step alone. `offload` says what is kept in
    host memory: "optimizer" (stored values and optimizer state) or "parameters" (all of it but for
    the time of use).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    sync: tuple[str, ...] = ()
    zero: int = 0
    unit: str = ""
    requires_grad: bool = True
    master: str = ""
    gradient: str = ""
    reduce: str = ""
    borrowed: bool = False
    offload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """One buffer, whole on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    persistent: bool = True


class Scope(nn.Module):
    """A module whose members are indexed: by number as in a list, or by name as in a dict."""

    def __getitem__(self, index: int | str | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(index.start or 0, index.stop)]
        key = str(index)
        for members in (self._modules, self._parameters, self._buffers):
            if key in members:
                return members[key]
        raise KeyError(f"no member {key!r} in {type(self).__name__}")


def attach(module: nn.Module, path: str, child: nn.Module) -> None:
    """Put a module at a dotted path, with bare modules on the way."""
    owner, last = locate(module, path, create=True)
    owner.add_module(last, child)


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype), name
    return found


def locate(module: nn.Module, name: str, *, create: bool = False) -> tuple[nn.Module, str]:
    """The module that holds a dotted name, and the last part of the name."""
    *path, last = name.split(".")
    for step in path:
        child = module._modules.get(step)
        if child is None:
            if not create:
                raise AttributeError(f"{type(module).__name__} has no module {step!r} for {name!r}")
            child = Scope()
            module.add_module(step, child)
        module = child
    return module, last


def declare(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    dtype: str = "float32",
    requires_grad: bool = True,
) -> None:
    """Register a parameter without memory at a dotted path, with bare modules on the way.

    The store gives it memory. Generated code then says `self.attn.qkv.weight`.
    """
    owner, last = locate(module, name, create=True)
    empty = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="meta")
    owner.register_parameter(last, nn.Parameter(empty, requires_grad=requires_grad))


def declare_buffer(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    dtype: str = "float32",
    persistent: bool = True,
) -> None:
    """Register a buffer without memory at a dotted path."""
    owner, last = locate(module, name, create=True)
    empty: Tensor = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="meta")
    owner.register_buffer(last, empty, persistent=persistent)


def needed_axes(specs: Sequence[ParameterSpec], axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The combinations of mesh axes that a store of these parameters talks over."""
    found: dict[tuple[str, ...], None] = {}
    for spec in specs:
        cut = {split.axis for split in spec.splits}
        for names in (spec.sync, cut):
            combined = tuple(name for name in axes if name in names)
            if math.prod(axes[name] for name in combined) > 1:
                found.setdefault(combined)
    return list(found)
