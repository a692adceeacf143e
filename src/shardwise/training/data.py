"""Load batches from a dataset ahead of their use, and slice out this rank's part of them.

Samples of a map-style dataset (`__len__`, `__getitem__`) are read by number, and only this rank's
rows. An iterable dataset is read in full by every rank; a resumed run continues it from its own
`state_dict` or, without one, by skipping samples.
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
from typing import Any

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
    sampled_batches,
)
from shardwise.training.state import seeded, undisturbed

Rows = Callable[[int], tuple[int, ...] | None]  # rows to read of a batch's count; None: all
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """A batch, or only this rank's `rows` of it; the full batch has `count` rows."""

    batch: Any
    count: int
    rows: tuple[int, ...] | None
    epoch: int
    after: Position
    ends_epoch: bool
    state: Any = None  # of an iterable dataset, after this batch


def make_source(loading: Loading, seed: int) -> MapLoader | StreamLoader:
    """Return the loader for the kind of a dataset."""
    dataset = loading.dataset
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return (MapLoader if is_map_style else StreamLoader)(loading, seed)


class _Loader:
    """The settings that both kinds of loaders have."""

    def __init__(self, loading: Loading, seed: int) -> None:
        self.loading, self.seed = loading, seed
        self.dataset, self.collate = loading.dataset, loading.collate
        self.stacks = loading.stacks  # each sample is one row of every tensor
        self.batch_size, self.drop_last = loading.batch_size, loading.drop_last
        self.rows: Rows = lambda count: None
        self.pinned = False

    @property
    def order(self) -> bool | str:
        """Return whether samples are shuffled, or the class of the user's sampler."""
        sampler = self.loading.batch_sampler or self.loading.sampler
        return self.loading.shuffle if sampler is None else type(sampler).__qualname__


class MapLoader(_Loader):
    """Read samples by number; `rows` selects the rows of a batch that this rank needs."""

    def __init__(self, loading: Loading, seed: int) -> None:
        super().__init__(loading, seed)
        if loading.batch_sampler is not None:  # the model is captured with its first batch
            self.batch_size = len(next(self._positions(Position())).samples)

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, start: Position, state: Any = None) -> Iterator[LoadedBatch]:
        """Yield all batches from a position on, prefetched by worker processes or a thread."""
        if self.loading.workers:
            return self._load_in_workers(start)
        return prefetched(self._load(start), self.loading.prefetch)

    def epoch_batches(self) -> int | None:
        """Return the number of batches in an epoch, or None if the sampler has no length."""
        sampler = self.loading.batch_sampler
        if sampler is not None:
            return len(sampler) if hasattr(sampler, "__len__") else None
        size = self._epoch_samples()
        if size is None:
            return None
        full, remainder = divmod(size, self.batch_size)
        return full + bool(remainder and not self.drop_last)

    def _epoch_samples(self) -> int | None:
        sampler = self.loading.sampler
        if sampler is None:
            return len(self)
        return len(sampler) if hasattr(sampler, "__len__") else None

    def batch_sizes(self) -> tuple[int, ...]:
        """Return the numbers of rows that batches have, as far as they are known."""
        count, size = self._epoch_samples() or 0, self.batch_size
        full, remainder = (size,) if count >= size else (), count % size
        return (*full, remainder) if remainder and not self.drop_last else full

    def example(self) -> Any:
        """Return a batch to capture the model with: one row, or all if samples are not rows."""
        first = next(self._positions(Position()))
        keys = [(0, sample) for sample in first.samples[: 1 if self.stacks else None]]
        samples = _Samples(self.dataset, self.seed)
        return self.collate([samples[key] for key in keys])

    def _positions(self, start: Position) -> Iterator[BatchPositions]:
        draw = functools.partial(self.loading.draw, self.seed)
        if self.loading.batch_sampler is not None:
            return sampled_batches(draw, start)
        return batch_positions(
            len(self),
            self.batch_size,
            start,
            seed=self.seed,
            shuffle=self.loading.shuffle,
            drop_last=self.drop_last,
            draw=draw if self.loading.sampler is not None else None,
        )

    def _keys(
        self, start: Position
    ) -> Iterator[tuple[BatchPositions, tuple[int, ...] | None, list[tuple[int, int]]]]:
        """Yield every batch, the rows of it that are read here, and the keys of their samples."""
        for batch in self._positions(start):
            rows = self.rows(len(batch.samples))
            samples = batch.samples if rows is None else [batch.samples[row] for row in rows]
            yield batch, rows, [(batch.epoch, sample) for sample in samples]

    def _load(self, start: Position) -> Iterator[LoadedBatch]:
        samples = _Samples(self.dataset, self.seed)
        for batch, rows, keys in self._keys(start):
            yield _loaded(self.collate([samples[key] for key in keys]), batch, rows)

    def _load_in_workers(self, start: Position) -> Iterator[LoadedBatch]:
        pending: collections.deque[tuple[BatchPositions, Any]] = collections.deque()

        def batches() -> Iterator[list[tuple[int, int]]]:
            for batch, rows, keys in self._keys(start):
                pending.append((batch, rows))
                yield keys

        options = dict(self.loading.worker_options)
        options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"))
        loader: DataLoader[Any] = DataLoader(
            _Samples(self.dataset, self.seed),  # type: ignore[arg-type]
            batch_sampler=batches(),
            num_workers=self.loading.workers,
            prefetch_factor=self.loading.prefetch,
            collate_fn=self.collate,
            pin_memory=self.pinned,
            **options,
        )
        for data in loader:
            yield _loaded(data, *pending.popleft())


