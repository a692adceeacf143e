"""`ShardwiseTrainer`: a drop-in for `transformers.Trainer`, on any plan.

All ranks run the trainer's own loop over the same whole batches, as one device would (see
`arguments.py`); a step, an evaluation and an optimizer step are the plan's, on all ranks together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardwise.api.parallelize import parallelize
from shardwise.api.weights import Init
from shardwise.checkpoint import load_checkpoint, save_checkpoint
from shardwise.cluster import Cluster
from shardwise.errors import BatchError
from shardwise.integrations.huggingface.arguments import (
    OneProcess,
    num_ranks,
    one_device,
    rank,
    replicas_of,
    scale_batches,
)
from shardwise.integrations.huggingface.step import (
    FOLDER,
    ParallelModel,
    as_step,
    is_ours,
    loss_batch,
    newest_complete,
    on_meta,
    preserved_random,
    pull,
    push,
    require_batch_size,
    schedule_state,
    shard_optimizer,
    stand_in,
    unchanged_config,
)
from shardwise.integrations.plan_request import PlanLike, PlanRequest
from shardwise.plans import Plan
from shardwise.runtime import ShardedOptimizer, require_same_lengths, signature
from shardwise.training.export import full_tensors
from shardwise.training.state import load_random_state, random_state

log = logging.getLogger(__name__)
MANY_SHAPES = 8


class ShardwiseTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that runs its steps under a Shardwise plan.

    `plan` is as in `sw.Trainer`: "auto", the name of a strategy, a plan's file,
    `{"name": "hybrid", "args": {"dp": 2, "tp": 4}}`, a `Plan`, or a function of graph and cluster.
    A batch has `replicas` times `per_device_train_batch_size` samples: by default as many as the
    plan has data-parallel ranks, and with "auto" as there are ranks. `weights` is a checkpoint or
    Hugging Face folder to start from, of which each rank reads its shards: the model may be on
    meta. `init` initializes a model on meta, as in `sw.parallelize`. `timeout_s` is how long ranks
    wait for each other when they start. Everything else is as in `transformers.Trainer`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        plan: PlanLike = "auto",
        cluster: Cluster | str | Path | None = None,
        replicas: int | None = None,
        weights: str | Path | None = None,
        init: Init | None = None,
        timeout_s: float = 300.0,
        **keywords: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments("tmp_trainer")
        self._wanted = PlanRequest(
            plan=plan,
            cluster=cluster,
            precision="bf16-autocast" if args.bf16 else "fp16-autocast" if args.fp16 else None,
            seed=args.seed,
        )
        self._replicas, self._weights, self._timeout_s = replicas, weights, timeout_s
        self._init = init
        self._plan: Plan | None = None
        self._parallel: ParallelModel | None = None
        self._stand_in: nn.Module | None = None
        self._data: Any = None
        self._resumed: Mapping[str, Any] = {}
        self._signatures: set[Any] = set()
        super().__init__(model, one_device(args), *positional, **keywords)
        self.callback_handler.callbacks.insert(0, _TrainedModel(self))

    # --- the plan, and the module that runs it ---------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan; asked for the first time, it is found."""
        if self._plan is None:
            self._find_plan()
        assert self._plan is not None
        return self._plan

    def _find_plan(self) -> None:
        """Make the plan for a first batch, and the batch sizes those of all its replicas."""
        ranks = num_ranks()
        rows = self.args.per_device_train_batch_size * (self._replicas or ranks)
        with preserved_random():
            model, batch = self._step_model(), self._first_batch(rows)
            self._plan = self._wanted.make(model, batch, ranks, self.args.device)
        if self._replicas is None:
            self._replicas = ranks if self._wanted.is_auto else replicas_of(self._plan)
        scale_batches(self.args, self._replicas)
        self._train_batch_size = self.args.train_batch_size

    def _step_model(self) -> nn.Module:
        self.model.train()  # a plan is for training; whoever evaluates sets the mode again
        return as_step(self.model, self._loss_of)

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)
        return loss

    def _first_batch(self, rows: int) -> dict[str, Any]:
        """The first rows of the data, in order, as a batch for the loss."""
        data = self.train_dataset if self.train_dataset is not None else self._data
        if isinstance(data, str) or data is None:
            data = self.eval_dataset
        if isinstance(data, Mapping):
            data = next(iter(data.values()))
        if data is None:
            raise BatchError(
                "there is no data to make a plan for", hint="ShardwiseTrainer(train_dataset=…)"
            )
        loader = self._get_dataloader(data, description="first", batch_size=rows)
        inputs = self._prepare_inputs(next(iter(loader)))
        return self._loss_batch(inputs, self._get_num_items_in_batch([inputs], self.args.device))

    def _loss_batch(self, inputs: Mapping[str, Any], items: Any) -> dict[str, Any]:
        """A training batch, with what `training_step` divides its loss by."""
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and items is not None
            scaled = counted or self.compute_loss_func is not None
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        return loss_batch(inputs, items, None if scaled else steps)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None
    ) -> nn.Module:
        """The parallel module of `self.model`."""
        if (current := self._current) is None:
            plan = self.plan
            with preserved_random():
                self._captured = self._step_model()  # whose attributes every step compares
                part = parallelize(
                    self._captured,
                    self._first_batch(self.args.train_batch_size),
                    plan,
                    device=self.args.device,
                    seed=self.args.seed,
                    init=self._init,
                    compile=bool(self.args.torch_compile),
                    timeout_s=self._timeout_s,
                )
            data = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
            require_same_lengths(part.mesh, data, part.store.device)
            if self._weights is not None:
                load_checkpoint(self._weights, part)
            current = self._parallel = ParallelModel(part, self.model)
            self.accelerator.parallel = part
        return current

    @property
    def _current(self) -> ParallelModel | None:
        """The parallel module of `self.model`, which `model_init` may have replaced."""
        made = self._parallel
        return made if made is not None and made.whole is self.model else None

    def sync_model(self) -> None:
        """Give `self.model` the trained weights; all ranks call it. `train` does so at its end."""
        if (parallel := self._current) is not None:
            pull(parallel.parallel, parallel.whole)

    # --- training --------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """All ranks are one process to the trainer."""
        super().create_accelerator_and_postprocess()
        OneProcess.take_over(self.accelerator, self._shard_optimizer)
        self.gather_function = self.accelerator.gather_for_metrics

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        assert self._parallel is not None
        named = self._stand_in or self.model
        made = shard_optimizer(optimizer, named, self._parallel.parallel)
        self.accelerator.optimizer = made
        return made

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As ever, for the whole model; `accelerator.prepare` makes it this rank's."""
        if on_meta(self.model):
            model = self._stand_in = stand_in(self.model)
        made: torch.optim.Optimizer = super().create_optimizer(model)
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule; a given one was made for the optimizer before it was sharded."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if isinstance(self.optimizer, ShardedOptimizer):
            schedule.optimizer = self.optimizer
        return schedule

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As `transformers.Trainer.train`; `True` takes the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            found = newest_complete(self.args.output_dir)
            resume_from_checkpoint = str(found) if found is not None else True
        _ = self.plan  # the loop begins with data loaders, whose batches depend on the plan
        return super().train(resume_from_checkpoint, **options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of one whole batch, by all ranks: its loss."""
        assert isinstance(model, ParallelModel)
        model.train()  # as ever, whatever a callback has done
        batch = self._loss_batch(self._prepare_inputs(inputs), num_items_in_batch)
        self._note_shapes(batch)
        loss: Tensor = model.parallel.train_step(batch)
        return loss.to(self.args.device)

    def _note_shapes(self, batch: Mapping[str, Any]) -> None:
        """Say so when batches come in many shapes: each is captured and compiled by itself."""
        self._signatures.add(signature(batch))
        if len(self._signatures) > MANY_SHAPES and rank() == 0:
            log.warning(
                "%d shapes of training batches so far, each with a program of its own; pad to a "
                "few: DataCollatorWithPadding(…, pad_to_multiple_of=64), dataloader_drop_last=True",
                len(self._signatures),
            )

    # --- evaluation ------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As ever; the batch size is that of all replicas, which the plan says."""
        self._data = eval_dataset
        _ = self.plan
        loader: DataLoader[Any] = super().get_eval_dataloader(eval_dataset)
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As ever; the batch size is that of all replicas, which the plan says."""
        self._data = test_dataset
        _ = self.plan
        loader: DataLoader[Any] = super().get_test_dataloader(test_dataset)
        return loader

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """As ever; a loss alone is computed without gathering any other output."""
        labelled = self.label_names and all(inputs.get(k) is not None for k in self.label_names)
        if not (prediction_loss_only and labelled and isinstance(model, ParallelModel)):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        return model.parallel.eval_loss(loss_batch(inputs, items, None)), None, None

    # --- saved state -----------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a folder for `from_pretrained`; all ranks call it, rank 0 writes."""
        parallel = self._current
        if parallel is not None and on_meta(self.model):
            found = full_tensors(parallel.parallel)
            state = {name: tensor.cpu() for name, tensor in found if rank() == 0}
            if rank() == 0:
                with unchanged_config(self.model):
                    self._save(output_dir, state_dict=state)
        else:
            self.sync_model()
            with unchanged_config(self.model):
                super().save_model(output_dir, _internal_call)
        if dist.is_initialized():
            dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """All that training goes on from, under any plan."""
        assert self._parallel is not None
        extra = {
            "schedule": schedule_state(self.lr_scheduler),
            "random": random_state(),
            "plan": self.plan.to_json(),
            "batch_size": self._train_batch_size,
        }
        save_checkpoint(
            Path(output_dir, FOLDER),
            self._parallel.parallel,
            self.optimizer,
            step=self.state.global_step,
            extra=extra,
            frozen=False,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """It is with the optimizer's state."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Weights come with the optimizer's state; of a plain trainer's folder, into the model."""
        if not is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self._push()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._parallel is None:
            return
        if not is_ours(checkpoint):
            log.warning("%s has no state of Shardwise: the optimizer starts anew", checkpoint)
            return
        part = self._parallel.parallel
        frozen = any(not entry.spec.requires_grad for entry in part.store.entries)
        loaded = load_checkpoint(Path(checkpoint, FOLDER), part, self.optimizer, strict=not frozen)
        require_batch_size(loaded.extra.get("batch_size"), self._train_batch_size, checkpoint)
        self._resumed = loaded.extra
        self.lr_scheduler.load_state_dict(loaded.extra["schedule"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._resumed:
            load_random_state(self._resumed["random"])

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or self._current is None or not is_ours(best):
            super()._load_best_model()
            self._push()
            return
        load_checkpoint(Path(best, FOLDER), self._current.parallel, strict=False)

    def _push(self) -> None:
        if (parallel := self._current) is not None:
            push(parallel.whole, parallel.parallel)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return rank() == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is rank 0, the only one that talks."""
        return rank() == 0


class _TrainedModel(TrainerCallback):  # type: ignore[misc]
    """Gives the user's model its weights before other callbacks see the end of training."""

    def __init__(self, trainer: ShardwiseTrainer) -> None:
        self._trainer = trainer

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.sync_model()
