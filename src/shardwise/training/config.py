"""The settings of a training run: the fields of a config file and of `sw.Trainer(…)`.

Anything that is looked up by name (a model, a dataset, an optimizer, a strategy, a callback) is a
`Named`: a name or import path, and the arguments to call it with. In Python, the object itself may
be given instead. A plain value given for a class with a `SHORT_FORM` is the value of that field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from shardwise.schema import Range, Several

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EarlyStopConfig",
    "EmaConfig",
    "EvaluationConfig",
    "GroupConfig",
    "LogConfig",
    "LrScheduleConfig",
    "Named",
    "OptimizerConfig",
    "PlanConfig",
    "TraceConfig",
    "TrainConfig",
    "config_to_json",
]


Count = Annotated[int, Range(1)]
Number = Annotated[int, Range(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """`name` is `package.module:function` or `file.py:function`, called with `args`."""

    SHORT_FORM: ClassVar[str] = "name"
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


Part = Annotated[Any, Named]  # or in Python the object itself: a model, a dataset, a function
Class = Annotated[Any, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """`auto`, the name of a strategy, a plan's file, or the import path of an own strategy."""

    SHORT_FORM: ClassVar[str] = "name"
    name: str = "auto"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Options of the parameters whose names match a glob."""

    params: Several[str]
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """A class of `torch.optim` by name, or any by import path; `elementwise` as `sw.optimizer`."""

    SHORT_FORM: ClassVar[str] = "name"
    name: Class = "AdamW"
    args: Mapping[str, Any] = field(default_factory=dict)
    groups: Several[GroupConfig] = ()
    elementwise: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LrScheduleConfig:
    """A class of `torch.optim.lr_scheduler`, stepped each step, epoch or evaluation.

    Several make a chain: each but the last is for `steps` of them. In `args`, the texts
    `total_steps` and `total_epochs` stand for these numbers.
    """

    SHORT_FORM: ClassVar[str] = "name"
    name: Class
    args: Mapping[str, Any] = field(default_factory=dict)
    steps: Count | None = None
    each: Literal["step", "epoch", "evaluation"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Samples, and how they become batches; `batch_size` is that of all ranks together.

    `train` and `evaluation` are datasets, or each a `torch.utils.data.DataLoader`, which then says
    itself how samples become batches. Defaults: `batch_size` 8, `shuffle` and `drop_last` for
    training, no `workers`, `prefetch` 2 batches. With an own `collate`, `rowwise` says that each
    sample is one row of every tensor, so that a rank may read its rows alone; the default
    collation is so.
    """

    SHORT_FORM: ClassVar[str] = "train"
    train: Part
    evaluation: Part = None
    batch_size: Count | None = None
    evaluation_batch_size: Count | None = None
    collate: Part = None
    rowwise: bool = False
    shuffle: bool | None = None
    drop_last: bool | None = None
    workers: Number | None = None
    prefetch: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When the evaluation data is gone through, and how many of its batches."""

    every_steps: Count | None = None
    every_epochs: Count | None = None
    batches: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopConfig:
    """Stop after `patience` evaluations without a metric better by more than `min_delta`.

    `metric` is `evaluation_loss`, or one of `metrics`, for which `mode` says what is better.
    """

    SHORT_FORM: ClassVar[str] = "patience"
    patience: Count
    min_delta: Annotated[float, Range(0)] = 0.0
    metric: str = "evaluation_loss"
    mode: Literal["min", "max"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """A moving average of the parameters, by which evaluations go where `evaluate` says so."""

    SHORT_FORM: ClassVar[str] = "decay"
    decay: Annotated[float, Range(0)] = 0.999
    evaluate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and what is kept of it: the last, and the best by a metric.

    `metric` is `evaluation_loss`, one of `metrics`, `loss`, `learning_rate` or `gradient_norm`.
    """

    every_steps: Count | None = None
    every_epochs: Count | None = None
    keep_last: Count = 3
    keep_best: Number = 0
    metric: str = "evaluation_loss"
    mode: Literal["min", "max"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Steps whose events are recorded, the first and the last, into `file` in the run's folder."""

    SHORT_FORM: ClassVar[str] = "steps"
    steps: Several[Count]
    file: str = "trace.json"

    @property
    def range(self) -> range:
        """The steps, counted from 1."""
        return range(self.steps[0], self.steps[-1] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Where figures go: `console` is a bar on a terminal and lines elsewhere, if `auto`.

    At most every `ranks_every_s` seconds the times and memory of all ranks are gathered.
    """

    every_steps: Count = 1
    ranks_every_s: Annotated[float, Range(0)] | None = 5.0
    console: Literal["auto", "bar", "lines", "off"] = "auto"
    jsonl: bool = True
    tensorboard: bool = False
    wandb: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training. `folder` is where all of its files go; without one, none are written.

    `metrics` are functions of the model's output and the batch, by name, for evaluations.
    `num_microbatches` are the parts a batch is computed in; the loss stays the whole batch's.
    `verify` checks the plan's program against the model first, once for each program and folder.
    `resume` is `auto` (the newest checkpoint in the folder, if there is one), `never`, or a path.
    """

    model: Part
    data: DataConfig
    loss_fn: Part = None
    steps: Count | None = None
    epochs: Count | None = None
    plan: Annotated[Any, PlanConfig] = field(default_factory=PlanConfig)
    verify: bool = False
    cluster: Annotated[Any, str] = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: Several[LrScheduleConfig] = ()
    clip_norm: Annotated[float, Range(0)] | None = None
    num_microbatches: Count = 1
    ema: EmaConfig | None = None
    precision: str | None = None
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: Mapping[str, Part] = field(default_factory=dict)
    early_stop: EarlyStopConfig | None = None
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "auto"
    nonfinite: Literal["stop", "skip"] = "stop"
    callbacks: Several[Part] = ()
    logs: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig | None = None
    folder: str | None = None
    seed: int = 0
    device: str = "auto"
    compile: bool = False
    timeout_s: Annotated[float, Range(1)] = 300.0


def config_to_json(value: Any) -> Any:
    """The config as JSON; an object that has no other form is its type's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: config_to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): config_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [config_to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"<{named.__module__}:{named.__qualname__}>"
