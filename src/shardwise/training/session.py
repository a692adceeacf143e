"""A training that is under way on this rank: all that has state, and how it is saved.

Enters: a config, in every process of the group. Leaves: `Session`: the parallel module, optimizer,
schedule, average, data and position, ready for the next step; and the same again from a checkpoint.
"""

from __future__ import annotations

import contextlib
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
from shardwise.runtime.grad_sync import overflow_on_any_rank
from shardwise.training.callbacks import Callbacks, EarlyStop
from shardwise.training.config import TrainConfig, config_to_json
from shardwise.training.data import BatchParts, MapLoader, StreamLoader, make_source, whole_like
from shardwise.training.evaluation import Evaluator, check_metrics, make_metrics
from shardwise.training.logs.files import check_logs
from shardwise.training.lr_schedule import LrSchedule, from_plain, to_plain
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
from shardwise.training.sampling import Loading, Position, loading_of
from shardwise.training.state import Ema, load_random_state, random_state, seed_everything

__all__ = ["Ingredients", "Session", "check", "gather"]

MOST_TRACED = 100  # steps
WRITTEN = (
    *("config.json", "plan.json", "run.json", "metrics.jsonl", "ranks.jsonl"),  # by `outputs`
    VERIFIED,
)


class Ingredients:
    """What the config names, built: model, loss, data; and an example of a whole batch."""

    def __init__(self, config: TrainConfig, base: Path | None) -> None:
        self.config, self.base = config, base
        seed_everything(config.seed)
        self.model: nn.Module = _made(config.model, "model", base)
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"a {type(self.model).__name__} is no model",
                where="model",
                hint="a function that returns an nn.Module",
            )
        self.loss_fn = load_function(config.loss_fn, "loss_fn", base)
        self.metrics = make_metrics(config, base)
        data = config.data
        collate = load_function(data.collate, "data.collate", base)
        found = _made(data.train, "data.train", base)
        train = loading_of(found, data, collate, training=True)
        self.train, self.evaluation = make_source(train, config.seed), None
        if data.evaluation is not None:
            found = _made(data.evaluation, "data.evaluation", base)
            like: Loading = loading_of(found, data, collate, training=False, like=train)
            self.evaluation = make_source(like, config.seed)
        self.example = self.train.example()
        rows = self.reads_rows(self.train)
        self.batch = whole_like(self.example, self.train.batch_size) if rows else self.example

    @staticmethod
    def reads_rows(source: MapLoader | StreamLoader) -> bool:
        """Whether a rank may read its rows of a batch alone."""
        return isinstance(source, MapLoader) and source.stacks


def gather(config: TrainConfig, base: Path | None) -> Ingredients:
    """All that a config names, after what is wrong in the config itself was told."""
    check(config, base)
    return Ingredients(config, base)


def check(config: TrainConfig, base: Path | None) -> None:
    """Say what is wrong with a config, as far as that is known without building anything."""
    if config.steps is None and config.epochs is None:
        raise ConfigError("how long?", where="steps", hint="steps: 1000, or epochs: 3")
    evaluation = config.evaluation
    wants = evaluation.every_steps or evaluation.every_epochs or config.metrics
    if (wants or config.early_stop) and config.data.evaluation is None:
        raise ConfigError(
            "there is nothing to evaluate with",
            where="data.evaluation",
            hint="data: {evaluation: file.py:function}",
        )
    check_metrics(config)
    folder = Path(config.folder) if config.folder is not None else None
    check_logs(config.logs, folder)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be a folder: {error.strerror}", where="folder"
            ) from error
    _check_trace(config)
    choose_device(config.device)
    check_plan_name(config, base)
    find_class(config.optimizer.name, torch.optim, "optimizer", base)
    for index, each in enumerate(config.lr_schedule):
        find_class(each.name, lr_scheduler, f"lr_schedule.{index}", base)


def _check_trace(config: TrainConfig) -> None:
    trace = config.trace
    if trace is None:
        return
    if config.folder is None:
        raise ConfigError("a trace needs a folder", where="trace", hint="folder: runs/first")
    if not 1 <= len(trace.steps) <= 2 or not 1 <= len(trace.range) <= MOST_TRACED:
        raise ConfigError(
            f"{list(trace.steps)} are no first and last step, at most {MOST_TRACED} apart",
            where="trace.steps",
            hint="trace: {steps: [10, 12]}",
        )
    _check_trace_comes(config, config.steps)
    if Path(trace.file).name != trace.file or trace.file in ("", ".", "..", *WRITTEN):
        raise ConfigError(
            f"{trace.file!r} is no file's name in the folder that the run does not use itself",
            where="trace.file",
            hint="trace.json",
        )


