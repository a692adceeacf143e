"""Define what one training step computes, and the module that is exported for it.

A step is the model's call and its loss, or a function of the user's over several modules.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.batch import Call, register_dataclasses
from shardwise.errors import CaptureError, LossError
from shardwise.frontend.known_values import Inquiry, Question
from shardwise.frontend.python_state import Change, Watch
from shardwise.keras_model import KerasModule, without_keras

# ---------------------------------------------------------------- the loss
LossFn = Callable[[Any, Any], Any]
_HINT = (
    'loss_fn=lambda output, batch: output["..."], or return the loss alone, as .loss or ["loss"]'
)


def find_loss(output: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Return the loss of one step, or raise a `LossError` that says how to mark it.

    >>> find_loss({"loss": torch.tensor(1.0), "aux": torch.tensor(2.0)}, None, None)
    tensor(1.)
    """
    if loss_fn is not None:
        return _checked(_marked(loss_fn(output, batch)), "loss_fn's result")
    marked = _marked(output)
    if marked is not None:
        return _checked(marked, "the model's loss")
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    scalars = [tensor for tensor in tensors if tensor.dim() == 0 and tensor.is_floating_point()]
    if len(scalars) == 1:
        return _checked(scalars[0], "the only scalar")
    if scalars:
        raise LossError(
            f"the model returns {len(scalars)} scalars and none is marked as the loss", hint=_HINT
        )
    raise LossError(f"the model's output has no scalar: {_describe(output)}", hint=_HINT)


def _marked(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _checked(loss: Any, origin: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"{origin} is {_describe(loss)}, not a tensor", hint=_HINT)
    if loss.numel() != 1:
        raise LossError(
            f"{origin} has shape {list(loss.shape)}; a loss is one number",
            hint="reduce it: loss.mean(), or loss_fn=lambda output, batch: ...",
        )
    if not loss.is_floating_point():
        raise LossError(f"{origin} has dtype {loss.dtype}; a loss is floating-point", hint=_HINT)
    return loss.reshape(()) if loss.dim() else loss


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in output.items()) + "}"
    if isinstance(output, tuple | list):
        return "(" + ", ".join(map(_describe, output)) + ")"
    return f"a {type(output).__name__}"


# ---------------------------------------------------------------- models and step functions
StepFn = Callable[[Any, Any], Any]
Model = nn.Module | Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A step of the user's own: `fn(modules, batch)` returns the loss, or outputs that have it."""

    fn: StepFn


Objective = LossFn | StepFunction | None


def as_module(model: Model) -> nn.Module:
    """Return the model; a mapping becomes one module, with `modules.G` and `modules["G"]`."""
    if not isinstance(model, Mapping) or isinstance(model, nn.Module):
        return without_keras(model)
    if not model:
        raise CaptureError(
            "the mapping of modules is empty", hint='{"G": generator, "D": discriminator}'
        )
    for name, module in model.items():
        if not isinstance(module, nn.Module):
            raise CaptureError(f"{name!r} must be an nn.Module, not a {type(module).__name__}")
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise CaptureError(
                f"{name!r} cannot be the name of a module",
                hint="a Python identifier that nn.ModuleDict does not use itself",
            )
    modules = nn.ModuleDict({name: without_keras(module) for name, module in model.items()})
    modules.training = any(module.training for module in model.values())
    return modules


def objective(loss_fn: Objective, step: StepFn | None) -> Objective:
    """Return the loss function or the step; passing both is an error."""
    if step is None:
        return loss_fn
    if loss_fn is not None:
        raise CaptureError(
            "both loss_fn and a step were given, but a step computes its own loss",
            hint="leave loss_fn out",
        )
    if not callable(step):
        raise CaptureError(f"a step must be a function of the modules and a batch, not {step!r}")
    _check_call(step, "the step function", "the modules and the batch", "def step(modules, batch)")
    return StepFunction(step)


def check_objective(chosen: Objective) -> None:
    """Raise if the signature of the objective shows that it cannot be called."""
    if isinstance(chosen, nn.Module) and any(p.requires_grad for p in chosen.parameters()):
        raise CaptureError(
            "loss_fn has parameters, which nothing would train",
            hint="make it a submodule of the model and return the loss from forward",
        )
    if chosen is not None and not isinstance(chosen, StepFunction):
        hint = 'loss_fn=lambda output, batch: F.cross_entropy(output, batch["labels"])'
        _check_call(chosen, "loss_fn", "the model's output and the batch", hint)


