"""Parameters that are gathered for use and let go afterwards (zero 3).

A `Unit` is a module of the generated program with the flat groups of its parameters. Its hooks
gather them before its forward, while the next unit's are already on their way; let them go after;
and gather them again before its backward, which a hook on the gradient of its outputs announces.
Autograd runs backward in the reverse order of the forward's calls, so that when a unit's backward
begins, all units called after it are done: their memory goes, and sums not yet started start.
The root unit stays gathered from the beginning of a step to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.flat import Entry, FlatGroup
from shardwise.runtime.transport import Pending

__all__ = ["Unit", "Units"]


class Unit:
    """The sharded parameters of one module."""

    def __init__(self, path: str, groups: Sequence[FlatGroup]) -> None:
        self.path, self.groups = path, tuple(groups)
        self.entries: list[Entry] = [entry for group in groups for entry in group.entries]
        self.first_call: int | None = None
        self._pending: list[Pending] | None = None
        self.ready = False

    def start(self) -> None:
        """Begin to gather, unless that has been done."""
        if not self.ready and self._pending is None:
            self._pending = [group.gather() for group in self.groups]

    def use(self) -> None:
        """Have the whole parameters in the modules."""
        if self.ready:
            return
        self.start()
        for pending in self._pending or ():
            pending.wait()
        self._pending, self.ready = None, True
        for entry in self.entries:
            entry.show(entry.leaf)

    def free(self) -> None:
        """Let the whole parameters go."""
        if self._pending is not None:
            self.use()  # a transfer into the memory must not outlive it
        if self.ready:
            for group in self.groups:
                group.free()
            for entry in self.entries:
                entry.show(entry.shown)
            self.ready = False


class Units:
    """All units of a program, and where in the step it is."""

    def __init__(
        self, groups: Sequence[FlatGroup], flush: Callable[[Iterable[Entry]], None]
    ) -> None:
        by_path: dict[str, list[FlatGroup]] = {}
        for group in groups:
            by_path.setdefault(group.entries[0].spec.unit, []).append(group)
        self.root = Unit("", by_path.pop("", []))
        self.units = [Unit(path, found) for path, found in by_path.items()]
        self._flush = flush
        self._orders: dict[Hashable, list[Unit]] = {}
        self._order = self.units
        self._calls: list[Unit] = []
        self._in_backward = False
        self._key: Hashable = None

    def attach(self, module: nn.Module) -> None:
        """Hook a generated module's units.

        A program may write a block's code in its own forward, as where a block is called twice.
        Such a unit is gathered when the program begins, and stays until its end as the root does.
        """
        for unit in self.units:
            target = _submodule(module, unit.path)
            if target is None:
                module.register_forward_pre_hook(_eager(_use(unit)))
                continue
            target.register_forward_pre_hook(self._before(unit))
            target.register_forward_hook(self._after(unit))

    def begin(self, key: Hashable) -> None:
        """Start a step: gather the root, and the first unit ahead."""
        self._key, self._order = key, self._orders.get(key, self.units)
        self._calls, self._in_backward = [], False
        for unit in self.units:
            unit.first_call = None
        self.root.start()
        if self._order:
            self._order[0].start()
        self.root.use()

    def finish(self, *, abort: bool = False) -> None:
        """End a step: nothing stays gathered."""
        if not abort:
            self._orders.setdefault(self._key, list(self._calls) or self.units)
        called = sorted(self.units, key=lambda u: -1 if u.first_call is None else u.first_call)
        for unit in reversed(called):
            if self._in_backward and not abort:
                self._flush(unit.entries)
            unit.free()
        self.root.free()
        self._in_backward = False

    def _before(self, unit: Unit) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if self._in_backward:  # a recomputed forward
                unit.use()
                return
            call = len(self._calls)
            self._calls.append(unit)
            if unit.first_call is None:
                unit.first_call = call
            unit.use()
            if call + 1 < len(self._order):
                self._order[call + 1].start()

        return _eager(before)

    def _after(self, unit: Unit) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._in_backward:
                return
            call = len(self._calls) - 1
            if torch.is_grad_enabled():
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        self._announce(tensor, unit, call)
            unit.free()

        return _eager(after)

    def _announce(self, output: Tensor, unit: Unit, call: int) -> None:
        def before_backward(_: Tensor) -> None:
            self._before_backward(unit, call)

        output.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def _before_backward(self, unit: Unit, call: int) -> None:
        self._in_backward = True
        self._retire(call)
        unit.use()
        if call > 0:
            self._calls[call - 1].start()

    def _retire(self, call: int) -> None:
        """Let go of what was first called after `call`: its backward is done."""
        for unit in reversed(self.units):
            if unit.ready and unit.first_call is not None and unit.first_call > call:
                self._flush(unit.entries)
                unit.free()


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, if it has a forward that can be called."""
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return None
    return None if type(found).forward is nn.Module.forward else found


def _use(unit: Unit) -> Callable[..., None]:
    def before(module: nn.Module, args: Any) -> None:
        unit.use()

    return before


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Hooks talk to other ranks; a compiled program calls them as they are."""
    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled
