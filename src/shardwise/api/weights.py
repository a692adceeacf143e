"""Weights into a store: from a real model, or made module by module for one on meta.

Enters: the user's model and this rank's `ParameterStore`. Leaves: nothing; the store is filled.
Only one module's tensors exist at full size at a time, so a model larger than a device can start.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from shardwise import runtime as rt
from shardwise.errors import ShardwiseError
from shardwise.frontend import skeleton


def load_weights(model: nn.Module, store: rt.ParameterStore, seed: int) -> None:
    """Copy this rank's part of every parameter and buffer."""
    names = dict((*model.named_parameters(), *model.named_buffers()))
    known = [e.spec.name for e in store.entries] + list(store.buffers)
    if not any(names[name].is_meta for name in known):
        for name in known:
            tensor = names[name].detach()
            _require_finite(name, tensor)
            store.load_full(name, tensor)
        return
    with torch.random.fork_rng(devices=[]):
        _initialize(model, store, set(known), seed)


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        what = "parameter or buffer"
        if torch.isnan(tensor).any():
            raise ShardwiseError(
                f"{what} {name} has {bad} of {tensor.numel()} values that are NaN or infinite",
                hint="load or initialize the weights before parallelize",
            )


def _initialize(model: nn.Module, store: rt.ParameterStore, known: set[str], seed: int) -> None:
    """Initialize one module after the other, in order, and keep this rank's parts.

    A module's numbers follow from the seed and its path, so that a rank which holds some of the
    modules gives them the same values as any other.
    """
    twin = skeleton(model)
    real = dict(model.named_modules())
    done: set[str] = set()
    for path, module in twin.named_modules():
        own = [
            (f"{path}.{leaf}" if path else leaf, leaf)
            for leaf in (*module._parameters, *module._buffers)
        ]
        wanted = [(name, leaf) for name, leaf in own if name in known and name not in done]
        if not wanted:
            continue
        given = _real_tensors(real[path])
        if len(given) < len(wanted):
            module.to_empty(device="cpu", recurse=False)
            torch.manual_seed(_seed_of(path, seed))
            _reset(twin, module, path)
        for name, leaf in wanted:
            tensor = given.get(leaf)
            store.load_full(name, getattr(module, leaf).detach() if tensor is None else tensor)
            done.add(name)
        module.to_empty(device="meta", recurse=False)


def _seed_of(path: str, seed: int) -> int:
    return zlib.crc32(f"{seed} {path}".encode())


def _real_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that already have values."""
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    return {k: t.detach() for k, t in tensors.items() if t is not None and not t.is_meta}


@torch.no_grad()
def _reset(model: nn.Module, module: nn.Module, path: str) -> None:
    """The module's own initialization: `reset_parameters`, or the model's `_init_weights`."""
    reset = getattr(module, "reset_parameters", None)
    initialize = getattr(model, "_init_weights", None)
    if initialize is not None:
        initialize(module)
    elif reset is not None:
        reset()
    else:
        raise ShardwiseError(
            f"{type(module).__name__} has parameters on meta and no reset_parameters()",
            where=path or "the model",
            hint="define reset_parameters() on it, or build the model with weights",
        )
