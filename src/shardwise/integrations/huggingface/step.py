"""Adapt models, optimizers, weights and state between a trainer and its parallel module."""

from __future__ import annotations

import contextlib
import glob
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import BatchError, OptimizerError
from shardwise.frontend import skeleton
from shardwise.runtime import ParallelModule, ShardedOptimizer, optimizer
from shardwise.runtime.user_model import full_tensors, sample_values
from shardwise.training.state import load_random_state, random_state

COUNT = "num_items_in_batch"
STEPS = "gradient_accumulation_steps"
KIND = "shardwise_kind"

LossOf = Callable[[nn.Module, dict[str, Any], Any], Any]


def loss_batch(inputs: Mapping[str, Any], items: Any, steps: int | None) -> dict[str, Any]:
    """Return the batch with which the step's forward returns the loss of `inputs`.

    The count of items and the number of accumulated batches are tensors because they change from
    step to step.
    """
    batch = {**inputs, KIND: "loss"}
    if items is not None:
        batch[COUNT] = torch.as_tensor(items)
    if steps is not None:
        batch[STEPS] = torch.tensor(steps)
    return batch


def as_step(model: nn.Module, loss_of: LossOf) -> nn.Module:
    """Return a twin of `model`, with the same class name, whose forward is the step.

    Both share their attributes, also those that are set later, and names of modules and parameters,
    so that plans and checkpoints are those of the model.
    """
    kind = type(model)

    def forward(self: nn.Module, **batch: Any) -> Any:
        kind_of_step = batch.pop(KIND)
        self.__class__ = kind  # the trainer's loss must see the model itself
        try:
            if kind_of_step == "outputs":
                return self(**batch)
            items, steps = batch.pop(COUNT, None), batch.pop(STEPS, None)
            loss = loss_of(self, batch, items)
            return {"loss": loss if steps is None else loss / steps}
        finally:
            self.__class__ = step

    step = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    twin: nn.Module = object.__new__(step)
    object.__setattr__(twin, "__dict__", vars(model))
    return twin


class ParallelModel(nn.Module):
    """This rank's part of the model, which a trainer uses as its wrapped model."""

    def __init__(self, parallel: ParallelModule, model: nn.Module) -> None:
        super().__init__()
        self.parallel = parallel
        self._model = (model,)  # a tuple keeps it from becoming a submodule
        self.config = getattr(model, "config", None)
        inner = getattr(getattr(model, "base_model", None), "model", None)  # of a PeftModel
        self._name = type(inner if hasattr(model, "peft_config") else model).__name__

    def forward(self, **inputs: Any) -> Any:
        """Return the model's outputs for the full batch, in eval mode, on every rank."""
        return self.parallel.eval_step({**inputs, KIND: "outputs"})

    def train(self, mode: bool = True) -> ParallelModel:
        """Set the mode, also of the user's model, which is used after training."""
        self.user_model.train(mode)
        return super().train(mode)

    @property
    def user_model(self) -> nn.Module:
        """Return the user's model."""
        return self._model[0]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's local tensors under the original names."""
        return self.parallel.named_parameters(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self.parallel.zero_grad(set_to_none)

    def _get_name(self) -> str:
        return self._name


# ------------------------------------------------------------ the optimizer
def shard_optimizer(
    user_optimizer: torch.optim.Optimizer, model: nn.Module, parallel: ParallelModule
) -> ShardedOptimizer:
    """Return the same optimizer on the shards that this rank owns."""
    if user_optimizer.state:
        raise OptimizerError(
            "the optimizer has state of earlier steps, which cannot be sharded",
            hint="pass a new one, or resume from a checkpoint",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [_group(group, names) for group in user_optimizer.param_groups]
    _require_all_trained(model, {name for group in groups for name in group["params"]})
    for group in groups:
        group["params"] = [glob.escape(name) for name in group["params"]]
    kind = type(user_optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    options = {key: value for key, value in user_optimizer.defaults.items() if key in accepted}
    return optimizer(parallel, kind, groups, rest=False, **options)


def one_element_model(model: nn.Module) -> nn.Module:
    """Copy a meta model with one element per parameter, from which an optimizer can be made."""
    result = skeleton(model)
    parameters: dict[int, nn.Parameter] = {}
    for module in result.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = nn.Parameter(torch.zeros(1), requires_grad=old.requires_grad)
                module._parameters[name] = parameters.setdefault(id(old), new)
    return result


def _group(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
    if unknown:
        raise OptimizerError(
            f"the optimizer has {len(unknown)} parameters that are not the model's, the first of "
            f"shape {unknown[0]}",
            hint="make it from the parameters of the trainer's model",
        )
    trained = [names[id(p)] for p in group["params"] if p.requires_grad]
    return {**group, "params": trained}


def _require_all_trained(model: nn.Module, optimized: set[str]) -> None:
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    missing = sorted(trained - optimized)
    if missing:
        raise OptimizerError(
            f"the optimizer lacks {len(missing)} of {len(trained)} trained parameters, "
            f"such as {missing[0]}",
            hint="requires_grad_(False) for parameters that are not to be trained",
        )


# ------------------------------------------------------------ weights
# Only one full tensor exists at a time.


def on_meta(model: nn.Module) -> bool:
    """Return whether the model has meta parameters."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def pull(parallel: ParallelModule, model: nn.Module) -> None:
    """Copy trained weights to the user's model, unless it is on meta; all ranks call it."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    # The model already has its frozen parameters, unless they came from another rank.
    for (name, *_), tensor in full_tensors(parallel, frozen=parallel.store.received_weights):
        if not tensors[name].is_meta:
            tensors[name].copy_(tensor)
            parallel.exchanged[name] = sample_values(tensors[name])


@torch.no_grad()
def push(model: nn.Module, parallel: ParallelModule) -> None:
    """Copy this rank's part of the user's model."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    store = parallel.store
    for name in (*(e.spec.name for e in store.entries), *store.buffers):
        if not tensors[name].is_meta:
            store.load_full(name, tensors[name].detach())
            parallel.exchanged[name] = sample_values(tensors[name])


# ------------------------------------------------------------ other state of a trainer
FOLDER = "shardwise"  # inside each checkpoint-N


@contextlib.contextmanager
def preserved_random() -> Iterator[None]:
    """Restore the random generators afterwards."""
    state = random_state()
    try:
        yield
    finally:
        load_random_state(state)


@contextlib.contextmanager
def unchanged_config(model: nn.Module) -> Iterator[None]:
    """Restore the model's config afterwards: `save_pretrained` sets its dtype, only on rank 0.

    Captured steps may depend on it, and ranks would no longer agree on their programs.
    """
    config = getattr(model, "config", None)
    attributes = getattr(config, "__dict__", {})
    before = dict(attributes)
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


def has_shardwise_state(folder: str | Path) -> bool:
    """Return whether a trainer's checkpoint has the state that Shardwise saves."""
    return Path(folder, FOLDER, "checkpoint.json").is_file()


def require_batch_size(saved: Any, current: int, folder: str) -> None:
    """Refuse to resume with another batch size: steps would no longer identify the samples."""
    if isinstance(saved, int) and saved != current:
        raise BatchError(
            f"{folder} was trained with batches of {saved} rows, these have {current}",
            hint="the same per_device_train_batch_size times replicas; or replicas=…",
        )


def newest_complete(folder: str | Path) -> Path | None:
    """Return the newest complete `checkpoint-N`."""
    checkpoints = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in Path(folder).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
        and (path / "trainer_state.json").is_file()
        and has_shardwise_state(path)
    }
    return checkpoints[max(checkpoints)] if checkpoints else None
