"""Slices, concatenation and padding: a shard takes its part of every segment of a dim."""

from itertools import accumulate

from shardwise.sharding.registry import rule
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
    axes_of,
    frozen_axes,
    linear_rule,
    local_position,
    normalize,
    part,
    passes,
    with_dim,
)


# ---------------------------------------------------------------- concatenation
def segments(axes: dict[str, Axis], axis: str, sizes: list[int]) -> list[Dim]:
    """Return consecutive parts of an axis."""
    stops = accumulate(sizes)
    return [part(axes, axis, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


@rule("aten.cat", "aten.concat", "aten.concatenate")
def cat(call: Call) -> NodeRule:
    """Treat operands as segments of the result's dim; legacy empty vectors count for nothing."""
    target = call.results[0]
    if not isinstance(call.get("dim", 0), int) or 0 in target:
        return replicated_rule(call, "named dims, or an empty result")
    dim = normalize(call.get("dim", 0), len(target))
    axes, dims = axes_of(target)
    sizes = [shape[dim] if len(shape) == len(target) else 0 for shape in call.operands]
    operands = tuple(
        with_dim(dims, dim, piece) if len(shape) == len(target) else (piece,)
        for shape, piece in zip(call.operands, segments(axes, f"d{dim}", sizes), strict=True)
    )
    return NodeRule(axes, operands, (dims,), linear=passes(call, *range(len(operands))))


@rule("aten.stack")
def stack(call: Call) -> NodeRule:
    """Freeze the new dim, which counts the operands."""
    target = call.results[0]
    dim = normalize(call.get("dim", 0), len(target))
    axes, dims = axes_of(target, frozen=(dim,))
    return NodeRule(
        axes,
        tuple(with_dim(dims, dim) for _ in call.operands),
        (dims,),
        linear=passes(call, *range(len(call.operands))),
    )


@rule("aten.chunk", "aten.split", "aten.split_with_sizes", "aten.tensor_split")
@rule("aten.unsafe_chunk", "aten.unsafe_split", "aten.unsafe_split_with_sizes")
@rule("aten.split_with_sizes_copy", "aten.split_copy")
def split(call: Call) -> NodeRule:
    """Treat results as segments of the operand's dim; sizes become those of the local results."""
    source = call.operands[0]
    if len(call.operands) > 1 or 0 in source:
        return replicated_rule(call, "split points are data, or an empty tensor")
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source)
    sizes = [shape[dim] for shape in call.results]
    results = tuple(with_dim(dims, dim, piece) for piece in segments(axes, f"d{dim}", sizes))

    def localize(call: Call, local: Local) -> LocalCall:
        parts = tuple(shape[dim] for shape in local.results)
        even = call.get("chunks") == len(sizes) and len(set(parts)) == 1
        if f"d{dim}" not in local.sharded or even:
            return call.replace()
        return LocalCall("aten.split_with_sizes.default", (call.get("self"), parts, dim))

    return linear_rule(call, axes, dims, *results, localize=localize)


@rule("aten.unbind")
def unbind(call: Call) -> NodeRule:
    """Freeze the dim whose rows are the results."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    return linear_rule(call, axes, dims, *(with_dim(dims, dim) for _ in call.results))


# ---------------------------------------------------------------- padding
@rule("aten.pad", "aten.constant_pad_nd")
def pad(call: Call) -> NodeRule:
    """Treat constant padding as concatenation: the padding is sharded like the rest.

    Dims padded in other modes are frozen, and so are those padded on one side and cropped on the
    other.
    """
    source, target = call.operands[0], call.results[0]
    constant = call.get("mode", "constant") == "constant"
    if 0 in target or 0 in source:
        return replicated_rule(call, "an empty tensor")
    axes: dict[str, Axis] = {}
    operand: list[Dim] = []
    result: list[Dim] = []
    for d, (before, after) in enumerate(_widths(call.get("pad"), len(source))):
        name = f"d{d}"
        plain = before == after == 0
        axes[name] = Axis(name, max(source[d], target[d]), frozen=not (constant or plain))
        if constant and before >= 0 and after >= 0:
            operand.append(part(axes, name, before, before + source[d]))
            result.append((name,))
        elif constant and before <= 0 and after <= 0:
            operand.append((name,))
            result.append(part(axes, name, -before, -before + target[d]))
        else:
            axes |= frozen_axes({name: source[d], f"p{d}": target[d]})
            operand.append((name,))
            result.append((f"p{d}",))
    zero = not constant or not call.get("value")
    return NodeRule(
        axes,
        (tuple(operand),),
        (tuple(result),),
        linear=passes(call, 0) if zero else (),
        localize=_local_pad,
    )


def _widths(pad: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """Return `(before, after)` of every dim; the argument lists the last dim first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _local_pad(call: Call, local: Local) -> LocalCall:
    widths = _widths(call.get("pad"), len(call.operands[0]))
    for d, (before, after) in enumerate(widths):
        if f"d{d}" in local.sharded:
            crops = before < 0 or after < 0
            layout = (local.operand_layouts if crops else local.result_layouts)[0]
            first = local_position(layout, d, abs(before), local.coordinate) * (-1 if crops else 1)
            widths[d] = (first, local.results[0][d] - local.operands[0][d] - first)
    padded = reversed(widths[len(widths) - len(call.get("pad")) // 2 :])
    return call.replace(pad=tuple(w for pair in padded for w in pair))


# ---------------------------------------------------------------- slices
def bounds(call: Call, size: int) -> tuple[int, int, int]:
    """Return start, stop and step of a slice, in `0:size`."""
    if call.node.op.startswith("aten.narrow"):
        start = call.get("start")
        start = start + size if start < 0 else start
        return start, start + call.get("length"), 1
    return slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(size)


@rule("aten.slice", "aten.narrow", "aten.slice_copy", "aten.narrow_copy")
def take_slice(call: Call) -> NodeRule:
    """Treat `x[start:stop]` as a part of the axis, `x[i::step]` as one of every `step`."""
    source, target = call.operands[0], call.results[0]
    if not all(isinstance(call.get(a, 0), int | None) for a in ("start", "end", "length")):
        return replicated_rule(call, "bounds are data")
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
        axes |= frozen_axes({name: source[dim], "taken": target[dim]})
        result = with_dim(dims, dim, ("taken",))

    def localize(call: Call, local: Local) -> LocalCall:
        if name not in local.sharded or call.operands == call.results:
            return call.replace()
        if step != 1:
            return call.replace(end=None)
        first, last = local_bounds(local, dim, start, stop)
        if "length" in call.arguments:
            return call.replace(start=first, length=last - first)
        return call.replace(start=first, end=last)

    return linear_rule(call, axes, operand, result, localize=localize)


def local_bounds(local: Local, dim: int, start: int, stop: int) -> tuple[int, int]:
    """Return where positions `start:stop` of the first operand's dim are in the local tensor."""
    if start >= stop:
        return 0, 0
    layout, place = local.operand_layouts[0], local.coordinate
    return local_position(layout, dim, start, place), local_position(layout, dim, stop, place)


@rule("aten.slice_scatter")
def slice_scatter(call: Call) -> NodeRule:
    """Treat `src` as a part of the dim's axis."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    start, stop, step = bounds(call, source[dim])
    axes, dims = axes_of(source)
    name = f"d{dim}"
    if step == 1:
        piece = part(axes, name, start, stop)
    else:
        axes |= frozen_axes({name: source[dim], "written": call.shape("src")[dim]})
        piece = ("written",)

    def localize(call: Call, local: Local) -> LocalCall:
        if name not in local.sharded:
            return call.replace()
        first, last = local_bounds(local, dim, start, stop)
        return call.replace(start=first, end=last)

    return NodeRule(
        axes,
        (dims, with_dim(dims, dim, piece)),
        (dims,),
        linear=passes(call, 0, 1),
        localize=localize,
    )


@rule("aten.select", "aten.select_copy", "aten.select_scatter")
def select(call: Call) -> NodeRule:
    """Freeze the dim of which one row is read or overwritten."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    row: Dims = with_dim(dims, dim)
    writes = call.has("src")
    return NodeRule(
        axes,
        (dims, row) if writes else (dims,),
        (dims if writes else row,),
        linear=passes(call, *range(1 + writes)),
    )


@rule("aten.unfold", "aten.unfold_copy")
def unfold(call: Call) -> NodeRule:
    """Put the elements of windows into a new last dim; shard only where windows do not overlap."""
    source, target = call.operands[0], call.results[0]
    if not source:
        return replicated_rule(call, "a scalar")
    dim = normalize(call.get("dimension"), len(source))
    size, step = call.get("size"), call.get("step")
    axes, dims = axes_of(target, frozen=(len(source),))
    operand = dims[:-1]
    if step == size and source[dim] % size == 0:
        operand = with_dim(operand, dim, (f"d{dim}", f"d{len(source)}"))
    else:
        axes |= frozen_axes({f"d{dim}": target[dim], "covered": source[dim]})
        operand = with_dim(operand, dim, ("covered",))
    return linear_rule(call, axes, operand, dims, localize=_local_unfold)


def _local_unfold(call: Call, local: Local) -> LocalCall:
    # An empty shard has no window; it is reshaped, so that its gradient is still connected.
    if 0 in local.results[0]:
        return LocalCall("aten.reshape.default", (call.get("self"), local.results[0]))
    return call.replace()
