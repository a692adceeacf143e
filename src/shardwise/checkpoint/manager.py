"""A folder of checkpoints, `step-00000100/` …: the newest, the best, and which are kept."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.opening import is_complete, located
from shardwise.checkpoint.save import Saving, save_checkpoint
from shardwise.errors import CheckpointError

__all__ = ["CheckpointManager"]


_STEP = re.compile(r"(?:\.(?=.*\.replaced))?step-(\d{8,})(?:\.replaced)?")
_LEFT_OVER = re.compile(r"\.step-\d+\.partial-[0-9a-f]+")
METRICS = "metrics"


class CheckpointManager:
    """The checkpoints of one training run.

    The last `keep_last` are kept, and the `keep_best` with the lowest (`mode="max"`: highest)
    `metric`. One is removed only after a newer one is complete.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        keep_best: int = 0,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise CheckpointError(f"keep_last={keep_last}, keep_best={keep_best}: at least 1 and 0")
        if mode not in ("min", "max"):
            raise CheckpointError(f"mode {mode!r} is neither 'min' nor 'max'")
        if keep_best and metric is None:
            raise CheckpointError("keep_best needs a metric", hint='metric="loss"')
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.metric, self.mode = metric, mode
        self._saving: Saving | None = None
        self._untidy = False  # whether the saving under way makes an older one superfluous

    def path(self, step: int) -> Path:
        """Where the checkpoint after a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        copies: Mapping[str, Mapping[str, Tensor]] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
        timeout_s: float = 3600.0,
    ) -> Saving:
        """Write the state after `step`; all ranks call it. Waits for the saving under way first.

        `metrics` are kept in `extra["metrics"]`.
        """
        self.wait()
        given = dict(extra or {})
        if metrics:
            given[METRICS] = {**given.get(METRICS, {}), **{k: float(v) for k, v in metrics.items()}}
        self._untidy = True
        saving = self._saving = save_checkpoint(
            self.path(step),
            module,
            optimizer,
            step=step,
            extra=given,
            copies=copies,
            wait=wait,
            timeout_s=timeout_s,
        )
        if wait:
            self.wait()
        return saving

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the saving under way, and remove what is not kept; raises what failed."""
        saving = self._saving
        if saving is None:
            return
        try:
            saving.wait(timeout_s)
        finally:
            if saving.done():
                self._saving = None
        self._remove_old()

    def tidy(self) -> None:
        """Remove what is not kept as soon as the saving under way is complete; never waits."""
        if self._untidy and self._saving is not None and self._saving.done():
            self._untidy = False
            self._remove_old()

    def all(self) -> list[Path]:
        """All complete ones, by step; their tensors are not read."""
        return [path for path in self._named() if is_complete(path)]

    def latest(self) -> Path | None:
        """The newest complete one."""
        return next((path for path in reversed(self._named()) if is_complete(path)), None)

    def best(self) -> Path | None:
        """The complete one with the best metric; of equals, the newest."""
        ranked = self._ranked(self.all())
        return ranked[0] if ranked else None

    def _named(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        steps = {int(found[1]) for p in self.folder.iterdir() if (found := _STEP.fullmatch(p.name))}
        return [self.path(step) for step in sorted(steps)]

    def _ranked(self, paths: list[Path]) -> list[Path]:
        """Those with a metric, best first."""
        sign = 1.0 if self.mode == "min" else -1.0
        scores: list[tuple[float, int, Path]] = []
        for place, path in enumerate(paths):
            metrics = Manifest.read(located(path)).extra.get(METRICS)
            value = metrics.get(self.metric) if isinstance(metrics, dict) else None
            if isinstance(value, (int, float)) and not math.isnan(value):
                scores.append((sign * value, -place, path))
        return [path for *_, path in sorted(scores)]

    def _remove_old(self) -> None:
        """Remove checkpoints that are not to be kept, and what killed saves have left."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        complete = self.all()
        if not complete:
            return
        kept = set(complete[-self.keep_last :]) | set(self._ranked(complete)[: self.keep_best])
        for path in self._named():
            if path not in kept and (path in complete or path.name < complete[-1].name):
                # Renamed first: a removal that is killed leaves nothing that looks complete.
                doomed = path.with_name(f".{path.name}.partial-0")
                located(path).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        for path in self.folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
