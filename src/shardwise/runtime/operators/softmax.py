"""Softmax along sharded dims, and operators built on it: attention and losses.

Maximum and sum are reduced over ranks; scores are never gathered. A mean loss over a sharded batch
is this rank's sum divided by the count of all ranks, which depends on the labels only: a partial
sum, correct for empty shards and for shards whose labels are all ignored.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime import primitives
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators import local_range, require_in_range, summed, untraced, widened
from shardwise.runtime.operators.reductions import local_extreme
from shardwise.runtime.operators.ring import causal_rows
from shardwise.runtime.redistribute import reduce
from shardwise.runtime.rng import Rng, Splits, dropout
from shardwise.runtime.splits import Of, full_length


def attention(
    query: Tensor,
    key_: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    row_axis: Axis | None = None,
    rows: Of = 0,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    key: str = "",
    shape: tuple[int, ...] = (),
    splits: Splits = (),
) -> Tensor:
    """Compute scaled dot-product attention.

    `row_axis` shards the query rows as `rows`, which the causal mask depends on. Dropout is drawn
    for the node `key` from the full weights' `shape`, sharded as `splits`.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if is_causal:  # row i of the shard sees columns up to `first + i`
        first = local_range(row_axis, rows)[0] if row_axis is not None else 0
        heads = -3 if enable_gqa else -2
        same = query.shape[:heads] == key_.shape[:heads] and key_.shape[:-1] == value.shape[:-1]
        if same and not dropout_p and not torch.is_autocast_enabled(query.device.type):
            return causal_rows(query, key_, value, first, factor)
        stop, columns = first + query.shape[-2], key_.shape[-2]
        mask = torch.arange(first, stop, device=query.device).unsqueeze(1) >= torch.arange(
            columns, device=query.device
        )
    if not dropout_p:
        return F.scaled_dot_product_attention(
            query, key_, value, mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and query.shape[-3] != key_.shape[-3]:
        groups = query.shape[-3] // key_.shape[-3]
        key_, value = (t.repeat_interleave(groups, -3) for t in (key_, value))
    assert rng is not None, "dropout needs a source of random numbers"
    weights = masked_softmax(query @ key_.transpose(-2, -1) * factor, mask)
    return dropout(weights, dropout_p, rng, key, shape, splits) @ value


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax of masked scores; a fully masked row has zero weights."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    masked_out = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(masked_out, 0).softmax(-1).masked_fill(masked_out, 0)


def _shifted(x: Tensor, axis: Axis, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` minus its maximum over ranks, its exponentials and their sum over ranks."""
    values = x.to(widened(dtype))
    shifted = values - primitives.all_reduce(local_extreme(values, (dim,), "max"), axis, "max")
    exponentials = shifted.exp()
    return shifted, exponentials, summed(exponentials.sum(dim, keepdim=True), axis)


class _Softmax(torch.autograd.Function):
    """Softmax or log-softmax along a sharded dim."""

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
        grad = grads[0].to(widened(grads[0].dtype))
        if not ctx.log:
            grad = grad * result
        total = summed(grad.sum(ctx.dim, keepdim=True), ctx.axis)
        # No variable holds on to the exponentials, which are as large as the scores.
        to_x = grad - (result.to(grad.dtype).exp() if ctx.log else result) * total
        return to_x.to(ctx.dtype), None, None, None, None


@untraced
def softmax(x: Tensor, axis: Axis, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute softmax along `dim`, which is sharded over `axis`."""
    result = _Softmax.apply(x, axis, dim, dtype or x.dtype, False)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


@untraced
def log_softmax(x: Tensor, axis: Axis, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute log-softmax along `dim`, which is sharded over `axis`."""
    result = _Softmax.apply(x, axis, dim, dtype or x.dtype, True)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


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

    `class_axis` shards the classes as `classes`; `batch_axis` shards the positions that a mean
    averages over. `count` is their number if the target is probabilities.
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
        num_classes = full_length(classes)
        weighted = logs if weight is None else logs * _along(weight, logs, dim)
        if target.is_floating_point():
            smooth = target * (1 - label_smoothing) + label_smoothing / num_classes
            terms = -(weighted * smooth).sum(dim)
        else:
            terms = _select(weighted, target, ignore_index, class_axis, classes)
            if label_smoothing:
                uniform = -weighted.sum(dim).masked_fill(target == ignore_index, 0)
                terms = terms * (1 - label_smoothing) + uniform * (label_smoothing / num_classes)
    divisor: Tensor | int | None = None
    if reduction == "mean":
        if target.is_floating_point():
            divisor = terms.numel() if count is None else count
        else:
            divisor = _divisor(target, weight, ignore_index, class_axis, classes, batch_axis)
    return _reduce(terms, reduction, divisor, class_axis)


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
    terms = _select(weighted, target, ignore_index, class_axis, classes)
    divisor = None
    if reduction == "mean":
        divisor = _divisor(target, weight, ignore_index, class_axis, classes, batch_axis)
    return _reduce(terms, reduction, divisor, class_axis)


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


def _along(weight: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Reshape class weights so that they broadcast to scores."""
    return weight.view([-1 if d == dim else 1 for d in range(scores.dim())])


def _local_targets(
    target: Tensor, ignore_index: int, length: int, class_axis: Axis | None, classes: Of
) -> tuple[Tensor, Tensor]:
    """Return targets as indices among this rank's `length` classes, and a mask of local ones."""
    start = 0 if class_axis is None else local_range(class_axis, classes)[0]
    is_local = (target != ignore_index) & (target >= start) & (target < start + length)
    return (target - start).masked_fill(~is_local, 0), is_local


def _select(
    logs: Tensor, target: Tensor, ignore_index: int, class_axis: Axis | None, classes: Of
) -> Tensor:
    """Return the targets' negative logs; zero for ignored ones and those of other ranks."""
    dim = _class_dim(logs)
    num_classes = logs.shape[dim] if class_axis is None else full_length(classes)
    require_in_range(target, num_classes, "the loss", ignored=ignore_index)
    if logs.shape[dim] == 0:
        return -logs.sum(dim)
    indices, is_local = _local_targets(target, ignore_index, logs.shape[dim], class_axis, classes)
    return -logs.gather(dim, indices.unsqueeze(dim)).squeeze(dim).masked_fill(~is_local, 0)


def _divisor(
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    class_axis: Axis | None,
    classes: Of,
    batch_axis: Axis | None,
) -> Tensor:
    """Return the divisor of a mean: the number of targets not ignored, or their weights' sum."""
    if weight is None:
        return summed((target != ignore_index).sum(), batch_axis)
    if weight.numel():
        indices, is_local = _local_targets(target, ignore_index, len(weight), class_axis, classes)
        own = weight.detach()[indices].masked_fill(~is_local, 0).sum(dtype=widened(weight.dtype))
    else:
        own = weight.new_zeros((), dtype=widened(weight.dtype))
    return summed(summed(own, class_axis), batch_axis)


def _reduce(
    terms: Tensor, reduction: str, divisor: Tensor | int | None, class_axis: Axis | None
) -> Tensor:
    """Reduce over positions, and over the ranks that hold the other classes."""
    result = terms if reduction == "none" else terms.sum(dtype=widened(terms.dtype))
    if class_axis is not None:
        result = reduce(result, class_axis)
    return (result if divisor is None else result / divisor).to(terms.dtype)
