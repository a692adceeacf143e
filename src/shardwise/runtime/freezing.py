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
        self._note()

    def _note(self) -> None:
        """Prepare the comparisons of every step."""
        self._frozen = tuple(name for name in self._names if not self._trained[name])
        self._flags = list(self._trained.values())
        self._original_flags = [self._trained[name] for name in self._originals]

    def frozen(self) -> tuple[str, ...]:
        """The names of parameters that are not trained, as the user has set it by now."""
        if [shown.requires_grad for shown in self._shown.values()] != self._flags:
            self._follow(self._shown)
        try:
            originals = [ref().requires_grad for ref in self._originals.values()]  # type: ignore[union-attr]
        except AttributeError:  # some are gone, and nobody can change them
            self._originals = {n: ref for n, ref in self._originals.items() if ref() is not None}
            self._note()
            return self.frozen()
        if originals != self._original_flags:
            self._follow({name: ref() for name, ref in self._originals.items()})
        return self._frozen

    def _follow(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        """Take over the flags of these parameters where they have changed."""
        for name, parameter in parameters.items():
            if parameter is not None and parameter.requires_grad != self._trained[name]:
                self.set(name, parameter.requires_grad)

    def set(self, name: str, trained: bool) -> None:
        """Train a parameter from now on, or leave it as it is; all ranks call it alike."""
        self._trained[name] = trained
        self._note()
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
        self._note()
