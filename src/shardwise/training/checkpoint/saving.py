"""A first, simple form: rank 0 writes full tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["Saving", "save_checkpoint"]


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until it is complete; raises what failed."""
        return self.path

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state is copied aside, and may be changed."""

    def done(self) -> bool:
        """Whether `wait` would take no time."""
        return True


def save_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] = {},
    copies: Mapping[str, Mapping[str, Tensor]] = {},
    wait: bool = True,
) -> Saving:
    """Write the state of a module and its optimizer; all ranks call it."""
    path = Path(path)
    parallel = hasattr(module, "gather_state_dict")
    tensors: dict[str, Tensor] = dict(
        module.gather_state_dict() if parallel else module.state_dict()
    )
    groups: Any = None
    if optimizer is not None:
        state = optimizer.state_dict()
        groups = {"groups": state["param_groups"], "state": {}}
        for key, values in state["state"].items():
            for k, v in values.items():
                if isinstance(v, Tensor):
                    tensors[f"optimizer.{k}.{key}"] = v
                else:
                    groups["state"].setdefault(str(key), {})[k] = v
    for label, values in copies.items():
        for name, value in values.items():
            entry = module.store.entry(name) if parallel else None  # type: ignore[operator,union-attr]
            full = (
                value if entry is None else module.store.gather_full(entry, value, piece=True)  # type: ignore[operator,union-attr]
            )
            tensors[f"{label}.{name}"] = full
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(
            {n: t.detach().clone().contiguous() for n, t in tensors.items()},
            path / "all.safetensors",
        )
        text = {"step": step, "optimizer": groups, "extra": dict(extra)}
        (path / "checkpoint.json").write_text(json.dumps(text))
    if dist.is_initialized():
        dist.barrier()
    return Saving(path)
