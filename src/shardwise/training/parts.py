"""What of a batch this rank reads.

Enters: a parallel module, and what one row of a batch looks like. Leaves: the rows that this rank's
program takes of a batch, and that program's local batch made of these rows alone. The answer comes
from the program itself: it is given a batch of row numbers, and keeps some.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.batch import read_batch
from shardwise.runtime.consistency import signature
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.step import StepProgram
from shardwise.training.loading import Fetched
from shardwise.training.random_state import undisturbed

__all__ = ["BatchParts", "whole_like"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """How the local batch follows from the rows; `leaves` are None where other dims are cut, too.

    A leaf has the rows that are kept, in their order, or an empty shape.
    """

    rows: tuple[int, ...]
    leaves: tuple[tuple[int, ...] | torch.Size, ...] | None


class BatchParts:
    """What this rank's program takes of whole batches; with `rows`, of its own rows alone."""

    def __init__(self, module: ParallelModule, *, training: bool, rows: bool) -> None:
        self.module, self.training, self.by_rows = module, training, rows
        self._known: dict[Hashable, _Reading] = {}

    def rows(self, like: Any, count: int) -> tuple[int, ...] | None:
        """The rows that this rank reads of a batch of `count`; all ranks call it for a new size.

        `like` is a batch of any number of rows. At least one row is read, to know its shapes.
        """
        if self.by_rows:
            return self._reading(like, count).rows
        self.program(whole_like(like, count))
        return None

    def take(self, fetched: Fetched) -> tuple[Any, bool]:
        """What a step takes, and whether that is the local batch."""
        if fetched.rows is None:
            self.program(fetched.batch)
            return fetched.batch, False
        return self._cut(fetched.batch, fetched.count), True

    def program(self, whole: Any) -> StepProgram:
        """The program for batches like this one, which may have to be made."""
        with undisturbed():
            return self.module.program(whole, self.training)

    def _cut(self, part: Any, count: int) -> Any:
        """The local batch of a whole one of `count` rows, from a batch of this rank's rows."""
        reading = self._reading(part, count)
        call = read_batch(part)
        tensors = [tensor for _, tensor in call.tensors]
        if reading.leaves is None:
            places = torch.tensor(reading.rows)
            whole = [t.new_zeros((count, *t.shape[1:])).index_copy_(0, places, t) for t in tensors]
            return self.program(whole_like(part, count)).local_batch(call.batch_with(whole))
        place = {row: index for index, row in enumerate(reading.rows)}
        pairs = zip(tensors, reading.leaves, strict=True)
        return call.batch_with([_taken(tensor, leaf, place) for tensor, leaf in pairs])

    def _reading(self, like: Any, count: int) -> _Reading:
        whole = whole_like(like, count)
        program, key = self.program(whole), signature(whole)
        if key not in self._known:
            self._known[key] = _read(program, whole, count)
        return self._known[key]


def whole_like(batch: Any, count: int) -> Any:
    """A batch of `count` rows, all zeros, in no memory of its own."""
    call = read_batch(batch)
    return call.batch_with(
        [tensor.new_zeros(()).expand(count, *tensor.shape[1:]) for _, tensor in call.tensors]
    )


def _read(program: StepProgram, whole: Any, count: int) -> _Reading:
    call = read_batch(whole)
    numbers = torch.arange(count, dtype=torch.int32)
    shapes = [tensor.shape for _, tensor in call.tensors]
    asked = [numbers.view(-1, *(1,) * (len(shape) - 1)).expand(shape) for shape in shapes]
    given = [t for _, t in read_batch(program.local_batch(call.batch_with(asked))).tensors]
    rows = sorted({row for tensor in given for row in torch.unique(tensor).tolist()})
    only_rows = all(
        not part.numel() or part.shape[1:] == shape[1:]
        for part, shape in zip(given, shapes, strict=True)
    )
    leaves = tuple(_leaf(part) for part in given) if only_rows else None
    return _Reading(rows=tuple(rows) or (0,), leaves=leaves)


def _leaf(part: Tensor) -> tuple[int, ...] | torch.Size:
    if not part.numel():
        return part.shape
    return tuple(part.reshape(part.shape[0], -1)[:, 0].tolist())


def _taken(tensor: Tensor, leaf: Sequence[int] | torch.Size, place: dict[int, int]) -> Tensor:
    if isinstance(leaf, torch.Size):
        return tensor.new_empty(leaf)
    wanted = [place[row] for row in leaf]
    if wanted == list(range(tensor.shape[0])):
        return tensor
    return tensor.index_select(0, torch.tensor(wanted))
