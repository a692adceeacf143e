"""An exponential moving average of the parameters, on this rank's pieces of them.

Buffers are not averaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.runtime import ParallelModule
from shardwise.training.config import EmaConfig

__all__ = ["Ema", "load_random_state", "random_state", "seed_everything", "seeded", "undisturbed"]


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


# Random numbers outside of the model: of Python, NumPy and torch.
#
# A sample that draws some (augmentation) is seeded by its own place in the data, so that it is the
# same for any number of workers and ranks, and after a resumed run. What callbacks draw continues
# from the saved state. The model's own random numbers come from `runtime.rng`, by step and node.


_LOCK = threading.RLock()  # a loading thread seeds while others would look


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators, as all ranks have them at the start."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Inside, random numbers follow from the key; outside, nothing has happened."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") & (2**63 - 1)
    with _LOCK:
        before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.default_generator.set_state(before[2])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, no loading thread draws numbers: a capture would take them for the model's."""
    with _LOCK:
        yield


def random_state() -> dict[str, Any]:
    """The generators' state, as JSON."""
    with _LOCK:
        version, numbers, gauss = random.getstate()
        kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
        state = torch.default_generator.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), place, has_gauss, cached],
        "torch": bytes(state.tolist()).hex(),
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Continue from `random_state`."""
    version, numbers, gauss = state["python"]
    kind, keys, place, has_gauss, cached = state["numpy"]
    with _LOCK:
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
        torch.default_generator.set_state(
            torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8)
        )
