"""Read and write by index: embeddings, `x[i, :, j]`, gather and scatter.

Indexed dims are frozen and all others free; sharding the index tensors gives every rank other rows
to read. Rows of embedding tables are sharded with a mask and a partial sum. Where values are added
(`scatter_add`, `index_add`), the source may be sharded: every rank adds its part, and the results
are partial sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.ir import Ref
from shardwise.sharding.registry import keep_replicated, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dim,
    Dims,
    Local,
    LocalCall,
    NodeRule,
    replicated_rule,
)
from shardwise.sharding.rules.building_blocks import (
    aligned,
    axes_of,
    broadcastable,
    each,
    frozen_axes,
    guarded,
    normalize,
    operand_dims,
    part,
    passes,
    shard_argument,
    single_shard,
    with_dim,
)


@rule("aten.embedding")
def embedding(call: Call) -> NodeRule:
    """Add zeros on ranks that do not have a row."""
    rows, features = call.shape("weight")
    indices = call.shape("indices")
    counts = bool(call.get("scale_grad_by_freq")) or bool(call.get("sparse"))
    lookups, batch = axes_of(indices, "b", frozen=range(len(indices)) if counts else ())
    axes = {
        "v": Axis("v", rows, outermost=True, once=True, frozen=counts),
        "e": Axis("e", features),
        **lookups,
    }

    def localize(call: Call, local: Local) -> LocalCall:
        axis = local.axis("v")
        if axis is None:
            return call.replace()
        of = shard_argument(local, "v", call.position("weight"))
        padding = call.get("padding_idx", -1)
        options = (("padding_idx", padding),) if padding >= 0 else ()
        return LocalCall(
            "rt.embedding_rows", (call.get("weight"), call.get("indices"), axis, of), options
        )

    return NodeRule(
        axes,
        operand_dims(call, weight=each("ve"), indices=batch),
        ((*batch, ("e",)),),
        linear=(frozenset({call.position("weight")}),),
        localize=guarded(localize),  # CUDA's backward of a table without columns is out of bounds
    )


@rule("aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(call: Call) -> NodeRule:
    """Let every rank look up its bags, which are ranges of all indices, in its rows of the table.

    Only the maximum of a bag needs all rows. Models use no result but the first.
    """
    rows, features = call.shape("weight")
    if call.get("sparse") or call.get("scale_grad_by_freq"):
        return replicated_rule(call, "sparse gradients or counts over the full batch")
    is_max, bags = call.get("mode", 0) == 2, call.results[0][0]
    axes = {
        "v": Axis("v", rows, outermost=True, once=True, frozen=is_max),
        "e": Axis("e", features, reduce="same"),
        "b": Axis("b", bags, reduce="same", outermost=True, once=True, begins=True),
    }
    results: list[Dims] = [(("b",), ("e",))]
    for index, shape in enumerate(call.results[1:], 1):
        last = len(shape) == 2 and shape[1] == features
        own = shape[:-1] if last else shape
        more, names = axes_of(own, f"r{index}_", frozen=range(len(own)))
        axes |= more
        results.append((*names, ("e",)) if last else names)
    dims: dict[str, Dims] = {"weight": each("ve")}
    for name in ("indices", "offsets", "per_sample_weights"):
        if call.has(name):
            more, dims[name] = axes_of(call.shape(name), name, frozen=range(2))
            axes |= more

    def localize(call: Call, local: Local) -> LocalCall:
        shards: list[tuple[str, Any]] = []
        if (axis := local.axis("v")) is not None:
            shards += [("rows", shard_argument(local, "v", call.position("weight")))]
            shards += [("row_axis", axis)]
        if (shard := single_shard(local, local.result_layouts[0], "b", 0)) is not None:
            shards += [("bags", shard[0]), ("bag_axis", shard[1])]
        names = ("weight", "indices", "offsets", "mode", "per_sample_weights")
        padding = call.get("padding_idx")
        if call.get("include_last_offset"):
            shards += [("include_last_offset", True)]
        if padding is not None and padding >= 0:
            shards += [("padding_idx", padding)]
        return LocalCall("rt.embedding_bag", tuple(call.get(n) for n in names), tuple(shards))

    return NodeRule(axes, operand_dims(call, **dims), tuple(results), localize=localize)


@dataclass(frozen=True, slots=True)
class Indexing:
    """The meaning of `x[indices]` for a tensor of some shape, in terms of axes."""

    axes: dict[str, Axis]
    source: Dims  # of the indexed tensor
    indices: tuple[Dims, ...]  # of every index tensor
    result: Dims  # of `x[indices]`
    shape: tuple[int, ...]  # of `x[indices]`


def is_mask(call: Call, index: Ref) -> bool:
    """Return whether an index tensor selects by true and false."""
    return call.types[index.name].dtype in (torch.bool, torch.uint8)


def indexing(call: Call, indices: tuple[Any, ...], *, mask_length: int = -1) -> Indexing | None:
    """Return the axes: `d*` are the tensor's dims, `i*` those of the broadcast indices.

    The dims of the indices are where the first of them was, or in front if a slice separates them.
    A mask of k dims indexes k dims and gives one of data-dependent length: `mask_length`. None if
    a mask is among several index tensors.
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
    axes, block = axes_of(common, "i", frozen=range(len(common)) if masked else ())
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
    return aligned(shape, common, each(f"i{d}" for d in range(len(common))))


