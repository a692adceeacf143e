"""Choose the implementation of each collective: the library's, or one that the plan names.

A transport asks `CollectiveBackends` first and gets a `Pending`, or None where the library runs it.
The answer depends on the operation, the group and the sizes alone, so all ranks of a group agree.
Other implementations, programs of messages and memory that ranks of a host share, run in a
`CommunicationThread` and are imported on first use, since most plans have none.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.messages import CollectiveChoice, MessageProgram
from shardwise.dtypes import torch_dtypes
from shardwise.errors import ProgramError, RankError
from shardwise.runtime.transport import Group, Pending

if TYPE_CHECKING:
    from shardwise.runtime.collectives.shared_memory import SharedBuckets


class Handle:
    """A collective that runs."""

    def __init__(self, limit_s: float) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._limit_s = limit_s

    def done(self) -> bool:
        """Return whether the collective has ended, successfully or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the collective has ended; raise its error if it failed."""
        limit = self._limit_s if timeout_s is None else timeout_s
        if not self._over.wait(limit):
            raise RankError(f"a collective is not over after {limit:g} s")
        if self._error is not None:
            raise self._error

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._over.set()


class _Jobs:
    """What the thread works on; it holds nothing of the thread's owner."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Callable[[], None], Handle] | None] = (
            queue.SimpleQueue()
        )
        self.failed: BaseException | None = None

    def work(self) -> None:
        while (result := self.waiting.get()) is not None:
            job, handle = result
            error = self.failed
            if error is None:
                try:
                    job()
                except BaseException as problem:
                    error = self.failed = problem
            del result, job  # the data of a job live no longer than it
            handle._finish(error)


class CommunicationThread:
    """Run jobs one after the other; end when it is closed or nobody has it any more.

    All ranks submit their jobs in the same order. After a job has failed, connections are in an
    unknown state: all later jobs fail with its error.
    """

    def __init__(self, name: str) -> None:
        self._jobs = _Jobs()
        self._last: Handle | None = None
        self._thread = threading.Thread(target=self._jobs.work, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.waiting.put, None)
        self._end.atexit = False  # a daemon thread needs no end then

    @property
    def failed(self) -> BaseException | None:
        """Why nothing can be done any more."""
        return self._jobs.failed

    def start(self, job: Callable[[], None], limit_s: float) -> Handle:
        """Do `job`, which takes at most `limit_s`, after all that was given before."""
        if self._end.alive is False:
            raise RankError("a collective was started after `close`")
        before = self._last
        ahead = 0.0 if before is None or before.done() else before._limit_s
        handle = self._last = Handle(limit_s + ahead)
        self._jobs.waiting.put((job, handle))
        return handle

    def close(self, timeout_s: float) -> bool:
        """End after what was given, or leave it to itself when that takes too long; whether it has
        ended.
        """
        self._end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


Ranks = tuple[int, ...]
Derive = Callable[[CollectiveChoice, Ranks, int, int, Sequence[int]], MessageProgram | None]
ADDED = torch_dtypes(can_train=True)
DEFAULT_TIMEOUT_S = 300.0


class _Implementation(Protocol):
    """Does operations of one group, in place."""

    on_host: bool  # whether tensors must be in host memory

    def start(self, choice: CollectiveChoice, data: Tensor, counts: Sequence[int]) -> Handle: ...


class _Messages:
    """Programs of messages."""

    def __init__(
        self, ranks: Ranks, group: dist.ProcessGroup, derive: Derive, limit: float
    ) -> None:
        from shardwise.runtime.collectives.messenger import Messenger

        self.ranks, self.derive = ranks, derive
        self.messenger = Messenger(group, timeout_s=limit)
        self.on_host = self.messenger.backend != "nccl"
        self.programs: dict[object, MessageProgram] = {}

    def start(self, choice: CollectiveChoice, data: Tensor, counts: Sequence[int]) -> Handle:
        key = (choice.operation, data.numel(), data.element_size(), tuple(counts))
        if key not in self.programs:
            made = self.derive(choice, self.ranks, data.numel(), data.element_size(), counts)
            assert made is not None, key  # `CollectiveBackends` asks for what the choice takes
            self.programs[key] = made
        return self.messenger.start(self.programs[key], data)


