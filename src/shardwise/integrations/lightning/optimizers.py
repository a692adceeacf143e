"""Run the user's optimizer on this rank's shards, and Lightning's precision on compiled steps.

`configure_optimizers` returns an optimizer of the module's own parameters before there is a plan.
When training starts, that same object is given this rank's shards instead, so that learning-rate
schedulers, which refer to it, remain valid.
"""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
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


def single_optimizer(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the only optimizer, or raise an error if it is missing or unsupported."""
    if not optimizers or isinstance(optimizers[0], MockOptimizer):
        raise num_optimizers_error("no optimizer")
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS evaluates the model several times per step", hint="AdamW, SGD or another"
        )
    return optimizers[0]


def num_optimizers_error(number: str) -> OptimizerError:
    """Return the error about no or several optimizers."""
    return OptimizerError(
        f"configure_optimizers returns {number}; a compiled step needs exactly one",
        hint="one optimizer with parameter groups: AdamW([{'params': …, 'lr': …}, …])",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNames:
    """The names of the parameters in each group of an optimizer, and of those it trains."""

    names: tuple[tuple[str, ...], ...]
    optimized: frozenset[str]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, module: nn.Module) -> GroupNames:
        """Return the names of an optimizer's groups, whose tensors must be the module's."""
        names = {id(p): name for name, p in module.named_parameters()}
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
            if unknown:
                raise OptimizerError(
                    f"group {index} of the optimizer has tensors that are not parameters of "
                    f"{type(module).__name__}: shapes {unknown[:3]}",
                    hint="make them parameters: self.name = nn.Parameter(…)",
                )
            groups.append(tuple(names[id(p)] for p in group["params"]))
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        optimized = frozenset(trained.intersection(chain.from_iterable(groups)))
        return GroupNames(names=tuple(groups), optimized=optimized)

    def numbered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state by names to that of plain torch, by the parameters' numbers."""
        numbers = {name: i for i, name in enumerate(chain.from_iterable(self.names))}
        groups = [
            {**options, "params": [numbers[name] for name in names]}
            for options, names in zip(state["param_groups"], self.names, strict=True)
        ]
        values = {numbers[name]: state["state"][name] for name in numbers if name in state["state"]}
        return {"state": values, "param_groups": groups}

    def named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Invert `numbered`; refuse the state of another optimizer."""
        saved = [len(group["params"]) for group in state["param_groups"]]
        if saved != [len(group) for group in self.names]:
            raise OptimizerError(
                f"the saved optimizer has groups of {saved} parameters, this one of "
                f"{[len(group) for group in self.names]}",
                hint="resume with the configure_optimizers of the checkpoint",
            )
        numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
        names = dict(zip(numbers, chain.from_iterable(self.names), strict=True))
        values = {names[number]: value for number, value in state["state"].items()}
        pairs = zip(state["param_groups"], self.names, strict=True)
        groups = [{**options, "params": list(group_names)} for options, group_names in pairs]
        return {"state": values, "param_groups": groups}


class StepOptimizer(ShardedOptimizer):
    """A sharded optimizer in Lightning's order of calls: step, zero_grad, backward.

    A compiled step has already computed its gradients when Lightning calls `zero_grad`, which must
    not clear them: it does nothing while `has_new_gradients`.
    """

    has_new_gradients = False

    def __eq__(self, other: object) -> bool:
        """Equal the user's own optimizer, the inner one, to which schedulers refer."""
        return self is other or self.inner is other

    def __hash__(self) -> int:
        return hash(self.inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients but those of the current step."""
        if not self.has_new_gradients:
            super().zero_grad(set_to_none)


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    names: GroupNames,
    pm: rt.ParallelModule,
    elementwise: bool | None = None,
) -> StepOptimizer:
    """Give the user's optimizer this rank's shards."""
    kind = type(optimizer)

    def with_shards(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        user_groups = optimizer.param_groups
        for user_group, group in zip(user_groups, groups, strict=False):
            user_group["params"] = group["params"]
        assert not any(group["params"] for group in groups[len(user_groups) :])
        optimizer.state = defaultdict(dict)
        return optimizer

    with_shards.__name__ = kind.__name__
    groups = [{"params": [glob.escape(name) for name in group]} for group in names.names]
    elementwise = kind in ELEMENTWISE if elementwise is None else elementwise
    sharded = rt.optimizer(pm, with_shards, groups, elementwise=elementwise, rest=False)
    return StepOptimizer(pm.store, sharded.inner, sharded._entries[: len(groups)])


# ------------------------------------------------------------ precision
_OF_PLUGIN = ("convert_module", "convert_input", "convert_output", "tensor_init_context",
              "module_init_context", "forward_context")  # fmt: skip


class StepPrecision(Precision):
    """The trainer's precision, in which steps are compiled; clips gradients over all ranks."""

    def __init__(self, plugin: Precision, strategy: ShardwiseStrategy) -> None:
        super().__init__()
        if type(plugin) not in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
            raise PlanError(
                f"{type(plugin).__name__} is not supported",
                hint='"32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"',
            )
        self.plugin, self._strategy = plugin, strategy
        self.precision = plugin.precision
        for name in _OF_PLUGIN:
            setattr(self, name, getattr(plugin, name))

    @property
    def plan_precision(self) -> str | None:
        """Return the precision of the plan, or None if it is that of the module."""
        if not isinstance(self.plugin, MixedPrecision):
            return None
        return "fp16-autocast" if self.precision == "16-mixed" else "bf16-autocast"

    def compiling_context(self) -> AbstractContextManager[Any]:
        """Set the default dtype of new tensors for a compiled step, without autocast."""
        plain = Precision() if isinstance(self.plugin, MixedPrecision) else self.plugin
        return plain.forward_context()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of the full model's gradient."""
        rt.clip_grad_norm_(self._strategy.parallel_module, float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip every element."""
        self._strategy.training.clip_by_value(float(clip_val))

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.resume_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._strategy.load_resume_state(state_dict)
