"""Whole tensors out of a parallel module, one after the other.

Enters: this rank's part of a model. Leaves: every parameter and persistent buffer as one device has
it, the same on all ranks; only one of them is whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.runtime import ParallelModule, share_lists
from shardwise.runtime.parameters import torch_dtype

__all__ = ["whole_tensors"]


def whole_tensors(parallel: ParallelModule, *, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, whole, one after the other; all ranks go through it."""
    store, mesh = parallel.store, parallel.mesh
    entries = {
        e.spec.name: e for e in store.entries if not e.spec.borrowed and (frozen or e.trained)
    }
    mine = [[name, list(e.spec.shape), str(e.master)] for name, e in entries.items()]
    for spec in store.buffer_specs:
        if spec.persistent:
            mine.append([spec.name, list(spec.shape), str(store.buffers[spec.name].dtype)])
    seen: set[str] = set()
    here = mesh.ranks[mesh.rank]
    for ranks, table in zip(mesh.groups, share_lists(mesh, mine, store.device), strict=True):
        root = mesh.everyone.ranks.index(ranks[0])
        for name, shape, dtype in table:
            if name in seen:
                continue
            seen.add(name)
            if here in ranks:
                found = _whole(parallel, name)
            else:
                found = torch.empty(shape, dtype=torch_dtype(dtype), device=store.device)
            if len(mesh.groups) > 1:
                found = found.to(store.device).contiguous()
                found = mesh.everyone.broadcast(found, root).wait()
            yield name, found


def _whole(parallel: ParallelModule, name: str) -> Tensor:
    store = parallel.store
    if name in store.buffers:
        return store.buffers[name].clone()
    entry = store.entry(name)
    value, piece = store.stored(entry)
    return store.gather_full(entry, value, piece=piece)