class _Memory:
    """Memory that the ranks share."""

    on_host = True

    def __init__(self, buckets: SharedBuckets) -> None:
        self.buckets = buckets

    def start(self, choice: CollectiveChoice, data: Tensor, counts: Sequence[int]) -> Handle:
        if choice.operation == "all_reduce":
            return self.buckets.all_reduce(data)
        if choice.operation == "reduce_scatter":
            return self.buckets.reduce_scatter(data, counts)
        return self.buckets.all_gather(data, counts)


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
        self._of: dict[tuple[str, Ranks], tuple[CollectiveChoice, _Implementation]] = {}
        known: dict[tuple[bool, Ranks], _Implementation | None] = {}
        for choice in choices:
            for ranks in choice.groups if derive is not None and not choice.is_library else ():
                if dist.get_rank() not in ranks:
                    continue
                group = (groups or {}).get(ranks)
                if group is None:
                    raise ProgramError(
                        f"the plan solves a collective of ranks {ranks}, which share no group",
                        hint="sw.collectives.choose(plan, cluster)",
                    )
                key = (choice.has_trees, ranks)
                if key not in known:
                    known[key] = _open(choice, ranks, group, derive, timeout_s or DEFAULT_TIMEOUT_S)
                way = known[key]
                if way is not None:
                    self._of[choice.operation, ranks] = (choice, way)

    def bucket(self, numel: int, dtype: torch.dtype, operation: str, group: Group) -> Tensor | None:
        """Return a flat tensor in the group's shared memory, if this operation goes through it."""
        result = self._of.get((operation, group.ranks))
        if result is None or not isinstance(result[1], _Memory) or dtype not in ADDED:
            return None
        if not numel or numel * dtype.itemsize < result[0].min_bytes:
            return None
        return result[1].buckets.allocate(numel, dtype)

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending | None:
        """Sum in place."""
        added = op == "sum" and flat.dtype in ADDED
        result = self._find("all_reduce", group, flat.nbytes) if added else None
        if result is None:
            return None
        choice, way = result
        host = flat.cpu() if flat.is_cuda and way.on_host else flat
        handle = way.start(choice, host, ())
        return _after(flat, handle, None if host is flat else lambda: flat.copy_(host))

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending | None:
        """Return this rank's part of the sum; `flat` is unchanged unless it is a `bucket`."""
        added = flat.dtype in ADDED
        result = self._find("reduce_scatter", group, flat.nbytes) if added else None
        if result is None:
            return None
        choice, way = result
        resident = isinstance(way, _Memory) and way.buckets.is_resident(flat)
        data = flat.cpu() if flat.is_cuda and way.on_host else flat if resident else flat.clone()
        handle = way.start(choice, data, sizes)
        first, count = sum(sizes[: group.index]), sizes[group.index]

        def mine(_: Tensor) -> Tensor:
            # A copy: a slice would keep the full memory alive.
            return data[first : first + count].to(flat.device, copy=True)

        return _after(data, handle).then(mine)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None
    ) -> Pending | None:
        """Return all ranks' parts, as bytes of any dtype."""
        unit = flat.element_size()
        result = self._find("all_gather", group, sum(sizes) * unit)
        if result is None:
            return None
        choice, way = result
        full = flat.new_empty(sum(sizes)) if out is None else out
        # Memory that others read cannot be resized any more, as zero 3 does with what it gathers.
        staged = (full.is_cuda and way.on_host) or isinstance(way, _Memory)
        host = torch.empty(full.shape, dtype=full.dtype) if staged else full
        part = host[sum(sizes[: group.index]) :][: sizes[group.index]]
        if part.data_ptr() != flat.data_ptr():
            part.copy_(flat)
        handle = way.start(choice, host.view(torch.uint8), [size * unit for size in sizes])
        return _after(full, handle, (lambda: full.copy_(host)) if staged else None)

    def _find(
        self, operation: str, group: Group, num_bytes: int
    ) -> tuple[CollectiveChoice, _Implementation] | None:
        result = self._of.get((operation, group.ranks))
        if result is None or not num_bytes or num_bytes < result[0].min_bytes:
            return None
        self.started += 1
        return result


def _open(
    choice: CollectiveChoice,
    ranks: Ranks,
    group: dist.ProcessGroup,
    derive: Derive | None,
    limit: float,
) -> _Implementation | None:
    """Open a group's implementation; None on all of its ranks where they cannot share memory."""
    from shardwise.runtime.collectives.messenger import BACKENDS
    from shardwise.runtime.collectives.shared_memory import SharedBuckets

    if choice.has_trees:
        assert derive is not None
        if str(dist.get_backend(group)) not in BACKENDS:  # several: messages need one
            group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return _Messages(ranks, group, derive, limit)
    buckets = SharedBuckets.open(group, timeout_s=limit)
    return None if buckets is None else _Memory(buckets)


def _after(result: Tensor, handle: Handle, finish: Callable[[], object] | None = None) -> Pending:
    def done() -> None:
        handle.wait()
        if finish is not None:
            finish()

    return Pending(result, done)
