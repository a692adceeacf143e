"""Parameters that several stages use: keep them equal, and sum their gradients once.

The first stage that uses a parameter owns it; the others hold replicas. After a backward they send
their gradients to the owner, which adds them; after an optimizer step the owner sends the new
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.pipeline.transfers import Holding, Route
from shardwise.runtime.splits import Split
from shardwise.runtime.store import ParameterStore

if TYPE_CHECKING:
    from shardwise.runtime.pipeline.spec import PipelineSpec

__all__ = ["TiedParameters", "TiedSpec"]


_TAGS = 1 << 20  # above the tags of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSpec:
    """A parameter, and how the ranks of every stage that uses it hold it; its owner first."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stages: tuple[int, ...]
    splits: tuple[tuple[Split, ...], ...]
    trained: bool = True


class TiedParameters:
    """Exchanges the gradients and values of parameters that live on several groups of ranks."""

    def __init__(self, spec: PipelineSpec, store: ParameterStore, rank: int) -> None:
        self.store, self.rank = store, rank
        self._links: list[tuple[TiedSpec, Holding, Holding, int]] = []
        number = 0
        for tied in spec.tied:
            groups: dict[tuple[int, ...], Holding] = {}
            for stage, splits in zip(tied.stages, tied.splits, strict=True):
                ranks, axes = spec.stages[stage].ranks, spec.stages[stage].axes
                groups.setdefault(ranks, Holding(ranks, axes, tied.shape, splits, {}))
            owner, *others = groups.values()
            for other in others:
                self._links.append((tied, owner, other, _TAGS + 2 * number))
                number += 1
        if self._links:
            store.after_update.append(self.share_values)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of replicas to those of owners; all ranks call it after a step."""

        def gradient(entry: Entry, dtype: torch.dtype) -> Tensor:
            grad = self.store.gradient(entry)
            if grad is None:
                return torch.zeros(entry.local_shape, dtype=dtype, device=self.store.device)
            return grad.to(dtype)

        links = [(t, other, owner, tag) for t, owner, other, tag in self._links if t.trained]
        self._exchange(links, gradient, self.store.add_to_gradient)

    @torch.no_grad()
    def share_values(self) -> None:
        """Give replicas the values of their owners; all ranks call it after an update."""

        def value(entry: Entry, dtype: torch.dtype) -> Tensor:
            return self.store.local_value(entry).to(dtype).contiguous()

        links = [(t, owner, other, tag + 1) for t, owner, other, tag in self._links]
        self._exchange(links, value, self.store.set_local)

    def _exchange(
        self,
        links: Sequence[tuple[TiedSpec, Holding, Holding, int]],
        read: Callable[[Entry, torch.dtype], Tensor],
        write: Callable[[Entry, Tensor], object],
    ) -> None:
        """Send what `read` returns from each link's first holding; `write` it on the second."""
        store, sends, arrivals = self.store, [], []
        for tied, source, target, tag in links:
            if self.rank not in (*source.ranks, *target.ranks):
                continue
            route, entry, dtype = (
                Route(self.rank, source, target),
                store.entry(tied.name),
                torch_dtype(tied.dtype),
            )
            if self.rank in source.ranks:
                sends += route.send(store.mesh.transport, read(entry, dtype), tag)
            else:
                arrival = route.receive(store.mesh.transport, dtype, store.device, tag)
                arrivals.append((entry, arrival))
        for entry, arrival in arrivals:
            write(entry, arrival.wait())
        for send in sends:
            send.wait()