class StreamLoader(_Loader):
    """Read samples in the order of an iterable dataset."""

    def batches(self, start: Position, state: Any = None) -> Iterator[LoadedBatch]:
        """Yield all batches from a position on, at which the dataset had this `state`."""
        return prefetched(self._load(start, state), self.loading.prefetch)

    def epoch_batches(self) -> None:
        """Return None: the number is unknown."""

    def batch_sizes(self) -> tuple[int, ...]:
        """Return nothing: every rank reads all rows."""
        return ()

    def example(self) -> Any:
        """Return the first batch to capture the model with; training starts with it again."""
        if iter(self.dataset) is self.dataset:
            raise TrainingError(
                f"the data is an iterator ({type(self.dataset).__name__}) that can be read once",
                hint="an object whose __iter__ starts again, such as an IterableDataset",
            )
        before = self._state()
        first = next(self._load(Position(), None))
        if before is not None:
            self.dataset.load_state_dict(before)
        return first.batch

    def _load(self, start: Position, state: Any) -> Iterator[LoadedBatch]:
        epoch, num_read = start.epoch, start.sample
        skip = num_read
        if state is not None and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(copy.deepcopy(state))
            skip = 0
        while True:
            # A batch is held back until the next one shows whether it is the last of the epoch.
            previous: LoadedBatch | None = None
            for samples in self._groups(epoch, skip):
                num_read += len(samples)
                loaded = LoadedBatch(
                    batch=self.collate(samples),
                    count=len(samples),
                    rows=None,
                    epoch=epoch,
                    after=Position(epoch=epoch, sample=num_read),
                    ends_epoch=False,
                    state=self._state(),
                )
                if previous is not None:
                    yield previous
                previous = loaded
            if previous is not None:
                after = Position(epoch=epoch + 1)
                yield replace(previous, after=after, ends_epoch=True, state=None)
            if not num_read:
                raise TrainingError(
                    f"epoch {epoch} of the data has no batch of {self.batch_size} samples",
                    hint="an iterable dataset must yield its samples to every new iterator",
                )
            epoch, num_read, skip = epoch + 1, 0, 0

    def _groups(self, epoch: int, skip: int) -> Iterator[list[Any]]:
        """Yield the samples of each batch of an epoch, after the first `skip` samples."""
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
    """Samples by epoch and number, each with random numbers that follow from its key."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, sample = key
        with seeded(self.seed, epoch, sample):
            return self.dataset[sample]


def _loaded(data: Any, batch: BatchPositions, rows: Sequence[int] | None) -> LoadedBatch:
    return LoadedBatch(
        batch=data,
        count=len(batch.samples),
        rows=None if rows is None else tuple(rows),
        epoch=batch.epoch,
        after=batch.after,
        ends_epoch=batch.ends_epoch,
    )


def prefetched(items: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield the items, up to `depth` of which a thread computes in advance."""
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


