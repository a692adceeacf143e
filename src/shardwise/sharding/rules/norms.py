"""Normalizations and softmax: statistics over a cut dim are combined inside the operator."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import dtype_change, each, guarded, operand_dims, over


def _axes(shape: tuple[int, ...], frozen: tuple[int, ...] = ()) -> dict[str, Axis]:
    return {f"d{i}": Axis(f"d{i}", n, frozen=i in frozen) for i, n in enumerate(shape)}


@rule("aten.layer_norm", "aten.rms_norm")
def layer_norm(call: Call) -> NodeRule:
    """Normalized dims may be cut: their sums go over ranks, forward and backward."""
    shape = call.shape("input")
    kept = len(shape) - len(call.get("normalized_shape"))
    axes = _axes(shape)
    inner = tuple(axes)[kept:]
    name = call.node.op.split(".")[1]
    talks = 3 if name == "layer_norm" else 2
    axes |= {axis: replace(axes[axis], talks=talks) for axis in inner}

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, inner)
        if axis is None:
            return call.replace()
        args = [call.get("input"), axis, len(inner), call.get("weight")]
        if name == "layer_norm":
            args.append(call.get("bias"))
        options = (("eps", call.get("eps")), ("count", prod(shape[kept:])))
        return LocalCall(f"rt.{name}", tuple(args), (*options, *dtype_change(call)))

    dims: dict[str, Dims] = {"input": each(axes), "weight": each(inner), "bias": each(inner)}
    return NodeRule(
        axes=axes, operands=operand_dims(call, dims), results=(each(axes),), localize=localize
    )


@rule("aten.native_layer_norm", "aten._fused_rms_norm")
def native_layer_norm(call: Call) -> NodeRule:
    """With statistics as results: the normalized dims are frozen."""
    shape = call.shape("input")
    kept = len(shape) - len(call.get("normalized_shape"))
    axes = _axes(shape, tuple(range(kept, len(shape))))
    inner = each(tuple(axes)[kept:])
    statistics: Dims = (*each(tuple(axes)[:kept]), *(() for _ in inner))
    dims: dict[str, Dims] = {"input": each(axes), "weight": inner, "bias": inner}
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=(each(axes), *(statistics for _ in call.results[1:])),
    )


@rule("aten.group_norm")
def group_norm(call: Call) -> NodeRule:
    """Groups and batch are free; a group stays together."""
    shape, groups = call.shape("input"), call.get("num_groups")
    channels = shape[1] // groups

    def localize(call: Call, local: Local) -> LocalCall:
        own = local.operands[call.position("input")][1] // channels
        return call.replace(num_groups=own) if own != groups else call.replace()

    return _grouped(call, "input", groups, channels, guarded(localize))


@rule("aten.native_group_norm")
def native_group_norm(call: Call) -> NodeRule:
    """Group norm with statistics as results."""
    shape, groups = call.shape("input"), call.get("group")
    channels = shape[1] // groups

    def localize(call: Call, local: Local) -> LocalCall:
        rows, own, *_ = local.operands[call.position("input")]
        return call.replace(N=rows, C=own, group=own // channels)

    found = _grouped(call, "input", groups, channels, guarded(localize))
    statistics: Dims = (("n",), ("g",))
    return NodeRule(
        axes=found.axes,
        operands=found.operands,
        results=(*found.results, statistics, statistics),
        localize=found.localize,
    )


def _grouped(call: Call, name: str, groups: int, channels: int, localize: Any) -> NodeRule:
    shape = call.shape(name)
    space = [f"s{i}" for i in range(len(shape) - 2)]
    axes = {
        "n": Axis("n", shape[0]),
        "g": Axis("g", groups),
        "c": Axis("c", channels, frozen=True),
        **{s: Axis(s, n, frozen=True) for s, n in zip(space, shape[2:], strict=True)},
    }
    full: Dims = (("n",), ("g", "c"), *each(space))
    dims: dict[str, Dims] = {name: full, "weight": (("g", "c"),), "bias": (("g", "c"),)}
    return NodeRule(
        axes=axes, operands=operand_dims(call, dims), results=(full,), localize=localize
    )


@rule("aten.instance_norm")
def instance_norm(call: Call) -> NodeRule:
    """Every channel of every sample by itself."""
    if call.has("running_mean"):
        return whole_rule(call, "running statistics over the whole batch")
    shape = call.shape("input")
    axes = _axes(shape, tuple(range(2, len(shape))))
    dims: dict[str, Dims] = {"input": each(axes), "weight": (("d1",),), "bias": (("d1",),)}
    return NodeRule(
        axes=axes, operands=operand_dims(call, dims), results=(each(axes),), localize=guarded()
    )


STATISTICS = ("weight", "bias", "running_mean", "running_var")


@rule("aten.batch_norm", "aten._native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> NodeRule:
    """With running statistics each element is by itself; in training only channels are free."""
    shape = call.shape("input")
    training = bool(call.get("training", False)) or not call.has("running_mean")
    if training and call.has("running_mean"):
        return whole_rule(call, "changes its running statistics in place")
    axes = _axes(shape, tuple(i for i in range(len(shape)) if i != 1) if training else ())
    dims: dict[str, Dims] = {"input": each(axes), **dict.fromkeys(STATISTICS, each(["d1"]))}
    empty: Dims = ((),)
    saved = [each(("d1",)) if s and s[0] == shape[1] != 1 else empty for s in call.results[1:]]
    if any(s == (0,) for s in call.results[1:]):
        return whole_rule(call, "has empty results")
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=(each(axes), *saved),
        localize=guarded(),
    )


@rule("shardwise.batch_norm")
def batch_norm_training(call: Call) -> NodeRule:
    """Training batch norm `(input, weight, bias, running_mean, running_var, momentum, eps)`.

    Statistics are those of the whole batch: cut axes are summed over inside, and the new running
    statistics are the same on every rank. Channels are free.
    """
    x = call.node.args[0]
    shape = call.shape(x)
    axes = {
        f"d{i}": Axis(f"d{i}", n, reduce="same", talks=3 if i != 1 else 0)
        for i, n in enumerate(shape)
    }
    reduced = tuple(name for name in axes if name != "d1")

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, reduced)
        count = prod(n for i, n in enumerate(shape) if i != 1)
        options = (("axis", axis), ("count", count)) if axis is not None else ()
        return LocalCall("rt.batch_norm", call.node.args, (*call.node.kwargs, *options))

    others = tuple((("d1",),) for _ in call.node.inputs[1:])
    return NodeRule(
        axes=axes,
        operands=(each(axes), *others),
        results=(each(axes), *((("d1",),) for _ in call.results[1:])),
        localize=localize,
    )


@rule("aten._weight_norm")
def weight_norm(call: Call) -> NodeRule:
    """`v * (g / |v|)`: the norm goes over all dims but one; their squares are summed over ranks."""
    shape = call.shape("v")
    if call.get("dim", 0) == -1:
        return whole_rule(call, "one norm over the whole weight")
    kept = call.get("dim", 0) % len(shape)
    axes = _axes(shape)
    reduced = tuple(name for name in axes if name != f"d{kept}")
    axes |= {name: replace(axes[name], talks=2) for name in reduced}

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, reduced)
        if axis is None:
            return guarded()(call, local)
        return LocalCall("rt.weight_norm", (call.get("v"), axis, call.get("g"), kept))

    norms: Dims = tuple((name,) if name == f"d{kept}" else () for name in axes)
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, {"v": each(axes), "g": norms}),
        results=(each(axes),),
        localize=localize,
    )


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax")
@rule("aten._safe_softmax", "aten.special_softmax", "aten.special_log_softmax")
def softmax(call: Call) -> NodeRule:
    """The maximum and the sum over a cut dim go over ranks; nothing is gathered."""
    shape = call.operands[0]
    if not shape:
        return whole_rule(call, "a scalar")
    dim = call.get("dim") % len(shape)
    name = call.node.op.split(".")[1]
    axes = _axes(shape, (dim,) if name == "_safe_softmax" else ())
    axes[f"d{dim}"] = replace(axes[f"d{dim}"], talks=3)

    def localize(call: Call, local: Local) -> LocalCall:
        axis = local.axis(f"d{dim}")
        if axis is None:
            return call.replace()
        fn = "rt.log_softmax" if "log" in name else "rt.softmax"
        return LocalCall(fn, (call.node.args[0], axis, dim), dtype_change(call))

    return NodeRule(axes=axes, operands=(each(axes),), results=(each(axes),), localize=localize)
