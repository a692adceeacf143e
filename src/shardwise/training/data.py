"""Batches from a dataset, read ahead: by position, or as a stream.

A map-style dataset
(`__len__`, `__getitem__`) is read by position, this rank's rows alone. Of an iterable one every
rank reads all samples; it continues by its own `state_dict` or, without one, by skipping.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise.batch import read_batch
from shardwise.errors import TrainingError
from shardwise.runtime.consistency import signature
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.step import StepProgram
from shardwise.training.processes import WorkerStart
from shardwise.training.sampling import (
    BatchPositions,
    Loading,
    Position,
    batch_positions,
    positions_of_batches,
)
from shardwise.training.state import seeded, undisturbed

__all__ = [
    "BatchParts",
    "Fetched",
    "MapLoader",
    "Source",
    "StreamLoader",
    "is_map_style",
    "make_source",
    "whole_like",
]


Rows = Callable[[int], tuple[int, ...] | None]  # of a batch's count; None: the whole batch
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A batch, or this rank's rows of it; `count` is the whole's number of rows."""

    batch: Any
    count: int
    rows: tuple[int, ...] | None
    epoch: int
    after: Position
    ends_epoch: bool
    state: Any = None  # of an iterable dataset, after this batch


class Source(Protocol):
    """Where batches come from."""

    def batches(self, start: Position, state: Any = None) -> Iterator[Fetched]:
        """All batches from a position on, epoch after epoch."""
        ...

    def epoch_batches(self) -> int | None:
        """The batches of an epoch, where that is known."""
        ...

    def example(self) -> Any:
        """A batch to capture the model with: of one row, or whole where rows do not stack."""
        ...


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be asked for by number."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def make_source(loading: Loading, seed: int) -> MapLoader | StreamLoader:
    """The loader that fits a dataset."""
    kind = MapLoader if is_map_style(loading.dataset) else StreamLoader
    return kind(loading, seed)


class _Loader:
    """What both ways of loading have."""

    def __init__(self, loading: Loading, seed: int) -> None:
        self.loading, self.seed = loading, seed
        self.dataset, self.collate = loading.dataset, loading.collate
        self.stacks = loading.stacks  # whether samples are rows
        self.batch_size, self.drop_last = loading.batch_size, loading.drop_last
        self.rows: Rows = lambda count: None
        self.pinned = False

    @property
    def order(self) -> bool | str:
        """In which order samples come: shuffled or not, or the class of the user's sampler."""
        own = self.loading.batch_sampler or self.loading.sampler
        return self.loading.shuffle if own is None else type(own).__qualname__