# ------------------------------------------------------------ this rank's part of a batch
# The program itself knows its part: given a batch that holds row numbers, it returns those it uses.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """The rows of a batch that this rank reads, and those of each tensor of its local batch.

    A leaf is the rows of one tensor in their order, or the shape of an empty one. `leaves` is None
    if other dims are sharded, too.
    """

    rows: tuple[int, ...]
    leaves: tuple[tuple[int, ...] | torch.Size, ...] | None


class BatchSlicer:
    """Slice this rank's local batches out of full ones or, if `by_rows`, out of its own rows."""

    def __init__(self, module: ParallelModule, *, training: bool, by_rows: bool) -> None:
        self.module, self.training, self.by_rows = module, training, by_rows
        self._selections: dict[Hashable, _Selection] = {}

    def rows(self, example: Any, count: int) -> tuple[int, ...] | None:
        """Return the rows to read of a batch of `count` rows; all ranks call it for a new count.

        `example` has any number of rows. At least one row is read, for its shapes. Where Python
        looks at values of the batch, every rank reads the full batch.
        """
        if not self.module.is_guarded:
            self.program(placeholder_batch(example, count))
        if self.module.is_guarded or not self.by_rows:
            return None
        return self._selection(example, count).rows

    def slice(self, loaded: LoadedBatch) -> tuple[Any, bool]:
        """Return the batch that a step takes, and whether it is the local one."""
        if loaded.rows is None:
            self.program(loaded.batch)
            return loaded.batch, False
        return self._local(loaded.batch, loaded.count), True

    def program(self, batch: Any) -> StepProgram:
        """Return the program for full batches of this signature, compiled if it is new."""
        with undisturbed():
            return self.module.program(batch, self.training)

    def _local(self, batch: Any, count: int) -> Any:
        """Return the local batch, from this rank's rows of a batch of `count` rows."""
        selection = self._selection(batch, count)
        call = read_batch(batch)
        tensors = [tensor for _, tensor in call.tensors]
        if selection.leaves is None:
            rows = torch.tensor(selection.rows)
            full = [t.new_zeros((count, *t.shape[1:])).index_copy_(0, rows, t) for t in tensors]
            program = self.program(placeholder_batch(batch, count))
            return program.local_batch(call.batch_with(full))
        indices = {row: index for index, row in enumerate(selection.rows)}
        pairs = zip(tensors, selection.leaves, strict=True)
        return call.batch_with([_select(tensor, leaf, indices) for tensor, leaf in pairs])

    def _selection(self, example: Any, count: int) -> _Selection:
        batch = placeholder_batch(example, count)
        program, key = self.program(batch), signature(batch)
        if key not in self._selections:
            self._selections[key] = _used_rows(program, batch, count)
        return self._selections[key]


def placeholder_batch(example: Any, count: int) -> Any:
    """Return a batch of `count` rows that share the memory of the example's first row."""
    call = read_batch(example)
    rows = [t[:1] if len(t) else t.new_zeros(1, *t.shape[1:]) for _, t in call.tensors]
    return call.batch_with([row.expand(count, *row.shape[1:]) for row in rows])


def _used_rows(program: StepProgram, batch: Any, count: int) -> _Selection:
    call = read_batch(batch)
    numbers = torch.arange(count, dtype=torch.int32)
    shapes = [tensor.shape for _, tensor in call.tensors]
    full = [numbers.view(-1, *(1,) * (len(shape) - 1)).expand(shape) for shape in shapes]
    local = [t for _, t in read_batch(program.local_batch(call.batch_with(full))).tensors]
    rows = sorted({row for tensor in local for row in torch.unique(tensor).tolist()})
    only_rows = all(
        not tensor.numel() or tensor.shape[1:] == shape[1:]
        for tensor, shape in zip(local, shapes, strict=True)
    )
    leaves = tuple(
        tuple(tensor.reshape(tensor.shape[0], -1)[:, 0].tolist())
        if tensor.numel()
        else tensor.shape
        for tensor in local
    )
    return _Selection(rows=tuple(rows) or (0,), leaves=leaves if only_rows else None)


def _select(tensor: Tensor, leaf: Sequence[int] | torch.Size, indices: dict[int, int]) -> Tensor:
    if isinstance(leaf, torch.Size):
        return tensor.new_empty(leaf)
    rows = [indices[row] for row in leaf]
    if rows == list(range(tensor.shape[0])):
        return tensor
    return tensor.index_select(0, torch.tensor(rows))
