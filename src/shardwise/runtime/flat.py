"""Parameters as this rank holds them, alone or as a range of a flat buffer.

An `Entry` is one parameter on this rank. With zero >= 1, entries of one unit, type and set of
synchronizing axes form a `FlatGroup`: their local tensors one after the other, of which each rank
of the axis owns one consecutive range. An owner's `pieces` are what its optimizer works on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from shardwise.runtime.mesh import Axis, part
from shardwise.runtime.parameters import ParameterSpec
from shardwise.runtime.transport import Pending

__all__ = ["Entry", "FlatGroup"]


class Entry:
    """One parameter on this rank.

    `leaf` is what the forward uses and autograd accumulates into; `shown` is what
    `pm.parameters()` shows between steps; `piece` is what the optimizer updates. For zero 0 the
    three are one; for zero 3 `shown` is the piece. `parts` are the parts of the program (pipeline
    stages) on this rank that use it.
    """

    __slots__ = (
        *("bounds", "group", "leaf", "local_shape", "parts", "piece", "shown", "slots", "spec"),
    )

    def __init__(self, spec: ParameterSpec, local_shape: tuple[int, ...]) -> None:
        self.spec, self.local_shape = spec, local_shape
        self.bounds = (0, math.prod(local_shape))
        self.group: FlatGroup | None = None
        self.parts: set[Hashable] = set()
        self.slots: list[tuple[nn.Module, str]] = []
        self.leaf: nn.Parameter
        self.shown: nn.Parameter
        self.piece: nn.Parameter

    def __repr__(self) -> str:
        return f"Entry({self.spec.name}, {self.local_shape}, zero={self.spec.zero})"

    @property
    def zero(self) -> int:
        return self.spec.zero if self.group is not None else 0

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    def show(self, parameter: nn.Parameter) -> None:
        """Make the modules hold this parameter."""
        for owner, name in self.slots:
            owner._parameters[name] = parameter

    def own_whole(self, device: torch.device, dtype: torch.dtype) -> None:
        """Give the parameter its own memory (zero 0)."""
        made = torch.empty(self.local_shape, dtype=dtype, device=device)
        self.leaf = nn.Parameter(made, requires_grad=self.spec.requires_grad)
        self.shown = self.piece = self.leaf


class FlatGroup:
    """Several entries as one flat buffer that the ranks of an axis own in ranges."""

    def __init__(
        self, entries: Sequence[Entry], axis: Axis, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.entries, self.axis = tuple(entries), axis
        self.zero = self.entries[0].spec.zero
        self.numel = sum(entry.numel for entry in self.entries)
        self.sizes = [part(self.numel, axis.size, i)[1] for i in range(axis.size)]
        self.offsets = list(itertools.accumulate((e.numel for e in self.entries), initial=0))
        self.full = torch.empty(self.numel, dtype=dtype, device=device)
        begin, length = part(self.numel, axis.size, axis.index)
        if self.zero == 3:
            self.shard = torch.empty(length, dtype=dtype, device=device)
        else:
            self.shard = self.full[begin : begin + length]
        for index, entry in enumerate(self.entries):
            self._adopt(entry, index, begin)
        if self.zero == 3:
            self.free()

    def _adopt(self, entry: Entry, index: int, begin: int) -> None:
        start, trainable = self.offsets[index], entry.spec.requires_grad
        # `.data` has its own version counter: writing the buffer does not invalidate what
        # autograd has saved of the parameter.
        view = self.full[start : start + entry.numel].view(entry.local_shape).data
        entry.leaf = nn.Parameter(view, requires_grad=trainable)
        entry.group, entry.bounds = self, self.bounds(index, self.axis.index)
        low, high = entry.bounds
        mine = self.shard[max(start - begin, 0) :][: high - low].data
        entry.piece = nn.Parameter(mine, requires_grad=trainable)
        entry.shown = entry.piece if self.zero == 3 else entry.leaf

    def bounds(self, index: int, rank: int) -> tuple[int, int]:
        """Which elements of entry `index` the axis' rank owns, within the entry."""
        begin, length = part(self.numel, self.axis.size, rank)
        start, numel = self.offsets[index], self.entries[index].numel
        low = min(max(begin - start, 0), numel)
        return low, min(max(begin + length - start, low), numel)

    def piece_sizes(self, entry: Entry) -> list[int]:
        """How many elements of the entry each rank of the axis owns."""
        index = self.entries.index(entry)
        ends = [self.bounds(index, rank) for rank in range(self.axis.size)]
        return [high - low for low, high in ends]

    def pieces_of(self, shard: Tensor) -> list[Tensor]:
        """A tensor like the shard, cut into this rank's pieces of the entries."""
        return list(torch.split(shard, [e.bounds[1] - e.bounds[0] for e in self.entries]))

    def gather(self) -> Pending:
        """Bring all ranks' shards together in the full buffer."""
        if self.zero == 3:
            storage = self.full.untyped_storage()
            storage.resize_(self.numel * self.full.element_size())
        return self.axis.all_gather(self.shard, self.sizes, out=self.full)

    def free(self) -> None:
        """Let the full buffer's memory go (zero 3)."""
        self.full.untyped_storage().resize_(0)
