"""Parameters that several stages use: keep them equal, and sum their gradients once.

The first stage that uses a parameter owns it; the others hold replicas. After a backward they send
their gradients to the owner, which adds them; after an optimizer step the owner sends the new
value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

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
    """A parameter, and how the ranks of every stage that uses it hold it; its home first."""

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
            home, *others = groups.values()
            for other in others:
                self._links.append((tied, home, other, _TAGS + 2 * number))
                number += 1
        if self._links:
            store.after_update.append(self.share_values)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add what borrowers found to the gradients at home; all ranks call it after a step."""
        store, sends, arrivals = self.store, [], []
        for tied, home, other, tag in self._links:
            if not tied.trained or self.rank not in (*home.ranks, *other.ranks):
                continue
            route, entry = Route(self.rank, other, home), store.entry(tied.name)
            if self.rank in other.ranks:
                grad = store.gradient(entry)
                if grad is None:
                    grad = torch.zeros(
                        entry.local_shape, dtype=self._dtype(tied), device=store.device
                    )
                sends += route.send(store.mesh.transport, grad.to(self._dtype(tied)), tag)
            else:
                arrival = route.receive(store.mesh.transport, self._dtype(tied), store.device, tag)
                arrivals.append((entry, arrival))
        for entry, arrival in arrivals:
            store.add_to_gradient(entry, arrival.wait())
        for send in sends:
            send.wait()

    @torch.no_grad()
    def share_values(self) -> None:
        """Give borrowers the values that are at home; all ranks call it after an update."""
        store, sends, arrivals = self.store, [], []
        for tied, home, other, tag in self._links:
            if self.rank not in (*home.ranks, *other.ranks):
                continue
            route, entry = Route(self.rank, home, other), store.entry(tied.name)
            if self.rank in home.ranks:
                value = store.local_value(entry)
                sends += route.send(
                    store.mesh.transport, value.to(self._dtype(tied)).contiguous(), tag + 1
                )
            else:
                arrival = route.receive(
                    store.mesh.transport, self._dtype(tied), store.device, tag + 1
                )
                arrivals.append((entry, arrival))
        for entry, arrival in arrivals:
            store.set_local(entry, arrival.wait())
        for send in sends:
            send.wait()

    def _dtype(self, tied: TiedSpec) -> torch.dtype:
        return torch_dtype(tied.dtype)


def _entry(store: ParameterStore, name: str) -> Entry:
    return store.entry(name)
