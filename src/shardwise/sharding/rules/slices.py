"""Parts of a dim: slices, rows, windows, and writing into them."""

from __future__ import annotations

from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dim, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import (
    axes_of,
    local_position,
    normalize,
    part,
    passes,
)
from shardwise.sharding.rules.concat import with_dim
from shardwise.sharding.rules.permutations import along


def bounds(call: Call, size: int) -> tuple[int, int, int]:
    """Start, stop and step of a slice, in `0:size`."""
    if call.node.op.startswith("aten.narrow"):
        start = call.get("start")
        start = start + size if start < 0 else start
        return start, start + call.get("length"), 1
    first, last, step = call.get("start"), call.get("end"), call.get("step", 1)
    return slice(first, last, step).indices(size)


@rule("aten.slice", "aten.narrow", "aten.slice_copy", "aten.narrow_copy")
def take_slice(call: Call) -> NodeRule:
    """`x[start:stop]` is a part of the dim's axis; `x[i::step]` takes one of every `step`."""
    source, target = call.operands[0], call.results[0]
    if not all(isinstance(call.get(a, 0), int | None) for a in ("start", "end", "length")):
        return whole_rule(call, "bounds are data")
    dim = normalize(call.get("dim", 0), len(source))
    start, stop, step = bounds(call, source[dim])
    axes, dims = axes_of(source)
    name = f"d{dim}"
    operand = dims
    if step == 1:
        result = with_dim(dims, dim, part(axes, name, start, stop))
    elif source[dim] % step == 0 and start < step and target[dim] == source[dim] // step:
        axes[name] = Axis(name, target[dim])
        axes["step"] = Axis("step", step, frozen=True)
        operand, result = with_dim(dims, dim, (name, "step")), dims
    else:
        axes[name] = Axis(name, source[dim], frozen=True)
        axes["taken"] = Axis("taken", target[dim], frozen=True)
        result = with_dim(dims, dim, ("taken",))

    def localize(call: Call, local: Local) -> LocalCall:
        if name not in local.cuts or call.operands == call.results:
            return call.replace()
        if step != 1:
            return call.replace(end=None)
        first, last = local_bounds(local, dim, start, stop)
        if "length" in call.arguments:
            return call.replace(start=first, length=last - first)
        return call.replace(start=first, end=last)

    return NodeRule(
        axes=axes,
        operands=(operand,),
        results=(result,),
        linear=passes(call, 0),
        localize=localize,
    )


def local_bounds(local: Local, dim: int, start: int, stop: int) -> tuple[int, int]:
    """Where positions `start:stop` of the first operand's dim are in the local tensor."""
    if start >= stop:
        return 0, 0
    layout, place = local.operand_layouts[0], local.coordinate
    return local_position(layout, dim, start, place), local_position(layout, dim, stop, place)


@rule("aten.slice_scatter")
def slice_scatter(call: Call) -> NodeRule:
    """`src` is a part of the dim's axis."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    start, stop, step = bounds(call, source[dim])
    axes, dims = axes_of(source)
    name = f"d{dim}"
    if step == 1:
        piece = part(axes, name, start, stop)
    else:
        axes[name] = Axis(name, source[dim], frozen=True)
        axes["written"] = Axis("written", call.shape("src")[dim], frozen=True)
        piece = ("written",)

    def localize(call: Call, local: Local) -> LocalCall:
        if name not in local.cuts:
            return call.replace()
        first, last = local_bounds(local, dim, start, stop)
        return call.replace(start=first, end=last)

    return NodeRule(
        axes=axes,
        operands=(dims, with_dim(dims, dim, piece)),
        results=(dims,),
        linear=passes(call, 0, 1),
        localize=localize,
    )


@rule("aten.select", "aten.select_copy")
def select(call: Call) -> NodeRule:
    """One row of a dim that stays whole."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=((*dims[:dim], *dims[dim + 1 :]),),
        linear=passes(call, 0),
    )


@rule("aten.select_scatter")
def select_scatter(call: Call) -> NodeRule:
    """One row of a dim that stays whole is overwritten."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    return NodeRule(
        axes=axes,
        operands=(dims, (*dims[:dim], *dims[dim + 1 :])),
        results=(dims,),
        linear=passes(call, 0, 1),
    )


@rule("aten.diagonal_scatter")
def diagonal_scatter(call: Call) -> NodeRule:
    """A diagonal of two dims that stay whole is overwritten."""
    rank = len(call.operands[0])
    pair = {normalize(call.get("dim1", 0), rank), normalize(call.get("dim2", 1), rank)}
    axes, dims = axes_of(call.operands[0], frozen=pair)
    axes["diagonal"] = Axis("diagonal", call.shape("src")[-1], frozen=True)
    rest = tuple(dims[d] for d in range(rank) if d not in pair)
    return NodeRule(
        axes=axes,
        operands=(dims, (*rest, ("diagonal",))),
        results=(dims,),
        linear=passes(call, 0, 1),
    )


@rule("aten.unfold", "aten.unfold_copy")
def unfold(call: Call) -> NodeRule:
    """Windows along a dim, their elements in a new last dim; cut where windows only touch."""
    source, target = call.operands[0], call.results[0]
    if not source:
        return whole_rule(call, "a scalar")
    dim = normalize(call.get("dimension"), len(source))
    size, step = call.get("size"), call.get("step")
    axes, dims = axes_of(target, frozen=(len(source),))
    operand = dims[:-1]
    if step == size and source[dim] % size == 0:
        operand = with_dim(operand, dim, (f"d{dim}", f"d{len(source)}"))
    else:
        axes[f"d{dim}"] = Axis(f"d{dim}", target[dim], frozen=True)
        axes["covered"] = Axis("covered", source[dim], frozen=True)
        operand = with_dim(operand, dim, ("covered",))
    return NodeRule(
        axes=axes,
        operands=(operand,),
        results=(dims,),
        linear=passes(call, 0),
        localize=_local_unfold,
    )


def _local_unfold(call: Call, local: Local) -> LocalCall:
    """An empty shard has no window; it is reshaped, so that its gradient is still connected."""
    if 0 in local.results[0]:
        return LocalCall("aten.reshape.default", (call.get("self"), local.results[0]))
    return call.replace()


@rule("aten.im2col", "aten.col2im")
def im2col(call: Call) -> NodeRule:
    """Sliding blocks of an image: batch and channels are free."""
    image, columns = call.operands[0], call.results[0]
    if call.node.op.startswith("aten.col2im"):
        image, columns = columns, image
    channels = image[-3]
    if not channels:
        return whole_rule(call, "an image without channels")
    axes, dims = axes_of(image, frozen=(len(image) - 2, len(image) - 1))
    channel = f"d{len(image) - 3}"
    axes["kernel"] = Axis("kernel", columns[-2] // channels, frozen=True)
    axes["blocks"] = Axis("blocks", columns[-1], frozen=True)
    wide: tuple[Dim, ...] = (*dims[:-3], (channel, "kernel"), ("blocks",))
    forward = image is call.operands[0]
    return NodeRule(
        axes=axes,
        operands=(dims,) if forward else (wide,),
        results=(wide,) if forward else (dims,),
        linear=passes(call, 0),
    )


@rule("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.replication_pad1d")
@rule("aten.replication_pad2d", "aten.replication_pad3d", "aten.reflection_pad3d")
def edge_pad(call: Call) -> NodeRule:
    """Padding by the tensor's own edge: the padded dims stay whole."""
    rank = len(call.operands[0])
    return along(call, set(range(rank - len(call.get("padding")) // 2, rank)), linear=True)
