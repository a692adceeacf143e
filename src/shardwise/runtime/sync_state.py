"""The state of inexact synchronization: residuals, late gradients, and the last round of replicas.

Everything in a `SyncState` outlives a step, and is part of checkpoints.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.runtime.compression import CompressedSum, Feedback, compressed_sum, joined
from shardwise.runtime.mesh import Axis
from shardwise.runtime.parameters import Entry
from shardwise.runtime.transport import Pending


class Sent(NamedTuple):
    """A parameter's part of a round that has not taken effect yet."""

    mean: Pending  # of the differences between the last round and the replicas
    before: Tensor  # this rank's replica when it was sent


@dataclass(slots=True)
class SyncState:
    """All state by the names of parameters.

    `step` counts training steps and `updates` a parameter's optimizer steps. `late` are the sums of
    gradients that have yet to take effect, the oldest first. `anchors` are the parameters after the
    last round, and `momenta` those of the outer optimizer. `ages` counts the updates of a replica
    that no other rank has received.
    """

    feedback: Feedback = field(default_factory=Feedback)
    late: dict[str, deque[Pending]] = field(default_factory=lambda: defaultdict(deque))
    anchors: dict[str, Tensor] = field(default_factory=dict)
    momenta: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, Sent] = field(default_factory=dict)
    step: int = 0
    updates: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ages: dict[str, int] = field(default_factory=dict)
    _sums: dict[tuple[Any, ...], CompressedSum] = field(default_factory=dict)

    def start(
        self,
        entries: Sequence[Entry],
        values: Sequence[Tensor],
        axis: Axis,
        dtype: torch.dtype,
        number: int,
    ) -> Pending:
        """Start sum `number` of flat tensors over an axis, in `dtype` unless it is compressed."""
        inexact = entries[0].spec.inexact
        assert inexact is not None
        if inexact.compression is None:
            return axis.all_reduce(joined(values).to(dtype))
        names = tuple(entry.spec.name for entry in entries)
        if (names, axis.name) not in self._sums:
            shapes = [entry.local_shape for entry in entries]
            total = compressed_sum(inexact.compression, names, shapes, axis, self.feedback)
            self._sums[names, axis.name] = total
        return self._sums[names, axis.name].start(values, number)

    def arrive(self, entries: Sequence[Entry], pending: Pending) -> Iterator[tuple[Entry, Tensor]]:
        """Add a sum to the late gradients; yield those that take effect in this step."""
        inexact = entries[0].spec.inexact
        assert inexact is not None
        if inexact.compression is not None:  # the next message needs its residuals
            pending.wait()
        for entry, part in zip(entries, split(entries, pending), strict=True):
            queue = self.late[entry.spec.name]
            queue.append(part)
            if len(queue) > inexact.stale:
                yield entry, queue.popleft().wait()

    def figures(self) -> dict[str, float]:
        """Return the highest number of steps whose gradients have yet to arrive on this or other
        ranks, and the largest relative error of a compressed sum, if they are measured.
        """
        ages = [*map(len, self.late.values()), *self.ages.values()]
        lists = {"staleness": ages, "compression_error": self.feedback.errors.values()}
        return {name: float(max(values)) for name, values in lists.items() if values}

    def forget(self, name: str) -> None:
        """Begin a new round with the values that a parameter was just given."""
        for state in (self.anchors, self.momenta, self.sent, self.late, self.updates):
            state.pop(name, None)
        self.feedback.residuals.pop(name, None)
        self.feedback.warm.pop(name, None)


def split(entries: Sequence[Entry], pending: Pending) -> list[Pending]:
    """Return each entry's part of a flat tensor in flight; the rank's piece of it, with owners."""
    sizes = [e.piece.numel() if e.zero >= 2 else e.numel for e in entries]
    return [
        pending.then(lambda flat, i=index: flat.split(sizes)[i])  # type: ignore[misc]
        for index in range(len(entries))
    ]
