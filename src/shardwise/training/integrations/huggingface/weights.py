"""Weights between the user's model, which is whole, and this rank's part of it.

Enters: a model and a parallel module. Leaves: nothing; one or the other has been filled. One
tensor is whole at a time.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.runtime import ParallelModule
from shardwise.training.whole import whole_tensors


def on_meta(model: nn.Module) -> bool:
    """Whether the model has parameters without data."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def pull(parallel: ParallelModule, model: nn.Module) -> None:
    """Give the user's model what was trained; all ranks call it. On meta it stays as it is."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    # Frozen parameters are as the model has them, unless they came from another rank.
    for name, found in whole_tensors(parallel, frozen=parallel.store.received_weights):
        if not tensors[name].is_meta:
            tensors[name].copy_(found)
    parallel.copies += 1


@torch.no_grad()
def push(model: nn.Module, parallel: ParallelModule) -> None:
    """Take this rank's part of the user's model."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    store = parallel.store
    for name in (*(e.spec.name for e in store.entries), *store.buffers):
        if not tensors[name].is_meta:
            store.load_full(name, tensors[name].detach())
