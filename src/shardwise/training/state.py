"""The state of a training run besides its model and optimizer: averages and random generators."""

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


class Ema:
    """An exponential moving average of this rank's shards of the parameters, without buffers.

    `average = decay * average + (1 - decay) * parameter` after every step of the optimizer.
    """

    def __init__(self, module: ParallelModule, config: EmaConfig) -> None:
        if not config.decay < 1:
            raise ConfigError(f"decay is {config.decay:g}, must be below 1", where="ema.decay")
        self.module, self.decay = module, config.decay
        self._entries = [entry for entry in module.store.entries if entry.trained]
        self.pieces: dict[str, Tensor] = {
            entry.spec.name: entry.piece.detach().clone() for entry in self._entries
        }

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the current parameters."""
        for entry in self._entries:
            self.pieces[entry.spec.name].copy_(entry.piece)

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step of the optimizer."""
        for entry in self._entries:
            self.pieces[entry.spec.name].lerp_(entry.piece.detach(), 1 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the module's parameters; all ranks enter and exit together."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for entry in self._entries:
            average = self.pieces[entry.spec.name]
            parameter = entry.piece.detach().clone()
            entry.piece.detach().copy_(average)
            average.copy_(parameter)
        self.module.store.gather_updates(self._entries)


# ------------------------------------------------------------ random numbers outside of the model
# Random numbers of a sample (augmentation) are seeded by its position in the data, so that they are
# the same for any number of workers and ranks, and in a resumed run. Those of callbacks continue
# from the saved state. The model's own come from `runtime.rng`, by step and node.

_LOCK = threading.RLock()  # a loading thread must not reseed while another thread draws


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, the same on all ranks."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Derive random numbers from the key; restore the generators afterwards."""
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
    """Keep loading threads from drawing numbers, which a capture would attribute to the model."""
    with _LOCK:
        yield


def random_state() -> dict[str, Any]:
    """Return the state of the generators as JSON."""
    with _LOCK:
        version, numbers, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state = torch.default_generator.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(state.tolist()).hex(),
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state that `random_state` returned."""
    version, numbers, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    with _LOCK:
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.default_generator.set_state(
            torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8)
        )
