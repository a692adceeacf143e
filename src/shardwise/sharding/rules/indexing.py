"""Lookups: embedding tables, and reading and writing by index tensors, `x[i, :, j]`.

Of embedding tables, features and indices are free; rows are sharded with a mask and a partial sum.
Index tensors are broadcast together; their dims are where the first of them was, or in front if a
slice separates them. Indexed dims stay full and all others are free; sharding the index tensors
gives every rank other rows to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.ir import Ref
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dim, Dims, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import (
    broadcastable,
    cut_of,
    each,
    operand_dims,
    passes,
)


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


@dataclass(frozen=True, slots=True)
class Indexing:
    """What `x[indices]` means for a tensor of some shape, in terms of axes."""

    axes: dict[str, Axis]
    source: Dims  # of the indexed tensor
    indices: tuple[Dims, ...]  # of every index tensor
    result: Dims  # of `x[indices]`
    shape: tuple[int, ...]  # of `x[indices]`


def is_mask(call: Call, index: Ref) -> bool:
    """Whether an index tensor selects by true and false."""
    return call.types[index.name].dtype in (torch.bool, torch.uint8)


def indexing(call: Call, indices: tuple[Any, ...], *, mask_length: int = -1) -> Indexing | None:
    """Axes `d*` are the tensor's dims, `i*` those of the broadcast indices, `m*` of masks.

    A mask of k dims indexes k dims and gives one of data-dependent length: `mask_length`.
    """
    source = call.shape("self")
    slots = [i for i in indices if isinstance(i, Ref)]
    masked = [i for i in slots if is_mask(call, i)]
    if masked and (len(slots) > 1 or mask_length < 0):
        return None
    if masked:
        common: tuple[int, ...] = (mask_length,)
    else:
        shapes = [call.shape(i) for i in slots]
        common = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    axes: dict[str, Axis] = {}
    block: list[Dim] = []
    for i, size in enumerate(common):
        axes[f"i{i}"] = Axis(f"i{i}", size, frozen=bool(masked))
        block.append((f"i{i}",))
    dims: list[Dim] = []
    sliced: list[tuple[Dim, int]] = []
    used: list[int] = []  # positions in the list of indices that hold a tensor
    before = 0
    for position, index in enumerate((*indices, *([None] * len(source)))):
        if len(dims) == len(source):
            break
        width = len(call.shape(index)) if index in masked else 1
        for d in range(len(dims), len(dims) + width):
            axes[f"d{d}"] = Axis(f"d{d}", source[d], frozen=index is not None)
            dims.append((f"d{d}",))
        if index is None:
            sliced.append((dims[-1], source[len(dims) - 1]))
        else:
            before = before if used else len(sliced)
            used.append(position)
    adjacent = used == list(range(used[0], used[0] + len(used))) if used else True
    at = before if adjacent else 0
    own = [dim for dim, _ in sliced]
    lengths = [size for _, size in sliced]
    return Indexing(
        axes=axes,
        source=tuple(dims),
        indices=tuple(_index_dims(call, i, common, tuple(dims), bool(masked)) for i in slots),
        result=(*own[:at], *block, *own[at:]),
        shape=(*lengths[:at], *common, *lengths[at:]),
    )


def _index_dims(
    call: Call, index: Ref, common: tuple[int, ...], source: Dims, masked: bool
) -> Dims:
    shape = call.shape(index)
    if masked:
        start = next(i for i, slot in enumerate(call.get("indices")) if slot == index)
        return source[start : start + len(shape)]
    offset = len(common) - len(shape)
    return tuple(
        (f"i{d + offset}",) if size != 1 or common[d + offset] == 1 else ()
        for d, size in enumerate(shape)
    )


@rule("aten.index", "aten._unsafe_index")
def index(call: Call) -> NodeRule:
    """`x[indices]`."""
    indices = tuple(call.get("indices"))
    masks = [i for i in indices if isinstance(i, Ref) and is_mask(call, i)]
    length = -1
    if masks:  # the length of a mask's dim is known from the result alone
        length = call.results[0][sum(i is None for i in indices[: indices.index(masks[0])])]
    found = indexing(call, indices, mask_length=length)
    if found is None or found.shape != call.results[0]:
        return whole_rule(call, "a mask among several index tensors")
    return NodeRule(
        axes=found.axes,
        operands=(found.source, *found.indices),
        results=(found.result,),
        linear=passes(call, 0),
    )


@rule("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl")
def index_put(call: Call) -> NodeRule:
    """`x[indices] = values`, or `+=`: then rows may be cut, each rank adding its own."""
    indices = tuple(call.get("indices"))
    slots = [i for i in indices if isinstance(i, Ref)]
    values = call.shape("values")
    if any(is_mask(call, i) for i in slots):
        return _masked_put(call, indices, slots, values)
    found = indexing(call, indices)
    if found is None or not broadcastable(values, found.shape):
        return whole_rule(call, "index tensors that do not fit the values")
    adds = bool(call.get("accumulate")) and call.types[call.node.outputs[0]].dtype != torch.bool
    axes = {
        name: Axis(name, axis.size, frozen=axis.frozen or (name[0] == "i" and not adds))
        for name, axis in found.axes.items()
    }
    return NodeRule(
        axes=axes,
        operands=(found.source, *found.indices, _aligned(values, found.result, found.shape)),
        results=(found.source,),
        linear=passes(call, 0, len(slots) + 1),
        additive=frozenset({0}) if adds else frozenset(),
    )


def _aligned(values: tuple[int, ...], dims: Dims, shape: tuple[int, ...]) -> Dims:
    """The dims of values that are broadcast to `shape`."""
    offset = len(shape) - len(values)
    return tuple(
        () if size == 1 and shape[i + offset] != 1 else dims[i + offset]
        for i, size in enumerate(values)
    )


def _masked_put(
    call: Call, indices: tuple[Any, ...], slots: list[Ref], values: tuple[int, ...]
) -> NodeRule:
    """`x[mask] = value` acts on each element where the value has no dim along the mask."""
    source = call.shape("self")
    if len(slots) != 1:
        return whole_rule(call, "a mask among several index tensors")
    start = indices.index(slots[0])
    width = len(call.shape(slots[0]))
    axes = {f"d{i}": Axis(f"d{i}", size) for i, size in enumerate(source)}
    dims: Dims = tuple((name,) for name in axes)
    after = dims[start + width :]
    trailing = len(values) - len(after)  # dims of the values at and before the mask's
    if trailing > 0 and any(size != 1 for size in values[:trailing]):
        return whole_rule(call, "values that are given for each element of a mask")
    shape = (*(1 for _ in range(max(trailing, 0))), *source[start + width :])
    filled: Dims = (*(() for _ in range(max(trailing, 0))), *after)
    return NodeRule(
        axes=axes,
        operands=(dims, dims[start : start + width], _aligned(values, filled, shape)),
        results=(dims,),
        linear=passes(call, 0, 2),
    )


keep_whole(
    "the shape of the result depends on data",
    "aten.masked_select",
    "aten.nonzero",
    "aten.argwhere",
    "aten.where.default",
    "aten.nonzero_numpy",
)
keep_whole("values are consumed in the order of the mask", "aten.masked_scatter")