def _check_trace_comes(config: TrainConfig, total_steps: int | None) -> None:
    """Refuse to wait for steps that the run does not have, where their number is known."""
    trace = config.trace
    if trace is not None and total_steps is not None and trace.range.start > total_steps:
        raise ConfigError(
            f"the run ends at step {total_steps}, before step {trace.range.start}: "
            "nothing would be recorded",
            where="trace.steps",
            hint=f"trace: {total_steps}, or more steps",
        )


def _made(part: Any, key: str, base: Path | None) -> Any:
    """A model or dataset; a class or function that was given in Python is called."""
    found = build(part, key, base)
    return make(found, {}, key) if isinstance(found, type) or isfunction(found) else found


class Session:
    """Everything of a training that changes with its steps."""

    def __init__(self, parts: Ingredients, world: World) -> None:
        config, base = parts.config, parts.base
        self.config, self.world, self.base = config, world, base
        self.source, self.step, self.position = parts.train, 0, Position()
        self.data_state: Any = None
        _check_trace_comes(config, self.totals()["total_steps"])
        self.planned: Planned = make_planned(
            config,
            parts.model,
            parts.batch,
            parts.loss_fn,
            ranks=world.size,
            device=choose_device(config.device),
            base=base,
        )
        plan = self.planned.plan.with_(seed=config.seed)
        if not parts.model.training:
            parts.model.train()  # as trainers do; modules in eval mode within it stay so
        if config.verify:
            folder = None if config.folder is None else Path(config.folder)
            verify_first(parts.model, parts.batch, plan, parts.loss_fn, folder=folder)
        self.module = parallelize(
            parts.model,
            parts.batch,
            plan,
            parts.loss_fn,
            device=world.device,
            seed=config.seed,
            compile=config.compile,
            record="paused" if config.folder is not None else False,
            timeout_s=config.timeout_s,
        )
        data = {"data.train": parts.train, "data.evaluation": parts.evaluation}
        rt.require_same_lengths(self.module.mesh, data, self.module.store.device)
        self.optimizer = self._optimizer()
        self.lr_schedule = LrSchedule(config.lr_schedule, self.optimizer, self.totals(), base)
        self.ema = Ema(self.module, config.ema) if config.ema is not None else None
        self.parts = self._parts(parts, parts.train, training=True)
        self.evaluator = self._evaluator(parts)
        stops = [EarlyStop(config.early_stop)] if config.early_stop is not None else []
        own = [build(each, f"callbacks.{i}", base) for i, each in enumerate(config.callbacks)]
        self.callbacks = Callbacks([*stops, *own])
        self.checkpoints = self._folder()
        self.saving: Saving | None = None
        self.saved_step: int | None = None

    # --- making --------------------------------------------------------------------------

    def _optimizer(self) -> rt.ShardedOptimizer:
        wanted = self.config.optimizer
        found = find_class(wanted.name, torch.optim, "optimizer", self.base)
        groups = [{"params": list(g.params), **g.args} for g in wanted.groups]
        args = resolved(wanted.args, "optimizer", self.base)
        try:
            return rt.optimizer(
                self.module, found, groups or None, elementwise=wanted.elementwise, **args
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{wanted.name}: {error}", where="optimizer.args", hint="as in torch.optim"
            ) from error

    def _parts(
        self, made: Ingredients, source: MapLoader | StreamLoader, *, training: bool
    ) -> BatchParts:
        """How what is read here becomes a batch; the loader is told which rows it needs."""
        source.pinned = self.world.device.type == "cuda"
        rows = self.world.size > 1 and made.reads_rows(source)
        if made.metrics and not training:
            rows = False  # they are functions of the whole batch
        parts = BatchParts(self.module, training=training, rows=rows)
        if made.reads_rows(source):
            like = made.example if training else source.example()
            known = {count: parts.rows(like, count) for count in source.sizes()}
            source.rows = known.get
        return parts

    def _evaluator(self, made: Ingredients) -> Evaluator | None:
        if made.evaluation is None:
            return None
        parts = self._parts(made, made.evaluation, training=False)
        return Evaluator(self.module, self.planned.plan, made.evaluation, parts, made.metrics)

    def _folder(self) -> CheckpointManager | None:
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
        """The numbers of steps and epochs, where they are known."""
        each = self.source.epoch_batches()
        steps, epochs = self.config.steps, self.config.epochs
        by_epochs = epochs * each if epochs is not None and each is not None else None
        known = [n for n in (steps, by_epochs) if n is not None]
        total = min(known) if known else None
        if epochs is None and total is not None and each:
            epochs = -(-total // each)
        return {"total_steps": total, "total_epochs": epochs}

    def complete(self) -> bool:
        """Return whether all steps and epochs that the config asks for are done."""
        total, epochs = self.totals()["total_steps"], self.config.epochs
        done = total is not None and self.step >= total
        return done or (epochs is not None and self.position.epoch >= epochs)

    # --- evaluating, saving, continuing -----------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """The loss and metrics over the evaluation data, of the average where that is asked for."""
        if self.evaluator is None:
            raise ConfigError("there is nothing to evaluate with", where="data.evaluation")
        average = self.ema is not None and self.config.ema is not None and self.config.ema.evaluate
        context: Any = self.ema.applied() if average and self.ema else contextlib.nullcontext()
        self.settle()
        with context:
            return self.evaluator.run(self.config.evaluation.batches)

    def settle(self) -> None:
        """Before the state changes: what a checkpoint copies of it is copied."""
        if self.saving is not None:
            self.saving.staged(self.config.timeout_s)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, and remove those that are not kept."""
        if self.saving is not None:
            self.saving.wait(self.config.timeout_s)
        if self.checkpoints is not None:
            self.checkpoints.wait(self.config.timeout_s)

    def save(self, path: Path | None, metrics: Mapping[str, float], *, wait: bool) -> Path | None:
        """A checkpoint of this moment, in the run's folder or elsewhere; all ranks call it."""
        pieces = [entry.piece.detach() for entry in self.module.store.entries]
        floats = [piece for piece in pieces if piece.is_floating_point()]
        if overflow_on_any_rank(floats, self.module.mesh, self.module.store.device):
            raise TrainingError(
                f"parameters are infinite or undefined after step {self.step}: not saved",
                hint="the last checkpoint is as it was; a lower learning rate, or clip_norm: 1.0",
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
        """All that is no tensor, as JSON."""
        scaler = self.module.store.scaler
        return {
            "step": self.step,
            "data": {
                "position": self.position.to_json(),
                "state": to_plain(self.data_state),
                **self._order(),
            },
            "schedule": self.lr_schedule.state_dict(),
            "rng_step": self.module.rng.step,
            "random": random_state(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "callbacks": self.callbacks.state_dict(),
            "plan": self.planned.plan.to_json(),
            "config": config_to_json(self.config),
        }

    def _order(self) -> dict[str, Any]:
        """What a position in the data means."""
        size = len(self.source) if isinstance(self.source, MapLoader) else None
        return {"size": size, "seed": self.config.seed, "shuffle": self.source.order}

    def resume(self) -> Path | None:
        """Continue from the checkpoint that the config names, if there is one."""
        path = find_checkpoint(self.config, self.checkpoints)
        if path is None:
            return None
        averaged = self.ema is not None and "ema" in Manifest.read(path).sections
        copies = {"ema": self.ema.pieces} if self.ema is not None and averaged else {}
        extra = load_checkpoint(path, self.module, self.optimizer, copies=copies).extra
        if self.ema is not None and not averaged:
            self.ema.reset()  # an average that was not asked for before begins here
        if "data" not in extra:
            raise ConfigError(
                f"{path} holds no training: it was not saved by a Trainer", where="resume"
            )
        try:
            self._continue(extra, path)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"the state of the training in {path} is damaged: {type(error).__name__}: {error}",
                where="extra",
                hint="resume from an earlier checkpoint: resume: PATH",
            ) from error
        return path

    def _continue(self, extra: Mapping[str, Any], path: Path) -> None:
        """Take over the state that `state` wrote."""
        order = self._order()
        for name, mine in order.items():
            if extra["data"][name] != mine:
                raise TrainingError(
                    f"{path} was trained with data {name} {extra['data'][name]!r}, now it is "
                    f"{mine!r}: its position would mean other samples",
                    hint="the same data, seed and shuffle; or a new folder, resume: never",
                )
        self.step = self.saved_step = int(extra["step"])
        self.position = Position.from_json(extra["data"]["position"])
        self.data_state = from_plain(extra["data"]["state"])
        self.lr_schedule.load_state_dict(extra["schedule"])
        self.module.rng.step = int(extra["rng_step"])
        scaler = self.module.store.scaler
        if scaler is not None and extra["scaler"] is not None:
            scaler.load_state_dict(extra["scaler"])
        self.callbacks.load_state_dict(extra["callbacks"])
        load_random_state(extra["random"])


def find_checkpoint(config: TrainConfig, checkpoints: CheckpointManager | None) -> Path | None:
    """What `resume` names; all ranks find the same."""
    newest = checkpoints.latest() if checkpoints is not None else None
    if config.resume == "auto":
        return newest
    if config.resume == "never":
        if newest is not None:
            raise ConfigError(
                f"resume: never, but there is {newest}",
                where="resume",
                hint="resume: auto continues it; or another folder",
            )
        return None
    path = Path(config.resume)
    if os.path.isfile(path / "checkpoint.json"):
        return path
    inside = CheckpointManager(
        path / "checkpoints" if os.path.isdir(path / "checkpoints") else path
    )
    found = inside.latest() if os.path.isdir(path) else None
    if found is None:
        raise ConfigError(
            f"no checkpoint in {path}", where="resume", hint="auto, never, or a checkpoint's folder"
        )
    return found
