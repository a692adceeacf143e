"""Figures as lines of JSON, for TensorBoard, and for Weights & Biases.

Enters: figures of a step by name. Leaves: `metrics.jsonl`, `tensorboard/` in the run's folder, or a
run of W&B. A resumed run continues the same files, without lines of steps that are done again.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError
from shardwise.training.config import LogConfig

__all__ = ["JsonlLog", "Log", "TensorBoardLog", "WandbLog", "make_logs"]


class Log(Protocol):
    """Takes the figures of a step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Note figures by name."""
        ...

    def close(self) -> None:
        """Nothing comes any more."""
        ...


def make_logs(config: LogConfig, folder: Path | None, config_json: Any, step: int) -> list[Log]:
    """The logs that are asked for; `step` is the last one that stays."""
    found: list[Log] = []
    if folder is not None and config.jsonl:
        found.append(JsonlLog(folder / "metrics.jsonl", step))
    if config.tensorboard:
        found.append(TensorBoardLog(_needed(folder, "tensorboard") / "tensorboard", step))
    if config.wandb is not None:
        found.append(WandbLog(config.wandb, folder, config_json, step))
    return found


def check_logs(config: LogConfig, folder: Path | None) -> None:
    """Say what is missing before anything is computed."""
    if config.tensorboard:
        _needed(folder, "tensorboard")
        _import_tensorboard()
    if config.wandb is not None:
        _import_wandb()


def _needed(folder: Path | None, what: str) -> Path:
    if folder is None:
        raise ConfigError(f"{what} needs a folder", where="folder", hint="folder: runs/first")
    return folder


class JsonlLog:
    """A line of JSON for each step; numbers that are none are null."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_until(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One line."""
        row = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self.write_row({"step": step, **row})

    def write_row(self, row: Mapping[str, Any]) -> None:
        """One line of any figures, with its step."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep_until(path: Path, step: int) -> None:
    """Leave out the lines of steps that will be done again, and one that a crash cut off."""
    kept = []
    for line in path.read_text("utf-8").splitlines():
        try:
            if int(json.loads(line)["step"]) <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(kept), "utf-8")
    os.replace(fresh, path)


class TensorBoardLog:
    """Scalars in TensorBoard's own format."""

    def __init__(self, folder: Path, step: int) -> None:
        writer = _import_tensorboard()
        self._writer = writer(str(folder), purge_step=step + 1 if step else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _import_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard is not installed",
            where="logs.tensorboard",
            hint="pip install 'shardwise[tensorboard]', or logs: {tensorboard: false}",
        ) from error
    return SummaryWriter


class WandbLog:
    """A run of Weights & Biases; `options` are those of `wandb.init`."""

    def __init__(
        self, options: Mapping[str, Any], folder: Path | None, config_json: Any, step: int
    ) -> None:
        wandb = _import_wandb()
        place = {"dir": str(folder)} if folder is not None else {}
        self._run = wandb.init(**{"config": config_json, "resume": "allow", **place, **options})

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "Weights & Biases is not installed",
            where="logs.wandb",
            hint="pip install 'shardwise[wandb]', or leave logs.wandb out",
        ) from error
