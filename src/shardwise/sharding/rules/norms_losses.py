"""Normalizations, softmax and losses.

Statistics over a sharded dim are combined inside the operator; nothing is gathered. Losses summed
over a sharded batch stay partial, and means divide by the full count. Cross-entropy over sharded
classes combines maximum and sum over ranks and finds the target's logit on the rank that has it.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from shardwise.sharding.registry import keep_replicated, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dims,
    Local,
    LocalCall,
    Localize,
    MeshAxis,
    NodeRule,
    replicated_rule,
)
from shardwise.sharding.rules.building_blocks import (
    aligned,
    axes_of,
    communicating,
    dtype_change,
    each,
    guarded,
    op_name,
    operand_dims,
    over,
    shard_argument,
)


def _communicating(axes: dict[str, Axis], names: Iterable[str], num_collectives: int) -> None:
    """Set how many collectives the local implementation runs if one of these axes is sharded."""
    for name in names:
        axes[name] = replace(axes[name], num_collectives=num_collectives)


@rule("aten.layer_norm", "aten.rms_norm")
def layer_norm(call: Call) -> NodeRule:
    """Sum over ranks, forward and backward, if a normalized dim is sharded."""
    shape = call.shape("input")
    free = len(shape) - len(call.get("normalized_shape"))
    axes, full = axes_of(shape)
    inner = tuple(axes)[free:]
    name = op_name(call)
    _communicating(axes, inner, 3 if name == "layer_norm" else 2)

    def localize(call: Call, local: Local, axis: MeshAxis) -> LocalCall:
        args = [call.get("input"), axis, len(inner), call.get("weight")]
        if name == "layer_norm":
            args.append(call.get("bias"))
        options = (("eps", call.get("eps")), ("count", prod(shape[free:])))
        return LocalCall(f"rt.{name}", tuple(args), (*options, *dtype_change(call)))

    operands = operand_dims(call, input=full, weight=full[free:], bias=full[free:])
    return NodeRule(axes, operands, (full,), localize=communicating(inner, localize))


@rule("aten.native_layer_norm", "aten._fused_rms_norm")
def native_layer_norm(call: Call) -> NodeRule:
    """Freeze the normalized dims where statistics are results."""
    shape = call.shape("input")
    free = len(shape) - len(call.get("normalized_shape"))
    axes, full = axes_of(shape, frozen=range(free, len(shape)))
    statistics: Dims = (*full[:free], *(() for _ in full[free:]))
    operands = operand_dims(call, input=full, weight=full[free:], bias=full[free:])
    return NodeRule(axes, operands, (full, *(statistics for _ in call.results[1:])))


@rule("aten.group_norm")
def group_norm(call: Call) -> NodeRule:
    """Leave batch and groups free; a group stays together."""
    groups, channels = _channels(call, "num_groups")

    def localize(call: Call, local: Local) -> LocalCall:
        own = local.operands[call.position("input")][1] // channels
        return call.replace(num_groups=own) if own != groups else call.replace()

    return _grouped(call, groups, channels, guarded(localize))


@rule("aten.native_group_norm")
def native_group_norm(call: Call) -> NodeRule:
    """Leave batch and groups of the statistics, which are results, free as well."""
    groups, channels = _channels(call, "group")

    def localize(call: Call, local: Local) -> LocalCall:
        rows, own, *_ = local.operands[call.position("input")]
        return call.replace(N=rows, C=own, group=own // channels)

    grouped = _grouped(call, groups, channels, guarded(localize))
    statistics: Dims = (("n",), ("g",))
    return replace(grouped, results=(*grouped.results, statistics, statistics))


def _channels(call: Call, argument: str) -> tuple[int, int]:
    """Return the number of groups, and of channels in each."""
    groups = call.get(argument)
    return groups, call.shape("input")[1] // groups


def _grouped(call: Call, groups: int, channels: int, localize: Localize) -> NodeRule:
    shape = call.shape("input")
    space, plane = axes_of(shape[2:], "s", frozen=range(len(shape)))
    axes = {
        "n": Axis("n", shape[0]),
        "g": Axis("g", groups),
        "c": Axis("c", channels, frozen=True),
        **space,
    }
    full: Dims = (("n",), ("g", "c"), *plane)
    operands = operand_dims(call, input=full, weight=full[1:2], bias=full[1:2])
    return NodeRule(axes, operands, (full,), localize=localize)


@rule("aten.instance_norm")
def instance_norm(call: Call) -> NodeRule:
    """Normalize every channel of every sample by itself: batch and channels are free."""
    if call.has("running_mean"):
        return replicated_rule(call, "running statistics over the full batch")
    shape = call.shape("input")
    axes, full = axes_of(shape, frozen=range(2, len(shape)))
    operands = operand_dims(call, input=full, weight=full[1:2], bias=full[1:2])
    return NodeRule(axes, operands, (full,), localize=guarded())


STATISTICS = ("weight", "bias", "running_mean", "running_var")


@rule("aten.batch_norm", "aten._native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> NodeRule:
    """Leave all dims free with running statistics, and only channels free in training."""
    shape = call.shape("input")
    training = bool(call.get("training", False)) or not call.has("running_mean")
    if training and call.has("running_mean"):
        return replicated_rule(call, "changes its running statistics in place")
    axes, full = axes_of(shape, frozen=[i for i in range(len(shape)) if training and i != 1])
    channel: Dims = (("d1",),)
    empty: Dims = ((),)
    saved = [channel if s and s[0] == shape[1] != 1 else empty for s in call.results[1:]]
    if any(s == (0,) for s in call.results[1:]):
        return replicated_rule(call, "has empty results")
    operands = operand_dims(call, input=full, **dict.fromkeys(STATISTICS, channel))
    return NodeRule(axes, operands, (full, *saved), localize=guarded())


@rule("shardwise.batch_norm")
def batch_norm_training(call: Call) -> NodeRule:
    """Combine the statistics of training batch norm over ranks.

    Its arguments are `(input, weight, bias, running_mean, running_var, momentum, eps)`. Statistics
    are those of the full batch, and the new running statistics are the same on every rank.
    """
    x = call.node.args[0]
    shape = call.shape(x)
    axes = {
        f"d{i}": Axis(f"d{i}", n, reduce="same", num_collectives=3 if i != 1 else 0)
        for i, n in enumerate(shape)
    }
    reduced = tuple(name for name in axes if name != "d1")

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, reduced)
        count = prod(n for i, n in enumerate(shape) if i != 1)
        options = (("axis", axis), ("count", count)) if axis is not None else ()
        return LocalCall("rt.batch_norm", call.node.args, (*call.node.kwargs, *options))

    statistics = tuple((("d1",),) for _ in call.node.inputs[1:])
    return NodeRule(
        axes,
        (each(axes), *statistics),
        (each(axes), *((("d1",),) for _ in call.results[1:])),
        localize=localize,
    )


@rule("aten._weight_norm")
def weight_norm(call: Call) -> NodeRule:
    """Sum the squares of `v * (g / |v|)` over ranks; the norm goes over all dims but one."""
    shape = call.shape("v")
    if call.get("dim", 0) == -1:
        return replicated_rule(call, "one norm over the full weight")
    dim = call.get("dim", 0) % len(shape)
    axes, full = axes_of(shape)
    reduced = tuple(name for name in axes if name != f"d{dim}")
    _communicating(axes, reduced, 2)

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, reduced)
        if axis is None:
            return guarded()(call, local)
        return LocalCall("rt.weight_norm", (call.get("v"), axis, call.get("g"), dim))

    norms: Dims = tuple((name,) if name == f"d{dim}" else () for name in axes)
    operands = operand_dims(call, v=full, g=norms)
    return NodeRule(axes, operands, (full,), localize=localize)


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax")
@rule("aten._safe_softmax", "aten.special_softmax", "aten.special_log_softmax")
def softmax(call: Call) -> NodeRule:
    """Combine the maximum and the sum over a sharded dim over ranks."""
    shape = call.operands[0]
    if not shape:
        return replicated_rule(call, "a scalar")
    dim = call.get("dim") % len(shape)
    name = op_name(call)
    axes, full = axes_of(shape, frozen=(dim,) if name == "_safe_softmax" else ())
    _communicating(axes, [f"d{dim}"], 3)

    def localize(call: Call, local: Local, axis: MeshAxis) -> LocalCall:
        fn = "rt.log_softmax" if "log" in name else "rt.softmax"
        return LocalCall(fn, (call.node.args[0], axis, dim), dtype_change(call))

    return NodeRule(axes, (full,), (full,), localize=communicating([f"d{dim}"], localize))


NONE, MEAN, SUM = 0, 1, 2
keep_replicated("aligns full sequences", "aten.ctc_loss")
keep_replicated(
    "compares all classes of a sample", "aten.multi_margin_loss", "aten.multilabel_margin_loss"
)


@rule("aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss")
@rule("aten.binary_cross_entropy", "aten.binary_cross_entropy_with_logits", "aten.kl_div")
@rule("aten.soft_margin_loss", "aten.poisson_nll_loss", "aten.hinge_embedding_loss")
@rule("aten.margin_ranking_loss")
def elementwise_loss(call: Call) -> NodeRule:
    """Leave every dim free: there is a term for each element of the broadcast operands."""
    full = tuple(torch.broadcast_shapes(*call.operands))  # type: ignore[no-untyped-call]
    axes, dims = axes_of(full)
    return NodeRule(
        axes,
        tuple(aligned(shape, full, dims) for shape in call.operands),
        ((() if call.get("reduction") in (MEAN, SUM) else dims),),
        localize=mean_over(tuple(axes), prod(full)),
    )


def mean_over(names: tuple[str, ...], count: int) -> Localize:
    """Divide the local sum by the full count for a mean over a sharded axis."""

    def localize(call: Call, local: Local, axis: MeshAxis) -> LocalCall:
        if call.get("reduction") != MEAN:
            return call.replace()
        terms = call.replace(reduction=NONE)
        op = call.node.op.removesuffix(".default").removeprefix("aten.")
        return LocalCall("rt.partial_loss", (op, *terms.args), (*terms.kwargs, ("count", count)))

    return communicating(names, localize)


@rule("aten.cosine_embedding_loss", "aten.triplet_margin_loss", "aten.triplet_margin_with_distance")
def row_loss(call: Call) -> NodeRule:
    """Freeze the features of the rows, each of which is a term."""
    full = call.operands[0]
    target = call.shape("target") if call.has("target") else full[:-1]
    if any(s not in (full, target) for s in call.operands) or target != full[:-1]:
        return replicated_rule(call, "broadcast rows")
    axes, dims = axes_of(full, frozen=(len(full) - 1,))
    return NodeRule(
        axes,
        tuple(dims if s == full else dims[:-1] for s in call.operands),
        ((() if call.get("reduction") in (MEAN, SUM) else dims[:-1]),),
        localize=mean_over(tuple(axes), prod(full[:-1])),
    )


@rule("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d")
def class_loss(call: Call) -> NodeRule:
    """Give every rank the full loss if classes are sharded, partial sums if the batch is.

    The class dim is 1, or 0 of a single sample.
    """
    shape = call.shape("self")
    class_dim = 1 if len(shape) > 1 else 0
    names = [f"n{i}" for i in range(len(shape))]
    names[class_dim] = "c"
    counted = int(call.get("reduction") == MEAN)
    axes = {n: Axis(n, s, num_collectives=counted) for n, s in zip(names, shape, strict=True)}
    nll = "nll" in call.node.op
    axes["c"] = Axis("c", shape[class_dim], "same", outermost=True, once=True)
    _communicating(axes, ["c"], 1 if nll else 4)
    batch = each(n for n in names if n != "c")
    probabilities = call.shape("target") == shape and _is_floating(call, "target")
    target = each(names) if probabilities else batch
    return NodeRule(
        axes,
        operand_dims(call, self=each(names), target=target, weight=(("c",),)),
        (() if call.get("reduction") in (MEAN, SUM) else batch,),
        linear=(frozenset({call.position("self")}),) if nll else (),
        localize=_local_class_loss,
    )


def _is_floating(call: Call, name: str) -> bool:
    return call.types[call.arguments[name].name].dtype.is_floating_point


def _local_class_loss(call: Call, local: Local) -> LocalCall:
    shape = call.shape("self")
    batch = [f"n{i}" for i in range(len(shape))]
    class_axis, batch_axis = local.axis("c"), over(local, batch)
    mean = call.get("reduction") == MEAN
    if class_axis is None and (batch_axis is None or not mean):
        return call.replace()
    options: list[tuple[str, Any]] = [("reduction", ("none", "mean", "sum")[call.get("reduction")])]
    defaults = {"ignore_index": -100, "label_smoothing": 0.0}
    options += [(k, call.get(k)) for k, d in defaults.items() if call.get(k, d) != d]
    if class_axis is not None:
        classes = shard_argument(local, "c", call.position("self"))
        options += [("class_axis", class_axis), ("classes", classes), *dtype_change(call)]
    if batch_axis is not None and mean:
        options.append(("batch_axis", batch_axis))
        if _is_floating(call, "target"):
            options.append(("count", prod(shape) // shape[1] if len(shape) > 1 else 1))
    fn = "rt.nll_loss" if "nll" in call.node.op else "rt.cross_entropy"
    args = [call.get("self"), call.get("target")]
    if call.has("weight"):
        args.append(call.get("weight"))
    return LocalCall(fn, tuple(args), tuple(options))
