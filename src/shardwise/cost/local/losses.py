"""Softmax and losses over dims that are cut.

Enters: local tensors and mesh axes. Leaves: what `runtime.operators.softmax` and `losses` compute.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.cost.local.talks import Axis, all_reduce, reduce, wide


def _shifted(x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    values = x.to(wide(dtype))
    shifted = values - all_reduce(values.amax((dim,), keepdim=True), axis)
    exponentials = shifted.exp()
    return shifted, exponentials, all_reduce(exponentials.sum(dim, keepdim=True), axis)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
        shifted, exponentials, total = _shifted(x, axis, dim, dtype)
        result = (shifted - total.log() if log else exponentials / total).to(dtype)
        ctx.save_for_backward(result)
        ctx.axis, ctx.dim, ctx.dtype, ctx.log = axis, dim, x.dtype, log
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (result,) = ctx.saved_tensors
        grad = grads[0].to(wide(grads[0].dtype))
        if ctx.log:  # in one expression, as the runtime: nothing lives longer than there
            total = all_reduce(grad.sum(ctx.dim, keepdim=True), ctx.axis)
            found = grad - result.to(grad.dtype).exp() * total
        else:
            weighted = grad * result
            total = all_reduce(weighted.sum(ctx.dim, keepdim=True), ctx.axis)
            found = weighted - result * total
        return found.to(ctx.dtype), None, None, None, None


def softmax(
    x: Tensor, axis: Axis, dim: int, *, dtype: torch.dtype | None = None, log: bool = False
) -> Tensor:
    """Softmax, or its logarithm, along a cut dim."""
    return _Softmax.apply(x, axis, dim, dtype or x.dtype, log)  # type: ignore[no-any-return, no-untyped-call]


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


def _along(weight: Tensor, scores: Tensor, dim: int) -> Tensor:
    return weight.view([-1 if d == dim else 1 for d in range(scores.dim())])


def _held_targets(target: Tensor, ignore_index: int, length: int) -> tuple[Tensor, Tensor]:
    here = (target != ignore_index) & (target >= 0) & (target < length)
    return (target - 0).masked_fill(~here, 0), here


def _picked(logs: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    dim = _class_dim(logs)
    places, here = _held_targets(target, ignore_index, logs.shape[dim])
    return -logs.gather(dim, places.unsqueeze(dim)).squeeze(dim).masked_fill(~here, 0)


def _divisor(
    target: Tensor, weight: Tensor | None, ignore_index: int, class_axis: Axis, batch_axis: Axis
) -> Tensor:
    if weight is None:
        return all_reduce((target != ignore_index).sum(), batch_axis)
    places, here = _held_targets(target, ignore_index, len(weight))
    own = weight.detach()[places].masked_fill(~here, 0).sum(dtype=wide(weight.dtype))
    return all_reduce(all_reduce(own, class_axis), batch_axis)


def _reduced(terms: Tensor, reduction: str, divisor: Any, class_axis: Axis) -> Tensor:
    found = terms if reduction == "none" else terms.sum(dtype=wide(terms.dtype))
    found = reduce(found, class_axis)
    return (found if divisor is None else found / divisor).to(terms.dtype)


def cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_axis: Axis = None,
    classes: Any = 0,
    batch_axis: Axis = None,
    count: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy with cut classes or a cut batch."""
    dim = _class_dim(scores)
    soft = target.is_floating_point()
    if class_axis is None:
        terms = F.cross_entropy(
            scores,
            target,
            weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    else:
        logs = softmax(scores, class_axis, dim, dtype=dtype, log=True)
        weighted = logs if weight is None else logs * _along(weight, logs, dim)
        if soft:
            smooth = target * (1 - label_smoothing) + label_smoothing
            terms = -(weighted * smooth).sum(dim)
        else:
            terms = _picked(weighted, target, ignore_index)
            if label_smoothing:
                spread = -weighted.sum(dim).masked_fill(target == ignore_index, 0)
                terms = terms * (1 - label_smoothing) + spread * label_smoothing
    divisor: Any = None
    if reduction == "mean":
        divisor = 1 if soft else _divisor(target, weight, ignore_index, class_axis, batch_axis)
    return _reduced(terms, reduction, divisor, class_axis)


def nll_loss(
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int = -100,
    class_axis: Axis = None,
    classes: Any = 0,
    batch_axis: Axis = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Negative log-likelihood with cut classes or a cut batch."""
    values = logs if dtype is None else logs.to(dtype)
    weighted = values if weight is None else values * _along(weight, logs, _class_dim(logs))
    terms = _picked(weighted, target, ignore_index)
    divisor = None
    if reduction == "mean":
        divisor = _divisor(target, weight, ignore_index, class_axis, batch_axis)
    return _reduced(terms, reduction, divisor, class_axis)


def partial_loss(op: str, *args: Any, count: int, **kwargs: Any) -> Tensor:
    """This rank's term of a mean."""
    terms: Tensor = getattr(torch.ops.aten, op)(*args, **kwargs)
    return (terms.sum(dtype=wide(terms.dtype)) / count).to(terms.dtype)
