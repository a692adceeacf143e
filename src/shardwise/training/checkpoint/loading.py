"""A first, simple form: every rank reads full tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["Loaded", "load_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint held beside the tensors that went into module and optimizer."""

    path: Path
    step: int | None
    extra: Mapping[str, Any]
    names: tuple[str, ...]
    state_dict: Mapping[str, Tensor] = field(default_factory=dict)


def load_checkpoint(
    path: str | Path,
    module: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    copies: Mapping[str, Mapping[str, Tensor]] = {},
    strict: bool = True,
) -> Loaded:
    """Fill a module, its optimizer and copies from a checkpoint; all ranks call it.

    `copies` are filled in place. Without a module, the whole state dict is in the result.
    """
    path = Path(path)
    text = json.loads((path / "checkpoint.json").read_text())
    tensors = load_file(path / "all.safetensors")
    saved: dict[str, dict[str, Any]] = {}
    model: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, key, param = name.split(".", 2)
            saved.setdefault(param, {})[key] = value
        elif name.split(".")[0] not in copies:
            model[name] = value
    if module is not None:
        module.load_state_dict(model)
    if optimizer is not None:
        for name, values in text["optimizer"]["state"].items():
            saved.setdefault(name, {}).update(values)
        state: dict[Any, Any] = saved
        if not hasattr(optimizer, "store"):
            state = {int(k): v for k, v in saved.items()}
        optimizer.load_state_dict({"state": state, "param_groups": text["optimizer"]["groups"]})
    for label, values in copies.items():
        for name, value in values.items():
            full = tensors[f"{label}.{name}"]
            if module is not None and hasattr(module, "store"):
                store: Any = module.store
                full = store.piece_of(store.entry(name), full)
            value.copy_(full)
    return Loaded(
        path=path,
        step=text["step"],
        extra=text["extra"],
        names=tuple(tensors),
        state_dict=model if module is None else {},
    )
