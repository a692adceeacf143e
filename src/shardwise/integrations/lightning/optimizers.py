"""The user's optimizer on this rank's part of the model.

`configure_optimizers` makes an optimizer of the module's own parameters before there is a plan.
When training starts, that same object is given this rank's pieces instead, so that learning-rate
schedulers, which hold it, stay as they are.
"""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import runtime as rt
from shardwise.errors import OptimizerError, PlanError
from shardwise.integrations.lightning.library import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    MockOptimizer,
    Precision,
)
from shardwise.runtime.optimizer import ELEMENTWISE, ShardedOptimizer

if TYPE_CHECKING:
    from shardwise.integrations.lightning.strategy import ShardwiseStrategy

__all__ = [
    "GroupNames",
    "StepOptimizer",
    "StepPrecision",
    "adopt",
    "only_optimizer",
    "several_optimizers",
]


def only_optimizer(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The one optimizer of a training, or why there cannot be another."""
    if not optimizers or isinstance(optimizers[0], MockOptimizer):
        raise several_optimizers("no optimizer")
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS evaluates the model several times in a step", hint="AdamW, SGD or another"
        )
    return optimizers[0]


def several_optimizers(how_many: str) -> OptimizerError:
    """What is said of none or several."""
    return OptimizerError(
        f"configure_optimizers returns {how_many}; a compiled step has one",
        hint="one optimizer with parameter groups: AdamW([{'params': …, 'lr': …}, …])",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNames:
    """The names of the parameters in each group of an optimizer, in its order."""

    names: tuple[tuple[str, ...], ...]
    trained: frozenset[str]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, module: nn.Module) -> GroupNames:
        known = {id(p): name for name, p in module.named_parameters()}
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            strange = [tuple(p.shape) for p in group["params"] if id(p) not in known]
            if strange:
                raise OptimizerError(
                    f"group {index} of the optimizer has tensors that are no parameters of "
                    f"{type(module).__name__}: shapes {strange[:3]}",
                    hint="make them parameters: self.name = nn.Parameter(…)",
                )
            groups.append(tuple(known[id(p)] for p in group["params"]))
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        return GroupNames(names=tuple(groups), trained=frozenset(trained))

    @property
    def optimized(self) -> tuple[tuple[str, ...], ...]:
        """Those of each group that are trained."""
        return tuple(tuple(n for n in group if n in self.trained) for group in self.names)

    def numbered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state by names as plain torch has it: by the parameters' numbers."""
        numbers = {n: i for i, n in enumerate(name for group in self.names for name in group)}
        groups = [
            {**options, "params": [numbers[name] for name in names]}
            for options, names in zip(state["param_groups"], self.names, strict=True)
        ]
        values = {numbers[name]: state["state"][name] for name in numbers if name in state["state"]}
        return {"state": values, "param_groups": groups}

    def named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `numbered`; refuses the state of another optimizer."""
        saved = [len(group["params"]) for group in state["param_groups"]]
        if saved != [len(group) for group in self.names]:
            raise OptimizerError(
                f"the saved optimizer has groups of {saved} parameters, this one of "
                f"{[len(group) for group in self.names]}",
                hint="resume with the configure_optimizers of the checkpoint",
            )
        names = {
            number: name
            for group, mine in zip(state["param_groups"], self.names, strict=True)
            for number, name in zip(group["params"], mine, strict=True)
        }
        groups = [
            {**options, "params": list(mine)}
            for options, mine in zip(state["param_groups"], self.names, strict=True)
        ]
        return {
            "state": {names[number]: values for number, values in state["state"].items()},
            "param_groups": groups,
        }


class StepOptimizer(ShardedOptimizer):
    """A sharded optimizer in Lightning's order of calls: step, zero_grad, backward.

    A step here has made its gradients when Lightning asks to forget the earlier ones; while they
    are `fresh`, `zero_grad` is a request that has been met.
    """

    fresh = False

    def __eq__(self, other: object) -> bool:
        """Schedulers hold the user's own optimizer, which is the inner one."""
        return self is other or self.inner is other

    def __hash__(self) -> int:
        return hash(self.inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients but those of the step under way."""
        if not self.fresh:
            super().zero_grad(set_to_none)


def adopt(
    optimizer: torch.optim.Optimizer,
    names: GroupNames,
    pm: rt.ParallelModule,
    elementwise: bool | None = None,
) -> StepOptimizer:
    """The user's optimizer, from now on of this rank's pieces."""
    kind = type(optimizer)

    def with_pieces(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        own_groups = optimizer.param_groups
        for own, new in zip(own_groups, groups, strict=False):
            own["params"] = new["params"]
        assert not any(rest["params"] for rest in groups[len(own_groups) :])  # all have a group
        optimizer.state = defaultdict(dict)
        return optimizer

    with_pieces.__name__ = kind.__name__
    groups = [{"params": [glob.escape(name) for name in group]} for group in names.names]
    known = kind in ELEMENTWISE if elementwise is None else elementwise
    made = rt.optimizer(pm, with_pieces, groups, elementwise=known, rest=False)
    return StepOptimizer(pm.store, made.inner, made._entries[: len(groups)])


# The trainer's number types, as the plan's; clipping and loss scaling over all ranks.


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
