"""A training run in progress on this rank: everything that has state, and how it is saved.

`Session` holds the parallel module, optimizer, schedule, average, data and position, ready for the
next step, from the start or from a checkpoint.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import shardwise.runtime as rt
from shardwise.api.parallelize import parallelize
from shardwise.api.verify import VERIFIED, verify_first
from shardwise.checkpoint import CheckpointManager, Saving, load_checkpoint, save_checkpoint
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.runtime.devices import has_streams
from shardwise.runtime.grad_sync import overflow_on_any_rank
from shardwise.training.callbacks import Callbacks, EarlyStop
from shardwise.training.config import TrainConfig, config_to_json
from shardwise.training.data import (
    BatchSlicer,
    MapLoader,
    StreamLoader,
    make_source,
    placeholder_batch,
)
from shardwise.training.evaluation import Evaluator, check_metrics, make_metrics
from shardwise.training.logs import check_logs
from shardwise.training.lr_schedule import LrSchedule
from shardwise.training.planning import (
    Planned,
    build,
    check_plan_name,
    find_class,
    load_function,
    make,
    make_planned,
    resolved,
)
from shardwise.training.processes import World, choose_device
from shardwise.training.sampling import Position, make_loading
from shardwise.training.state import (
    Ema,
    from_plain,
    load_random_state,
    random_state,
    seed_everything,
    to_plain,
)

MAX_TRACED_STEPS = 100
NO_EVALUATION_DATA = "there is no evaluation data"
RUN_FILES = (
    *("config.json", "plan.json", "run.json", "metrics.jsonl", "ranks.jsonl"),  # by `RunOutputs`
    VERIFIED,
)


class Ingredients:
    """The objects that a config names: model, loss, metrics and data, and an example batch."""

    def __init__(self, config: TrainConfig, base: Path | None) -> None:
        self.config, self.base = config, base
        seed_everything(config.seed)
        self.model: nn.Module = _instance(config.model, "model", base)
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"a {type(self.model).__name__} is not a model",
                where="model",
                hint="a function that returns an nn.Module",
            )
        self.loss_fn = load_function(config.loss_fn, "loss_fn", base)
        self.metrics = make_metrics(config, base)
        data = config.data
        collate = load_function(data.collate, "data.collate", base)
        dataset = _instance(data.train, "data.train", base)
        train = make_loading(dataset, data, collate, training=True)
        self.train, self.evaluation = make_source(train, config.seed), None
        if data.evaluation is not None:
            dataset = _instance(data.evaluation, "data.evaluation", base)
            loading = make_loading(dataset, data, collate, training=False, train=train)
            self.evaluation = make_source(loading, config.seed)
        self.example = self.batch = self.train.example()
        if self.reads_rows(self.train):
            self.batch = placeholder_batch(self.example, self.train.batch_size)

    @staticmethod
    def reads_rows(source: MapLoader | StreamLoader) -> bool:
        """Return whether a rank may read only its own rows of a batch."""
        return isinstance(source, MapLoader) and source.stacks


def _instance(part: Any, key: str, base: Path | None) -> Any:
    """Return a model or dataset; call a class or function that was passed in Python."""
    built = build(part, key, base)
    return make(built, {}, key) if isinstance(built, type) or isfunction(built) else built


def check(config: TrainConfig, base: Path | None) -> None:
    """Raise an error for mistakes in a config that show without building anything."""
    if config.steps is None and config.epochs is None:
        raise ConfigError(
            "set either steps or epochs", where="steps", hint="steps: 1000, or epochs: 3"
        )
    evaluation = config.evaluation
    evaluates = evaluation.every_steps or evaluation.every_epochs or config.metrics
    if (evaluates or config.early_stop) and config.data.evaluation is None:
        raise ConfigError(
            NO_EVALUATION_DATA, where="data.evaluation", hint="data: {evaluation: file.py:function}"
        )
    check_metrics(config)
    folder = Path(config.folder) if config.folder is not None else None
    check_logs(config.logs, folder)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder {folder}: {error.strerror}", where="folder"
            ) from error
    _check_trace(config)
    choose_device(config.device)
    check_plan_name(config, base)
    find_class(config.optimizer.name, torch.optim, "optimizer", base)
    for index, schedule in enumerate(config.lr_schedule):
        find_class(schedule.name, lr_scheduler, f"lr_schedule.{index}", base)


def _check_trace(config: TrainConfig) -> None:
    trace = config.trace
    if trace is None:
        return
    if config.folder is None:
        raise ConfigError("a trace needs a folder", where="trace", hint="folder: runs/first")
    if not 1 <= len(trace.steps) <= 2 or not 1 <= len(trace.range) <= MAX_TRACED_STEPS:
        raise ConfigError(
            f"{list(trace.steps)} is not the first and last of at most {MAX_TRACED_STEPS} steps",
            where="trace.steps",
            hint="trace: {steps: [10, 12]}",
        )
    _check_trace_steps(config, config.steps)
    if Path(trace.file).name != trace.file or trace.file in ("", ".", "..", *RUN_FILES):
        raise ConfigError(
            f"{trace.file!r} must be a plain file name that the run does not use itself",
            where="trace.file",
            hint="trace.json",
        )


def _check_trace_steps(config: TrainConfig, total_steps: int | None) -> None:
    """Refuse a trace that starts after the last step, if the number of steps is known."""
    trace = config.trace
    if trace is not None and total_steps is not None and trace.range.start > total_steps:
        raise ConfigError(
            f"the run ends at step {total_steps}, before step {trace.range.start}: "
            "nothing would be recorded",
            where="trace.steps",
            hint=f"trace: {total_steps}, or more steps",
        )


class Session:
    """Everything that changes with the steps of a run."""

    def __init__(self, ingredients: Ingredients, world: World) -> None:
        config, base = ingredients.config, ingredients.base
        model, batch, loss_fn = ingredients.model, ingredients.batch, ingredients.loss_fn
        self.config, self.world, self.base = config, world, base
        self.source, self.step, self.position = ingredients.train, 0, Position()
        self.data_state: Any = None
        _check_trace_steps(config, self.totals()["total_steps"])
        self.planned: Planned = make_planned(
            config,
            model,
            batch,
            loss_fn,
            ranks=world.size,
            device=choose_device(config.device),
            base=base,
        )
        plan = self.planned.plan.with_(seed=config.seed)
        if not model.training:
            model.train()  # as other trainers do; of a model in training mode, no module is touched
        if config.verify:
            folder = None if config.folder is None else Path(config.folder)
            verify_first(model, batch, plan, loss_fn, folder=folder)
        self.module = parallelize(
            model,
            batch,
            plan,
            loss_fn,
            device=world.device,
            seed=config.seed,
            init=load_function(config.init, "init", base),
            compile=config.compile,
            record="paused" if config.folder is not None else False,
            timeout_s=config.timeout_s,
        )
        data = {"data.train": ingredients.train, "data.evaluation": ingredients.evaluation}
        rt.require_same_lengths(self.module.mesh, data, self.module.store.device)
        self.optimizer = self._optimizer()
        self.lr_schedule = LrSchedule(config.lr_schedule, self.optimizer, self.totals(), base)
        self.ema = Ema(self.module, config.ema) if config.ema is not None else None
        self.slicer = self._slicer(ingredients, ingredients.train, training=True)
        self.evaluator = self._evaluator(ingredients)
        callbacks = [EarlyStop(config.early_stop)] if config.early_stop is not None else []
        callbacks += [build(c, f"callbacks.{i}", base) for i, c in enumerate(config.callbacks)]
        self.callbacks = Callbacks(callbacks)
        self.checkpoints = self._checkpoint_manager()
        self.saving: Saving | None = None
        self.saved_step: int | None = None

    # ------------------------------------------------------------ construction
    def _optimizer(self) -> rt.ShardedOptimizer:
        config = self.config.optimizer
        cls = find_class(config.name, torch.optim, "optimizer", self.base)
        groups = [{"params": list(g.params), **g.args} for g in config.groups]
        args = resolved(config.args, "optimizer", self.base)
        try:
            return rt.optimizer(
                self.module, cls, groups or None, elementwise=config.elementwise, **args
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{config.name}: {error}", where="optimizer.args", hint="as in torch.optim"
            ) from error

    def _slicer(
        self, ingredients: Ingredients, source: MapLoader | StreamLoader, *, training: bool
    ) -> BatchSlicer:
        """Return the slicer of a source's batches, and tell the source which rows to read."""
        source.pinned = has_streams(self.world.device)
        reads_rows = ingredients.reads_rows(source)
        # Metrics are functions of the full batch.
        by_rows = reads_rows and self.world.size > 1 and (training or not ingredients.metrics)
        slicer = BatchSlicer(self.module, training=training, by_rows=by_rows)
        if reads_rows:
            example = ingredients.example if training else source.example()
            rows = {count: slicer.rows(example, count) for count in source.batch_sizes()}
            source.rows = rows.get
        return slicer

    def _evaluator(self, ingredients: Ingredients) -> Evaluator | None:
        source = ingredients.evaluation
        if source is None:
            return None
        slicer = self._slicer(ingredients, source, training=False)
        return Evaluator(self.module, self.planned.plan, source, slicer, ingredients.metrics)

    def _checkpoint_manager(self) -> CheckpointManager | None:
        config = self.config.checkpoints
        if self.config.folder is None:
            return None
        return CheckpointManager(
            Path(self.config.folder) / "checkpoints",
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            metric=config.metric if config.keep_best else None,
            mode=config.mode or "min",
        )

    def totals(self) -> dict[str, int | None]:
        """Return the total numbers of steps and epochs, as far as they are known."""
        epoch_steps = self.source.epoch_batches()
        steps, epochs = self.config.steps, self.config.epochs
        limits = [] if steps is None else [steps]
        limits += [epochs * epoch_steps] if epochs is not None and epoch_steps is not None else []
        total = min(limits, default=None)
        if epochs is None and total is not None and epoch_steps:
            epochs = -(-total // epoch_steps)
        return {"total_steps": total, "total_epochs": epochs}

    def complete(self) -> bool:
        """Return whether all steps and epochs that the config asks for are done."""
        total, epochs = self.totals()["total_steps"], self.config.epochs
        done = total is not None and self.step >= total
        return done or (epochs is not None and self.position.epoch >= epochs)

    # ------------------------------------------------------------ evaluating, saving, resuming
    def evaluate(self) -> dict[str, float]:
        """Return the loss and metrics over the evaluation data, by default of the average."""
        if self.evaluator is None:
            raise ConfigError(NO_EVALUATION_DATA, where="data.evaluation")
        uses_ema = self.config.ema is not None and self.config.ema.evaluate
        context: Any = self.ema.applied() if uses_ema and self.ema else contextlib.nullcontext()
        self.settle()
        with context:
            return self.evaluator.run(self.config.evaluation.batches)

    def settle(self) -> None:
        """Wait until a checkpoint in progress has copied the state, which is about to change."""
        if self.saving is not None:
            self.saving.staged(self.config.timeout_s)

    def finish_saving(self) -> None:
        """Wait for the checkpoint in progress, and remove those that are not to be kept."""
        if self.saving is not None:
            self.saving.wait(self.config.timeout_s)
        if self.checkpoints is not None:
            self.checkpoints.wait(self.config.timeout_s)

    def save(self, path: Path | None, metrics: Mapping[str, float], *, wait: bool) -> Path | None:
        """Save a checkpoint, in the run's folder or at a path; all ranks call it."""
        pieces = [entry.piece.detach() for entry in self.module.store.entries]
        floats = [piece for piece in pieces if piece.is_floating_point()]
        if overflow_on_any_rank(floats, self.module.mesh, self.module.store.device):
            raise TrainingError(
                f"parameters are infinite or NaN after step {self.step}: not saved",
                hint="the last checkpoint is intact; a lower learning rate, or clip_norm: 1.0",
            )
        copies = {"ema": self.ema.pieces} if self.ema is not None else {}
        state: Any = {"extra": self.state(), "copies": copies, "wait": wait}
        if path is not None:
            self.saving = save_checkpoint(
                path, self.module, self.optimizer, step=self.step, **state
            )
        elif self.checkpoints is not None:
            self.saving = self.checkpoints.save(
                self.step, self.module, self.optimizer, metrics=metrics, **state
            )
            self.saved_step = self.step
        return self.saving.path if self.saving is not None else None

    def state(self) -> dict[str, Any]:
        """Return all state that is not in tensors, as JSON."""
        scaler = self.module.store.scaler
        return {
            "step": self.step,
            "data": {
                "position": dataclasses.asdict(self.position),
                "state": to_plain(self.data_state),
                **self._data_identity(),
            },
            "schedule": self.lr_schedule.state_dict(),
            "rng_step": self.module.rng.step,
            "random": random_state(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "callbacks": self.callbacks.state_dict(),
            "plan": self.planned.plan.to_json(),
            "config": config_to_json(self.config),
        }

    def _data_identity(self) -> dict[str, Any]:
        """Return the properties of the data on which the meaning of a position depends."""
        size = len(self.source) if isinstance(self.source, MapLoader) else None
        return {"size": size, "seed": self.config.seed, "shuffle": self.source.order}

    def resume(self) -> Path | None:
        """Resume from the checkpoint that the config names, if there is one; return its path."""
        path = find_checkpoint(self.config, self.checkpoints)
        if path is None:
            return None
        has_ema = self.ema is not None and "ema" in Manifest.read(path).sections
        copies = {"ema": self.ema.pieces} if self.ema is not None and has_ema else {}
        extra = load_checkpoint(path, self.module, self.optimizer, copies=copies).extra
        if self.ema is not None and not has_ema:
            self.ema.reset()  # the earlier run had no average: it starts here
        if "data" not in extra:
            raise ConfigError(
                f"{path} has no training state: it was not saved by a Trainer", where="resume"
            )
        try:
            self._load_state(extra, path)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"the training state in {path} is corrupt: {type(error).__name__}: {error}",
                where="extra",
                hint="resume from an earlier checkpoint: resume: PATH",
            ) from error
        return path

    def _load_state(self, extra: Mapping[str, Any], path: Path) -> None:
        """Restore the state that `state` returned."""
        data = extra["data"]
        for name, value in self._data_identity().items():
            if data[name] != value:
                raise TrainingError(
                    f"{path} was trained with data {name} {data[name]!r}, now it is {value!r}: "
                    "its position would mean other samples",
                    hint="the same data, seed and shuffle; or a new folder, resume: never",
                )
        self.step = self.saved_step = int(extra["step"])
        self.position = Position(**{name: int(n) for name, n in data["position"].items()})
        self.data_state = from_plain(data["state"])
        self.lr_schedule.load_state_dict(extra["schedule"])
        self.module.rng.step = int(extra["rng_step"])
        scaler = self.module.store.scaler
        if scaler is not None and extra["scaler"] is not None:
            scaler.load_state_dict(extra["scaler"])
        self.callbacks.load_state_dict(extra["callbacks"])
        load_random_state(extra["random"])


def find_checkpoint(config: TrainConfig, checkpoints: CheckpointManager | None) -> Path | None:
    """Return the checkpoint that `resume` selects, the same on all ranks."""
    newest = checkpoints.latest() if checkpoints is not None else None
    if config.resume == "auto":
        return newest
    if config.resume == "never":
        if newest is not None:
            raise ConfigError(
                f"resume: never, but the folder has {newest}",
                where="resume",
                hint="resume: auto to continue it; or another folder",
            )
        return None
    path = Path(config.resume)
    if os.path.isfile(path / "checkpoint.json"):
        return path
    folder = path / "checkpoints" if os.path.isdir(path / "checkpoints") else path
    latest = CheckpointManager(folder).latest() if os.path.isdir(path) else None
    if latest is None:
        raise ConfigError(
            f"no checkpoint in {path}", where="resume", hint="auto, never, or a checkpoint's folder"
        )
    return latest