@rule("aten.index", "aten._unsafe_index")
def index(call: Call) -> NodeRule:
    """Read `x[indices]`."""
    indices = tuple(call.get("indices"))
    masks = [i for i in indices if isinstance(i, Ref) and is_mask(call, i)]
    length = -1
    if masks:  # the length of a mask's dim is known from the result alone
        length = call.results[0][sum(i is None for i in indices[: indices.index(masks[0])])]
    read = indexing(call, indices, mask_length=length)
    if read is None or read.shape != call.results[0]:
        return replicated_rule(call, "a mask among several index tensors")
    return NodeRule(read.axes, (read.source, *read.indices), (read.result,), linear=passes(call, 0))


@rule("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl")
def index_put(call: Call) -> NodeRule:
    """Write `x[indices] = values`, or `+=`: then rows may be sharded, each rank adding its own."""
    indices = tuple(call.get("indices"))
    slots = [i for i in indices if isinstance(i, Ref)]
    values = call.shape("values")
    if any(is_mask(call, i) for i in slots):
        return _masked_put(call, indices, slots, values)
    write = indexing(call, indices)
    if write is None or not broadcastable(values, write.shape):
        return replicated_rule(call, "index tensors that do not fit the values")
    adds = bool(call.get("accumulate")) and call.types[call.node.outputs[0]].dtype != torch.bool
    axes = {
        name: Axis(name, axis.size, frozen=axis.frozen or (name[0] == "i" and not adds))
        for name, axis in write.axes.items()
    }
    return NodeRule(
        axes,
        (write.source, *write.indices, aligned(values, write.shape, write.result)),
        (write.source,),
        linear=passes(call, 0, len(slots) + 1),
        additive=frozenset({0}) if adds else frozenset(),
    )


def _masked_put(
    call: Call, indices: tuple[Any, ...], slots: list[Ref], values: tuple[int, ...]
) -> NodeRule:
    """Write `x[mask] = value` element by element if the value has no dim along the mask."""
    source = call.shape("self")
    if len(slots) != 1:
        return replicated_rule(call, "a mask among several index tensors")
    start = indices.index(slots[0])
    width = len(call.shape(slots[0]))
    axes, dims = axes_of(source)
    after = dims[start + width :]
    leading = max(len(values) - len(after), 0)  # dims of the values at and before the mask's
    if any(size != 1 for size in values[:leading]):
        return replicated_rule(call, "values that are given for each element of a mask")
    shape = (*(1 for _ in range(leading)), *source[start + width :])
    filled: Dims = (*(() for _ in range(leading)), *after)
    return NodeRule(
        axes,
        (dims, dims[start : start + width], aligned(values, shape, filled)),
        (dims,),
        linear=passes(call, 0, 2),
    )


keep_replicated(
    "the shape of the result depends on data",
    "aten.masked_select",
    "aten.nonzero",
    "aten.argwhere",
    "aten.where.default",
    "aten.nonzero_numpy",
)
keep_replicated("values are consumed in the order of the mask", "aten.masked_scatter")


