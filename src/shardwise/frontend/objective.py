"""What one training step computes: the model's own call, or a function of several modules.

Enters: what the user passes as model, `loss_fn` and `step`. Leaves: one module that holds every
parameter under its name, and an objective that capture and verification call in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.batch import Call
from shardwise.errors import CaptureError
from shardwise.frontend.loss import LossFn

StepFn = Callable[[Any, Any], Any]
Model = nn.Module | Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A step of the user's own: `fn(modules, batch)` gives the loss, or outputs that hold it."""

    fn: StepFn


Objective = LossFn | StepFunction | None


def as_module(model: Model) -> nn.Module:
    """Return the model; several named ones as one module, `modules.G` and `modules["G"]`."""
    if not isinstance(model, Mapping) or isinstance(model, nn.Module):
        return model
    if not model:
        raise CaptureError("no modules were given", hint='{"G": generator, "D": discriminator}')
    for name, module in model.items():
        if not isinstance(module, nn.Module):
            raise CaptureError(f"{name!r} is an nn.Module, not a {type(module).__name__}")
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise CaptureError(
                f"{name!r} cannot be the name of a module",
                hint="a Python identifier that nn.ModuleDict does not use itself",
            )
    modules = nn.ModuleDict(dict(model))
    modules.training = any(module.training for module in model.values())
    return modules


def objective(loss_fn: Objective, step: StepFn | None) -> Objective:
    """Return the one of the two that is given."""
    if step is None:
        return loss_fn
    if loss_fn is not None:
        raise CaptureError(
            "both loss_fn and a step were given, but a step computes its own loss",
            hint="leave loss_fn out",
        )
    if not callable(step):
        raise CaptureError(f"a step is a function of the modules and a batch, not {step!r}")
    _check_call(step, "the step function", "the modules and the batch", "def step(modules, batch)")
    return StepFunction(step)


def check_objective(chosen: Objective) -> None:
    """Raise unless it can be called, as far as its signature tells."""
    if isinstance(chosen, nn.Module) and any(p.requires_grad for p in chosen.parameters()):
        raise CaptureError(
            "loss_fn has parameters of its own, which nothing would train",
            hint="make it a submodule of the model and return the loss from forward",
        )
    if chosen is not None and not isinstance(chosen, StepFunction):
        hint = 'loss_fn=lambda output, batch: F.cross_entropy(output, batch["labels"])'
        _check_call(chosen, "loss_fn", "the model's output and the batch", hint)


def _check_call(function: Callable[..., Any], name: str, given: str, hint: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise CaptureError(
            f"{name} takes {signature}, but it is called with {given}", hint=hint
        ) from None


def run_objective(model: nn.Module, call: Call, batch: Any, chosen: Objective) -> Any:
    """Return the output of one step on a batch; `loss_of(chosen)` then says which value is its
    loss.
    """
    if isinstance(chosen, StepFunction):
        return chosen.fn(model, batch)
    args, kwargs = call.arguments(batch, None if chosen is None else model)
    return model(*args, **kwargs)


def loss_of(chosen: Objective) -> LossFn | None:
    """Return the loss function for `find_loss`; a step's output holds its loss."""
    return None if isinstance(chosen, StepFunction) else chosen
