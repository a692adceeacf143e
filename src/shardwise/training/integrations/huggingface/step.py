"""The trainer's step as a model of its own, and the parallel module as the trainer calls it.

Enters: the user's model, and the trainer's `compute_loss`. Leaves: `as_step`, a twin whose forward
is the loss of a batch as the trainer defines it (label smoothing, `compute_loss_func`, the count
of items over all accumulated batches), which is what gets captured; and `ParallelModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.runtime import ParallelModule

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
