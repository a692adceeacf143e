"""What a transport between ranks offers, the transport of a single rank, and one that records.

A transport moves 1-D contiguous tensors within a `Group` of ranks. Everything that knows about
dims, splits and gradients is built on these operations. Each returns at once with a `Pending`,
whose `wait()` returns the result. All ranks of a group call the same operations in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.runtime.tracing import Recorder

__all__ = [
    "Group",
    "LocalTransport",
    "Pending",
    "RecordingTransport",
    "Transport",
    "unwrap_transport",
]


@dataclass(frozen=True, slots=True)
class Group:
    """Global ranks in ascending order, and this rank's place among them."""

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


class Pending:
    """A tensor in flight; `wait()` returns it, any number of times."""

    __slots__ = ("_finish", "_result")

    def __init__(self, result: Tensor, finish: Callable[[], None] | None = None) -> None:
        self._result, self._finish = result, finish

    def wait(self) -> Tensor:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return self._result

    @property
    def is_done(self) -> bool:
        """Whether waiting is known to take no time."""
        return self._finish is None

    def then(self, after: Callable[[Tensor], Tensor]) -> Pending:
        """Return this tensor transformed once it has arrived."""
        chained = Pending(self._result)

        def finish() -> None:
            chained._result = after(self.wait())

        chained._finish = finish
        return chained

    def within(self, context: Callable[[], AbstractContextManager[object]]) -> Pending:
        """Return the same tensor, waited for inside a context."""
        inside = Pending(self._result)

        def finish() -> None:
            with context():
                inside._result = self.wait()

        inside._finish = finish
        return inside


class Transport(Protocol):
    """Moves flat tensors between the ranks of a group."""

    rank: int
    world_size: int

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        """Reduce in place with `op` ("sum", "max", "min"); the same bits on every rank."""
        ...

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        """Concatenate everyone's `flat`, rank i having `sizes[i]` elements.

        `flat` may be the very slice of `out` that it belongs to.
        """
        ...

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        """Sum everyone's `flat`, and keep this rank's of the consecutive parts of `sizes`."""
        ...

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        """Send part i of `flat` to rank i; concatenate what arrived in the order of ranks."""
        ...

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        """Overwrite `flat` with that of the group's `root`-th rank."""
        ...

    def send(self, flat: Tensor, target: int, tag: int) -> Pending:
        """Send to one rank; messages of one tag arrive in the order they were sent."""
        ...

    def receive(self, flat: Tensor, source: int, tag: int) -> Pending:
        """Overwrite `flat` with what one rank sent."""
        ...


class LocalTransport:
    """The transport of a single rank: no operation is ever needed."""

    rank = 0
    world_size = 1

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        return Pending(self._alone(flat, group))

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        return Pending(self._alone(flat, group) if out is None else out.copy_(flat))

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        return Pending(self._alone(flat, group))

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        return Pending(self._alone(flat, group))

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        return Pending(self._alone(flat, group))

    def send(self, flat: Tensor, target: int, tag: int) -> Pending:
        raise ProgramError(f"a single rank cannot send to rank {target}")

    def receive(self, flat: Tensor, source: int, tag: int) -> Pending:
        raise ProgramError(f"a single rank cannot receive from rank {source}")

    @staticmethod
    def _alone(flat: Tensor, group: Group) -> Tensor:
        if group.size != 1:
            raise ProgramError(f"a single rank cannot communicate with ranks {group.ranks}")
        return flat


class RecordingTransport:
    """Record the collectives of another transport: what travels, which rank waits for it, and why.

    While the recorder is paused, a collective costs one extra call. Each has a cause: "gradients"
    for their sums, "parameters" for units gathered for use, "update" for what an optimizer changed,
    and "collectives" for all others of generated code. Messages between stages are recorded by
    `pipeline.p2p`.
    """

    def __init__(self, inner: Transport, recorder: Recorder, cause: str = "collectives") -> None:
        self.inner, self.recorder, self.cause = inner, recorder, cause
        self.rank, self.world_size = inner.rank, inner.world_size

    def about(self, cause: str) -> RecordingTransport:
        """Return the same transport, for collectives of another cause."""
        return RecordingTransport(self.inner, self.recorder, cause)

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        return self._noted(
            "all_reduce", flat, group, lambda: self.inner.all_reduce(flat, op, group)
        )

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        return self._noted(
            "all_gather", flat, group, lambda: self.inner.all_gather(flat, sizes, group, out)
        )

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        return self._noted(
            "reduce_scatter", flat, group, lambda: self.inner.reduce_scatter(flat, sizes, group)
        )

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        return self._noted(
            "all_to_all",
            flat,
            group,
            lambda: self.inner.all_to_all(flat, in_sizes, out_sizes, group),
        )

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        return self._noted(
            "broadcast", flat, group, lambda: self.inner.broadcast(flat, root, group)
        )

    def bucket(self, numel: int, dtype: torch.dtype, operation: str, group: Group) -> Tensor | None:
        """Return shared memory, where the transport has some."""
        make = getattr(self.inner, "bucket", None)
        result: Tensor | None = None if make is None else make(numel, dtype, operation, group)
        return result

    def send(self, flat: Tensor, target: int, tag: int) -> Pending:
        return self.inner.send(flat, target, tag)

    def receive(self, flat: Tensor, source: int, tag: int) -> Pending:
        return self.inner.receive(flat, source, tag)

    def _noted(self, op: str, flat: Tensor, group: Group, start: Callable[[], Pending]) -> Pending:
        if not self.recorder.enabled:
            return start()
        details = {"op": op, "bytes": flat.numel() * flat.element_size(), "ranks": group.size}
        travel = self.recorder.span("communication", self.cause, **details)
        travel.__enter__()
        pending = start()

        @contextlib.contextmanager
        def waiting() -> Iterator[None]:
            with self.recorder.span("waiting", self.cause, op=op):
                yield
            travel.__exit__(None, None, None)

        return pending.within(waiting)


def unwrap_transport(transport: Transport) -> Transport:
    """Return the transport that moves the tensors, without recorders around it."""
    return transport.inner if isinstance(transport, RecordingTransport) else transport
