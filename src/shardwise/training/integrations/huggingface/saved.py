"""What a trainer needs beside the weights to go on exactly: as JSON, next to the optimizer's state.

Enters: the random number generators of this process and a learning-rate schedule. Leaves: JSON
values, and back. All ranks read the same batches, so rank 0's generators are everyone's.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import ShardwiseError

FOLDER = "shardwise"  # inside of each checkpoint-N


def random_state() -> dict[str, Any]:
    """The generators that data loaders and collators draw from."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue from what `random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    data = bytearray(bytes.fromhex(state["torch"]))
    torch.set_rng_state(torch.frombuffer(data, dtype=torch.uint8))


@contextlib.contextmanager
def preserved_random() -> Iterator[None]:
    """What happens inside draws no numbers that others would have drawn."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def schedule_state(schedule: Any) -> Any:
    """The state of a learning-rate schedule, as JSON carries it."""
    state = schedule.state_dict()
    try:
        return json.loads(json.dumps(state, default=_number))
    except (TypeError, ValueError) as error:
        raise ShardwiseError(
            f"the state of {type(schedule).__name__} cannot be saved: {error}",
            hint="a schedule whose state_dict() has numbers, texts, lists and dicts",
        ) from None


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"it has a {type(value).__name__}")


def newest_complete(folder: str | Path) -> Path | None:
    """The newest `checkpoint-N` that was written to its end."""
    found = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in Path(folder).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
        and (path / "trainer_state.json").is_file()
        and (path / FOLDER / "checkpoint.json").is_file()
    }
    return found[max(found)] if found else None
