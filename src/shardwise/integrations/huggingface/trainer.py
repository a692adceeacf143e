"""`ShardwiseTrainer`: a drop-in for `transformers.Trainer`, on any plan.

All ranks run the trainer's own loop over the same global batches, as one device would (see
`arguments.py`); steps, evaluations and optimizer steps run under the plan, on all ranks together.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardwise.api.parallelize import parallelize
from shardwise.api.weights import Init
from shardwise.checkpoint import load_checkpoint, save_checkpoint
from shardwise.checkpoint.manifest import decode, encode
from shardwise.cluster import Cluster
from shardwise.errors import BatchError
from shardwise.integrations.huggingface.arguments import OneProcess, one_device, replicas_of
from shardwise.integrations.huggingface.step import (
    FOLDER,
    ParallelModel,
    as_step,
    has_shardwise_state,
    loss_batch,
    newest_complete,
    on_meta,
    one_element_model,
    preserved_random,
    pull,
    push,
    require_batch_size,
    shard_optimizer,
    unchanged_config,
)
from shardwise.integrations.plan_request import PlanLike, PlanRequest
from shardwise.plans import Plan
from shardwise.runtime import ShardedOptimizer, require_same_lengths, signature
from shardwise.runtime.devices import barrier, num_processes, process_rank
from shardwise.runtime.user_model import full_tensors
from shardwise.training.state import load_random_state, random_state

log = logging.getLogger(__name__)
MAX_SHAPES = 8  # of batches, before a warning


class ShardwiseTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that runs its steps under a Shardwise plan.

    `plan` is as in `sw.Trainer`: "auto", the name of a strategy, a plan file,
    `{"name": "hybrid", "args": {"dp": 2, "tp": 4}}`, a `Plan`, or a function of graph and cluster.
    A batch has `replicas` times `per_device_train_batch_size` samples; the default is the number of
    data-parallel ranks of the plan, and with "auto" the number of ranks. `weights` is a checkpoint
    or Hugging Face folder to start from, of which each rank reads its shards; the model may be on
    the meta device. `init` initializes a meta model, as in `sw.parallelize`. `timeout_s` limits the
    time for which ranks wait for each other when they start. Everything else is as in
    `transformers.Trainer`.
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
        self._request = PlanRequest(
            plan=plan,
            cluster=cluster,
            precision="bf16-autocast" if args.bf16 else "fp16-autocast" if args.fp16 else None,
            seed=args.seed,
        )
        self._replicas, self._weights, self._timeout_s = replicas, weights, timeout_s
        self._init = init
        self._plan: Plan | None = None
        self._parallel: ParallelModel | None = None
        self._one_element: nn.Module | None = None
        self._data: Any = None
        self._resumed: Mapping[str, Any] = {}
        self._signatures: set[Any] = set()
        super().__init__(model, one_device(args), *positional, **keywords)
        self.callback_handler.callbacks.insert(0, _SyncModel(self))

    # ------------------------------------------------------------ the plan and its module
    @property
    def plan(self) -> Plan:
        """Return the plan, which is made on first use."""
        if self._plan is None:
            self._make_plan()
        assert self._plan is not None
        return self._plan

    def _make_plan(self) -> None:
        """Make the plan with a first batch, and scale the batch sizes to all its replicas."""
        ranks = num_processes()
        rows = self.args.per_device_train_batch_size * (self._replicas or ranks)
        with preserved_random():
            model, batch = self._step_model(), self._first_batch(rows)
            self._plan = self._request.make(model, batch, ranks, self.args.device)
        if self._replicas is None:
            self._replicas = ranks if self._request.is_auto else replicas_of(self._plan)
        self.args.per_device_train_batch_size *= self._replicas
        self.args.per_device_eval_batch_size *= self._replicas
        self._train_batch_size = self.args.train_batch_size

    def _step_model(self) -> nn.Module:
        self.model.train()  # a plan is for training; evaluation sets the mode again
        return as_step(self.model, self._loss_of)

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)
        return loss

    def _first_batch(self, rows: int) -> dict[str, Any]:
        """Return the first rows of the data, in order, as a batch for the loss."""
        data = self.train_dataset if self.train_dataset is not None else self._data
        if isinstance(data, str) or data is None:
            data = self.eval_dataset
        if isinstance(data, Mapping):
            data = next(iter(data.values()))
        if data is None:
            raise BatchError(
                "there is no data to make a plan with", hint="ShardwiseTrainer(train_dataset=…)"
            )
        loader = self._get_dataloader(data, description="first", batch_size=rows)
        inputs = self._prepare_inputs(next(iter(loader)))
        return self._loss_batch(inputs, self._get_num_items_in_batch([inputs], self.args.device))

    def _loss_batch(self, inputs: Mapping[str, Any], items: Any) -> dict[str, Any]:
        """Return a training batch with the divisor of its loss in `training_step`."""
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            uses_count = self.model_accepts_loss_kwargs and items is not None
            scaled = uses_count or self.compute_loss_func is not None
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        return loss_batch(inputs, items, None if scaled else steps)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None
    ) -> nn.Module:
        """Return the parallel module of `self.model`, which is made on first use."""
        if (current := self._current) is None:
            plan = self.plan
            with preserved_random():
                self._captured = self._step_model()  # steps compare its attributes
                module = parallelize(
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
            require_same_lengths(module.mesh, data, module.store.device)
            if self._weights is not None:
                load_checkpoint(self._weights, module)
            current = self._parallel = ParallelModel(module, self.model)
            self.accelerator.parallel = module
        return current

    @property
    def _current(self) -> ParallelModel | None:
        """Return the parallel module unless `model_init` has replaced `self.model`."""
        parallel = self._parallel
        is_current = parallel is not None and parallel.user_model is self.model
        return parallel if is_current else None

    def sync_model(self) -> None:
        """Copy trained weights to `self.model`, as `train` does at its end; all ranks call it."""
        if (parallel := self._current) is not None:
            pull(parallel.parallel, parallel.user_model)

    # ------------------------------------------------------------ training
    def create_accelerator_and_postprocess(self) -> None:
        """Make all ranks one process for the trainer."""
        super().create_accelerator_and_postprocess()
        OneProcess.take_over(self.accelerator, self._shard_optimizer)
        self.gather_function = self.accelerator.gather_for_metrics

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        assert self._parallel is not None
        named = self._one_element or self.model
        sharded = shard_optimizer(optimizer, named, self._parallel.parallel)
        self.accelerator.optimizer = sharded
        return sharded

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the full model, which `accelerator.prepare` shards."""
        if on_meta(self.model):
            model = self._one_element = one_element_model(self.model)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule; one from the user refers to the optimizer before sharding."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if isinstance(self.optimizer, ShardedOptimizer):
            schedule.optimizer = self.optimizer
        return schedule

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as `transformers.Trainer`; resume from the newest complete checkpoint if `True`."""
        if resume_from_checkpoint is True:
            newest = newest_complete(self.args.output_dir)
            resume_from_checkpoint = str(newest) if newest is not None else True
        _ = self.plan  # the loop starts with data loaders, whose batch size depends on the plan
        return super().train(resume_from_checkpoint, **options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward of a global batch on all ranks; return its loss."""
        assert isinstance(model, ParallelModel)
        model.train()  # a callback may have changed it
        batch = self._loss_batch(self._prepare_inputs(inputs), num_items_in_batch)
        self._warn_about_shapes(batch)
        loss: Tensor = model.parallel.train_step(batch)
        return loss.to(self.args.device)

    def _warn_about_shapes(self, batch: Mapping[str, Any]) -> None:
        """Warn if batches have many shapes, each of which is captured and compiled separately."""
        self._signatures.add(signature(batch))
        if len(self._signatures) > MAX_SHAPES and process_rank() == 0:
            log.warning(
                "%d shapes of training batches so far, each with its own program; pad to a "
                "few: DataCollatorWithPadding(…, pad_to_multiple_of=64), dataloader_drop_last=True",
                len(self._signatures),
            )

    # ------------------------------------------------------------ evaluation
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader; its batch size depends on the plan."""
        return self._loader(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader; its batch size depends on the plan."""
        return self._loader(super().get_test_dataloader, test_dataset)

    def _loader(self, make: Callable[[Any], DataLoader[Any]], data: Any) -> DataLoader[Any]:
        self._data = data
        _ = self.plan
        return make(data)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Predict; if only the loss is needed, gather no other output."""
        has_labels = self.label_names and all(inputs.get(k) is not None for k in self.label_names)
        if not (prediction_loss_only and has_labels and isinstance(model, ParallelModel)):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        return model.parallel.eval_loss(loss_batch(inputs, items, None)), None, None

    # ------------------------------------------------------------ saved state
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a folder for `from_pretrained`; all ranks call it, rank 0 writes."""
        parallel = self._current
        if parallel is not None and on_meta(self.model):
            tensors = full_tensors(parallel.parallel)
            state = {names[0]: tensor.cpu() for names, tensor in tensors if process_rank() == 0}
            if process_rank() == 0:
                with unchanged_config(self.model):
                    self._save(output_dir, state_dict=state)
        else:
            self.sync_model()
            with unchanged_config(self.model):
                super().save_model(output_dir, _internal_call)
        barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state from which training resumes under any plan."""
        assert self._parallel is not None
        extra = {
            "schedule": encode(self.lr_scheduler.state_dict(), type(self.lr_scheduler).__name__),
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
        """Do nothing: it is saved with the optimizer's state."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the weights of a plain trainer's folder; others come with the optimizer's state."""
        if not has_shardwise_state(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self._push()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._parallel is None:
            return
        if not has_shardwise_state(checkpoint):
            log.warning("%s has no Shardwise state: the optimizer starts from scratch", checkpoint)
            return
        module = self._parallel.parallel
        frozen = any(not entry.spec.requires_grad for entry in module.store.entries)
        loaded = load_checkpoint(
            Path(checkpoint, FOLDER), module, self.optimizer, strict=not frozen
        )
        require_batch_size(loaded.extra.get("batch_size"), self._train_batch_size, checkpoint)
        self._resumed = loaded.extra
        self.lr_scheduler.load_state_dict(decode(loaded.extra["schedule"], "schedule"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._resumed:
            load_random_state(self._resumed["random"])

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or self._current is None or not has_shardwise_state(best):
            super()._load_best_model()
            self._push()
            return
        load_checkpoint(Path(best, FOLDER), self._current.parallel, strict=False)

    def _push(self) -> None:
        if (parallel := self._current) is not None:
            push(parallel.user_model, parallel.parallel)

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return process_rank() == 0

    is_local_process_zero = is_world_process_zero  # only rank 0 prints


class _SyncModel(TrainerCallback):  # type: ignore[misc]
    """Copies the weights to the user's model before other callbacks see the end of training."""

    def __init__(self, trainer: ShardwiseTrainer) -> None:
        self._trainer = trainer

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.sync_model()
