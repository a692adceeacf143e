"""Operators on tensors without data, and an account of the bytes that would be there.

Enters: the operators of a step. Leaves: `Peak`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
SMALL = 1 << 16  # elements of a constant that is computed, so that its values can be asked for
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes there were at a time, by kind, and in which phase."""

    bytes_of: Mapping[str, int]
    most_activations_bytes: int  # at any time
    when: str


@dataclass(slots=True, eq=False)
class _Block:
    """One storage."""

    size: int
    kind: str | None = None
    watch: Any = field(default=None, repr=False)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators without data, and keeps account of the storages on a device.

    Small constants, which depend on nothing but numbers, are computed for real: programs may ask
    for their values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.phase = device, ""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live: dict[int, _Block] = {}
        self._elastic: list[tuple[torch.UntypedStorage, _Block]] = []
        self._events: list[tuple[_Block, int, str]] = []
        self._recording = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            stack.enter_context(self)
            yield
            self._recording = False

    # --- operators -----------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = self._call(func, args, dict(kwargs or {}))
        for item in tree_leaves(found):
            if isinstance(item, Tensor):
                self._block(item)
        for storage, block in self._elastic:
            self._resize(block, storage.nbytes())
        return found

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_constant(func, args, kwargs):
            return func(*args, **kwargs)
        try:
            found = func(*args, **kwargs)
            if any(t.numel() > SMALL for t in tree_leaves(found) if isinstance(t, Tensor)):
                return found
        except NEEDS_DATA:
            pass
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    # --- storages ------------------------------------------------------------------------

    def _block(self, tensor: Tensor) -> _Block | None:
        """The account of a tensor's storage, opened if it is new."""
        if tensor.device.type != self.device.type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._live.get(key)
        if block is None:
            block = self._live[key] = _Block(0)
            block.watch = weakref.ref(storage, lambda _: self._gone(key))
        self._resize(block, storage.nbytes())
        return block

    def _resize(self, block: _Block, size: int) -> None:
        change, block.size = size - block.size, size
        if change and self._recording:
            self._events.append((block, change, self.phase))

    def _gone(self, key: int) -> None:
        self._resize(self._live.pop(key), 0)

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say what storages are; the first word counts."""
        for tensor in tensors:
            block = self._block(tensor) if isinstance(tensor, Tensor) else None
            if block is not None and block.kind is None:
                block.kind = kind

    def watch(self, tensor: Tensor, kind: str) -> None:
        """Mark a storage that changes its size without an operator."""
        self.mark(kind, [tensor])
        block = self._block(tensor)
        if block is not None:
            self._elastic.append((tensor.untyped_storage(), block))

    def keep(self) -> None:
        """A forward ends: what it leaves are activations."""
        for block in self._live.values():
            block.kind = block.kind or "activations"

    # --- steps ---------------------------------------------------------------------------

    def begin(self, *, record: bool) -> None:
        """A step begins: what is there and unknown belongs to none."""
        gc.collect()
        for block in self._live.values():
            block.kind = block.kind or "temporary"
        if record:
            self._events = [(block, block.size, "") for block in self._live.values()]
        self._recording = record

    def peak(self) -> Peak:
        """The highest sum of what was recorded, and its parts."""
        now, best = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        when, most_kept = "", 0
        for block, change, phase in self._events:
            now[block.kind or "temporary"] += change
            most_kept = max(most_kept, now["activations"])
            if change > 0 and sum(now.values()) > sum(best.values()):
                best, when = dict(now), phase
        return Peak(bytes_of=best, most_activations_bytes=most_kept, when=when)


def _is_constant(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this makes small numbers of nothing but small numbers, on the host."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    if not tensors:
        return getattr(func, "overloadpacket", None) is torch.ops.aten.arange
    return not any(isinstance(t, FakeTensor) or t.is_meta or t.numel() > SMALL for t in tensors)
