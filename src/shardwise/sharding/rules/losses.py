"""Losses: sums over a cut batch stay partial, means divide by the whole count.

Cross-entropy with cut classes takes maximum and sum over ranks and finds the target's logit on the
rank that holds it; logits are never gathered. Batch and classes may be cut by different mesh axes.
"""

from __future__ import annotations

from math import prod
from typing import Any

from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dims,
    Local,
    LocalCall,
    Localize,
    NodeRule,
    whole_rule,
)
from shardwise.sharding.rules.building_blocks import (
    aligned,
    broadcast,
    cut_of,
    dtype_change,
    each,
    operand_dims,
    over,
)

NONE, MEAN, SUM = 0, 1, 2
keep_whole("aligns whole sequences", "aten.ctc_loss")
keep_whole(
    "compares all classes of a sample", "aten.multi_margin_loss", "aten.multilabel_margin_loss"
)


@rule("aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss")
@rule("aten.binary_cross_entropy", "aten.binary_cross_entropy_with_logits", "aten.kl_div")
@rule("aten.soft_margin_loss", "aten.poisson_nll_loss", "aten.hinge_embedding_loss")
@rule("aten.margin_ranking_loss")
def elementwise_loss(call: Call) -> NodeRule:
    """One term per element of the broadcast operands."""
    full = broadcast(*call.operands)
    axes = {f"d{i}": Axis(f"d{i}", n) for i, n in enumerate(full)}
    names = each(axes)
    return NodeRule(
        axes=axes,
        operands=tuple(aligned(shape, full, names) for shape in call.operands),
        results=((() if call.get("reduction") in (MEAN, SUM) else names),),
        localize=mean_over(tuple(axes), prod(full)),
    )


def mean_over(names: tuple[str, ...], count: int) -> Localize:
    """A mean over a cut axis is the local sum by the whole count; other reductions stay."""

    def localize(call: Call, local: Local) -> LocalCall:
        if call.get("reduction") != MEAN or over(local, names) is None:
            return call.replace()
        terms = call.replace(reduction=NONE)
        op = call.node.op.removesuffix(".default").removeprefix("aten.")
        return LocalCall("rt.partial_loss", (op, *terms.args), (*terms.kwargs, ("count", count)))

    return localize


@rule("aten.cosine_embedding_loss", "aten.triplet_margin_loss", "aten.triplet_margin_with_distance")
def row_loss(call: Call) -> NodeRule:
    """One term per row; a row's features stay together."""
    full = call.operands[0]
    target = call.shape("target") if call.has("target") else full[:-1]
    if any(s not in (full, target) for s in call.operands) or target != full[:-1]:
        return whole_rule(call, "broadcast rows")
    axes = {f"d{i}": Axis(f"d{i}", n, frozen=i == len(full) - 1) for i, n in enumerate(full)}
    names = each(axes)
    return NodeRule(
        axes=axes,
        operands=tuple(names if s == full else names[:-1] for s in call.operands),
        results=((() if call.get("reduction") in (MEAN, SUM) else names[:-1]),),
        localize=mean_over(tuple(axes), prod(full[:-1])),
    )


@rule("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d")
def class_loss(call: Call) -> NodeRule:
    """Losses of class scores; the class dim is 1, or 0 of a single sample.

    Cut classes give every rank the whole loss; a cut batch gives partial sums.
    """
    shape = call.shape("self")
    class_dim = 1 if len(shape) > 1 else 0
    names = [f"n{i}" for i in range(len(shape))]
    names[class_dim] = "c"
    counted = int(call.get("reduction") == MEAN)
    axes = {n: Axis(n, s, talks=counted) for n, s in zip(names, shape, strict=True)}
    talks = 1 if "nll" in call.node.op else 4
    axes["c"] = Axis("c", shape[class_dim], "same", outermost=True, once=True, talks=talks)
    kept = each(n for n in names if n != "c")
    probabilities = call.shape("target") == shape and _is_floating(call, "target")
    dims: dict[str, Dims] = {
        "self": each(names),
        "target": each(names) if probabilities else kept,
        "weight": (("c",),),
    }
    reduced = call.get("reduction") in (MEAN, SUM)
    nll = "nll" in call.node.op
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=(() if reduced else kept,),
        linear=(frozenset({call.position("self")}),) if nll else (),
        localize=_localize_class_loss,
    )


def _is_floating(call: Call, name: str) -> bool:
    return call.types[call.arguments[name].name].dtype.is_floating_point


def _localize_class_loss(call: Call, local: Local) -> LocalCall:
    shape = call.shape("self")
    batch = [f"n{i}" for i in range(len(shape))]
    class_axis, batch_axis = local.axis("c"), over(local, batch)
    mean = call.get("reduction") == MEAN
    if class_axis is None and (batch_axis is None or not mean):
        return call.replace()
    options: list[tuple[str, Any]] = [("reduction", ("none", "mean", "sum")[call.get("reduction")])]
    options += [(k, call.get(k)) for k in ("ignore_index", "label_smoothing") if _given(call, k)]
    if class_axis is not None:
        classes = cut_of(local, "c", call.position("self"))
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


def _given(call: Call, name: str) -> bool:
    default = {"ignore_index": -100, "label_smoothing": 0.0}
    return bool(call.get(name, default[name]) != default[name])
