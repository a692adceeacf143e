"""Choose the implementation of each collective: the library's, or one that the plan names.

A transport asks `CollectiveBackends` first, which returns a `Pending`, or None to leave the
operation to the library. The answer depends only on operation, group and sizes, so that all ranks
of a group agree. Other implementations (message programs, and shared memory of ranks on one host)
run in a `CommunicationThread` and are imported on first use, since most plans have none.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.messages import CollectiveChoice, MessageProgram
from shardwise.dtypes import torch_dtypes
from shardwise.errors import ProgramError, RankError
from shardwise.runtime.devices import is_remote
from shardwise.runtime.transport import Group, Pending, after

if TYPE_CHECKING:
    from shardwise.runtime.collectives.shared_memory import SharedBuckets


class Handle:
    """A collective in progress."""

    def __init__(self, limit_s: float) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._limit_s = limit_s

    def done(self) -> bool:
        """Return whether the collective has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the collective has ended; raise its error if it failed."""
        limit = self._limit_s if timeout_s is None else timeout_s
        if not self._ended.wait(min(limit, threading.TIMEOUT_MAX)):
            raise RankError(f"a collective did not finish within {limit:g} s")
        if self._error is not None:
            raise self._error

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()


class _Jobs:
    """The thread's queue, which does not refer to the thread's owner."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Callable[[], None], Handle] | None] = (
            queue.SimpleQueue()
        )
        self.failed: BaseException | None = None

    def work(self) -> None:
        while (item := self.waiting.get()) is not None:
            job, handle = item
            error = self.failed
            if error is None:
                try:
                    job()
                except BaseException as problem:
                    error = self.failed = problem
            del item, job  # release the data of the job
            handle._finish(error)


class CommunicationThread:
    """Run jobs one after the other, until it is closed or garbage-collected.

    All ranks submit their jobs in the same order. After a job has failed, connections are in an
    unknown state: all later jobs fail with its error.
    """

    def __init__(self, name: str) -> None:
        self._jobs = _Jobs()
        self._last: Handle | None = None
        self._thread = threading.Thread(target=self._jobs.work, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.waiting.put, None)
        self._end.atexit = False  # the interpreter abandons daemon threads

    @property
    def failed(self) -> BaseException | None:
        """The error with which all further jobs fail."""
        return self._jobs.failed

    def start(self, job: Callable[[], None], limit_s: float) -> Handle:
        """Run `job`, which takes at most `limit_s`, after all jobs submitted before."""
        if self._end.alive is False:
            raise RankError("a collective was started after `close`")
        previous = self._last
        ahead = 0.0 if previous is None or previous.done() else previous._limit_s
        handle = self._last = Handle(limit_s + ahead)
        self._jobs.waiting.put((job, handle))
        return handle

    def close(self, timeout_s: float) -> bool:
        """End after the submitted jobs; return whether that happened within `timeout_s`."""
        self._end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


Ranks = tuple[int, ...]
Derive = Callable[[CollectiveChoice, Ranks, int, int, Sequence[int]], MessageProgram | None]
SUMMABLE = torch_dtypes(can_train=True)
DEFAULT_TIMEOUT_S = 300.0


class _MessagePrograms:
    """Collectives as programs of messages."""

    def __init__(
        self, ranks: Ranks, group: dist.ProcessGroup, derive: Derive, limit: float
    ) -> None:
        from shardwise.runtime.collectives.messenger import Messenger

        self.ranks, self.derive = ranks, derive
        self.messenger = Messenger(group, timeout_s=limit)
        self.on_host = self.messenger.backend != "nccl"  # whether tensors must be in host memory
        self.programs: dict[object, MessageProgram] = {}

    def start(self, choice: CollectiveChoice, data: Tensor, counts: Sequence[int]) -> Handle:
        key = (choice.operation, data.numel(), data.element_size(), tuple(counts))
        if key not in self.programs:
            program = self.derive(choice, self.ranks, data.numel(), data.element_size(), counts)
            assert program is not None, key  # the choice applies to this size
            self.programs[key] = program
        return self.messenger.start(self.programs[key], data)


class _SharedMemory:
    """Collectives through memory that the ranks share."""

    on_host = True

    def __init__(self, buckets: SharedBuckets) -> None:
        self.buckets = buckets

    def start(self, choice: CollectiveChoice, data: Tensor, counts: Sequence[int]) -> Handle:
        if choice.operation == "all_reduce":
            return self.buckets.all_reduce(data)
        if choice.operation == "reduce_scatter":
            return self.buckets.reduce_scatter(data, counts)
        return self.buckets.all_gather(data, counts)


_Implementation = _MessagePrograms | _SharedMemory


