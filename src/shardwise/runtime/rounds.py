"""Combine replicas that ranks train on their own, after every few updates: local SGD and DiLoCo.

Between rounds, each rank's optimizer updates its own replica. A round sums the differences from the
last round over ranks. Its result is the mean of the replicas, or a step of the outer optimizer from
the last round; each replica keeps the updates that it made after its difference was sent.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.runtime.grad_sync import sync_axis
from shardwise.runtime.parameters import Entry
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.sync_state import Sent, split


class Rounds:
    """Combine the replicas of an optimizer's parameters, in fragments, after its updates."""

    def __init__(self, store: ParameterStore, entries: Iterable[Entry]) -> None:
        self.store, self.state = store, store.reducer.state
        trained = {e for e in entries if e.spec.is_local and e.trained}
        fragments: dict[tuple[Any, ...], list[Entry]] = {}
        for inexact in dict.fromkeys(e.spec.inexact for e in store.entries if e in trained):
            assert inexact is not None
            equals = [e for e in store.entries if e.spec.inexact == inexact and e.trained]
            for place, entry in enumerate(equals):
                if entry in trained:
                    number = place * inexact.fragments // len(equals)
                    key = (inexact, number, sync_axis(entry, store.mesh).name, entry.master)
                    fragments.setdefault(key, []).append(entry)
        self.fragments = [(key[1], members) for key, members in fragments.items()]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the parameters before the first update of a round."""
        for _, entries in self.fragments:
            for entry in entries:
                if entry.spec.name not in self.state.anchors:
                    self.state.anchors[entry.spec.name] = entry.piece.detach().clone()

    @torch.no_grad()
    def finish(self) -> None:
        """Count an update; send the differences of due fragments, and apply those that arrive."""
        for number, entries in self.fragments:
            inexact = entries[0].spec.inexact
            assert inexact is not None
            for entry in entries:
                self.state.updates[entry.spec.name] += 1
            offset = number * inexact.every // inexact.fragments
            due = self.state.updates[entries[0].spec.name] + offset
            if due % inexact.every == 0:
                self._send(entries, due // inexact.every - 1)
            if due % inexact.every == inexact.overlap and entries[0].spec.name in self.state.sent:
                for entry in entries:
                    self._apply(entry)
            for entry in entries:
                name, since = entry.spec.name, due % inexact.every
                since += inexact.every * (name in self.state.sent)
                self.state.ages[name] = min(since, self.state.updates[name])

    def _send(self, entries: Sequence[Entry], number: int) -> None:
        axis, anchors = sync_axis(entries[0], self.store.mesh), self.state.anchors
        differences = [anchors[e.spec.name].sub(e.piece.detach()).view(-1) for e in entries]
        dtype = entries[0].reduce_dtype
        total = self.state.start(entries, differences, axis.about("rounds"), dtype, number)
        for entry, part in zip(entries, split(entries, total), strict=True):
            mean = part.then(lambda flat, e=entry: flat.to(e.master) / axis.size)  # type: ignore[misc]
            self.state.sent[entry.spec.name] = Sent(mean, entry.piece.detach().clone())

    def _apply(self, entry: Entry) -> None:
        name, inexact = entry.spec.name, entry.spec.inexact
        assert inexact is not None
        sent, anchor = self.state.sent.pop(name), self.state.anchors[name]
        mean = sent.mean.wait().view_as(anchor)
        if inexact.outer is None:
            anchor.sub_(mean)
        else:
            outer = inexact.outer
            if outer.momentum:
                momentum = self.state.momenta.setdefault(name, torch.zeros_like(anchor))
                momentum.mul_(outer.momentum).add_(mean)
                mean = mean.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
            anchor.sub_(mean, alpha=outer.lr)
        piece = entry.piece.detach()
        piece.copy_(anchor + (piece - sent.before))
        self.store.value_changed(entry)
