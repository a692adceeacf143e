"""An exponential moving average of the parameters, on this rank's pieces of them.

Enters: a parallel module after each step. Leaves: `pieces` for checkpoints, and a context in which
the module computes with the average. Buffers are not averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.runtime import ParallelModule
from shardwise.training.config import EmaConfig

__all__ = ["Ema"]


class Ema:
    """`average = decay * average + (1 - decay) * parameter`, for what this rank's optimizer has."""

    def __init__(self, module: ParallelModule, config: EmaConfig) -> None:
        if not config.decay < 1:
            raise ConfigError(f"{config.decay:g}, must be below 1", where="ema.decay")
        self.module, self.decay = module, config.decay
        self._entries = [entry for entry in module.store.entries if entry.trained]
        self.pieces: dict[str, Tensor] = {
            entry.spec.name: entry.piece.detach().clone() for entry in self._entries
        }

    @torch.no_grad()
    def reset(self) -> None:
        """Begin at the parameters as they are."""
        for entry in self._entries:
            self.pieces[entry.spec.name].copy_(entry.piece)

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the optimizer."""
        for entry in self._entries:
            self.pieces[entry.spec.name].lerp_(entry.piece.detach(), 1 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module's parameters are the average; all ranks enter and leave together."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for entry in self._entries:
            average = self.pieces[entry.spec.name]
            kept = entry.piece.detach().clone()
            entry.piece.detach().copy_(average)
            average.copy_(kept)
        self.module.store.gather_updates(self._entries)