class CollectiveBackends:
    """Implementations of the collectives of this rank's groups; `started` counts their uses."""

    def __init__(
        self,
        choices: Sequence[CollectiveChoice] = (),
        derive: Derive | None = None,
        groups: Mapping[Ranks, dist.ProcessGroup] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.started = 0
        self._chosen: dict[tuple[str, Ranks], tuple[CollectiveChoice, _Implementation]] = {}
        opened: dict[tuple[bool, Ranks], _Implementation | None] = {}
        for choice in choices:
            for ranks in choice.groups if derive is not None and not choice.is_library else ():
                if dist.get_rank() not in ranks:
                    continue
                group = (groups or {}).get(ranks)
                if group is None:
                    raise ProgramError(
                        f"the plan has a collective of ranks {ranks}, which have no process group",
                        hint="sw.collectives.choose(plan, cluster)",
                    )
                key = (choice.has_trees, ranks)
                if key not in opened:
                    limit = timeout_s or DEFAULT_TIMEOUT_S
                    opened[key] = _open(choice, ranks, group, derive, limit)
                backend = opened[key]
                if backend is not None:
                    self._chosen[choice.operation, ranks] = (choice, backend)

    def bucket(self, numel: int, dtype: torch.dtype, operation: str, group: Group) -> Tensor | None:
        """Return a flat tensor in the group's shared memory, if this operation uses it."""
        chosen = self._find(operation, group, numel * dtype.itemsize) if dtype in SUMMABLE else None
        if chosen is None or not isinstance(chosen[1], _SharedMemory):
            return None
        return chosen[1].buckets.allocate(numel, dtype)

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending | None:
        """Sum in place."""
        summable = op == "sum" and flat.dtype in SUMMABLE
        chosen = self._find("all_reduce", group, flat.nbytes) if summable else None
        if chosen is None:
            return None
        choice, backend = chosen
        self.started += 1
        host = flat.cpu() if is_remote(flat) and backend.on_host else flat
        handle = backend.start(choice, host, ())
        return after(flat, [handle], None if host is flat else lambda: flat.copy_(host))

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending | None:
        """Return this rank's part of the sum; `flat` is unchanged unless it is a `bucket`."""
        summable = flat.dtype in SUMMABLE
        chosen = self._find("reduce_scatter", group, flat.nbytes) if summable else None
        if chosen is None:
            return None
        choice, backend = chosen
        self.started += 1
        if is_remote(flat) and backend.on_host:
            data = flat.cpu()
        else:
            shared = isinstance(backend, _SharedMemory) and backend.buckets.is_resident(flat)
            data = flat if shared else flat.clone()
        handle = backend.start(choice, data, sizes)
        first, count = sum(sizes[: group.index]), sizes[group.index]
        # A copy, because a slice would keep the full memory alive.
        return after(data, [handle]).then(
            lambda full: full[first : first + count].to(flat.device, copy=True)
        )

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None
    ) -> Pending | None:
        """Return all ranks' parts, of any dtype."""
        unit = flat.element_size()
        chosen = self._find("all_gather", group, sum(sizes) * unit)
        if chosen is None:
            return None
        choice, backend = chosen
        self.started += 1
        full = flat.new_empty(sum(sizes)) if out is None else out
        # Staged, because zero 3 resizes its buffers, and memory that others map cannot be resized.
        staged = (is_remote(full) and backend.on_host) or isinstance(backend, _SharedMemory)
        host = torch.empty(full.shape, dtype=full.dtype) if staged else full
        part = host[sum(sizes[: group.index]) :][: sizes[group.index]]
        if part.data_ptr() != flat.data_ptr():
            part.copy_(flat)
        handle = backend.start(choice, host.view(torch.uint8), [size * unit for size in sizes])
        return after(full, [handle], (lambda: full.copy_(host)) if staged else None)

    def _find(
        self, operation: str, group: Group, num_bytes: int
    ) -> tuple[CollectiveChoice, _Implementation] | None:
        chosen = self._chosen.get((operation, group.ranks))
        if chosen is None or not num_bytes or num_bytes < chosen[0].min_bytes:
            return None
        return chosen


def _open(
    choice: CollectiveChoice,
    ranks: Ranks,
    group: dist.ProcessGroup,
    derive: Derive | None,
    limit: float,
) -> _Implementation | None:
    """Open a group's implementation; return None on all ranks if they cannot share memory."""
    from shardwise.runtime.collectives.messenger import BACKENDS
    from shardwise.runtime.collectives.shared_memory import SharedBuckets

    if choice.has_trees:
        assert derive is not None
        if str(dist.get_backend(group)) not in BACKENDS:  # such as "cpu:gloo,cuda:nccl"
            group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return _MessagePrograms(ranks, group, derive, limit)
    buckets = SharedBuckets.open(group, timeout_s=limit)
    return None if buckets is None else _SharedMemory(buckets)
