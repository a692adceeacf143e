"""Embedding tables: features and indices are free, rows are cut with a mask and a partial sum."""

from __future__ import annotations

from shardwise.sharding.build import cut_of, each, operand_dims
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, whole_rule


@rule("aten.embedding")
def embedding(call: Call) -> NodeRule:
    """`embedding(weight, indices)`; a rank that does not hold a row adds zeros."""
    rows, features = call.shape("weight")
    indices = call.shape("indices")
    counts = bool(call.get("scale_grad_by_freq")) or bool(call.get("sparse"))
    axes = {
        "v": Axis("v", rows, outermost=True, once=True, frozen=counts),
        "e": Axis("e", features),
        **{f"b{i}": Axis(f"b{i}", n, frozen=counts) for i, n in enumerate(indices)},
    }
    batch = each(f"b{i}" for i in range(len(indices)))

    def localize(call: Call, local: Local) -> LocalCall:
        axis = local.axis("v")
        if axis is None:
            return call.replace()
        of = cut_of(local, "v", call.position("weight"))
        padding = call.get("padding_idx", -1)
        options = (("padding_idx", padding),) if padding >= 0 else ()
        return LocalCall(
            "rt.embedding_rows", (call.get("weight"), call.get("indices"), axis, of), options
        )

    return NodeRule(
        axes=axes,
        operands=operand_dims(call, {"weight": (("v",), ("e",)), "indices": batch}),
        results=((*batch, ("e",)),),
        linear=(frozenset({call.position("weight")}),),
        localize=localize,
    )


@rule("aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(call: Call) -> NodeRule:
    """Sums of rows: features are free; bags are ragged ranges of the indices and stay whole."""
    rows, features = call.shape("weight")
    if call.get("sparse") or call.get("scale_grad_by_freq"):
        return whole_rule(call, "sparse gradients or counts over the whole batch")
    axes = {
        "v": Axis("v", rows, frozen=True),
        "e": Axis("e", features, reduce="same"),
    }
    results: list[Dims] = []
    for index, shape in enumerate(call.results):
        names = [f"r{index}_{d}" for d in range(len(shape))]
        if index == 0 or (len(shape) == 2 and shape[1] == features):
            names[-1] = "e"
        axes |= {n: Axis(n, s, frozen=True) for n, s in zip(names, shape, strict=True) if n != "e"}
        results.append(each(names))
    dims: dict[str, Dims] = {"weight": (("v",), ("e",))}
    for name in ("indices", "offsets", "per_sample_weights"):
        if call.has(name):
            labels = [f"{name}{d}" for d in range(len(call.shape(name)))]
            sizes = zip(labels, call.shape(name), strict=True)
            axes |= {n: Axis(n, s, frozen=True) for n, s in sizes}
            dims[name] = each(labels)
    return NodeRule(axes=axes, operands=operand_dims(call, dims), results=tuple(results))
