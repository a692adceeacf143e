"""What a step does besides computing: `self.log`, metrics, lists that grow.

A step is captured once and then runs as a compiled program, so calls that leave it are recorded
while it is captured, with the tensors they were given as further outputs of the program, and done
again after every run with that run's values.

Enters: calls, while a step is captured. Leaves: a `Recording`, and `replay` of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError

__all__ = ["Deferred", "Effect", "Recording", "Tape", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One of the tensors that the program returns."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRef:
    """A submodule, such as a metric."""

    path: str


class Deferred:
    """What a recorded call will return: it can be given to `self.log` and to other such calls."""

    def __init__(self, slot: int, what: str) -> None:
        self.slot, self.what = slot, what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"the step uses the value of {self.what}, which is known after the step alone",
            hint="give it to self.log or self.log_dict, or compute it from tensors in the step",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A call of a method of the module at `path`, or the growth of a list that is there."""

    path: tuple[Any, ...]
    method: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The effects of one captured step in order, and what it returned."""

    effects: tuple[Effect, ...]
    returned: Any
    num_tensors: int

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the step returned, with the tensors of one run."""
        return pytree.tree_map(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, TensorRef) else leaf, self.returned
        )


class Tape:
    """Records one step at a time; copies of a module share their tape."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.tensors: list[torch.Tensor] = []
        self._effects: list[Effect] = []
        self._paths: dict[int, str] = {}
        self._slots = 0

    def __deepcopy__(self, memo: Any) -> Tape:
        return self

    def begin(self, module: nn.Module) -> None:
        """Forget what was recorded: a step of this module begins."""
        self.recording = None
        self.tensors, self._effects, self._slots = [], [], 0
        self._paths = {id(found): path for path, found in module.named_modules()}

    def add(
        self, path: tuple[Any, ...], method: str, args: Any, kwargs: Any, what: str = ""
    ) -> Deferred | None:
        """Record a call; `what` names its value, if it has one."""
        slot = None
        if what:
            slot, self._slots = self._slots, self._slots + 1
        self._effects.append(
            Effect(
                path=path,
                method=method,
                args=tuple(self._frozen(list(args))),
                kwargs=tuple(self._frozen(dict(kwargs)).items()),
                slot=slot,
            )
        )
        return None if slot is None else Deferred(slot, what)

    def end(self, returned: Any) -> None:
        """The step is over and has returned this."""
        frozen = self._frozen(returned)
        self.recording = Recording(
            effects=tuple(self._effects), returned=frozen, num_tensors=len(self.tensors)
        )

    def _frozen(self, tree: Any) -> Any:
        return pytree.tree_map(self._reference, tree)

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            for index, known in enumerate(self.tensors):
                if known is leaf:
                    return TensorRef(index=index)
            self.tensors.append(leaf)
            return TensorRef(index=len(self.tensors) - 1)
        if isinstance(leaf, nn.Module):
            path = self._paths.get(id(leaf))
            if path is None:
                kind = type(leaf).__name__
                raise CaptureError(
                    f"the step uses a {kind} that is no attribute of the module",
                    hint=f"self.{kind.lower()} = {kind}(…) in __init__",
                )
            return ModuleRef(path=path)
        return leaf


def replay(recording: Recording, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Do on `module` what the captured step did, with the tensors of one run."""
    slots: dict[int, Any] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return tensors[leaf.index]
        if isinstance(leaf, Deferred):
            return slots[leaf.slot]
        if isinstance(leaf, ModuleRef):
            return module.get_submodule(leaf.path)
        return leaf

    for effect in recording.effects:
        args = [pytree.tree_map(value, arg) for arg in effect.args]
        kwargs = {name: pytree.tree_map(value, arg) for name, arg in effect.kwargs}
        if effect.method == "extend":
            _item(module, effect.path).extend(*args)
            continue
        target = module.get_submodule(effect.path[0])
        found = getattr(target, effect.method)(*args, **kwargs)
        if effect.slot is not None:
            slots[effect.slot] = found


def _item(module: nn.Module, path: tuple[Any, ...]) -> Any:
    found = getattr(module, path[0])
    for key in path[1:]:
        found = found[key]
    return found
