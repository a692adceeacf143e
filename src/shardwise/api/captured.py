"""The graph that a plan runs: of the model in the plan's number types, for its micro-batches.

Enters: a model, a batch and a plan. Leaves: `Graph`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.batch import path_name, read_batch
from shardwise.errors import BatchError, PlanError
from shardwise.frontend import capture as capture_once
from shardwise.frontend import skeleton
from shardwise.frontend.hooks import hooks_of, name_of, place_of
from shardwise.frontend.objective import Model, Objective, StepFn, as_module, objective
from shardwise.frontend.sizes import GraphsBySize
from shardwise.frontend.watch import Reads
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.plans.execution import check_types


def capture_for_plan(
    model: Model,
    batch: Any,
    plan: Plan,
    loss_fn: Objective = None,
    *,
    step: StepFn | None = None,
    training: bool | None = None,
    device: torch.device | str | None = None,
    reads: Reads | None = None,
    graphs: GraphsBySize | None = None,
) -> Graph:
    """The graph of one step as the plan computes it.

    With `per_microbatch` it is that of one micro-batch; else the whole batch's. `step` and `reads`
    are as in `capture`. `graphs` remembers traces of this step for batches of other sizes.
    """
    capture = graphs or capture_once
    model, loss_fn = as_module(model), objective(loss_fn, step)
    if plan.per_microbatch and plan.num_microbatches > 1:
        _require_no_hooks(model)
        batch = microbatch(batch, plan, 0)
    precision = plan.precision
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if not precision.compute:
        return capture(model, batch, loss_fn, training=training, device=device, reads=reads)
    dtype = getattr(torch, precision.compute)
    if precision.autocast:
        kind = torch.device(device).type if device is not None else "cpu"
        with torch.autocast(kind, dtype, cache_enabled=False):
            return capture(model, batch, loss_fn, training=training, device=device, reads=reads)
    model = cast_model(model, dtype)
    return capture(
        model, cast_batch(batch, dtype), loss_fn, training=training, device=device, reads=reads
    )


def _require_no_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hook := next(iter(hooks_of(parameter)), None):
            raise PlanError(
                f"the gradient hook {name_of(hook)} on parameter {name} would run once per step, "
                "but on one device once per micro-batch",
                where=place_of(hook),
                hint="per_microbatch=False, or change the gradients between backward and step",
            )


def require_precision(graph: Graph, plan: Plan) -> None:
    """Raise when the graph was not captured in the number types of the plan."""
    check_types(graph, plan.precision, hint="graph = sw.capture_for_plan(model, batch, plan)")


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy without data whose floating parameters and buffers are of another type."""
    twin = skeleton(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return twin


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with floating tensors of another type."""
    call = read_batch(batch)
    return call.batch_with([t.to(dtype) if t.is_floating_point() else t for _, t in call.tensors])


def microbatch(batch: Any, plan: Plan, index: int) -> Any:
    """One of a batch's micro-batches, where each is a batch of its own; all have one size."""
    call = read_batch(batch)
    parts = []
    for path, tensor in call.tensors:
        dim = _batch_dim(path_name(path), plan, tensor)
        if dim is None:
            parts.append(tensor)
            continue
        rows, rest = divmod(tensor.shape[dim], plan.num_microbatches)
        if rest:
            raise BatchError(
                f"{tensor.shape[dim]} samples are not {plan.num_microbatches} micro-batches of one "
                "size, which the plan takes as batches of their own",
                where=path_name(path),
                hint="another batch size, or per_microbatch=False if the model allows it",
            )
        parts.append(tensor.narrow(dim, index * rows, rows))
    return call.batch_with(parts)


def _batch_dim(name: str, plan: Plan, tensor: torch.Tensor) -> int | None:
    found = None
    for glob, dim in plan.inputs.items():
        if fnmatchcase(name, glob):
            found = dim
    return found if found is not None and tensor.dim() > found else None
