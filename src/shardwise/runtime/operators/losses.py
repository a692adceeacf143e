"""Losses over a sharded batch, and over sharded classes without gathering the scores.

A mean over a sharded batch is this rank's sum divided by the count of all ranks, which follows from
the labels alone: a partial sum, correct for empty shards and for shards whose labels are all
ignored.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.attention import log_softmax
from shardwise.runtime.operators.support import held, require_in_range, summed, untraced, widened
from shardwise.runtime.redistribute import reduce
from shardwise.runtime.splits import Of, whole_length

__all__ = ["cross_entropy", "nll_loss", "partial_loss"]


def partial_loss(op: str, *args: Any, count: int, **kwargs: Any) -> Tensor:
    """Return this rank's term of an ATen loss's mean over `count` elements."""
    terms = cast(Tensor, getattr(torch.ops.aten, op)(*args, **kwargs))
    return (terms.sum(dtype=widened(terms.dtype)) / count).to(terms.dtype)


@untraced
def cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_axis: Axis | None = None,
    classes: Of = 0,
    batch_axis: Axis | None = None,
    count: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute cross-entropy of class indices or probabilities; dim 1 (0 of one sample) is classes.

    `class_axis` cuts the classes as `classes`; `batch_axis` cuts what a mean goes over, of `count`
    positions where the target is probabilities.
    """
    dim = _class_dim(scores)
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
        logs = log_softmax(scores, class_axis, dim, dtype=dtype)
        number = whole_length(classes)
        weighted = logs if weight is None else logs * _along(weight, logs, dim)
        if target.is_floating_point():
            smooth = target * (1 - label_smoothing) + label_smoothing / number
            terms = -(weighted * smooth).sum(dim)
        else:
            terms = _picked(weighted, target, ignore_index, class_axis, classes)
            if label_smoothing:
                spread = -weighted.sum(dim).masked_fill(target == ignore_index, 0)
                terms = terms * (1 - label_smoothing) + spread * (label_smoothing / number)
    divisor: Tensor | int | None = None
    if reduction == "mean":
        if target.is_floating_point():
            divisor = terms.numel() if count is None else count
        else:
            divisor = _divisor(target, weight, ignore_index, class_axis, classes, batch_axis)
    return _reduced(terms, reduction, divisor, class_axis)


@untraced
def nll_loss(
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int = -100,
    class_axis: Axis | None = None,
    classes: Of = 0,
    batch_axis: Axis | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the negative log-likelihood of class indices; see `cross_entropy`."""
    values = logs if dtype is None else logs.to(dtype)
    weighted = values if weight is None else values * _along(weight, logs, _class_dim(logs))
    terms = _picked(weighted, target, ignore_index, class_axis, classes)
    divisor = None
    if reduction == "mean":
        divisor = _divisor(target, weight, ignore_index, class_axis, classes, batch_axis)
    return _reduced(terms, reduction, divisor, class_axis)


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


def _along(weight: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Reshape a tensor of classes so that it multiplies scores."""
    return weight.view([-1 if d == dim else 1 for d in range(scores.dim())])


def _held_targets(
    target: Tensor, ignore_index: int, length: int, class_axis: Axis | None, classes: Of
) -> tuple[Tensor, Tensor]:
    """Return targets as positions among this rank's `length` classes, and which are local."""
    start = 0 if class_axis is None else held(class_axis, classes)[0]
    here = (target != ignore_index) & (target >= start) & (target < start + length)
    return (target - start).masked_fill(~here, 0), here


def _picked(
    logs: Tensor, target: Tensor, ignore_index: int, class_axis: Axis | None, classes: Of
) -> Tensor:
    """Return the targets' negative logs; zero for ignored ones and those of other ranks."""
    dim = _class_dim(logs)
    number = logs.shape[dim] if class_axis is None else whole_length(classes)
    require_in_range(target, number, "the loss", ignored=ignore_index)
    if logs.shape[dim] == 0:
        return -logs.sum(dim)
    places, here = _held_targets(target, ignore_index, logs.shape[dim], class_axis, classes)
    return -logs.gather(dim, places.unsqueeze(dim)).squeeze(dim).masked_fill(~here, 0)


def _divisor(
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    class_axis: Axis | None,
    classes: Of,
    batch_axis: Axis | None,
) -> Tensor:
    """Return what a mean divides by: the number of targets not ignored, or their weights' sum."""
    if weight is None:
        return summed((target != ignore_index).sum(), batch_axis)
    if weight.numel():
        places, here = _held_targets(target, ignore_index, len(weight), class_axis, classes)
        own = weight.detach()[places].masked_fill(~here, 0).sum(dtype=widened(weight.dtype))
    else:
        own = weight.new_zeros((), dtype=widened(weight.dtype))
    return summed(summed(own, class_axis), batch_axis)


def _reduced(
    terms: Tensor, reduction: str, divisor: Tensor | int | None, class_axis: Axis | None
) -> Tensor:
    """Reduce over positions, and over the ranks that hold other classes."""
    result = terms if reduction == "none" else terms.sum(dtype=widened(terms.dtype))
    if class_axis is not None:
        result = reduce(result, class_axis)
    return (result if divisor is None else result / divisor).to(terms.dtype)
