"""Whole batches, the same on every rank, from a place in the data that can be saved.

A batch of the user's DataLoader is the batch of all ranks together. Every rank reads it, with the
random state of rank 0 when an epoch begins, so that all shuffle alike. Where an epoch stands and
the random state it began with are part of checkpoints: resuming goes on with the next batch.

Enters: a DataLoader, or any iterable. Leaves: `WholeBatches` around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from shardwise.errors import BatchError
from shardwise.training.integrations.lightning.library import seed_worker

__all__ = ["WholeBatches"]


class WholeBatches:
    """The user's loader, iterated alike on every rank.

    `taken` says how many batches of the epoch were trained on, and whether that were all.
    """

    def __init__(
        self, loader: Any, device: torch.device, taken: Callable[[], tuple[int, bool]]
    ) -> None:
        self._loader, self._device, self._taken = loader, device, taken
        self._begin: torch.Tensor | None = None
        self._resume: Mapping[str, Any] | None = None
        self._position = 0
        _require_whole(loader)
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeded and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(seed_worker, rank=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def _iterator(self) -> Any:  # Lightning ends its workers at the end of a training
        return getattr(self._loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        skipped = 0
        if resume is not None:
            skipped = int(resume["position"])
            torch.set_rng_state(resume["begin"] if skipped else resume["now"])
        _same_random_state(self._device)
        self._begin = torch.get_rng_state()
        self._position = 0
        return self._batches(iter(self._loader), skipped, resume)

    def _batches(
        self, batches: Iterator[Any], skipped: int, resume: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        for _ in islice(batches, skipped):
            self._position += 1
        if skipped and resume is not None:
            torch.set_rng_state(resume["now"])
        for batch in batches:
            self._position += 1
            yield batch

    def place(self) -> dict[str, Any]:
        """Where the epoch stands; an epoch that is over is the beginning of the next."""
        now = torch.get_rng_state()
        taken, over = self._taken()
        if over or self._begin is None or _knows_its_place(self._loader):
            return {"position": 0, "begin": now, "now": now}
        return {"position": min(self._position, taken), "begin": self._begin, "now": now}

    def go_on_from(self, place: Mapping[str, Any]) -> None:
        """Begin there when next iterated."""
        self._resume = place


def _knows_its_place(loader: Any) -> bool:
    """Whether Lightning saves the loader's own place, as of torchdata's StatefulDataLoader."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _require_whole(loader: Any) -> None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise BatchError(
            f"a DistributedSampler gives rank {sampler.rank} one of {sampler.num_replicas} parts "
            "of the data, and a batch here is the whole batch of all ranks",
            hint="DataLoader(dataset, batch_size=<of all ranks together>, shuffle=True)",
        )


def _same_random_state(device: torch.device) -> None:
    """Rank 0's state of torch's generator on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = torch.get_rng_state()
    near = state.to(device) if dist.get_backend() == "nccl" else state
    dist.broadcast(near, 0)
    torch.set_rng_state(near.cpu())
