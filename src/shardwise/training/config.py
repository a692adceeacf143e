"""The settings of a training run: the fields of a config file and of `sw.Trainer(…)`.

Anything that is looked up by name (a model, a dataset, an optimizer, a strategy, a callback) is a
`Named`: a name or import path, and the arguments to call it with. Python callers may pass the
object itself instead. A plain value in place of a class with a `SHORT_FORM` is the value of that
field. Settings come from YAML files, keyword arguments and `--set a.b=c`.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from shardwise.errors import ConfigError
from shardwise.files import read_text
from shardwise.schema import Range, Reader, Several, parse_yaml

MAX_BYTES = 1 << 20  # of a config file
MAX_VALUES = 20_000  # in a config file, with every alias expanded

Count = Annotated[int, Range(1)]
Number = Annotated[int, Range(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """`name` is `package.module:function` or `file.py:function`, called with `args`."""

    SHORT_FORM: ClassVar[str] = "name"
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


Part = Annotated[Any, Named]  # in Python also the object itself: a model, a dataset, a function
Class = Annotated[Any, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """`auto`, the name of a strategy, a plan file, or the import path of a custom strategy."""

    SHORT_FORM: ClassVar[str] = "name"
    name: str = "auto"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Optimizer options for the parameters whose names match a glob."""

    params: Several[str]
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """A class of `torch.optim`, or any import path; other fields as in `sw.optimizer`."""

    SHORT_FORM: ClassVar[str] = "name"
    name: Class = "AdamW"
    args: Mapping[str, Any] = field(default_factory=dict)
    groups: Several[GroupConfig] = ()
    elementwise: bool | None = None
    rowwise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LrScheduleConfig:
    """A class of `torch.optim.lr_scheduler`, stepped after each step, epoch or evaluation.

    A list is a chain, in which each schedule but the last runs for `steps` of these. In `args`, the
    strings `total_steps` and `total_epochs` stand for these numbers.
    """

    SHORT_FORM: ClassVar[str] = "name"
    name: Class
    args: Mapping[str, Any] = field(default_factory=dict)
    steps: Count | None = None
    each: Literal["step", "epoch", "evaluation"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Datasets and their batching; `batch_size` is the global one, over all ranks.

    `train` and `evaluation` are datasets, or `torch.utils.data.DataLoader`s, which bring their own
    batching. Defaults: `batch_size` 8, `shuffle` and `drop_last` for training, no `workers`,
    `prefetch` 2 batches. Set `rowwise` if a custom `collate` puts each sample into one row of every
    tensor, as the default collation does: a rank then reads only its own rows.
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
    """When to evaluate, and on how many batches of the evaluation data."""

    every_steps: Count | None = None
    every_epochs: Count | None = None
    batches: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopConfig:
    """Stop after `patience` evaluations in which a metric did not improve by `min_delta`.

    `metric` is `evaluation_loss` or one of `metrics`, which need `mode`: whether lower or higher
    is better.
    """

    SHORT_FORM: ClassVar[str] = "patience"
    patience: Count
    min_delta: Annotated[float, Range(0)] = 0.0
    metric: str = "evaluation_loss"
    mode: Literal["min", "max"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the parameters; with `evaluate`, evaluations use it."""

    SHORT_FORM: ClassVar[str] = "decay"
    decay: Annotated[float, Range(0)] = 0.999
    evaluate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and how many to keep: the last ones, and the best by a metric.

    `metric` is `evaluation_loss`, one of `metrics`, `loss`, `learning_rate` or `gradient_norm`.
    """

    every_steps: Count | None = None
    every_epochs: Count | None = None
    keep_last: Count = 3
    keep_best: Number = 0
    metric: str = "evaluation_loss"
    mode: Literal["min", "max"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Continue when ranks are lost or added, with at least `min_ranks`.

    Every `every_steps` steps the state is copied in memory; a loss repeats at most as many. A rank
    that shows no sign of life for `silent_s` seconds is killed. With `replace`, a new process is
    started for each one that was lost.
    """

    SHORT_FORM: ClassVar[str] = "min_ranks"
    min_ranks: Count = 1
    every_steps: Count = 10
    silent_s: Annotated[float, Range(1)] = 10.0
    replace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The first and last step to record, and the file in the run's folder for the trace."""

    SHORT_FORM: ClassVar[str] = "steps"
    steps: Several[Count]
    file: str = "trace.json"

    @property
    def range(self) -> range:
        """Return the steps, counted from 1."""
        return range(self.steps[0], self.steps[-1] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Where figures go; `console: auto` is a progress bar on a terminal and lines elsewhere.

    The times and memory of all ranks are gathered at most every `ranks_every_s` seconds.
    """

    every_steps: Count = 1
    ranks_every_s: Annotated[float, Range(0)] | None = 5.0
    console: Literal["auto", "bar", "lines", "off"] = "auto"
    jsonl: bool = True
    tensorboard: bool = False
    wandb: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training run. All files go to `folder`; without one, none are written.

    `init` gives weights to a model on meta, as in `sw.parallelize`.
    `metrics` are functions of the model's output and the batch, by name, for evaluations.
    A batch is computed in `num_microbatches` parts; the loss remains that of the full batch.
    `verify` first checks the plan's program against the model, once for each program and folder.
    `resume` is `auto` (the newest checkpoint in the folder, if there is one), `never`, or a path.
    """

    model: Part
    data: DataConfig
    loss_fn: Part = None
    init: Part = None
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
    elastic: ElasticConfig | None = None
    folder: str | None = None
    seed: int = 0
    device: str = "auto"
    compile: bool | Literal["blocks", "cuda-graph"] = False
    timeout_s: Annotated[float, Range(1)] = 300.0


def config_to_json(value: Any) -> Any:
    """Return the config as JSON; objects become the names of their types."""
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


# ------------------------------------------------------------ reading
def load_config(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> TrainConfig:
    """Read a config file; `overrides` have the form `a.b=c`, `changes` are values of fields."""
    path = Path(path)
    hint = "shardwise train config.yaml"
    text = read_text(path, ConfigError, what="config", hint=hint, max_bytes=MAX_BYTES)
    data, lines = parse_yaml(text, ConfigError, where=str(path), max_values=MAX_VALUES)
    reader = Reader(ConfigError, str(path), lines)
    if not isinstance(data, Mapping):
        reader.read(TrainConfig, data)  # raises
    values = {**data, **{name: value for name, value in changes.items() if value is not None}}
    config: TrainConfig = reader.read(TrainConfig, with_overrides(values, overrides))
    return config


def config_from(values: Mapping[str, Any]) -> TrainConfig:
    """Return the config that keyword arguments describe."""
    config: TrainConfig = Reader(ConfigError, "sw.Trainer", call=True).read(TrainConfig, values)
    return config


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with overrides of the form `a.b=c` applied.

    >>> with_overrides({"optimizer": "SGD"}, ["optimizer.args.lr=1e-2"])
    {'optimizer': {'name': 'SGD', 'args': {'lr': 0.01}}}
    """
    result: Any = dict(values)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{text!r} is not KEY=VALUE", hint="--set optimizer.args.lr=1e-3")
        item, _ = parse_yaml(value, ConfigError, where=f"--set {key}", max_values=MAX_VALUES)
        result = _put(result, key.split("."), item, key)
    return typing.cast(dict[str, Any], result)


def _put(target: Any, keys: list[str], value: Any, full_key: str) -> Any:
    if not keys:
        return value
    first, *inner = keys
    if isinstance(target, list | tuple):
        if not first.isdigit() or int(first) >= len(target):
            raise ConfigError(
                f"index {first!r} is out of range for a list of length {len(target)}",
                where=f"--set {full_key}",
            )
        items = list(target)
        items[int(first)] = _put(items[int(first)], inner, value, full_key)
        return items
    if target is None:
        target = {}
    elif not isinstance(target, Mapping):
        target = {"name": target}  # the short form of an object that has a name
    return {**target, first: _put(target.get(first), inner, value, full_key)}
