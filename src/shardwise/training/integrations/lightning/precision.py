"""The trainer's number types, as the plan's; clipping and loss scaling over all ranks.

Enters: the precision plugin that `Trainer(precision=…)` chose. Leaves: one that converts modules
and batches as that does, and leaves autocast and loss scaling to the compiled step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.training.integrations.lightning.library import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

if TYPE_CHECKING:
    from shardwise.training.integrations.lightning.strategy import ShardwiseStrategy

__all__ = ["StepPrecision"]


class StepPrecision(Precision):
    """What Lightning calls around a step; the step itself is compiled in these types."""

    def __init__(self, given: Precision, strategy: ShardwiseStrategy) -> None:
        super().__init__()
        if type(given) not in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
            raise PlanError(
                f"{type(given).__name__} is not supported",
                hint='"32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"',
            )
        self.given, self._strategy = given, strategy
        self.precision = given.precision

    @property
    def of_plan(self) -> str | None:
        """The types that the plan must have; None where the module's own say it all."""
        if not isinstance(self.given, MixedPrecision):
            return None
        return "fp16-autocast" if self.precision == "16-mixed" else "bf16-autocast"

    def compiling_context(self) -> AbstractContextManager[Any]:
        """Around a compiled step: the default type of new tensors, but no autocast."""
        plain = Precision() if isinstance(self.given, MixedPrecision) else self.given
        return plain.forward_context()

    def convert_module(self, module: nn.Module) -> nn.Module:
        return self.given.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return self.given.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.given.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.given.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.given.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.given.forward_context()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """By the norm of the whole model's gradient."""
        self._strategy.clip_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Element by element."""
        self._strategy.clip_by_value(float(clip_val))

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.moment()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._strategy.continue_from(state_dict)
