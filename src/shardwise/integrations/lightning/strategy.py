"""`Trainer(strategy=ShardwiseStrategy("fsdp"))`: Lightning's loops around compiled steps.

The order of Lightning's calls is kept: `training_step` runs forward and backward of the compiled
step and then repeats what the user's step logged; `backward` only runs the hooks around it.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise import runtime as rt
from shardwise.api.weights import Init
from shardwise.cluster import Cluster
from shardwise.errors import CaptureError, OptimizerError
from shardwise.integrations.lightning.library import (
    LightningModule,
    Precision,
    Processes,
    TrainerFn,
    init_optimizers,
)
from shardwise.integrations.lightning.optimizers import (
    GroupNames,
    StepOptimizer,
    StepPrecision,
    num_optimizers_error,
    shard_optimizer,
    single_optimizer,
)
from shardwise.integrations.lightning.step import (
    require_supported,
    step_batch,
    training_arguments,
    unsynced_metrics,
)
from shardwise.integrations.lightning.training import GlobalBatches, Training
from shardwise.integrations.plan_request import PlanLike, PlanRequest
from shardwise.plans import Plan

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_WRONG_WARNINGS = (
    r"It is recommended to use `self\.log",  # every rank has the values of the full batch
    r".*your dataloader is not resumable",  # its position is saved
)


def _in_dtype(init: Init, dtype: torch.dtype) -> Init:
    """Make `init` run under a default dtype, which the trainer's precision may have changed."""

    @functools.wraps(init)
    def run(*module: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return init(*module)
        finally:
            torch.set_default_dtype(before)

    return run


class ShardwiseStrategy(Processes):
    """Run a LightningModule's steps under a Shardwise plan.

    `plan` is as in `sw.Trainer`: "auto", the name of a strategy of `sw.strategies`, a plan file,
    `{"name": "pipeline", "args": {"pp": 2, "num_microbatches": 4}}`, a `Plan`, or a function of
    graph and cluster.

    A batch of the DataLoader is the global batch of all ranks. `evaluate="whole"` runs validation
    during `fit` as plain Python with gathered weights, for steps that cannot be captured.
    `elementwise=True` declares that a custom optimizer class may update shards of parameters.
    `init` initializes a module on the meta device, as in `sw.parallelize`.
    """

    strategy_name = "shardwise"

    def __init__(
        self,
        plan: PlanLike = "auto",
        *,
        cluster: Cluster | str | None = None,
        evaluate: Literal["captured", "whole"] = "captured",
        elementwise: bool | None = None,
        seed: int = 0,
        init: Init | None = None,
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.request = PlanRequest(plan=plan, cluster=cluster, seed=seed)
        super().__init__(
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
        )
        self._evaluate, self._elementwise = evaluate, elementwise
        self._seed, self._init, self._seconds = seed, init, timeout_s
        self._reset()

    def _reset(self) -> None:
        self.plan: Plan | None = None
        self._training: Training | None = None
        self._names: GroupNames | None = None
        self._saved: Mapping[str, Any] | None = None  # optimizer state, until there is a plan
        self._resume_state: Mapping[str, Any] = {}
        self._positions: list[Mapping[str, Any]] = []  # at which training loaders start
        self._open, self._validating = contextlib.ExitStack(), contextlib.ExitStack()
        self._failed = False

    # ------------------------------------------------------------ setup
    @property
    def precision_plugin(self) -> Precision:
        return self._step_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if not isinstance(plugin, StepPrecision):
            self._step_precision = StepPrecision(plugin or Precision(), self)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: the module must have its final dtypes, so that nothing is rounded."""
        return True

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def connect(self, model: LightningModule) -> None:
        """Start again with a new module."""
        super().connect(model)
        self._reset()

    def setup(self, trainer: Any) -> None:
        """Make the optimizer; the parallel module is made with the first batch."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        for message in _WRONG_WARNINGS:
            warnings.filterwarnings("ignore", message)
        module = self._module
        require_supported(module)
        self._step_precision.convert_module(module)
        self.broadcast_weights(module)
        unsynced_metrics(module, self._open)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        else:
            self.model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the user's optimizer of the module's own parameters."""
        try:
            optimizers, configs = init_optimizers(self._module)
        except RuntimeError as error:
            if "multiple optimizers" in str(error):  # Lightning suggests manual optimization
                raise num_optimizers_error("several optimizers") from error
            raise
        self._names = GroupNames.of(single_optimizer(optimizers), self._module)
        self.optimizers, self.lr_scheduler_configs = optimizers, configs

    def model_to_device(self) -> None:
        """Move the full module, which every rank runs while there is no plan."""
        if any(p.is_meta for p in self._module.parameters()):
            raise CaptureError(
                f"{type(self._module).__name__} has meta parameters, which only fit initializes",
                hint="Trainer(num_sanity_val_steps=0); a module with weights for validate and test",
            )
        self._module.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader of global batches, which a resumed training continues."""
        loader = GlobalBatches(dataloader, self.root_device, self._epoch_progress)
        if self._positions and self._module.trainer.training:
            loader.resume_from(self._positions.pop(0))
        return loader

    def _epoch_progress(self) -> tuple[int, bool]:
        """Return the number of batches trained in this epoch, and whether it is complete."""
        progress = self._module.trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready, bool(progress.is_last_batch)

    # ------------------------------------------------------------ training
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make the plan with the first batch."""
        if self._training is None:
            self._start(step_batch("training", batch, training_arguments(self._module)))

    def _start(self, batch: Any) -> None:
        assert self._names is not None
        precision = self._step_precision

        def make_plan(model: nn.Module) -> Plan:
            ranks, device = self.world_size, self.root_device
            saved = self._saved_plan()
            if saved is not None and saved.num_ranks == ranks:
                return saved
            return self.request.make(model, batch, ranks, device, precision.plan_precision)

        init = None if self._init is None else _in_dtype(self._init, torch.get_default_dtype())
        with torch.random.fork_rng(devices=[]), precision.compiling_context():
            training = Training(
                self._module,
                self.root_device,
                batch,
                make_plan,
                self._names.optimized,
                seed=self._seed,
                init=init,
                timeout_s=self._seconds,
            )
        self.plan, pm = training.plan, training.parallel
        loaders = {f"loader {i}": loader for i, loader in enumerate(self._training_loaders())}
        rt.require_same_lengths(pm.mesh, loaders, pm.store.device)
        optimizer = shard_optimizer(
            single_optimizer(self.optimizers), self._names, pm, self._elementwise
        )
        self._training, self.optimizers = training, [optimizer]
        if self._saved is not None:
            optimizer.load_state_dict(self._names.named(self._saved))
            self._saved = None
        self._restore(pm)

    def _saved_plan(self) -> Plan | None:
        """Return the plan of the resumed training, if it was requested in the same way.

        The first batch after a resume may be a small one, which could lead to another plan.
        """
        request = self.request.text
        if request is None or self._resume_state.get("asked") != request:
            return None
        return Plan.from_json(self._resume_state["plan"])

    @property
    def parallel_module(self) -> rt.ParallelModule:
        """Return this rank's part of the module, once training has started."""
        return self.training.parallel

    @property
    def training(self) -> Training:
        """Return the module in parallel, once training has started."""
        if self._training is None:
            raise OptimizerError("training has not started: the plan is made with the first batch")
        return self._training

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        """Run forward and backward of the compiled step, and what the user's step logs."""
        trainer = self._module.trainer
        optimizer = self._step_optimizer()
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            optimizer.has_new_gradients = False
            optimizer.zero_grad()
        with self._step_precision.compiling_context():
            result = self.training.train(step_batch("training", batch, len(arguments)))
        optimizer.has_new_gradients = True
        return result

    def _step_optimizer(self) -> StepOptimizer:
        optimizer = self.optimizers[0]
        assert isinstance(optimizer, StepOptimizer)
        return optimizer

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the hooks of backward, which is already done; average accumulated gradients."""
        trainer, plugin = self._module.trainer, self._step_precision
        closure_loss = plugin.pre_backward(closure_loss, self._module)
        self._step_optimizer().has_new_gradients = False
        batches = trainer.accumulate_grad_batches
        if batches > 1 and not trainer.fit_loop._should_accumulate():
            self.training.scale_gradients(1.0 / batches)
        return plugin.post_backward(closure_loss, self._module)

    # ------------------------------------------------------------ evaluation
    def _evaluation(self, step: str, batch: Any, *arguments: Any) -> Any:
        if self._training is None or self._evaluate == "whole":
            with self._step_precision.forward_context():
                return getattr(self._module, f"{step}_step")(batch, *arguments)
        dataloader = arguments[1] if len(arguments) > 1 else 0
        with self._step_precision.compiling_context():
            return self._training.evaluate(step_batch(step, batch, len(arguments), dataloader))

    # A compiled step during training, otherwise the module's own.
    validation_step = functools.partialmethod(_evaluation, "validation")
    test_step = functools.partialmethod(_evaluation, "test")
    predict_step = functools.partialmethod(_evaluation, "predict")

    def on_validation_start(self) -> None:
        """Gather the weights for validation as plain Python."""
        if self._training is None:
            self.model_to_device()
        elif self._evaluate == "whole":
            self._validating.enter_context(self._training.gathered())

    def on_validation_end(self) -> None:
        """Release the weights."""
        self._validating.close()

    @contextlib.contextmanager
    def whole_module(self) -> Iterator[LightningModule]:
        """Yield the module with all its weights, for instance to sample; all ranks enter."""
        if self._training is None:
            yield self._module
            return
        with self._training.gathered() as module:
            yield module

    # ------------------------------------------------------------ checkpoints
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return full tensors under the module's own names; all ranks call it."""
        if self._training is None:
            return self._module.state_dict()
        return self._training.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state as in plain Lightning: full tensors by the parameters' numbers."""
        if self._training is None or self._names is None:
            return dict(self._saved) if self._saved is not None else optimizer.state_dict()
        return self._names.numbered(self._step_optimizer().state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load into the parallel module if there is one, otherwise into the module."""
        state = checkpoint["state_dict"]
        if self._training is not None:
            self._training.parallel.load_state_dict(state)
            return
        meta = any(p.is_meta for p in self._module.parameters())
        self._module.load_state_dict(state, strict=strict, assign=meta)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a state that plain Lightning, or a training under any plan, has saved."""
        assert self._names is not None
        saved = checkpoint["optimizer_states"][0]
        if self._training is not None:
            self._step_optimizer().load_state_dict(self._names.named(saved))
            return
        self._names.named(saved)  # raises if it does not fit, before anything is computed
        self._saved = saved
        for group, options in zip(
            self.optimizers[0].param_groups, saved["param_groups"], strict=True
        ):
            group.update({key: value for key, value in options.items() if key != "params"})

    def resume_state(self) -> dict[str, Any]:
        """Return the plan, random numbers, loss scale and data positions for a checkpoint."""
        if self._training is None:
            return dict(self._resume_state)
        pm = self._training.parallel
        scaler = pm.store.scaler
        return {
            "asked": self.request.text,
            "plan": None if self.plan is None else self.plan.to_json(),
            "random_step": pm.rng.step,
            "loss_scale": None if scaler is None else scaler.state_dict(),
            "data": [loader.position() for loader in self._training_loaders()],
        }

    def _training_loaders(self) -> list[GlobalBatches]:
        combined = self._module.trainer.fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else []
        return [loader for loader in loaders if isinstance(loader, GlobalBatches)]

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `resume_state` returned."""
        self._resume_state = dict(state)
        self._positions = list(state.get("data", ()))
        if self._training is not None:
            self._restore(self._training.parallel)

    def _restore(self, pm: rt.ParallelModule) -> None:
        pm.rng.step = int(self._resume_state.get("random_step", pm.rng.step))
        scale = self._resume_state.get("loss_scale")
        if scale is not None and pm.store.scaler is not None:
            pm.store.scaler.load_state_dict(scale)

    # ------------------------------------------------------------ teardown
    def on_exception(self, exception: BaseException) -> None:
        """Gather nothing at teardown: the other ranks may be gone."""
        self._failed = True

    def teardown(self) -> None:
        """Leave the trained weights in the module, as plain Lightning does."""
        training, self._training = self._training, None
        if training is not None and not self._failed:
            training.weights.restore(training.parallel.gather_state_dict())
        self._open.close()
        if self._failed and any(p.is_meta for p in self._module.parameters()):
            self._lightning_module = None  # it has no weights to move
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        fresh = {name: contextlib.ExitStack() for name in ("_open", "_validating")}
        return {**super().__getstate__(), **fresh}
