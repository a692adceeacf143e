"""What a trainer needs beside the weights to go on exactly: as JSON, next to the optimizer's state.

Enters: a learning-rate schedule, a folder of checkpoints. Leaves: JSON values, and the newest
checkpoint that is complete.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import BatchError, ShardwiseError
from shardwise.training.random_state import load_random_state, random_state

FOLDER = "shardwise"  # inside of each checkpoint-N


@contextlib.contextmanager
def preserved_random() -> Iterator[None]:
    """What happens inside draws no numbers that others would have drawn."""
    state = random_state()
    try:
        yield
    finally:
        load_random_state(state)


@contextlib.contextmanager
def unchanged_config(model: nn.Module) -> Iterator[None]:
    """Leave the config as it was: `save_pretrained` sets its dtype, on the rank that writes alone.

    Captured steps may depend on it, and ranks would no longer agree on their programs.
    """
    config = getattr(model, "config", None)
    attributes = getattr(config, "__dict__", {})
    before = dict(attributes)
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


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


def is_ours(folder: str | Path) -> bool:
    """Whether a trainer's checkpoint has the state that Shardwise saves."""
    return Path(folder, FOLDER, "checkpoint.json").is_file()


def require_batch_size(saved: Any, here: int, folder: str) -> None:
    """Refuse to go on with other batches: steps would no longer say which samples were seen."""
    if isinstance(saved, int) and saved != here:
        raise BatchError(
            f"{folder} was trained with batches of {saved} rows, these have {here}",
            hint="per_device_train_batch_size times the replicas as before; or replicas=…",
        )


def newest_complete(folder: str | Path) -> Path | None:
    """The newest `checkpoint-N` that was written to its end."""
    found = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in Path(folder).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
        and (path / "trainer_state.json").is_file()
        and is_ours(path)
    }
    return found[max(found)] if found else None
