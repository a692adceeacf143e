"""Python state that one capture reads and writes.

A captured graph holds the values that Python variables had. While the model runs for its graph,
`Watch` notes which attributes of modules it reads, and compares attributes, global variables and
closures before and after. `Reads` then says what later steps have to compare; a change that the
next step would see is refused with the line that makes it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.frontend.provenance import Frame, is_user_code, running_frame
from shardwise.frontend.reach import Reach, reachable
from shardwise.frontend.snapshot import ATOMS, INTERNAL, MISSING, snapshot

_MODULE_FILE = nn.modules.module.__file__
Place = tuple[str, str]  # path of a module, name of an attribute
_HINT = (
    "state that forward changes belongs in a buffer: self.register_buffer({name!r}, tensor), "
    "changed in place; or pass the value in the batch"
)


@dataclass(frozen=True, slots=True)
class Write:
    """An attribute that forward assigns and does not read.

    `is_known` says that `value` is what every captured step assigns. Tensors and other objects that
    only exist inside a step are not known.
    """

    value: Any
    is_known: bool
    frame: Frame | None

    def merge(self, other: Write) -> Write:
        """Return what is known after another capture has assigned the same attribute."""
        same = snapshot(self.value, frozenset()) == snapshot(other.value, frozenset())
        return Write(other.value, self.is_known and other.is_known and same, other.frame)


@dataclass(slots=True)
class Reads:
    """The Python state that captures of one model read, and the attributes that they only write."""

    attributes: dict[Place, None] = field(default_factory=dict)
    methods: dict[Place, None] = field(default_factory=dict)
    writes: dict[Place, Write] = field(default_factory=dict)
    reach: Reach = field(default_factory=Reach)

    def add(self, watch: Watch) -> None:
        """Add what one capture read and wrote."""
        self.attributes.update(dict.fromkeys(watch.first))
        for place, write in watch.writes.items():
            known = self.writes.get(place)
            self.writes[place] = write if known is None else known.merge(write)
        self.methods.update(watch.methods)
        self.reach.variables.update(watch.reach.variables)
        self.reach.names |= watch.reach.names


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute that forward reads and leaves with another value."""

    place: Place
    before: Any
    after: Any
    frame: Frame | None

    @property
    def name(self) -> str:
        return ".".join(filter(None, self.place))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that it holds now, unless it held one before."""
        if isinstance(self.before, torch.Tensor):
            return []
        return [t for t in pytree.tree_leaves(self.after) if isinstance(t, FakeTensor)]

    def refusal(self, what: str) -> CaptureError:
        """Return the error that names the attribute, its line and the cure."""
        return CaptureError(
            f"forward changes the attribute {self.name}, which it also reads: {what}",
            where=str(self.frame) if self.frame else None,
            hint=_HINT.format(name=self.place[1]),
        )


def _is_ours(frame: types.FrameType) -> bool:
    """Whether code that looks at all attributes is that of `nn.Module` or of an integration."""
    name = frame.f_globals.get("__name__", "")
    return frame.f_code.co_filename == _MODULE_FILE or str(name).startswith("shardwise.")


class Watch:
    """Notes reads and writes of a model's Python state while it runs."""

    def __init__(self, model: nn.Module, functions: Iterable[Any]) -> None:
        self.modules = dict(model.named_modules())
        self._carries_growth = getattr(type(model), "carries_growth", False)
        # An integration calls metrics after the step: their state is no part of what is captured.
        is_carried = getattr(type(model), "carries_state_of", lambda module: False)
        self._paths = {
            id(vars(module)): path
            for path, module in self.modules.items()
            if not is_carried(module)
        }
        self.reach = reachable(model, functions)
        self.first: dict[Place, Any] = {}  # snapshots of attributes when they were first read
        self._values: dict[Place, Any] = {}  # the same, as values if they are plain
        self._frames: dict[Place, Frame | None] = {}  # of the last use that may have been a write
        self._assigned: dict[Place, Any] = {}  # written before they were read: the value before
        self.methods: dict[Place, None] = {}  # that were called or otherwise read
        self.changes: list[Change] = []
        self.writes: dict[Place, Write] = {}
        self._plain_class: dict[tuple[type, str], bool] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Patch the attribute access of modules; compare variables before and after."""
        before = self._variables()
        get, put = object.__getattribute__, nn.Module.__setattr__

        def getattribute(module: nn.Module, name: str) -> Any:
            value = get(module, name)
            if name == "__dict__" and not _is_ours(sys._getframe(1)):
                self._note_all(value)
            elif name == "forward" or (name not in INTERNAL and not name.startswith("__")):
                owner = get(module, "__dict__")
                path = self._paths.get(id(owner))
                if path is None:
                    return value
                if name != "forward" and (name in owner or self._is_plain(type(module), name)):
                    self._note_read((path, name), value)
                elif name == "forward" or isinstance(value, types.MethodType):
                    self.methods[path, name] = None
            return value

        def setattr_(module: nn.Module, name: str, value: Any) -> None:
            owner = get(module, "__dict__")
            path = self._paths.get(id(owner))
            if path is not None and name not in INTERNAL:
                self._note_write((path, name), owner.get(name, MISSING))
            put(module, name, value)

        nn.Module.__getattribute__ = getattribute  # type: ignore[assignment, method-assign]
        nn.Module.__setattr__ = setattr_  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = put  # type: ignore[method-assign]
            changed = self._restore(before)
        if changed:
            raise changed[0]

    def _is_plain(self, cls: type, name: str) -> bool:
        """Whether a class attribute is a value, not a method or property."""
        key = (cls, name)
        if key not in self._plain_class:
            raw = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
            self._plain_class[key] = not hasattr(type(raw), "__get__")
        return self._plain_class[key]

    def _is_torchs(self, place: Place) -> bool:
        """Whether a module is torch's own, which keeps its state in order by itself."""
        return type(self.modules[place[0]]).__module__.startswith("torch.nn.")

    def _note_read(self, place: Place, value: Any) -> None:
        if place in self._assigned:
            return
        plain = (*ATOMS, tuple, types.FunctionType, types.BuiltinFunctionType)
        if self._is_torchs(place) and not isinstance(value, plain):
            return
        if type(value).__module__.startswith("shardwise."):  # an integration's own
            return
        if place not in self.first:
            self.first[place] = snapshot(value, self.reach.names)
            self._values[place] = value
        if not isinstance(value, (*ATOMS, torch.Tensor, nn.Module, types.FunctionType)):
            self._frames[place] = running_frame()  # it may be changed in place

    def _note_all(self, owner: dict[str, Any]) -> None:
        """Note that code has taken the whole `__dict__` of a module."""
        path = self._paths.get(id(owner))
        if path is not None and is_user_code(sys._getframe(2).f_code.co_filename):
            for name in owner.keys() - INTERNAL - {"training"}:
                self._note_read((path, name), owner[name])

    def _note_write(self, place: Place, before: Any) -> None:
        if self._is_torchs(place):
            return
        if place not in self.first and place not in self._assigned:
            self._assigned[place] = before
        self._frames[place] = running_frame()

    def _now(self, place: Place) -> Any:
        module = self.modules[place[0]]
        owner = vars(module)
        return owner[place[1]] if place[1] in owner else getattr(type(module), place[1], MISSING)

    def compare(self) -> None:
        """Find attributes that were read first and have another value now.

        Export sets attributes back afterwards, so this is done before forward returns to it. A
        model that does the growth of its containers again after every step says so by
        `carries_growth`; what its containers hold is then no part of the captured state.
        """
        carried = (
            []
            if not self._carries_growth
            else [place for place in self.first if isinstance(self._now(place), list | dict)]
        )
        for place, before in self.first.items():
            if place not in self._frames:
                continue
            now = self._now(place)
            if snapshot(now, self.reach.names) != before and place not in carried:
                self.changes.append(Change(place, self._values[place], now, self._frames[place]))
        for place in carried:
            del self.first[place]

        for place, old in self._assigned.items():
            now = self._now(place)
            if now is not old and now is not MISSING:
                known = all(isinstance(leaf, ATOMS) for leaf in pytree.tree_leaves(now))
                self.writes[place] = Write(now if known else None, known, self._frames[place])

    def warnings(self) -> list[str]:
        """Return a line for each attribute that forward only writes and steps leave unset."""
        return [
            f"forward assigns the attribute {'.'.join(filter(None, place))} ({write.frame}), which "
            "parallel steps do not: return the value from forward to see it"
            for place, write in self.writes.items()
            if not write.is_known
        ]

    # --- global variables and closures ---------------------------------------------------

    def _variables(self) -> dict[tuple[int, str], tuple[Any, Any, Any]]:
        """Value, shallow copy and snapshot of every variable that code may read."""
        found = {}
        for key, variable in self.reach.variables.items():
            value = variable.read()
            kept = value.copy() if isinstance(value, list | dict | set) else None
            found[key] = (value, kept, snapshot(value, self.reach.names))
        return found

    def _restore(self, before: dict[tuple[int, str], tuple[Any, Any, Any]]) -> list[CaptureError]:
        """Undo the changes of variables; the errors that refuse them."""
        errors = []
        for key, (value, kept, taken) in before.items():
            variable = self.reach.variables[key]
            now = variable.read()
            if now is value and snapshot(now, self.reach.names) == taken:
                continue
            if now is not value:
                variable.write(value)
            elif isinstance(value, list) and kept is not None:
                value[:] = kept
            elif isinstance(value, dict | set) and kept is not None:
                value.clear()
                value.update(kept)
            name = f".{variable.name}" if isinstance(variable.home, type) else variable.name
            errors.append(
                CaptureError(
                    f"forward changes the {variable.kind} {variable.name}; a captured step would "
                    "not repeat the change",
                    where=self.reach.writes.get(name, variable.place) or None,
                    hint="return the value from forward (train_step(batch, outputs=True)), or "
                    "keep it in a buffer of the model",
                )
            )
        return errors
