"""Figures as lines of JSON, for TensorBoard, and for Weights & Biases.

Enters: figures of a step by name. Leaves: `metrics.jsonl`, `tensorboard/` in the run's folder, or a
run of W&B. A resumed run continues the same files, without lines of steps that are done again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError, TrainingError
from shardwise.files import write_error, write_text, writing
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


class _Tolerant:
    """Goes on when a log cannot be written: training is worth more than its figures.

    The first time, a warning says why; every step tries again, as space may have been freed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0  # writes that failed

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """Turn what the system refuses inside into one warning."""
        try:
            yield
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                problem = write_error(self.path, error, hint="make the folder writable again")
                message = f"{problem.message}; training goes on without it ({problem.hint})"
                warnings.warn(message, RuntimeWarning, stacklevel=2)


class JsonlLog(_Tolerant):
    """A line of JSON for each step; numbers that are not finite are null."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path)
        hint = "folder: a folder that you may write to"
        if path.exists():
            _keep_until(path, step)
        with writing(path, TrainingError, hint=hint):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = False  # whether the last line was written in part

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One line."""
        row = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self.write_row({"step": step, **row})

    def write_row(self, row: Mapping[str, Any]) -> None:
        """One line of any figures, with its step."""
        line = ("\n" * self._torn + json.dumps(row) + "\n").encode()
        with self.tolerating():
            while line:
                written = os.write(self._file, line)
                line = line[written:]
                self._torn = bool(line)

    def close(self) -> None:
        """Close the file."""
        with self.tolerating():
            os.close(self._file)


def _keep_until(path: Path, step: int) -> None:
    """Leave out the lines of steps that will be done again, and one that a crash cut off."""
    kept = []
    with writing(path, TrainingError, hint="a log that can be read"):
        text = path.read_text("utf-8", errors="replace")
    for line in text.split("\n"):
        try:
            if int(json.loads(line)["step"]) <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    write_text(path, "".join(kept), TrainingError)


class TensorBoardLog(_Tolerant):
    """Scalars in TensorBoard's own format."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        writer = _import_tensorboard()
        with writing(folder, TrainingError, hint="folder: a folder that you may write to"):
            self._writer = writer(str(folder), purge_step=step + 1 if step else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One scalar for each figure."""
        with self.tolerating():
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        with self.tolerating():
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
