"""Callbacks: user code that runs at certain moments of a training run.

A callback is any object with some of these methods; all ranks call them, in the config's order.
`trainer.stop()` ends the run after the current step. A callback with `state_dict` and
`load_state_dict` (JSON values) is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.manifest import decode, encode
from shardwise.training.config import EarlyStopConfig

if TYPE_CHECKING:
    from shardwise.training.trainer import FitResult, Trainer


class Callback:
    """The base class of callbacks, whose methods do nothing."""

    def on_start(self, trainer: Trainer) -> None:
        """Run before the first step, after a resumed state is loaded."""

    def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Run after every step; metrics are `loss`, `learning_rate` and others."""

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Run after every evaluation; metrics are `evaluation_loss` and the user's."""

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """Run after the last batch of an epoch."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Run when a checkpoint starts to be written."""

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """Run after the last step."""


class Callbacks:
    """All callbacks of a run."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = {f"{i}.{type(c).__name__}": c for i, c in enumerate(callbacks)}

    def call(self, method: str, *args: Any) -> None:
        """Call a method of all callbacks that have it."""
        for callback in self._callbacks.values():
            if hasattr(callback, method):
                getattr(callback, method)(*args)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by index and class."""
        return {
            name: encode(callback.state_dict(), name, partial=True)
            for name, callback in self._callbacks.items()
            if hasattr(callback, "state_dict")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks that were there when the state was saved."""
        for name, callback in self._callbacks.items():
            if hasattr(callback, "load_state_dict") and name in state:
                callback.load_state_dict(decode(state[name], name))


class EarlyStop(Callback):
    """Stop the run when a metric has not improved for some evaluations."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.waited = 0

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.config.metric)
        if value is None:
            return
        signed = -value if self.config.mode == "max" else value
        if self.best is None or signed < self.best - self.config.min_delta:
            self.best, self.waited = signed, 0
            return
        self.waited += 1
        if self.waited >= self.config.patience:
            trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
