"""The module that is exported: the model's call, its loss, and what forward leaves behind.

Enters: a fake copy of the model and the call. Leaves: flat outputs `(loss, *leaves, *buffers)`
and a `Layout` that says what they are. Wrapping keeps export away from the user's containers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.batch import Call, path_name, register_dataclasses
from shardwise.errors import CaptureError, LossError
from shardwise.frontend.loss import find_loss
from shardwise.frontend.objective import Objective, loss_of, run_objective
from shardwise.frontend.outputs import flatten_output, kept_leaf
from shardwise.frontend.watch import Change, Watch

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class StepOutputs:
    """What the flat outputs of the exported step are, filled in while it is traced."""

    has_loss: bool = False
    leaves: list[Any] = field(default_factory=list)  # a constant, or the marker `TENSOR`
    spec: Any = None
    assigned: list[str] = field(default_factory=list)  # buffers that forward reassigned
    replaced: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # plain attributes
    cached: list[Change] = field(default_factory=list)  # attributes that now hold these tensors
    warnings: list[str] = field(default_factory=list)
    has_symbols: bool = False  # whether a leaf is a number that depends on sizes


class _Tensor:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _Tensor()


class Step(nn.Module):
    """`forward(*tensors)`: the model on the batch rebuilt from `tensors`, then the loss."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        chosen: Objective,
        *,
        needs_loss: bool,
        watch: Watch,
        around: Around = nullcontext,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        # A tuple hides these from export's search for attributes.
        self._hidden = (call, chosen, needs_loss, watch, around)
        self.outputs = (StepOutputs(),)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call, chosen, needs_loss, watch, around = self._hidden
        report = self.outputs[0]
        before = _state(self.model)
        results: list[torch.Tensor] = []
        with watch.watching(), around():
            output = run_objective(self.model, call, call.batch_with(tensors), chosen)
            register_dataclasses(output)
            try:
                results.append(find_loss(output, call.batch_with(tensors), loss_of(chosen)))
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
        results.extend(_reassigned(self.model, before, report))
        results.extend(tensor for _, tensor in cached)
        return tuple(results)


def _leaf(leaf: Any, results: list[torch.Tensor], report: StepOutputs) -> Any:
    if isinstance(leaf, torch.Tensor):
        results.append(leaf)
        return TENSOR
    if kept_leaf(leaf) is None and leaf is not None:
        report.has_symbols |= isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        report.warnings.append(f"the output's {type(leaf).__name__} is not kept: None in its place")
    return kept_leaf(leaf)


def _state(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]:
    return [
        (path, module, dict(vars(module)), dict(module._buffers))
        for path, module in model.named_modules()
    ]


def _reassigned(model: nn.Module, before: Any, report: StepOutputs) -> list[torch.Tensor]:
    """New contents of buffers bound to another tensor; other attributes are put back."""
    fresh: list[torch.Tensor] = []
    for path, module, attributes, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is old:
                continue
            where = path_name(tuple(filter(None, (path, name))))
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(
                    f"forward changes the shape or dtype of buffer {where}",
                    hint="keep the buffer's shape, or pass the state in the batch",
                )
            fresh.append(new)
            report.assigned.append(where)
            module._buffers[name] = old
        for name, new in list(vars(module).items()):
            old = attributes.get(name)
            if new is old or not isinstance(new, torch.Tensor):
                continue
            if isinstance(old, torch.Tensor):
                report.replaced.append((path_name(tuple(filter(None, (path, name)))), old))
            if name in attributes:
                vars(module)[name] = old
            else:
                del vars(module)[name]
    return fresh
