"""The trainer's step as a model of its own, and the parallel module as the trainer calls it."""

from __future__ import annotations

import contextlib
import glob
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import BatchError, OptimizerError, ShardwiseError
from shardwise.frontend import skeleton
from shardwise.runtime import ParallelModule, ShardedOptimizer, optimizer
from shardwise.training.export import full_tensors
from shardwise.training.state import load_random_state, random_state

COUNT = "num_items_in_batch"
STEPS = "gradient_accumulation_steps"
WANTED = "shardwise_wants"

LossOf = Callable[[nn.Module, dict[str, Any], Any], Any]


def loss_batch(inputs: Mapping[str, Any], items: Any, steps: int | None) -> dict[str, Any]:
    """What the step's forward takes for the loss of `inputs`.

    The count of items and the number of accumulated batches are tensors, since they change from
    step to step.
    """
    batch = {**inputs, WANTED: "loss"}
    if items is not None:
        batch[COUNT] = torch.as_tensor(items)
    if steps is not None:
        batch[STEPS] = torch.tensor(steps)
    return batch


def as_step(model: nn.Module, loss_of: LossOf) -> nn.Module:
    """A twin of `model`, with its class's name, whose forward is the step.

    Both have the same attributes, also those that are set later. Names of modules and parameters
    stay as they are, so plans and checkpoints are the model's.
    """
    kind = type(model)

    def forward(self: nn.Module, **batch: Any) -> Any:
        wanted = batch.pop(WANTED)
        self.__class__ = kind  # inside, the trainer sees the model itself
        try:
            if wanted == "outputs":
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
    """This rank's part of the model, in the place of the wrapped model of a trainer."""

    def __init__(self, parallel: ParallelModule, model: nn.Module) -> None:
        super().__init__()
        self.parallel = parallel
        self._whole = (model,)  # in a tuple it is no submodule
        self.config = getattr(model, "config", None)
        inner = getattr(getattr(model, "base_model", None), "model", None)  # of a PeftModel
        self._name = type(inner if hasattr(model, "peft_config") else model).__name__

    def forward(self, **inputs: Any) -> Any:
        """The model's outputs on the whole batch, in eval mode, on every rank."""
        return self.parallel.eval_step({**inputs, WANTED: "outputs"})

    def train(self, mode: bool = True) -> ParallelModel:
        """Set the mode, the user's model's as well: it is used again after the training."""
        self.whole.train(mode)
        return super().train(mode)

    @property
    def whole(self) -> nn.Module:
        """The user's model."""
        return self._whole[0]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's local tensors under the original names."""
        return self.parallel.named_parameters(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.parallel.zero_grad(set_to_none)

    def _get_name(self) -> str:
        return self._name


# A torch optimizer of the whole model as one of this rank's part.


def shard_optimizer(
    made: torch.optim.Optimizer, model: nn.Module, parallel: ParallelModule
) -> ShardedOptimizer:
    """The same optimizer on the pieces that this rank owns."""
    if made.state:
        raise OptimizerError(
            "the optimizer has state of earlier steps, which cannot be taken over",
            hint="give a new one, or resume from a checkpoint",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [_group(group, names) for group in made.param_groups]
    _require_all(model, [name for group in groups for name in group["params"]])
    for group in groups:
        group["params"] = [glob.escape(name) for name in group["params"]]
    kind = type(made)
    known = inspect.signature(kind.__init__).parameters
    options = {key: value for key, value in made.defaults.items() if key in known}
    return optimizer(parallel, kind, groups, rest=False, **options)


def stand_in(model: nn.Module) -> nn.Module:
    """A model on meta with one number for every parameter, of which an optimizer can be made."""
    twin = skeleton(model)
    made: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        for name, old in module._parameters.items():
            if old is not None:
                like = nn.Parameter(torch.zeros(1), requires_grad=old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), like)
    return twin


def _group(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
    if unknown:
        raise OptimizerError(
            f"the optimizer has {len(unknown)} parameters that are not the model's, the first of "
            f"shape {unknown[0]}",
            hint="make it of model.parameters(), of the model that the trainer is given",
        )
    trained = [names[id(p)] for p in group["params"] if p.requires_grad]
    return {**group, "params": trained}


def _require_all(model: nn.Module, found: list[str]) -> None:
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = sorted({*trained} - {*found})
    if missing:
        raise OptimizerError(
            f"the optimizer lacks {len(missing)} of {len(trained)} parameters that are trained, "
            f"{missing[0]} for one",
            hint="requires_grad_(False) on what is not to be trained",
        )


# Weights between the user's model, which is whole, and this rank's part of it.
#
# One tensor is whole at a time.


def on_meta(model: nn.Module) -> bool:
    """Whether the model has parameters without data."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def pull(parallel: ParallelModule, model: nn.Module) -> None:
    """Give the user's model what was trained; all ranks call it. On meta it stays as it is."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    # Frozen parameters are as the model has them, unless they came from another rank.
    for name, found in full_tensors(parallel, frozen=parallel.store.received_weights):
        if not tensors[name].is_meta:
            tensors[name].copy_(found)
    parallel.copies += 1


@torch.no_grad()
def push(model: nn.Module, parallel: ParallelModule) -> None:
    """Take this rank's part of the user's model."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    store = parallel.store
    for name in (*(e.spec.name for e in store.entries), *store.buffers):
        if not tensors[name].is_meta:
            store.load_full(name, tensors[name].detach())


# What a trainer needs beside the weights to go on exactly: as JSON, next to the optimizer's state.


FOLDER = "shardwise"  # inside of each checkpoint-N


@contextlib.contextmanager
def preserved_random() -> Iterator[None]:
    """What happens inside draws no numbers that others would have drawn."""
    state = random_state()
    try:
        yield
    finally:
        load_random_state(state)


@contextlib.contextmanager
def unchanged_config(model: nn.Module) -> Iterator[None]:
    """Leave the config as it was: `save_pretrained` sets its dtype, on the rank that writes alone.

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


def schedule_state(schedule: Any) -> Any:
    """The state of a learning-rate schedule, as JSON carries it."""
    state = schedule.state_dict()
    try:
        return json.loads(json.dumps(state, default=_number))
    except (TypeError, ValueError) as error:
        raise ShardwiseError(
            f"the state of {type(schedule).__name__} cannot be saved: {error}",
            hint="a schedule whose state_dict() has numbers, texts, lists and dicts",
        ) from None


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"it has a {type(value).__name__}")


def is_ours(folder: str | Path) -> bool:
    """Whether a trainer's checkpoint has the state that Shardwise saves."""
    return Path(folder, FOLDER, "checkpoint.json").is_file()


def require_batch_size(saved: Any, here: int, folder: str) -> None:
    """Refuse to go on with other batches: steps would no longer say which samples were seen."""
    if isinstance(saved, int) and saved != here:
        raise BatchError(
            f"{folder} was trained with batches of {saved} rows, these have {here}",
            hint="per_device_train_batch_size times the replicas as before; or replicas=…",
        )


def newest_complete(folder: str | Path) -> Path | None:
    """The newest `checkpoint-N` that was written to its end."""
    found = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in Path(folder).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
        and (path / "trainer_state.json").is_file()
        and is_ours(path)
    }
    return found[max(found)] if found else None