class MapLoader(_Loader):
    """Reads samples by number; `rows` says which of a batch this rank needs."""

    def __init__(self, loading: Loading, seed: int) -> None:
        super().__init__(loading, seed)
        if loading.batch_sampler is not None:  # of which the first batch is captured
            self.batch_size = len(next(self._positions(Position())).samples)

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, start: Position, state: Any = None) -> Iterator[Fetched]:
        """All batches from a position on, read ahead by processes or by a thread."""
        if self.loading.workers:
            return self._by_processes(start)
        return ahead(self._one_by_one(start), self.loading.prefetch)

    def epoch_batches(self) -> int | None:
        own = self.loading.batch_sampler
        if own is not None:
            return len(own) if hasattr(own, "__len__") else None
        size = self._epoch_samples()
        if size is None:
            return None
        whole, rest = divmod(size, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def _epoch_samples(self) -> int | None:
        """The samples of an epoch: those of the data, or as many as the user's sampler gives."""
        own = self.loading.sampler
        if own is None:
            return len(self)
        return len(own) if hasattr(own, "__len__") else None

    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that batches have, as far as they are known."""
        count, size = self._epoch_samples() or 0, self.batch_size
        full, rest = (size,) if count >= size else (), count % size
        return (*full, rest) if rest and not self.drop_last else full

    def example(self) -> Any:
        first = next(self._positions(Position()))
        keys = [(0, sample) for sample in first.samples[: 1 if self.stacks else None]]
        samples = _Samples(self.dataset, self.seed)
        return self.collate([samples[key] for key in keys])

    def _positions(self, start: Position) -> Iterator[BatchPositions]:
        draw = functools.partial(self.loading.drawn, self.seed)
        if self.loading.batch_sampler is not None:
            return positions_of_batches(draw, start)
        return batch_positions(
            len(self),
            self.batch_size,
            start,
            seed=self.seed,
            shuffle=self.loading.shuffle,
            drop_last=self.drop_last,
            draw=draw if self.loading.sampler is not None else None,
        )

    def _wanted(
        self, start: Position
    ) -> Iterator[tuple[BatchPositions, tuple[int, ...] | None, list[tuple[int, int]]]]:
        """Every batch, which of its rows are read here, and their keys."""
        for batch in self._positions(start):
            rows = self.rows(len(batch.samples))
            chosen = batch.samples if rows is None else [batch.samples[row] for row in rows]
            yield batch, rows, [(batch.epoch, sample) for sample in chosen]

    def _one_by_one(self, start: Position) -> Iterator[Fetched]:
        samples = _Samples(self.dataset, self.seed)
        for batch, rows, keys in self._wanted(start):
            yield _fetched(self.collate([samples[key] for key in keys]), batch, rows)

    def _by_processes(self, start: Position) -> Iterator[Fetched]:
        waiting: collections.deque[tuple[BatchPositions, Any]] = collections.deque()

        def keys() -> Iterator[list[tuple[int, int]]]:
            for batch, rows, wanted in self._wanted(start):
                waiting.append((batch, rows))
                yield wanted

        options = dict(self.loading.worker_options)
        options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"))
        loader: DataLoader[Any] = DataLoader(
            _Samples(self.dataset, self.seed),  # type: ignore[arg-type]
            batch_sampler=_Once(keys()),
            num_workers=self.loading.workers,
            prefetch_factor=self.loading.prefetch,
            collate_fn=self.collate,
            pin_memory=self.pinned,
            **options,
        )
        for data in loader:
            yield _fetched(data, *waiting.popleft())


class StreamLoader(_Loader):
    """Reads samples as they come."""

    def batches(self, start: Position, state: Any = None) -> Iterator[Fetched]:
        """All batches from a position on; `state` is that of the dataset at this position."""
        return ahead(self._one_by_one(start, state), self.loading.prefetch)

    def epoch_batches(self) -> None:
        """Unknown."""

    def sizes(self) -> tuple[int, ...]:
        """Rows are not chosen."""
        return ()

    def example(self) -> Any:
        """The first batch; its samples come again."""
        if iter(self.dataset) is self.dataset:
            raise TrainingError(
                f"the data is an iterator ({type(self.dataset).__name__}), which can be read once",
                hint="an object whose __iter__ begins anew, such as an IterableDataset",
            )
        before = self._state()
        found = next(self._one_by_one(Position(), None))
        if before is not None:
            self.dataset.load_state_dict(before)
        return found.batch

    def _one_by_one(self, start: Position, state: Any) -> Iterator[Fetched]:
        epoch, taken = start.epoch, start.sample
        skip = taken
        if state is not None and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(copy.deepcopy(state))
            skip = 0
        while True:
            held: Fetched | None = None  # until it is known whether it is the epoch's last
            for samples in self._groups(epoch, skip):
                taken += len(samples)
                made = self._fetched(samples, Position(epoch=epoch, sample=taken))
                if held is not None:
                    yield held
                held = made
            if held is not None:
                yield replace(held, after=Position(epoch=epoch + 1), ends_epoch=True, state=None)
            if not taken:
                raise TrainingError(
                    f"epoch {epoch} of the data has no batch of {self.batch_size} samples",
                    hint="an iterable dataset gives its samples again to every new iterator",
                )
            epoch, taken, skip = epoch + 1, 0, 0

    def _fetched(self, samples: list[Any], after: Position) -> Fetched:
        return Fetched(
            batch=self.collate(samples),
            count=len(samples),
            rows=None,
            epoch=after.epoch,
            after=after,
            ends_epoch=False,
            state=self._state(),
        )

    def _groups(self, epoch: int, skip: int) -> Iterator[list[Any]]:
        """The samples of an epoch in groups, after the first `skip`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        group: list[Any] = []
        for sample in itertools.islice(self.dataset, skip, None):
            group.append(sample)
            if len(group) == self.batch_size:
                yield group
                group = []
        if group and not self.drop_last:
            yield group

    def _state(self) -> Any:
        state = getattr(self.dataset, "state_dict", None)
        return copy.deepcopy(state()) if state is not None else None


class _Samples:
    """Samples by epoch and number, each with its own random numbers."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, sample = key
        with seeded(self.seed, epoch, sample):
            return self.dataset[sample]


class _Once:
    """An iterator as an iterable without a length."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return self.items


def _fetched(data: Any, batch: BatchPositions, rows: Sequence[int] | None) -> Fetched:
    return Fetched(
        batch=data,
        count=len(batch.samples),
        rows=None if rows is None else tuple(rows),
        epoch=batch.epoch,
        after=batch.after,
        ends_epoch=batch.ends_epoch,
    )


def ahead(items: Iterable[Any], depth: int) -> Iterator[Any]:
    """The items, of which up to `depth` are made by a thread before they are asked for."""
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Any, error: BaseException | None = None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((item, error), timeout=_POLL_S)
                return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=work, name="shardwise-loading", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        thread.join(timeout=5.0)


# What of a batch this rank reads.
#
# The answer comes from the program itself: it is given a batch of row numbers, and keeps some.


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
