"""How samples become batches: the fields of `data`, or those of a `torch.utils.data.DataLoader`.

Enters: a dataset or a data loader, and the config. Leaves: `Loading`, by which `loading.py` reads.

Of a data loader the dataset, batch size, `collate_fn`, `drop_last`, sampler and the settings of its
workers are used. It is not iterated: ranks read the same batches in the same order, each possibly
only its rows, and a position in the data must mean the same in every process and after a resume. So
a loader that shuffles is read in Shardwise's own seeded order, and a sampler of the user's draws
the order of each epoch under seeds that follow from `seed` and the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from shardwise.errors import ConfigError, TrainingError
from shardwise.training.config import DataConfig
from shardwise.training.random_state import seeded

__all__ = ["Loading", "loading_of"]

BATCH_SIZE, PREFETCH = 8, 2
_OWN_FIELDS = ("batch_size", "collate", "shuffle", "drop_last", "workers", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A dataset and how it is read; `stacks` says that each sample is a row of every tensor."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any]
    stacks: bool
    shuffle: bool
    drop_last: bool
    workers: int
    prefetch: int
    sampler: Any = None  # the user's own: gives the samples of an epoch
    batch_sampler: Any = None  # the user's own: gives the batches of an epoch
    worker_options: dict[str, Any] = field(default_factory=dict)

    def drawn(self, seed: int, epoch: int) -> list[Any]:
        """Return what the user's own sampler gives for an epoch; the same on every rank."""
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with seeded(seed, epoch, -1):
            for each in (sampler, getattr(sampler, "sampler", None)):
                generator = getattr(each, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            found = list(sampler)
        if hasattr(sampler, "__len__") and len(sampler) != len(found):
            raise TrainingError(
                f"{type(sampler).__name__} says that it has {len(sampler)} entries, and gave "
                f"{len(found)} in epoch {epoch}",
                where="data",
                hint="a __len__ that is right for every epoch, or none",
            )
        return found


def loading_of(
    source: Any, config: DataConfig, collate: Any, *, training: bool, like: Loading | None = None
) -> Loading:
    """Return how a dataset or a data loader is read.

    What the config leaves open for evaluation data is as for the training data, `like`.
    """
    key = "data.train" if training else "data.evaluation"
    if isinstance(source, DataLoader):
        return _of_loader(source, config, key, training=training)
    if not hasattr(source, "__getitem__") and not hasattr(source, "__iter__"):
        raise ConfigError(
            f"a {type(source).__name__} has no samples",
            where=key,
            hint="__len__ and __getitem__, __iter__, or a torch.utils.data.DataLoader",
        )
    size = config.batch_size or (like.batch_size if like is not None else BATCH_SIZE)
    made = Loading(
        dataset=source,
        batch_size=size if training else config.evaluation_batch_size or size,
        collate=collate or default_collate,
        stacks=collate is None or config.rowwise,
        shuffle=config.shuffle is not False and training,
        drop_last=config.drop_last is not False and training,
        workers=config.workers or 0,
        prefetch=config.prefetch or PREFETCH,
    )
    if like is not None and collate is None and like.collate is not default_collate:
        made = replace(made, collate=like.collate, stacks=like.stacks)
    return made


def _of_loader(loader: DataLoader[Any], config: DataConfig, key: str, *, training: bool) -> Loading:
    _check_fields(loader, config, key, training=training)
    own = loader.batch_size is None  # DataLoader(dataset, batch_sampler=…)
    plain = loader.sampler is None or type(loader.sampler) is SequentialSampler
    shuffles = _shuffles(loader)
    iterable = isinstance(loader.dataset, IterableDataset)
    default = loader.collate_fn is default_collate
    options = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
    }
    return Loading(
        dataset=loader.dataset,
        batch_size=loader.batch_size or 1,
        collate=loader.collate_fn,
        stacks=(default or config.rowwise) and not own,
        shuffle=shuffles and training and not own,
        drop_last=bool(loader.drop_last),
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or PREFETCH,
        sampler=None if own or plain or shuffles or iterable else loader.sampler,
        batch_sampler=loader.batch_sampler if own else None,
        worker_options={n: v for n, v in options.items() if v} if loader.num_workers else {},
    )


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether the loader gives every sample once, in a random order."""
    sampler = loader.sampler
    if type(sampler) is not RandomSampler:
        return False
    size = len(loader.dataset)  # type: ignore[arg-type]
    return not sampler.replacement and sampler.num_samples == size


def _check_fields(loader: DataLoader[Any], config: DataConfig, key: str, *, training: bool) -> None:
    """Refuse what a loader says in two places, or what would be read differently than it says."""
    given = [name for name in _OWN_FIELDS if getattr(config, name) is not None]
    if not training:  # those fields are for training data that is no loader
        given = ["evaluation_batch_size"] if config.evaluation_batch_size is not None else []
    own = (loader.batch_sampler, loader.sampler)
    if given:
        _refuse(
            f"data.{given[0]} and a DataLoader both say how samples become batches",
            key,
            f"leave data.{given[0]} out, or give the loader's dataset",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        _refuse(
            f"a {type(loader).__name__} iterates in its own way, which ranks cannot share",
            key,
            "a torch.utils.data.DataLoader, or the loader's dataset",
        )
    if any(isinstance(each, DistributedSampler) for each in own) or any(
        isinstance(getattr(each, "sampler", None), DistributedSampler) for each in own
    ):
        _refuse(
            "a DistributedSampler divides the samples among ranks, which the plan does already",
            key,
            "DataLoader(dataset, batch_size=…, shuffle=True), with the batch size of all ranks",
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        _refuse(
            "a DataLoader with batch_size=None gives whole batches of an unknown number of rows",
            key,
            "a dataset of single samples and DataLoader(dataset, batch_size=…)",
        )
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers:
        _refuse(
            f"an iterable dataset in {loader.num_workers} worker processes has no order that a "
            "resumed run could continue",
            key,
            "num_workers=0: a thread reads ahead",
        )


def _refuse(message: str, key: str, hint: str) -> None:
    raise ConfigError(message, where=key, hint=hint)
