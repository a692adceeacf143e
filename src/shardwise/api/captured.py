"""`capture`: the graph of a step, in the dtypes and for the micro-batches of a plan."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.batch import path_name, read_batch
from shardwise.cluster import Mesh
from shardwise.errors import BatchError, PlanError
from shardwise.frontend import capture as capture_once
from shardwise.frontend import skeleton
from shardwise.frontend.hooks import hooks_of, name_of, place_of
from shardwise.frontend.loss import LossFn
from shardwise.frontend.objective import (
    Model,
    Objective,
    StepFn,
    as_module,
    objective,
)
from shardwise.frontend.sizes import GraphsBySize
from shardwise.frontend.watch import Reads
from shardwise.ir import Graph
from shardwise.plans import Plan, Precision
from shardwise.plans.execution import check_types


def capture(
    model: Model,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    plan: Plan | None = None,
    precision: str | Precision | None = None,
    step: StepFn | None = None,
    training: bool | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Capture the forward step of `model` on `batch`, up to the loss, as a graph.

    `batch` is a dict (keyword arguments), a tuple (positional) or a tensor. `training` sets the
    mode of the captured copy, by default the model's own. `device` is where tensors are taken to
    be, by default the model's device, or the CPU for meta tensors. With `precision`, for example
    "bf16", the step is captured in these dtypes; with `plan`, in the plan's dtypes, and for one
    micro-batch if each is a batch of its own (`per_microbatch`).

    Instead of a model and its loss function, a `step` may define what is computed: a function of
    the modules (the model, or a mapping from names to several) and the batch that returns the
    loss, or outputs that contain it.

    >>> graph = capture(nn.Linear(2, 1), (torch.zeros(3, 2),), lambda y, batch: y.mean())
    >>> [node.op for node in graph.nodes]
    ['aten.linear.default', 'aten.mean.default']
    """
    if plan is not None and precision is not None:
        raise PlanError("both plan= and precision= are given", hint="a plan has its own precision")
    if plan is None and precision is None:
        return capture_once(model, batch, loss_fn, step=step, training=training, device=device)
    if plan is None:
        kinds = Precision.of(precision)
        plan = Plan(name="", model="", fingerprint="", mesh=Mesh(), roles={}, precision=kinds)
    return capture_for_plan(
        model, batch, plan, loss_fn, step=step, training=training, device=device
    )


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
    """Capture one step as the plan computes it; see `capture`.

    `reads` collects the Python state that the graph depends on. `graphs` remembers traces of this
    step for batches of other sizes.
    """
    trace = graphs or capture_once
    model, loss_fn = as_module(model), objective(loss_fn, step)
    if plan.per_microbatch and plan.num_microbatches > 1:
        _require_no_hooks(model)
        batch = microbatch(batch, plan, 0)
    precision = plan.precision
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if not precision.compute:
        return trace(model, batch, loss_fn, training=training, device=device, reads=reads)
    dtype = getattr(torch, precision.compute)
    if precision.autocast:
        kind = torch.device(device).type if device is not None else "cpu"
        with torch.autocast(kind, dtype, cache_enabled=False):
            return trace(model, batch, loss_fn, training=training, device=device, reads=reads)
    model = cast_model(model, dtype)
    return trace(
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
    check_types(graph, plan.precision, hint="graph = sw.capture(model, batch, plan=plan)")


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
