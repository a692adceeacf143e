"""Which parameters are trained: `requires_grad`, which may change between any two steps.

A parameter shows its flag in two places: in `pm.parameters()` and in the user's own model. Both are
one switch: `TrainedFlags` notices a change of either, and gives it to the other and to what the
programs use. Programs are captured for given flags, so its `frozen()` is a part of their key.

A rank shows the parameters of other pipeline stages as stand-ins on meta, so that code which
freezes by name does the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from shardwise.runtime.store import ParameterStore

__all__ = ["TrainedFlags"]


class TrainedFlags:
    """The flags of all parameters of a model, the same on every rank."""

    def __init__(
        self,
        store: ParameterStore,
        originals: Mapping[str, weakref.ref[nn.Parameter]] | None = None,
    ) -> None:
        self._store = store
        self._shown = {entry.spec.name: entry.shown for entry in store.entries} | store.stand_ins
        self._trained = {name: shown.requires_grad for name, shown in self._shown.items()}
        self._names = sorted(self._trained)
        self._originals = {n: p for n, p in (originals or {}).items() if n in self._trained}
        self._frozen = tuple(name for name in self._names if not self._trained[name])

    def frozen(self) -> tuple[str, ...]:
        """The names of parameters that are not trained, as the user has set it by now."""
        changed = {
            name: not trained
            for name, trained in self._trained.items()
            if self._shown[name].requires_grad != trained
        }
        for name, reference in self._originals.items():
            original = reference()
            if original is not None and original.requires_grad != self._trained[name]:
                changed[name] = not self._trained[name]
        for name, trained in changed.items():
            self.set(name, trained)
        return self._frozen

    def set(self, name: str, trained: bool) -> None:
        """Train a parameter from now on, or leave it as it is; all ranks call it alike."""
        self._trained[name] = trained
        self._frozen = tuple(name for name in self._names if not self._trained[name])
        self._shown[name].requires_grad_(trained)
        if self._store.holds(name):
            self._store.entry(name).set_trained(trained)
        reference = self._originals.get(name)
        original = reference() if reference is not None else None
        if original is not None:
            original.requires_grad_(trained)

    def ignore_originals(self) -> None:
        """Let the flags of the user's own model mean nothing from now on."""
        self._originals.clear()
