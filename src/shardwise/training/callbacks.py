"""What user code can do while training goes on, and what it is told.

A callback is any object with some of these methods; all ranks call them, in the config's order.
`trainer.stop()` ends the training after the step under way. A callback with `state_dict` and
`load_state_dict` (JSON values) is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.training.config import EarlyStopConfig
from shardwise.training.lr_schedule import from_plain, to_plain

if TYPE_CHECKING:
    from shardwise.training.trainer import FitResult, Trainer

__all__ = ["Callback", "Callbacks", "EarlyStop"]


class Callback:
    """Does nothing at any moment; a subclass does something at some."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step; a resumed state is loaded."""

    def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After every step: `loss`, `learning_rate` and others."""

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After every evaluation: `evaluation_loss`."""

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """After the last batch of an epoch."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint was begun."""

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """After the last step."""


class Callbacks:
    """All callbacks as one."""

    def __init__(self, several: Sequence[Any]) -> None:
        self._several = list(several)

    def tell(self, moment: str, *what: Any) -> None:
        """Call a method of all that have it."""
        for each in self._several:
            method = getattr(each, moment, None)
            if method is not None:
                method(*what)

    def state_dict(self) -> dict[str, Any]:
        """The state of those that have one, by place and class."""
        return {
            _name(place, each): to_plain(each.state_dict())
            for place, each in enumerate(self._several)
            if hasattr(each, "state_dict")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue those that were there when the state was saved."""
        for place, each in enumerate(self._several):
            if hasattr(each, "load_state_dict") and _name(place, each) in state:
                each.load_state_dict(from_plain(state[_name(place, each)]))


def _name(place: int, callback: Any) -> str:
    return f"{place}.{type(callback).__name__}"


class EarlyStop(Callback):
    """Stops when a metric has not become better for some evaluations."""

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
