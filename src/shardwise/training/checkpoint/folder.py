"""A folder of checkpoints, `step-00000100/` …: the newest, the best, and which are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.training.checkpoint.saving import Saving, save_checkpoint

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one training run."""

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        keep_best: int = 0,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.metric, self.mode = metric, mode

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] = {},
        copies: Mapping[str, Mapping[str, Tensor]] = {},
        metrics: Mapping[str, float] = {},
        wait: bool = False,
    ) -> Saving:
        """Write the state after `step`; all ranks call it."""
        saving = save_checkpoint(
            self.folder / f"step-{step:08d}",
            module,
            optimizer,
            step=step,
            extra={**extra, "metrics": dict(metrics)},
            copies=copies,
            wait=wait,
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            kept = {*self.all()[-self.keep_last :], self.best()}
            for path in self.all():
                if path not in kept:
                    shutil.rmtree(path)
        return saving

    def all(self) -> list[Path]:
        """All complete ones, oldest first."""
        return sorted(p.parent for p in self.folder.glob("step-*/checkpoint.json"))

    def latest(self) -> Path | None:
        """The newest complete one."""
        found = self.all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The one with the best metric."""
        scores = {}
        for path in self.all():
            metrics = json.loads((path / "checkpoint.json").read_text())["extra"].get("metrics", {})
            if self.metric in metrics:
                scores[path] = metrics[self.metric] * (1 if self.mode == "min" else -1)
        return min(scores, key=lambda p: scores[p]) if scores else None

    def wait(self) -> None:
        """Wait for the saving under way."""
