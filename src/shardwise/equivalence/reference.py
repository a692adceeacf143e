"""The original model on one device in float64: what every plan is compared with.

Enters: the user's model, batch and loss function. Leaves: `Reference`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.batch import flatten_batch, read_batch
from shardwise.equivalence.precision import KeepDouble, widen_tensor
from shardwise.errors import VerifyError
from shardwise.frontend.functions import without_checkpoints
from shardwise.frontend.hooks import copy_hooks
from shardwise.frontend.loss import find_loss
from shardwise.frontend.objective import Objective, loss_of, run_objective
from shardwise.frontend.outputs import flatten_output, kept_leaf

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One training step of the model: before, after, and what it gave."""

    state: Mapping[str, torch.Tensor]  # before the step, buffers that are not saved included
    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor | None]
    state_after: Mapping[str, torch.Tensor]
    batches: tuple[Mapping[str, torch.Tensor], ...] = ()  # inputs by name, of each micro-batch


def double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return a float64 copy of the model and the batch on the CPU."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise VerifyError(
            "the model has no weights (meta tensors)",
            hint="verify a real instance, or a smaller configuration of the same model",
        )
    twin = copy.deepcopy(model).cpu()
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.data = widen_tensor(tensor.data)
    for original, copied in zip(model.parameters(), twin.parameters(), strict=True):
        copy_hooks(original, copied)
    call = read_batch(batch)
    return twin, call.batch_with([widen_tensor(t.detach().cpu()) for _, t in call.tensors])


def run_reference(
    model: nn.Module,
    batch: Any,
    loss_fn: Objective = None,
    *,
    more: Sequence[Any] = (),
) -> Reference:
    """Forward, backward and one AdamW step of a model that may be changed.

    With `more` batches the gradients and losses of all are averaged, as by accumulation.
    """
    batches = [batch, *more]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: t.detach().clone() for name, t in tensors.items()}
    model.zero_grad(set_to_none=True)
    losses, outputs = [], []
    for batch in batches:
        with KeepDouble(), without_checkpoints():
            output = run_objective(model, read_batch(batch), batch, loss_fn)
            loss = find_loss(output, batch, loss_of(loss_fn)) / len(batches)
            if not loss.requires_grad:
                raise VerifyError("the loss depends on no parameter that is trained")
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        outputs.append([kept_leaf(leaf) for leaf in flatten_output(output)[0]])
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    gradients = {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained:
        torch.optim.AdamW(trained, lr=LEARNING_RATE).step()
    return Reference(
        state=state,
        loss=torch.stack(losses).sum(),
        outputs=tuple(join_outputs(leaf) for leaf in zip(*outputs, strict=True)),
        gradients=gradients,
        state_after={
            name: t.detach().clone()
            for name, t in (*model.named_parameters(), *model.named_buffers())
        },
        batches=tuple(flatten_batch(batch)[0] for batch in batches),
    )


def join_outputs(parts: Sequence[Any]) -> Any:
    """One output of several batches: rows put together, numbers averaged, counts added up."""
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        return first
    if len(parts) == 1:
        return first.detach()
    whole = [part.detach() for part in parts]
    if first.dim():
        return torch.cat(whole)
    total = torch.stack(whole).sum(0)
    return total / len(whole) if first.is_floating_point() else total
