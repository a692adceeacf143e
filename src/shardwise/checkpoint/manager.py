"""Manage a folder of checkpoints, `step-00000100/` …: find the latest and best, remove old ones."""

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.open import is_complete, locate
from shardwise.checkpoint.save import Saving, save_checkpoint
from shardwise.errors import CheckpointError
from shardwise.runtime.devices import process_rank

_STEP = re.compile(r"(?:\.(?=.*\.replaced))?step-(\d{8,})(?:\.replaced)?")
_LEFTOVER = re.compile(r"\.step-\d+\.partial-[0-9a-f]+")
METRICS = "metrics"


class CheckpointManager:
    """The checkpoints of one training run.

    The last `keep_last` are kept, and the `keep_best` with the lowest (`mode="max"`: highest)
    `metric`. Others are removed, but only once a newer one is complete.
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
            raise CheckpointError(
                f"keep_last={keep_last}, keep_best={keep_best}, must be at least 1 and 0"
            )
        if mode not in ("min", "max"):
            raise CheckpointError(f"mode {mode!r} is neither 'min' nor 'max'")
        if keep_best and metric is None:
            raise CheckpointError("keep_best needs a metric", hint='metric="loss"')
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.metric, self.mode = metric, mode
        self._saving: Saving | None = None
        self._may_remove = False  # the save in progress makes an older checkpoint obsolete

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint after a step, which need not exist."""
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
        """Save the state after `step`, once the save in progress is complete; all ranks call it.

        `metrics` are stored in `extra["metrics"]`.
        """
        self.wait()
        values = dict(extra or {})
        if metrics:
            floats = {name: float(value) for name, value in metrics.items()}
            values[METRICS] = {**values.get(METRICS, {}), **floats}
        self._may_remove = True
        saving = self._saving = save_checkpoint(
            self.path(step),
            module,
            optimizer,
            step=step,
            extra=values,
            copies=copies,
            wait=wait,
            timeout_s=timeout_s,
        )
        if wait:
            self.wait()
        return saving

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the save in progress, raise its error, and remove old checkpoints."""
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
        """Remove old checkpoints if the save in progress is complete; never wait for it."""
        if self._may_remove and self._saving is not None and self._saving.done():
            self._may_remove = False
            self._remove_old()

    def all(self) -> list[Path]:
        """Return all complete checkpoints, by step; their tensors are not read."""
        return [path for path in self._named() if is_complete(path)]

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return next((path for path in reversed(self._named()) if is_complete(path)), None)

    def best(self) -> Path | None:
        """Return the complete checkpoint with the best metric; of equal ones, the newest."""
        ranked = self._ranked(self.all())
        return ranked[0] if ranked else None

    def _named(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        steps = {int(match[1]) for p in self.folder.iterdir() if (match := _STEP.fullmatch(p.name))}
        return [self.path(step) for step in sorted(steps)]

    def _ranked(self, paths: list[Path]) -> list[Path]:
        """Return the checkpoints that have the metric, best first."""
        sign = 1.0 if self.mode == "min" else -1.0
        scores: list[tuple[float, int, Path]] = []
        for index, path in enumerate(paths):
            metrics = Manifest.read(locate(path)).extra.get(METRICS)
            value = metrics.get(self.metric) if isinstance(metrics, dict) else None
            if isinstance(value, (int, float)) and not math.isnan(value):
                scores.append((sign * value, -index, path))
        return [path for *_, path in sorted(scores)]

    def _remove_old(self) -> None:
        """Remove checkpoints that are not to be kept, and the remains of killed saves."""
        if process_rank() != 0:
            return
        complete = self.all()
        if not complete:
            return
        retained = {*complete[-self.keep_last :], *self._ranked(complete)[: self.keep_best]}
        for path in self._named():
            if path not in retained and (path in complete or path.name < complete[-1].name):
                # Rename first, so that a killed removal leaves nothing that looks complete.
                doomed = path.with_name(f".{path.name}.partial-0")
                locate(path).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
