"""Determine the samples of a batch from a position in the data alone.

A position is an epoch and the number of samples already taken in it. The order of an epoch follows
from the seed, so that a position means the same for any number of ranks and any batch size: no
sample is lost or repeated when they change. No list of all samples is ever built.
"""

from collections.abc import Callable, Iterator, Sequence
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

ROUNDS = 6  # of the Feistel network; its permutations look random from four rounds on
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The number of samples already taken in an epoch; all earlier epochs are complete."""

    epoch: int = 0
    sample: int = 0


class Permutation:
    """A seeded random order of `size` numbers, computed element by element.

    A Feistel network permutes the next power of four; it is repeated on numbers beyond `size`.

    >>> sorted(Permutation(5, seed=1)[[0, 1, 2, 3, 4]].tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        self.size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        start = np.array([seed & (2**63 - 1), epoch], dtype=np.uint64)
        key = _mixed(_mixed(start[:1]) ^ start[1:])
        self._keys = [key := _mixed(key + np.uint64(1)) for _ in range(ROUNDS)]

    def __getitem__(self, indices: Any) -> NDArray[np.int64]:
        values = np.asarray(indices, dtype=np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        while outside.any():
            values = np.where(outside, self._permuted(values), values)
            outside = values >= self.size
        return values.astype(np.int64)

    def _permuted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits, mask = np.uint64(self._half), np.uint64(2**self._half - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64, in which every output bit depends on all input bits."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * _MIX[0]
        values = (values ^ (values >> np.uint64(27))) * _MIX[1]
        return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPositions:
    """One batch: the samples of its rows, and the position of the next batch."""

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
    """Yield batches from a position on, epoch after epoch, without end.

    `draw` returns the samples of an epoch in order; without it, all `size` samples are taken.
    """
    epoch, sample = start.epoch, start.sample
    drawn = None if draw is None else np.asarray(draw(epoch), dtype=np.int64)
    size = size if drawn is None else len(drawn)
    if size < 1 or (drop_last and size < batch_size):
        raise TrainingError(
            f"the data has {size} samples, fewer than a batch of {batch_size}",
            hint="a smaller data.batch_size, or data.drop_last: false",
        )
    while True:
        order: Any = drawn
        if drawn is None and shuffle:
            order = Permutation(size, seed, epoch)
        while size - sample >= (batch_size if drop_last else 1):
            indices = np.arange(sample, min(sample + batch_size, size))
            sample += len(indices)
            ends = size - sample < (batch_size if drop_last else 1)
            after = Position(epoch=epoch + 1) if ends else Position(epoch=epoch, sample=sample)
            rows = indices if order is None else order[indices]
            yield BatchPositions(
                samples=tuple(rows.tolist()), epoch=epoch, after=after, ends_epoch=ends
            )
        epoch, sample = epoch + 1, 0
        if draw is not None:
            drawn = np.asarray(draw(epoch), dtype=np.int64)
            size = len(drawn)


def sampled_batches(
    draw: Callable[[int], Sequence[Sequence[int]]], start: Position
) -> Iterator[BatchPositions]:
    """Yield batches from a position on; `draw` returns the batches of an epoch."""
    epoch, skip = start.epoch, start.sample
    while True:
        batches = [tuple(map(int, batch)) for batch in draw(epoch)]
        if not any(batches):
            raise TrainingError(f"the batch sampler yields no batch in epoch {epoch}", where="data")
        sample = 0
        for index, samples in enumerate(batches):
            sample += len(samples)
            if sample <= skip:
                continue
            if sample - len(samples) < skip:
                raise TrainingError(
                    f"sample {skip} of epoch {epoch} is inside a batch: the batch sampler "
                    "yields different batches than before",
                    where="data",
                    hint="the batch sampler of the first run; or a new folder",
                )
            ends = index == len(batches) - 1
            after = Position(epoch=epoch + 1) if ends else Position(epoch=epoch, sample=sample)
            yield BatchPositions(samples=samples, epoch=epoch, after=after, ends_epoch=ends)
        epoch, skip = epoch + 1, 0


# ------------------------------------------------------------ settings of a loader
# A `torch.utils.data.DataLoader` contributes its dataset, batch size, `collate_fn`, `drop_last`,
# sampler and worker settings, but is never iterated: ranks must read the same batches in the same
# order, possibly only their own rows, and a position must mean the same in every process and after
# a resume. A loader that shuffles is therefore read in Shardwise's seeded order, and the user's
# sampler draws the order of each epoch with seeds that follow from `seed` and the epoch.

BATCH_SIZE, PREFETCH = 8, 2
_BATCHING_FIELDS = ("batch_size", "collate", "shuffle", "drop_last", "workers", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A dataset and how to read it; with `stacks`, each sample is one row of every tensor."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any]
    stacks: bool
    shuffle: bool
    drop_last: bool
    workers: int
    prefetch: int
    sampler: Any = None  # the user's, which yields the samples of an epoch
    batch_sampler: Any = None  # the user's, which yields the batches of an epoch
    worker_options: dict[str, Any] = field(default_factory=dict)

    def draw(self, seed: int, epoch: int) -> list[Any]:
        """Return what the user's sampler yields for an epoch, the same on every rank."""
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with seeded(seed, epoch, -1):
            for owner in (sampler, getattr(sampler, "sampler", None)):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            entries = list(sampler)
        if hasattr(sampler, "__len__") and len(sampler) != len(entries):
            raise TrainingError(
                f"{type(sampler).__name__} has length {len(sampler)}, but yielded "
                f"{len(entries)} entries in epoch {epoch}",
                where="data",
                hint="a __len__ that is right for every epoch, or none",
            )
        return entries


def make_loading(
    source: Any, config: DataConfig, collate: Any, *, training: bool, train: Loading | None = None
) -> Loading:
    """Return how to read a dataset or a data loader.

    Evaluation data takes the settings that the config leaves open from the training data, `train`.
    """
    key = "data.train" if training else "data.evaluation"
    if isinstance(source, DataLoader):
        return _from_loader(source, config, key, training=training)
    if not hasattr(source, "__getitem__") and not hasattr(source, "__iter__"):
        raise ConfigError(
            f"a {type(source).__name__} has no samples",
            where=key,
            hint="__len__ and __getitem__, __iter__, or a torch.utils.data.DataLoader",
        )
    size = config.batch_size or (train.batch_size if train is not None else BATCH_SIZE)
    loading = Loading(
        dataset=source,
        batch_size=size if training else config.evaluation_batch_size or size,
        collate=collate or default_collate,
        stacks=collate is None or config.rowwise,
        shuffle=config.shuffle is not False and training,
        drop_last=config.drop_last is not False and training,
        workers=config.workers or 0,
        prefetch=config.prefetch or PREFETCH,
    )
    if train is not None and collate is None and train.collate is not default_collate:
        loading = replace(loading, collate=train.collate, stacks=train.stacks)
    return loading


def _from_loader(
    loader: DataLoader[Any], config: DataConfig, key: str, *, training: bool
) -> Loading:
    _check_loader(loader, config, key, training=training)
    has_batch_sampler = loader.batch_size is None  # DataLoader(dataset, batch_sampler=…)
    is_sequential = loader.sampler is None or type(loader.sampler) is SequentialSampler
    is_iterable = isinstance(loader.dataset, IterableDataset)
    shuffles = _shuffles(loader)
    options = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
    }
    plain = has_batch_sampler or is_sequential or shuffles or is_iterable
    stacks = loader.collate_fn is default_collate or config.rowwise
    return Loading(
        dataset=loader.dataset,
        batch_size=loader.batch_size or 1,
        collate=loader.collate_fn,
        stacks=stacks and not has_batch_sampler,
        shuffle=shuffles and training and not has_batch_sampler,
        drop_last=bool(loader.drop_last),
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or PREFETCH,
        sampler=None if plain else loader.sampler,
        batch_sampler=loader.batch_sampler if has_batch_sampler else None,
        worker_options={n: v for n, v in options.items() if v} if loader.num_workers else {},
    )


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether the loader yields every sample once, in a random order."""
    sampler = loader.sampler
    if type(sampler) is not RandomSampler:
        return False
    size = len(loader.dataset)  # type: ignore[arg-type]
    return not sampler.replacement and sampler.num_samples == size


def _check_loader(loader: DataLoader[Any], config: DataConfig, key: str, *, training: bool) -> None:
    """Refuse loaders that contradict the config, or that ranks cannot share."""
    # An evaluation loader may accompany training data that uses the other fields.
    fields = _BATCHING_FIELDS if training else ("evaluation_batch_size",)
    duplicates = [name for name in fields if getattr(config, name) is not None]
    samplers = [loader.batch_sampler, loader.sampler]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    message = hint = None
    if duplicates:
        message = f"data.{duplicates[0]} and a DataLoader both define the batches"
        hint = f"leave data.{duplicates[0]} out, or pass the loader's dataset"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        message = f"a {type(loader).__name__} overrides __iter__, which ranks cannot share"
        hint = "a torch.utils.data.DataLoader, or the loader's dataset"
    elif any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        message = "a DistributedSampler divides the samples among ranks, as the plan already does"
        hint = "DataLoader(dataset, batch_size=…, shuffle=True), with the global batch size"
    elif loader.batch_size is None and loader.batch_sampler is None:
        message = "a DataLoader with batch_size=None yields batches of an unknown number of rows"
        hint = "a dataset of single samples and DataLoader(dataset, batch_size=…)"
    elif isinstance(loader.dataset, IterableDataset) and loader.num_workers:
        message = (
            f"an iterable dataset in {loader.num_workers} worker processes has no order that a "
            "resumed run could continue"
        )
        hint = "num_workers=0: a thread prefetches batches"
    if message is not None:
        raise ConfigError(message, where=key, hint=hint)
