"""Gather parameters for use and free them afterwards (zero 3).

A `Unit` is a module of the generated program with the flat groups of its parameters. Its hooks
gather them before its forward, while those of the next unit are already in flight; free them after
it; and gather them again before its backward, which a hook on the gradient of its outputs
announces. Autograd runs backward in the reverse order of the forward's calls, so that when a unit's
backward begins, all units called after it are done: their memory is freed, and, in the last
backward of a step, their remaining sums start. The root unit stays gathered during the entire step.

A step runs the forward and backward of several micro-batches in any order, each in a separate
window (`begin_forward` … `end_forward`); each forward creates a `Pass`, to which its hooks refer.
A step without windows is one forward and one backward.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.runtime.operators import untraced
from shardwise.runtime.parameters import Entry, FlatGroup
from shardwise.runtime.transport import Pending


class Unit:
    """The sharded parameters of one module."""

    def __init__(self, path: str, groups: Sequence[FlatGroup]) -> None:
        self.path, self.groups = path, tuple(groups)
        self.entries: list[Entry] = [entry for group in groups for entry in group.entries]
        self._pending: list[Pending] | None = None
        self.ready = False

    def __repr__(self) -> str:
        return f"Unit({self.path!r}, {len(self.entries)} parameters)"

    def start(self) -> None:
        """Begin to gather, unless that has happened."""
        if not self.ready and self._pending is None:
            self._pending = [group.gather() for group in self.groups]

    def use(self) -> None:
        """Put the full parameters into the modules."""
        if self.ready:
            return
        self.start()
        for pending in self._pending or ():
            pending.wait()
        self._pending, self.ready = None, True
        for entry in self.entries:
            entry.show(entry.leaf)

    def free(self) -> None:
        """Free the full parameters."""
        if self._pending is not None:
            self.use()  # a transfer into the memory must not outlive it
        if self.ready:
            for group in self.groups:
                group.free()
            for entry in self.entries:
                entry.show(entry.shown)
            self.ready = False


class Pass:
    """One forward of one part: the units in the order of their calls."""

    def __init__(self, order: Sequence[Unit]) -> None:
        self.order = order
        self.calls: list[Unit] = []
        self.first: dict[Unit, int] = {}
        self.inside: list[int] = []
        self.announced: set[Unit] = set()

    def enter(self, unit: Unit) -> Unit | None:
        """Record a call; return the unit that is expected next."""
        call = len(self.calls)
        self.calls.append(unit)
        self.first.setdefault(unit, call)
        self.inside.append(call)
        return self.order[call + 1] if call + 1 < len(self.order) else None

    def called_after(self, call: int) -> list[Unit]:
        """Return the units first called after `call`, the latest first."""
        return [unit for unit, first in reversed(self.first.items()) if first > call]


class Units:
    """All units of a program, and the state of the current step."""

    def __init__(
        self, groups: Sequence[FlatGroup], flush: Callable[[Iterable[Entry]], None]
    ) -> None:
        by_path: dict[str, list[FlatGroup]] = {}
        for group in groups:
            by_path.setdefault(group.entries[0].spec.unit, []).append(group)
        self.root = Unit("", by_path.pop("", []))
        self.units = [Unit(path, members) for path, members in by_path.items()]
        self._flush = flush
        self._orders: dict[Hashable, list[Unit]] = {}
        self._inline: dict[Hashable, dict[Unit, None]] = {}
        self._mode, self._last, self._windows = "", True, False
        self._key: Hashable = None
        self._order_key: Hashable = None
        self._pass = Pass(())
        self._current: tuple[Pass, int] = (self._pass, 0)

    def attach(self, module: nn.Module, part: Hashable = 0, spread: Collection[str] = ()) -> None:
        """Register hooks on a generated module's units.

        A program may inline a block's code in its own forward, for example if a block is called
        twice, or use parameters of a unit outside of it (`spread`). Such a unit is gathered when
        the program begins, and stays gathered until its end, as the root does. A module without
        the unit's parameters (one that precomputes values) has nothing to gather.
        """
        parameters = {id(parameter) for parameter in module.parameters()}
        for unit in self.units:
            if not any(id(entry.shown) in parameters for entry in unit.entries):
                continue
            target = None if unit.path in spread else _find_called(module, unit.path)
            if target is None:
                module.register_forward_pre_hook(self._inlined(unit, part))
                continue
            target.register_forward_pre_hook(self._before(unit))
            target.register_forward_hook(self._after(unit))

    def forget(self, key: Hashable) -> None:
        """Forget the orders of calls of a program that no longer exists."""
        for order_key in list(self._orders):
            if isinstance(order_key, tuple) and order_key[0] in (key, ("eval", key)):
                del self._orders[order_key]

    def begin(self, key: Hashable) -> None:
        """Start a step: gather the root."""
        self._key, self._windows = key, False
        self._inline.clear()
        self._last = True
        self._start_pass(0, None)
        self.root.use()

    def begin_forward(self, part: Hashable, key: Hashable) -> None:
        """Start a forward of a part, and gather its first unit."""
        self._windows = True
        self._start_pass(part, key)
        if self._pass.order:
            self._pass.order[0].start()

    def end_forward(self) -> None:
        """Free all units but the root."""
        self._orders.setdefault(self._order_key, self._pass.calls)
        self._free_all()
        self._mode = ""

    def begin_backward(self, part: Hashable, last: bool) -> None:
        """Start a backward of a part."""
        self._windows, self._mode, self._last = True, "backward", last
        self._current = (Pass(()), 0)
        for unit in self._inline.get(part, ()):
            unit.use()

    def end_backward(self) -> None:
        """Finish the units that are still gathered, and free all but the root."""
        for unit in self._current[0].called_after(-1):
            if self._last:
                self._flush(unit.entries)
            unit.free()
        self._free_all()
        self._mode = ""

    def finish(self, *, abort: bool = False) -> None:
        """End a step, and free all units."""
        if not abort and not self._windows:
            self._orders.setdefault(self._order_key, self._pass.calls)
            if self._mode == "backward":
                self.end_backward()
        self._free_all()
        self.root.free()
        self._mode = ""

    def _start_pass(self, part: Hashable, key: Hashable) -> None:
        self._order_key = (self._key, part, key)
        own = [u for u in self.units if any(part in entry.parts for entry in u.entries)]
        order = self._orders.get(self._order_key, own)
        self._pass, self._mode = Pass(order), "forward"

    def _free_all(self) -> None:
        for unit in reversed(self.units):
            unit.free()

    def _inlined(self, unit: Unit, part: Hashable) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            self._inline.setdefault(part, {})[unit] = None
            unit.use()

        return untraced(before)

    def _before(self, unit: Unit) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            unit.use()
            following = (
                self._recomputed(unit) if self._mode == "backward" else self._pass.enter(unit)
            )
            if following is not None:
                following.start()

        return untraced(before)

    def _after(self, unit: Unit) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._mode == "backward":
                current, call = self._current
                if unit in current.announced and current.calls[call] is not unit:
                    unit.free()  # until its own backward
                return
            call = self._pass.inside.pop()
            if torch.is_grad_enabled():
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        self._announce(tensor, unit, self._pass, call)
            unit.free()

        return untraced(after)

    def _recomputed(self, unit: Unit) -> Unit | None:
        """Return the unit after this one in a forward that backward recomputes."""
        current, call = self._current
        following = current.first.get(unit, call) + 1
        return current.calls[following] if following < call else None

    def _announce(self, output: Tensor, unit: Unit, forward: Pass, call: int) -> None:
        def before_backward(_: Tensor) -> None:
            self._mode, self._current = "backward", (forward, call)
            for done in forward.called_after(call):
                if done.ready:
                    if self._last:
                        self._flush(done.entries)
                    done.free()
            unit.use()
            if call > 0:
                forward.calls[call - 1].start()

        forward.announced.add(unit)
        output.register_hook(before_backward)  # type: ignore[no-untyped-call]


def _find_called(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at `path`, if it has a forward that can be called."""
    try:
        submodule = module.get_submodule(path)
    except AttributeError:
        return None
    return None if type(submodule).forward is nn.Module.forward else submodule
