"""Which samples a batch has, from a position in the data alone.

A position is an epoch and a number of samples already taken in it. The order of an epoch follows
from the seed, so that a position means the same to any number of ranks, with any batch size:
nothing is lost or repeated when they change. No list of all samples is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import TrainingError

__all__ = [
    "BatchPositions",
    "Permutation",
    "Position",
    "batch_positions",
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
