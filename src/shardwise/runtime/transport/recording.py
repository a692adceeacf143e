"""A transport that records its collectives: what travels, which rank waits for it, and why.

While the recorder is paused, a collective costs one extra call. Each has a cause: "gradients" for
their sums, "parameters" for units gathered for use, "update" for what an optimizer changed, and
"collectives" for all others of generated code. Messages between stages are recorded by
`pipeline.p2p`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.runtime.tracing import Recorder
from shardwise.runtime.transport.base import Group, Pending, Transport

__all__ = ["RecordingTransport", "unwrap_transport"]


class RecordingTransport:
    """Notes the collectives of another transport."""

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
