"""Losses over a cut batch, and over cut classes without gathering the scores.

A mean over a cut batch is this rank's sum by the count of all ranks, which comes from the labels
alone: a partial sum, right for empty shards and for shards whose labels are all ignored.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.collectives import reduce
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators.softmax import log_softmax
from shardwise.runtime.operators.support import held, summed, untraced, wide
from shardwise.runtime.splits import Of, whole_length

__all__ = ["cross_entropy", "nll_loss", "partial_loss"]


def partial_loss(op: str, *args: Any, count: int, **kwargs: Any) -> Tensor:
    """This rank's term of the mean over `count` elements of an ATen loss, called as a sum."""
    return cast(Tensor, getattr(torch.ops.aten, op)(*args, **kwargs)) / count


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
) -> Tensor:
    """Cross-entropy of class indices or probabilities; dim 1 (0 of one sample) has the classes.

    `class_axis` cuts the classes as `classes`; `batch_axis` cuts what a mean goes over, of `count`
    positions where the target is probabilities.
    """
    dim = _class_dim(scores)
    if class_axis is None:
        logs = F.log_softmax(scores, dim)
    else:
        logs = log_softmax(scores, class_axis, dim)
    number = scores.shape[dim] if class_axis is None else whole_length(classes)
    if target.is_floating_point():
        smooth = target * (1 - label_smoothing) + label_smoothing / number
        terms = -(_weighted(logs, weight, dim) * smooth).sum(dim, dtype=wide(logs.dtype))
        total = None if count is None else terms.new_tensor(float(count))
        total = terms.new_tensor(float(terms.numel())) if total is None else total
        return _reduced(terms, reduction, total, class_axis).to(scores.dtype)
    terms, weights = _picked(logs, target, weight, ignore_index, class_axis, classes)
    if label_smoothing:
        spread = -_weighted(logs, weight, dim).sum(dim, dtype=terms.dtype)
        spread = spread.masked_fill(target == ignore_index, 0)
        terms = terms * (1 - label_smoothing) + spread * (label_smoothing / number)
    total = _total(weights, weight, class_axis, batch_axis) if reduction == "mean" else None
    return _reduced(terms, reduction, total, class_axis).to(scores.dtype)


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
) -> Tensor:
    """Negative log-likelihood of class indices; see `cross_entropy`."""
    terms, weights = _picked(logs, target, weight, ignore_index, class_axis, classes)
    total = _total(weights, weight, class_axis, batch_axis) if reduction == "mean" else None
    return _reduced(terms, reduction, total, class_axis).to(logs.dtype)


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


def _weighted(logs: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    if weight is None:
        return logs
    return logs * weight.view([-1 if d == dim else 1 for d in range(logs.dim())])


def _picked(
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    class_axis: Axis | None,
    classes: Of,
) -> tuple[Tensor, Tensor]:
    """`-weight * log` of the targets that this rank holds, zero for others; and those weights."""
    dim = _class_dim(logs)
    start, length = (0, logs.shape[dim]) if class_axis is None else held(class_axis, classes)
    kept = target != ignore_index
    mine = kept & (target >= start) & (target < start + length)
    if length == 0:
        return logs.sum(dim, dtype=wide(logs.dtype)), kept.to(wide(logs.dtype)) * 0
    local = (target - start).masked_fill(~mine, 0)
    found = logs.gather(dim, local.unsqueeze(dim)).squeeze(dim).to(wide(logs.dtype))
    if weight is None:
        return -found.masked_fill(~mine, 0), mine.to(found.dtype)
    weights = weight[local].to(found.dtype).masked_fill(~mine, 0)
    return -found.masked_fill(~mine, 0) * weights, weights


def _total(
    weights: Tensor, weight: Tensor | None, class_axis: Axis | None, batch_axis: Axis | None
) -> Tensor:
    """The divisor of a mean: the weights of all kept targets, on all ranks."""
    return summed(summed(weights.detach().sum(), class_axis), batch_axis)


def _reduced(
    terms: Tensor, reduction: str, total: Tensor | None, class_axis: Axis | None
) -> Tensor:
    """Reduce over positions, and over the ranks that hold other classes."""
    found = terms if reduction == "none" else terms.sum()
    if class_axis is not None:
        found = reduce(found, class_axis)
    return found / total if reduction == "mean" and total is not None else found
