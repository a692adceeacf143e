"""Random numbers outside of the model: of Python, NumPy and torch.

A sample that draws some (augmentation) is seeded by its own place in the data, so that it is the
same for any number of workers and ranks, and after a resumed run. What callbacks draw continues
from the saved state. The model's own random numbers come from `runtime.rng`, by step and node.
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

__all__ = ["load_random_state", "random_state", "seed_everything", "seeded", "undisturbed"]

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
