"""Copy trained weights into the user's model; describe a parallel module as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise.errors import PlanMismatch, did_you_mean
from shardwise.formatting import size as format_bytes
from shardwise.runtime.sharing import share

if TYPE_CHECKING:
    from shardwise.runtime.module import ParallelModule

__all__ = ["copy_weights", "describe"]


@torch.no_grad()
def copy_weights(
    pm: ParallelModule, model: nn.Module | Mapping[str, nn.Module] | None, *, strict: bool
) -> None:
    """Copy parameters and persistent buffers into a model, one whole tensor at a time."""
    targets = None if model is None else _targets(model)
    if targets is not None:
        _check(pm, targets, strict)
    for name in pm.names:
        held = share(pm.mesh, _held(pm, name), pm.store.device)
        if targets is not None and name in targets:
            value = held[name]
            assert value is not None, name
            targets[name].copy_(value)


def _targets(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, Tensor]:
    root = model if isinstance(model, nn.Module) else nn.ModuleDict(dict(model))
    found: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    found |= dict(root.named_buffers(remove_duplicate=False))
    return {name: found[name] for name in root.state_dict() if name in found}


def _check(pm: ParallelModule, targets: Mapping[str, Tensor], strict: bool) -> None:
    for name in (*pm.names, *targets):
        missing = "the model" if name not in targets else "the parallel module"
        if strict and not (name in targets and name in pm.names):
            known = targets if name not in targets else pm.names
            raise PlanMismatch(
                f"{missing} has no {name}{did_you_mean(name, list(known))}",
                hint="copy into the model that was given to sw.parallelize, or strict=False",
            )
    for name in pm.names:
        if name not in targets:
            continue
        if targets[name].is_meta:
            raise PlanMismatch(
                "the model's tensor is on meta and has no memory",
                where=name,
                hint='model.to_empty(device="cpu") first',
            )
        if pm.store.holds(name) and tuple(targets[name].shape) != pm.store.full_shape(name):
            raise PlanMismatch(
                f"the model's tensor has shape {tuple(targets[name].shape)}, the trained one "
                f"{pm.store.full_shape(name)}",
                where=name,
            )


def _held(pm: ParallelModule, name: str) -> dict[str, Tensor | None]:
    """The whole tensor, if this rank's group of ranks is its home."""
    store = pm.store
    if not store.holds(name):
        return {}
    if name in store.buffer_names:
        return {name: store.buffers[store.buffer_names[name]]}
    entry = store.entry(name)
    if entry.spec.borrowed:
        return {}
    value, piece = store.stored(entry)
    return {name: store.gather_full(entry, value, piece=piece)}


def describe(pm: ParallelModule) -> str:
    """The model, its plan, and what this rank holds of it."""
    held = [pm.store.stored(entry)[0] for entry in pm.store.entries]
    numel = sum(tensor.numel() for tensor in held)
    size = sum(tensor.nbytes for tensor in held)
    mesh = pm.mesh
    place = ", ".join(f"{axis} {index}" for axis, index in mesh.coordinates.items())
    lines = [
        f"ParallelModule({pm.title or 'model'}",
        f"  rank {mesh.ranks[mesh.rank]} of {mesh.everyone.size}, at {place or 'the only place'}",
        f"  holds {numel:,} elements of {len(held)} parameters ({format_bytes(size)})",
    ]
    named = [name for name in pm.steps if name]
    if named:
        lines.append(f"  steps: {', '.join(named)}")
    return "\n".join([*lines, ")"])
