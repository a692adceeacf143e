"""Which samples a batch has, from a position in the data alone.

A position is an epoch and a number of samples already taken in it. The order of an epoch follows
from the seed, so that a position means the same to any number of ranks, with any batch size:
nothing is lost or repeated when they change. No list of all samples is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from shardwise.training.state import seeded

__all__ = [
    "BatchPositions",
    "Loading",
    "Permutation",
    "Position",
    "batch_positions",
    "loading_of",
    "positions_of_batches",
]


ROUNDS = 6  # of the Feistel network; from four on, its permutations pass for random ones
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """So many samples of an epoch are taken; all of the epochs before it are."""

    epoch: int = 0
    sample: int = 0

    def to_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "sample": self.sample}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Position:
        return Position(epoch=int(data["epoch"]), sample=int(data["sample"]))


class Permutation:
    """A seeded order of `size` numbers, each computed when it is asked for.

    A Feistel network permutes the next power of four; numbers beyond `size` go through it again.

    >>> sorted(Permutation(5, seed=1)[[0, 1, 2, 3, 4]].tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        self.size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        start = np.array([seed & (2**63 - 1), epoch], dtype=np.uint64)
        key = _mixed(_mixed(start[:1]) ^ start[1:])
        self._keys = [key := _mixed(key + np.uint64(1)) for _ in range(ROUNDS)]

    def __getitem__(self, places: Any) -> NDArray[np.int64]:
        """What is at these places."""
        found = np.asarray(places, dtype=np.uint64)
        outside = np.ones(found.shape, dtype=bool)
        while outside.any():
            found = np.where(outside, self._permuted(found), found)
            outside = found >= self.size
        return found.astype(np.int64)

    def _permuted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits, mask = np.uint64(self._half), np.uint64(2**self._half - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finalizer: every bit depends on all others."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * _MIX[0]
        values = (values ^ (values >> np.uint64(27))) * _MIX[1]
        return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPositions:
    """One batch: the samples of its rows, and where the next one begins."""

    samples: tuple[int, ...]
    epoch: int
    after: Position
    ends_epoch: bool


def batch_positions(
    size: int,
    batch_size: int,
    start: Position,
    *,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    draw: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[BatchPositions]:
    """All batches from a position on, epoch after epoch, without an end.

    `draw` gives the samples of an epoch in their order, instead of all `size`, shuffled or not.
    """
    epoch, sample = start.epoch, start.sample
    drawn = None if draw is None else np.asarray(draw(epoch), dtype=np.int64)
    size = size if drawn is None else len(drawn)
    if size < 1 or (drop_last and size < batch_size):
        raise TrainingError(
            f"the data has {size} samples, a batch is {batch_size}",
            hint="a smaller data.batch_size, or data.drop_last: false",
        )
    while True:
        order: Any = drawn
        if drawn is None and shuffle:
            order = Permutation(size, seed, epoch)
        while size - sample >= (batch_size if drop_last else 1):
            places = np.arange(sample, min(sample + batch_size, size))
            sample += len(places)
            ends = size - sample < (batch_size if drop_last else 1)
            after = Position(epoch=epoch + 1) if ends else Position(epoch=epoch, sample=sample)
            rows = places if order is None else order[places]
            yield BatchPositions(
                samples=tuple(rows.tolist()), epoch=epoch, after=after, ends_epoch=ends
            )
        epoch, sample = epoch + 1, 0
        if draw is not None:
            drawn = np.asarray(draw(epoch), dtype=np.int64)
            size = len(drawn)


def positions_of_batches(
    draw: Callable[[int], Sequence[Sequence[int]]], start: Position
) -> Iterator[BatchPositions]:
    """All batches from a position on, where `draw` gives those of an epoch as they are."""
    epoch, skip = start.epoch, start.sample
    while True:
        batches = [tuple(map(int, batch)) for batch in draw(epoch)]
        if not any(batches):
            raise TrainingError(f"the batch sampler gave no batch in epoch {epoch}", where="data")
        sample = 0
        for index, samples in enumerate(batches):
            sample += len(samples)
            if sample <= skip:
                continue
            if sample - len(samples) < skip:
                raise TrainingError(
                    f"sample {skip} of epoch {epoch} is inside of a batch: the batch sampler "
                    "makes other batches than before",
                    where="data",
                    hint="the batch sampler of the first run; or a new folder",
                )
            ends = index == len(batches) - 1
            after = Position(epoch=epoch + 1) if ends else Position(epoch=epoch, sample=sample)
            yield BatchPositions(samples=samples, epoch=epoch, after=after, ends_epoch=ends)
        epoch, skip = epoch + 1, 0


# How samples become batches: the fields of `data`, or those of a `torch.utils.data.DataLoader`.
#
# Of a data loader the dataset, batch size, `collate_fn`, `drop_last`, sampler and the settings of
# its workers are used. It is not iterated: ranks read the same batches in the same order, each
# possibly only its rows, and a position in the data must mean the same in every process and after a
# resume. So a loader that shuffles is read in Shardwise's own seeded order, and a sampler of the
# user's draws the order of each epoch under seeds that follow from `seed` and the epoch.


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