@rule("aten.index_select")
def index_select(call: Call) -> NodeRule:
    """Freeze the dim whose rows are selected; the index may be sharded."""
    source = call.operands[0]
    dim = normalize(call.get("dim"), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    axes["i"] = Axis("i", call.results[0][dim] if source else 1)
    return NodeRule(
        axes,
        (dims, each("i" for _ in call.shape("index"))),
        (with_dim(dims, dim, ("i",)) if source else (),),
        linear=passes(call, 0),
    )


def matched(
    axes: dict[str, Axis], shape: Sequence[int], dim: int, along: Dim, source: Sequence[int]
) -> Dims | None:
    """Return the dims of an index: `along` at `dim`, else the first positions of the tensor's.

    None if the index is larger than the tensor.
    """
    if any(size > source[d] for d, size in enumerate(shape) if d != dim):
        return None
    return tuple(
        along if d == dim else part(axes, f"d{d}", 0, size) for d, size in enumerate(shape)
    )


@rule("aten.gather")
def gather(call: Call) -> NodeRule:
    """Freeze the gathered dim of x: `out[i][j] = x[index[i][j]][j]`."""
    source, target = call.operands[0], call.results[0]
    dim = normalize(call.get("dim"), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    axes["i"] = Axis("i", target[dim] if target else 1)
    index = matched(axes, target, dim, ("i",), source)
    if index is None or not source:
        return replicated_rule(call, "a scalar, or an index larger than the tensor")
    return NodeRule(axes, (dims, index), (index,), linear=passes(call, 0))


@rule("aten.take_along_dim")
def take_along_dim(call: Call) -> NodeRule:
    """Gather with the other dims broadcast."""
    source, index, target = call.operands[0], call.shape("indices"), call.results[0]
    if call.get("dim") is None or len(source) != len(index):
        return replicated_rule(call, "taken from the flattened tensor")
    dim = normalize(call.get("dim"), len(source))
    axes, dims = axes_of(target)
    axes["full"] = Axis("full", source[dim], frozen=True)
    table = with_dim(aligned(source, target, dims), dim, ("full",))
    lookup = with_dim(aligned(index, target, dims), dim, dims[dim])
    return NodeRule(axes, (table, lookup), (dims,), linear=passes(call, 0))


@rule("aten.take")
def take(call: Call) -> NodeRule:
    """Freeze all dims of the tensor, which is read as if flattened."""
    axes, dims = axes_of(call.results[0], prefix="i")
    more, source = axes_of(call.operands[0], frozen=range(len(call.operands[0])))
    return NodeRule(axes | more, (source, dims), (dims,), linear=passes(call, 0))


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: Call) -> NodeRule:
    """Write `x[index[i][j]][j] = src[i][j]`, or `+=`."""
    source, index = call.operands[0], call.shape("index")
    if not source or not index:
        return replicated_rule(call, "a scalar")
    dim = normalize(call.get("dim"), len(source))
    dtype = call.types[call.node.outputs[0]].dtype
    mode = call.get("reduce")
    sums = call.node.op.startswith("aten.scatter_add") or mode in ("sum", "add")
    adds = sums and call.get("include_self", True)
    axes, dims = axes_of(source, frozen=(dim,))
    axes["i"] = Axis("i", index[dim], frozen=not adds or dtype == torch.bool)
    operands: list[Dims | None] = [dims, matched(axes, index, dim, ("i",), source)]
    linear = passes(call, 0) if call.get("value") == 0 else ()
    if call.has("src"):
        shape, name = call.shape("src"), "i"
        if shape[dim] != index[dim]:
            name = "longer"
            axes |= frozen_axes({"i": index[dim], name: shape[dim]})
        operands.append(matched(axes, shape, dim, (name,), source))
        linear = passes(call, 0, call.position("src"))
    if None in operands:
        return replicated_rule(call, "an index or source larger than the tensor")
    return NodeRule(
        axes,
        tuple(o for o in operands if o is not None),
        (dims,),
        linear=linear if mode is None or adds else (),
        additive=frozenset({0}) if adds else frozenset(),
    )


@rule("aten.index_add", "aten.index_copy", "aten.index_fill")
def index_add(call: Call) -> NodeRule:
    """Write rows of a source to the rows that an index names."""
    source = call.operands[0]
    if not source:
        return replicated_rule(call, "a scalar")
    dim = normalize(call.get("dim"), len(source))
    adds = call.node.op.startswith("aten.index_add")
    dtype = call.types[call.node.outputs[0]].dtype
    axes, dims = axes_of(source, frozen=(dim,))
    rows = call.shape("index")
    axes["i"] = Axis("i", rows[0] if rows else 1, frozen=not adds or dtype == torch.bool)
    operands: list[Dims] = [dims, each("i" for _ in rows)]
    linear = passes(call, 0) if call.get("value") == 0 else ()
    if call.has("source"):
        shape = call.shape("source")
        if len(shape) != len(source):
            return replicated_rule(call, "a scalar source")
        operands.append(with_dim(dims, dim, ("i",)))
        linear = passes(call, 0, call.position("source"))
    elif call.has("value"):
        operands.append(())
        linear = passes(call, 0, call.position("value"))
    return NodeRule(
        axes,
        tuple(operands),
        (dims,),
        linear=linear,
        additive=frozenset({0}) if adds else frozenset(),
    )


@rule("aten.one_hot")
def one_hot(call: Call) -> NodeRule:
    """Add a last dim of classes; a shard of it compares with its own class numbers."""
    target = call.results[0]
    last = len(target) - 1
    axes, dims = axes_of(target)
    axes[f"d{last}"] = Axis(f"d{last}", target[last], once=True)

    def localize(call: Call, local: Local) -> LocalCall:
        shard = single_shard(local, local.result_layouts[0], f"d{last}", last)
        if shard is None:
            return call.replace(num_classes=target[last])
        return LocalCall("rt.one_hot", (call.get("self"), *shard))

    return NodeRule(axes, (dims[:-1],), (dims,), localize=localize)


keep_replicated("the length of the result depends on data", "aten.bincount")
keep_replicated("elements of the flattened tensor are written", "aten.put")
