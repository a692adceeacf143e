"""Metrics of the user's own over the evaluation data, exactly.

A metric is a function `metric(output, batch)`. It returns one value for each sample of the batch
(or for each token of each sample), or a pair `(sum, count)`; the metric is the mean over all values
of the evaluation data, whatever its batches are. It may also be an object with
`update(output, batch)`, `compute()` and `reset()`, for what is no mean: F1, AUC, perplexity.

Every rank sees the whole batch and the whole output, so that a metric computes the same as on one
device. All ranks then go by the values of rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.errors import ConfigError, ShardwiseError, TrainingError, did_you_mean, failed
from shardwise.runtime.mesh import Axis
from shardwise.training.config import CheckpointConfig, EarlyStopConfig, TrainConfig
from shardwise.training.imports import DEBUG, load_function, make

__all__ = ["EVALUATION_LOSS", "FIGURES", "Metric", "agreed", "check_metrics", "make_metrics"]

EVALUATION_LOSS = "evaluation_loss"
STEP_FIGURES = ("loss", "learning_rate", "gradient_norm")
OTHER_FIGURES = (
    "epoch",
    "memory_bytes",
    "mfu",
    "samples_per_s",
    "skipped",
    "step",
    "step_s",
    "tokens_per_s",
)
FIGURES = (EVALUATION_LOSS, *STEP_FIGURES, *OTHER_FIGURES)  # names that metrics cannot have
_HINT = "return a tensor with a value for each sample, or a pair (sum, count)"


class Metric(Protocol):
    """Takes the batches of one evaluation."""

    def reset(self) -> None:
        """Begin a new evaluation."""
        ...

    def update(self, output: Any, batch: Any, rows: int) -> None:
        """Take the model's output for a batch of so many rows."""
        ...

    def compute(self) -> float:
        """Return the metric over all batches since `reset`."""
        ...


class _Mean:
    """The mean of what a function returns."""

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0.0

    def update(self, output: Any, batch: Any, rows: int) -> None:
        with _explained(self.name):
            value = self.function(output, batch)
        if isinstance(value, tuple) and len(value) == 2:
            with _explained(self.name):
                total, count = (float(each) for each in value)
        elif isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            total, count = float(value.detach().double().sum()), float(value.numel())
        else:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise TrainingError(
                f"metric {self.name!r} returned a {type(value).__name__}{shape} for {rows} "
                "samples, which gives no exact mean over all batches",
                where=f"metrics.{self.name}",
                hint=_HINT,
            )
        self.total, self.count = self.total + total, self.count + count

    def compute(self) -> float:
        if not self.count:
            raise TrainingError(
                f"metric {self.name!r} counted nothing in the evaluation data",
                where=f"metrics.{self.name}",
                hint="a count above 0 for some batch",
            )
        return self.total / self.count


class _Stateful:
    """An object that keeps what it needs of all batches."""

    def __init__(self, name: str, found: Any) -> None:
        self.name, self.found = name, found

    def reset(self) -> None:
        with _explained(self.name):
            self.found.reset()

    def update(self, output: Any, batch: Any, rows: int) -> None:
        with _explained(self.name):
            self.found.update(output, batch)

    def compute(self) -> float:
        with _explained(self.name):
            return float(self.found.compute())


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn an exception of the user's metric into an error with its name and line."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise failed(TrainingError, f"metrics.{name}", error, DEBUG) from error


def make_metrics(config: TrainConfig, base: Path | None) -> dict[str, Metric]:
    """Return the metrics that a config names, ready for the first evaluation."""
    found: dict[str, Metric] = {}
    for name, part in config.metrics.items():
        key = f"metrics.{name}"
        made = load_function(part, key, base)
        if isinstance(made, type):
            made = make(made, {}, key)
        if all(hasattr(made, each) for each in ("update", "compute", "reset")):
            found[name] = _Stateful(name, made)
        elif callable(made):
            found[name] = _Mean(name, made)
        else:
            raise ConfigError(
                f"a {type(made).__name__} is not a metric",
                where=key,
                hint="a function (output, batch), or an object with update, compute and reset",
            )
    return found


def agreed(values: Mapping[str, float], everyone: Axis, device: torch.device) -> dict[str, float]:
    """Return the values of rank 0, by which all ranks go; all ranks call it."""
    if everyone.size == 1 or not values:
        return dict(values)
    mine = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    every = everyone.all_gather(mine, [len(mine)] * everyone.size).wait()
    return dict(zip(values, every[: len(mine)].tolist(), strict=True))


def check_metrics(config: TrainConfig) -> None:
    """Refuse names of metrics that are taken, and settings that go by one that nobody reports."""
    for name in config.metrics:
        if name in FIGURES or not name.isidentifier():
            what = "is reported already" if name in FIGURES else "is no name"
            raise ConfigError(
                f"a metric {name!r}: that {what}", where="metrics", hint="metrics: {accuracy: …}"
            )
    evaluated = [EVALUATION_LOSS, *config.metrics] if config.data.evaluation is not None else []
    if config.early_stop is not None:
        _check_reported(config, config.early_stop, "early_stop", evaluated)
    steps = [each for each in STEP_FIGURES if each != "gradient_norm" or config.clip_norm]
    kept = config.checkpoints
    if kept.keep_best or kept.metric != EVALUATION_LOSS:
        _check_reported(config, kept, "checkpoints", [*evaluated, *steps])


def _check_reported(
    config: TrainConfig,
    wanted: EarlyStopConfig | CheckpointConfig,
    field: str,
    reported: list[str],
) -> None:
    if wanted.metric not in reported:
        missing = wanted.metric == EVALUATION_LOSS or wanted.metric in config.metrics
        raise ConfigError(
            f"nobody reports {wanted.metric!r}{did_you_mean(wanted.metric, reported)}",
            where=f"{field}.metric",
            hint="data: {evaluation: file.py:function}"
            if missing and config.data.evaluation is None
            else f"{', '.join(reported)}; or metrics: {{{wanted.metric}: file.py:function}}",
        )
    if wanted.mode is None and wanted.metric in config.metrics:
        raise ConfigError(
            f"is a higher or a lower {wanted.metric!r} better?",
            where=f"{field}.mode",
            hint=f"{field}: {{metric: {wanted.metric}, mode: max}}, or mode: min",
        )
