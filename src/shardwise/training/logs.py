"""Log the figures of a training run on rank 0: to files, services and the terminal.

Figures go to `metrics.jsonl` and `tensorboard/` in the run's folder, to Weights & Biases, and to
stderr. A resumed run continues the same files, without the lines of steps that it repeats.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.errors import ConfigError, TrainingError
from shardwise.files import write_error, write_text, writing
from shardwise.formatting import short_seconds, size
from shardwise.training.config import LogConfig
from shardwise.training.evaluation import FIGURES

LINE_INTERVAL_S = 10.0
_HINT = "folder: a folder that you may write to"


# ------------------------------------------------------------ files and services
def make_logs(config: LogConfig, folder: Path | None, config_json: Any, step: int) -> list[Log]:
    """Open the logs of a config; entries after `step` are removed."""
    logs: list[Log] = []
    if folder is not None and config.jsonl:
        logs.append(JsonlLog(folder / "metrics.jsonl", step))
    if config.tensorboard:
        assert folder is not None
        logs.append(TensorBoardLog(folder / "tensorboard", step))
    if config.wandb is not None:
        logs.append(WandbLog(config.wandb, folder, config_json))
    return logs


def check_logs(config: LogConfig, folder: Path | None) -> None:
    """Raise an error if a log lacks its package or folder, before anything is computed."""
    if config.tensorboard:
        if folder is None:
            raise ConfigError(
                "tensorboard needs a folder", where="folder", hint="folder: runs/first"
            )
        _import("torch.utils.tensorboard", "tensorboard", "logs: {tensorboard: false}")
    if config.wandb is not None:
        _import("wandb", "wandb", "leave logs.wandb out")


def _import(module: str, extra: str, alternative: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{extra} is not installed",
            where=f"logs.{extra}",
            hint=f"pip install 'shardwise[{extra}]', or {alternative}",
        ) from error


class _Tolerant:
    """A log that may fail: training is worth more than its figures.

    The first failure warns; later writes are still tried because space may have been freed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """Turn the first error of the operating system into a warning, and ignore later ones."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                problem = write_error(self.path, error, hint="make the folder writable again")
                message = f"{problem.message}; training continues without it ({problem.hint})"
                warnings.warn(message, RuntimeWarning, stacklevel=3)


class JsonlLog(_Tolerant):
    """A file with one line of JSON for each step; numbers that are not finite are null."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path)
        if path.exists():
            _truncate(path, step)
        with writing(path, TrainingError, hint=_HINT):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_torn = False  # the last line was written only in part

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one line."""
        row = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self.write_row({"step": step, **row})

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Write one line of any JSON values, among them the step."""
        line = ("\n" * self._is_torn + json.dumps(row) + "\n").encode()
        with self.tolerating():
            while line:
                written = os.write(self._file, line)
                line = line[written:]
                self._is_torn = bool(line)

    def close(self) -> None:
        """Close the file."""
        with self.tolerating():
            os.close(self._file)


def _truncate(path: Path, step: int) -> None:
    """Remove the lines of steps that will be repeated, and those that a crash left incomplete."""
    lines = []
    with writing(path, TrainingError, hint="a log that can be read"):
        text = path.read_text("utf-8", errors="replace")
    for line in text.split("\n"):
        try:
            if int(json.loads(line)["step"]) <= step:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    write_text(path, "".join(lines), TrainingError)


class TensorBoardLog(_Tolerant):
    """Scalars in TensorBoard's format."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        module = importlib.import_module("torch.utils.tensorboard")
        with writing(folder, TrainingError, hint=_HINT):
            self._writer = module.SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one scalar for each figure."""
        with self.tolerating():
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        with self.tolerating():
            self._writer.close()


class WandbLog:
    """A Weights & Biases run; `options` are the arguments of `wandb.init`."""

    def __init__(self, options: Mapping[str, Any], folder: Path | None, config_json: Any) -> None:
        wandb = importlib.import_module("wandb")
        location = {"dir": str(folder)} if folder is not None else {}
        self._run = wandb.init(**{"config": config_json, "resume": "allow", **location, **options})

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


Log = JsonlLog | TensorBoardLog | WandbLog


# ------------------------------------------------------------ the terminal
def make_terminal(kind: str, total: int | None, first: int) -> Terminal:
    """Return the terminal that `logs.console` selects."""
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "lines"
    if kind == "bar":
        return Bar(total, first)
    return Lines(total) if kind == "lines" else Terminal()


def summary(figures: Mapping[str, float]) -> str:
    """Format figures in one line.

    >>> summary({"loss": 2.5, "tokens_per_s": 12345.0, "step_s": 0.25, "mfu": 0.4})
    'loss 2.5000  12,345 tokens/s  250 ms  MFU 40.0%'
    """
    parts = [f"loss {figures['loss']:.4f}"] if "loss" in figures else []
    if "evaluation_loss" in figures:
        parts.append(f"evaluation loss {figures['evaluation_loss']:.4f}")
    parts += [f"{n.replace('_', ' ')} {v:.4f}" for n, v in figures.items() if n not in FIGURES]
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if name in figures:
            parts.append(f"{figures[name]:,.0f} {unit}")
            break
    if "step_s" in figures:
        parts.append(short_seconds(figures["step_s"]))
    if "mfu" in figures:
        parts.append(f"MFU {figures['mfu']:.1%}")
    if "memory_bytes" in figures:
        parts.append(size(figures["memory_bytes"]))
    return "  ".join(parts)


class Terminal:
    """Shows the progress of a training run; this one shows nothing."""

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a step."""

    def say(self, text: str) -> None:
        """Print a line that stays visible."""

    def close(self) -> None:
        """Stop showing progress."""


class Bar(Terminal):
    """A progress bar with the latest figures."""

    def __init__(self, total: int | None, first: int) -> None:
        self._progress = Progress(
            TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "")),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = self._progress.add_task("", total=total, completed=first, figures="")
        self._progress.start()

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        self._progress.update(self._task, completed=step, figures=summary(figures))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


class Lines(Terminal):
    """A line for the first and last step, and at most one every ten seconds between them."""

    def __init__(self, total: int | None) -> None:
        self._total, self._printed_at = total, -LINE_INTERVAL_S

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._printed_at < LINE_INTERVAL_S and step != self._total:
            return
        self._printed_at = now
        total = f"/{self._total}" if self._total else ""
        self.say(f"step {step}{total}  {summary(figures)}")

    def say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