def _check_call(function: Callable[..., Any], name: str, arguments: str, hint: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise CaptureError(
            f"{name} takes {signature}, but it is called with {arguments}", hint=hint
        ) from None


def run_objective(model: nn.Module, call: Call, batch: Any, chosen: Objective) -> Any:
    """Return the output of one step on a batch; `find_loss` has its loss."""
    if isinstance(chosen, StepFunction):
        return chosen.fn(model, batch)
    args, kwargs = call.arguments(batch, None if chosen is None else model)
    return model(*args, **kwargs)


def loss_of(chosen: Objective, model: nn.Module) -> LossFn | None:
    """Return the loss function for `find_loss`; the output of a step contains its loss."""
    if isinstance(chosen, StepFunction):
        for module in model.modules():
            if isinstance(module, KerasModule):
                module.require_read_losses()
        return None
    return model.loss_fn(chosen) if isinstance(model, KerasModule) else chosen


# ---------------------------------------------------------------- outputs
def flatten_output(output: Any) -> tuple[list[Any], Any]:
    """Return the leaves of an output and its structure; a cache of keys and values is one leaf.

    Such caches (transformers' `DynamicCache`) serve text generation. Training writes them and never
    reads them, so they are not results of the step.
    """
    return pytree.tree_flatten(output, is_leaf=is_cache)


def output_leaf(leaf: Any) -> Any:
    """Return the step's result for a leaf: tensors and plain values, None for other objects."""
    return leaf if isinstance(leaf, torch.Tensor | bool | int | float | str) else None


def is_cache(value: Any) -> bool:
    """Return whether an object is a cache of keys and values, by its class or its methods."""
    if any(c.__module__.startswith("transformers.cache_utils") for c in type(value).__mro__):
        return True
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


# ---------------------------------------------------------------- the exported module
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class StepOutputs:
    """The meaning of the exported step's flat outputs, recorded while it is traced."""

    has_loss: bool = False
    leaves: list[Any] = field(default_factory=list)  # a constant, or the class of tensors
    spec: Any = None
    assigned: list[str] = field(default_factory=list)  # buffers that forward reassigned
    replaced: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # plain attributes
    cached: list[Change] = field(default_factory=list)  # attributes that now are these tensors
    warnings: list[str] = field(default_factory=list)
    has_symbols: bool = False  # whether a leaf is a number that depends on sizes
    asked: list[Question] = field(default_factory=list)  # about values of the batch


class Step(nn.Module):
    """Run the model on a batch rebuilt from flat tensors, then the loss.

    Wrapping the model keeps export away from the user's containers.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        chosen: Objective,
        *,
        watch: Watch,
        inquiry: Inquiry,
        around: Around,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        # A tuple hides these from export's search for attributes.
        self._hidden = (call, chosen, model.training, watch, inquiry, around)
        self.outputs = (StepOutputs(),)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call, chosen, needs_loss, watch, inquiry, around = self._hidden
        report = self.outputs[0]
        inquiry.begin(tensors, self.model)
        before = [
            (path, module, dict(vars(module)), dict(module._buffers))
            for path, module in self.model.named_modules()
        ]
        results: list[torch.Tensor] = []
        with watch.watching(), around():
            output = run_objective(self.model, call, call.batch_with(tensors), chosen)
            register_dataclasses(output)
            try:
                results.append(
                    find_loss(output, call.batch_with(tensors), loss_of(chosen, self.model))
                )
                report.has_loss = True
            except LossError:
                if needs_loss or chosen is not None:
                    raise
        leaves, report.spec = flatten_output(output)
        report.leaves = [_leaf(leaf, results, report) for leaf in leaves]
        watch.compare()
        report.warnings += watch.warnings()
        cached = [(change, t) for change in watch.changes for t in change.tensors]
        report.cached = [change for change, _ in cached]
        results.extend(_reassigned(before, report))
        results.extend(tensor for _, tensor in cached)
        report.asked = list(inquiry.asked)
        results.extend(question.tensor for question in report.asked)
        return tuple(results)


def _leaf(leaf: Any, results: list[torch.Tensor], report: StepOutputs) -> Any:
    if isinstance(leaf, torch.Tensor):
        results.append(leaf)
        return torch.Tensor
    if output_leaf(leaf) is None and leaf is not None:
        report.has_symbols |= isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        report.warnings.append(f"the output's {type(leaf).__name__} is replaced by None")
    return output_leaf(leaf)


def _reassigned(before: Any, report: StepOutputs) -> list[torch.Tensor]:
    """Return the new contents of reassigned buffers; restore all other attributes."""
    contents: list[torch.Tensor] = []
    for path, module, attributes, buffers in before:
        prefix = f"{path}." if path else ""
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is old:
                continue
            where = f"{prefix}{name}"
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(
                    f"forward changes the shape or dtype of buffer {where}",
                    hint="keep the buffer's shape, or pass the state in the batch",
                )
            contents.append(new)
            report.assigned.append(where)
            module._buffers[name] = old
        for name, new in list(vars(module).items()):
            old = attributes.get(name)
            if new is old or not isinstance(new, torch.Tensor):
                continue
            if isinstance(old, torch.Tensor):
                report.replaced.append((f"{prefix}{name}", old))
            if name in attributes:
                vars(module)[name] = old
            else:
                del vars(module)[name]
    return contents
