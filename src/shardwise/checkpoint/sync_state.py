"""Save and load the state of inexact synchronization.

Sections `sync.<key>` have tensors by the names of parameters. Those that differ between ranks have
a first dim of ranks. On another number of ranks, residuals keep their sum over ranks, of which each
rank gets an equal part; replicas, and their optimizer state, continue from their mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import MODEL, Manifest
from shardwise.checkpoint.shards import MEAN, SUM, LocalBox, ParallelState, State, TensorShards
from shardwise.errors import CheckpointError
from shardwise.runtime.parameters import Entry
from shardwise.runtime.sync_state import Sent
from shardwise.runtime.transport import Pending
from shardwise.schema import Reader

Targets = list[tuple[str, TensorShards]]
Sections = dict[str, list[TensorShards]]


def sync_numbers(state: State) -> dict[str, Any]:
    """Return the counters of inexact synchronization, as JSON."""
    if not isinstance(state, ParallelState) or not _entries(state):
        return {}
    sync = state.store.reducer.state
    return {"sync": {"step": sync.step, "updates": dict(sync.updates)}}


def _entries(state: ParallelState) -> list[Entry]:
    return [entry for entry in state.store.entries if entry.spec.inexact is not None]


def save_sync(state: State) -> Sections:
    """Return this rank's part of the state; sums that are in flight are completed first."""
    sections: Sections = {}
    if not isinstance(state, ParallelState):
        return sections
    sync = state.store.reducer.state

    def add(key: str, shards: TensorShards) -> None:
        sections.setdefault(f"sync.{key}", []).append(replace(shards, volatile=True))

    for entry in _entries(state):
        name = entry.spec.name
        for number, pending in enumerate(sync.late.get(name, ())):
            grad = pending.wait()
            if entry.zero >= 2:  # owned by one rank each
                add(f"late_{number}", state.sharded(name, grad.view(entry.piece.shape)))
            else:
                add(f"late_{number}", state.shared(entry, grad))
        if name in sync.feedback.residuals:
            add("residual", state.per_rank(entry, sync.feedback.residuals[name], SUM))
        if name in sync.feedback.warm:
            add("warm", state.replicated(name, sync.feedback.warm[name]))
        if name in sync.anchors:
            add("replica", state.per_rank(entry, entry.piece.detach(), MEAN))
        if name in sync.momenta:
            add("momentum", state.shared(entry, sync.momenta[name]))
        if name in sync.sent:
            add("round", state.shared(entry, sync.sent[name].mean.wait()))
            add("before", state.per_rank(entry, sync.sent[name].before, MEAN))
    return sections


def load_sync(
    state: State, manifest: Manifest, stored_names: Mapping[str, str]
) -> tuple[Targets, Callable[[], None]]:
    """Allocate the state that a checkpoint has; return the targets, and a function to call after.

    Without it, for example from synchronous training, parameters begin a new round.
    """
    targets: Targets = []
    if not isinstance(state, ParallelState):
        return targets, lambda: None
    store, sync, replicas = state.store, state.store.reducer.state, list[tuple[Entry, Tensor]]()
    saved = manifest.module.get("sync", {})
    reader = Reader(CheckpointError, "the state of synchronization in the checkpoint")
    step = reader.read(int, saved.get("step", 0), ("sync", "step"))
    updates = reader.read(Mapping[str, int], saved.get("updates", {}), ("sync", "updates"))

    def empty(entry: Entry, section: str, merge: str = "") -> Tensor | None:
        """Return memory for a tensor like the parameter, or None if the checkpoint has none."""
        name = entry.spec.name
        if stored_names.get(name, name) not in manifest.sections.get(section, {}):
            return None
        owned = entry.zero >= 2
        shape = entry.piece.shape if owned else entry.local_shape
        tensor = torch.empty(shape, dtype=entry.master, device=store.device)
        make = partial(state.per_rank, merge=merge) if merge else state.shared
        shards = state.sharded(name, tensor) if owned else make(entry, tensor)
        targets.append((section, shards))
        return tensor

    for entry in _entries(state):
        name = entry.spec.name
        stored = stored_names.get(name, name)
        sync.forget(name)
        for number in count():
            if (tensor := empty(entry, f"sync.late_{number}")) is None:
                break
            sync.late[name].append(Pending(tensor.view(-1)))
        if (residual := empty(entry, "sync.residual", SUM)) is not None:
            sync.feedback.residuals[name] = residual.view(-1)
        if (warm := manifest.sections.get("sync.warm", {}).get(stored)) is not None:
            factors = torch.empty(warm.shape, dtype=entry.master, device=store.device)
            targets.append(("sync.warm", state.replicated(name, factors)))
            sync.feedback.warm[name] = factors
        if (replica := empty(entry, "sync.replica", MEAN)) is None:
            continue
        replicas.append((entry, replica))
        anchor = empty(entry, MODEL)
        assert anchor is not None
        sync.anchors[name], sync.updates[name] = anchor, updates.get(stored, 0)
        if (momentum := empty(entry, "sync.momentum")) is not None:
            sync.momenta[name] = momentum
        mean, before = empty(entry, "sync.round"), empty(entry, "sync.before", MEAN)
        if mean is not None and before is not None:
            sync.sent[name] = Sent(Pending(mean.view(-1)), before)

    def finish() -> None:
        sync.step = step
        for entry, replica in replicas:
            entry.piece.detach().copy_(replica)
            store.value_changed(entry)

    return targets, finish


def fill_boxes(
    shards: TensorShards, stored: tuple[int, ...]
) -> tuple[list[LocalBox], Callable[[], None]] | None:
    """Return the boxes to read from a tensor of other ranks, and a function to call after.

    None if the shapes do not belong to the same tensor.
    """
    full = shards.shape[1:] if shards.merge else shards.shape
    if stored == shards.shape:
        return list(shards.boxes), lambda: None
    boxes = [LocalBox(b.box.inner(), b.view[0]) if shards.merge else b for b in shards.boxes]
    if stored == full:  # the same on all ranks
        return boxes, lambda: None
    # A vector for a scalar is state of another shape, unless each rank has its own scalar.
    if stored[1:] != full or not (full or shards.merge):
        return None
    stacks = [torch.empty((stored[0], *b.box.size), dtype=b.view.dtype) for b in boxes]

    def merge() -> None:
        ranks = shards.shape[0] if shards.merge == SUM else stored[0]
        for local, stack in zip(boxes, stacks, strict=True):
            local.view.copy_(stack.sum(0) / ranks)

    pairs = zip(boxes, stacks, strict=True)
    return [LocalBox(b.box.on_ranks(0, stored[0]), stack) for b, stack in pairs], merge
