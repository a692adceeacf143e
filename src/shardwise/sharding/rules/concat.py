"""Concatenation and its inverse: a shard takes its part of every segment of the dim."""

from __future__ import annotations

from itertools import accumulate

from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dim, Dims, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import (
    axes_of,
    local_position,
    normalize,
    part,
    passes,
)


def segments(axes: dict[str, Axis], axis: str, sizes: list[int]) -> list[Dim]:
    """Consecutive parts of an axis."""
    stops = list(accumulate(sizes))
    return [part(axes, axis, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def with_dim(dims: Dims, at: int, dim: Dim) -> Dims:
    """The dims with another one at position `at`."""
    return (*dims[:at], dim, *dims[at + 1 :])


@rule("aten.cat", "aten.concat", "aten.concatenate")
def cat(call: Call) -> NodeRule:
    """Operands are segments of the result's dim; old-style empty vectors count for nothing."""
    target = call.results[0]
    if not isinstance(call.get("dim", 0), int) or 0 in target:
        return whole_rule(call, "named dims, or an empty result")
    dim = normalize(call.get("dim", 0), len(target))
    axes, dims = axes_of(target)
    sizes = [shape[dim] if len(shape) == len(target) else 0 for shape in call.operands]
    pieces = segments(axes, f"d{dim}", sizes)
    operands = tuple(
        with_dim(dims, dim, piece) if len(shape) == len(target) else (piece,)
        for shape, piece in zip(call.operands, pieces, strict=True)
    )
    return NodeRule(
        axes=axes,
        operands=operands,
        results=(dims,),
        linear=passes(call, *range(len(operands))),
    )


@rule("aten.stack")
def stack(call: Call) -> NodeRule:
    """The new dim counts the operands and stays whole."""
    target = call.results[0]
    dim = normalize(call.get("dim", 0), len(target))
    axes, dims = axes_of(target, frozen=(dim,))
    own = (*dims[:dim], *dims[dim + 1 :])
    return NodeRule(
        axes=axes,
        operands=tuple(own for _ in call.operands),
        results=(dims,),
        linear=passes(call, *range(len(call.operands))),
    )


@rule("aten.chunk", "aten.split", "aten.split_with_sizes", "aten.tensor_split")
@rule("aten.unsafe_chunk", "aten.unsafe_split", "aten.unsafe_split_with_sizes")
@rule("aten.split_with_sizes_copy", "aten.split_copy")
def split(call: Call) -> NodeRule:
    """Results are segments of the operand's dim; local sizes are those of the local results."""
    source = call.operands[0]
    if len(call.operands) > 1 or 0 in source:
        return whole_rule(call, "split points are data, or an empty tensor")
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source)
    sizes = [shape[dim] for shape in call.results]
    results = tuple(with_dim(dims, dim, piece) for piece in segments(axes, f"d{dim}", sizes))

    def localize(call: Call, local: Local) -> LocalCall:
        if f"d{dim}" not in local.cuts:
            return call.replace()
        parts = tuple(shape[dim] for shape in local.results)
        if call.get("chunks") == len(sizes) and len(set(parts)) == 1:
            return call.replace()
        return LocalCall("aten.split_with_sizes.default", (call.get("self"), parts, dim))

    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=results,
        linear=passes(call, 0),
        localize=localize,
    )


@rule("aten.unbind")
def unbind(call: Call) -> NodeRule:
    """Results are the rows of a dim, which stays whole."""
    source = call.operands[0]
    dim = normalize(call.get("dim", 0), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=tuple((*dims[:dim], *dims[dim + 1 :]) for _ in call.results),
        linear=passes(call, 0),
    )


@rule("aten.pad", "aten.constant_pad_nd")
def pad(call: Call) -> NodeRule:
    """Constant padding is concatenation: the padding is cut like the rest.

    Dims padded in other modes stay whole, and so do those padded on one side and cropped on the
    other.
    """
    source, target = call.operands[0], call.results[0]
    widths = _widths(call.get("pad"), len(source))
    constant = call.get("mode", "constant") == "constant"
    if 0 in target or 0 in source:
        return whole_rule(call, "an empty tensor")
    axes: dict[str, Axis] = {}
    operand: list[Dim] = []
    result: list[Dim] = []
    for d, (before, after) in enumerate(widths):
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
            axes[name] = Axis(name, source[d], frozen=True)
            axes[f"p{d}"] = Axis(f"p{d}", target[d], frozen=True)
            operand.append((name,))
            result.append((f"p{d}",))
    zero = not constant or not call.get("value")
    return NodeRule(
        axes=axes,
        operands=(tuple(operand),),
        results=(tuple(result),),
        linear=passes(call, 0) if zero else (),
        localize=_local_pad,
    )


def _widths(pad: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """`(before, after)` of every dim; the argument lists the last dim first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _local_pad(call: Call, local: Local) -> LocalCall:
    source = call.operands[0]
    widths = []
    for d, (before, after) in enumerate(_widths(call.get("pad"), len(source))):
        if f"d{d}" not in local.cuts:
            widths.append((before, after))
            continue
        crops = before < 0 or after < 0
        layout = (local.operand_layouts if crops else local.result_layouts)[0]
        first = local_position(layout, d, abs(before), local.coordinate) * (-1 if crops else 1)
        widths.append((first, local.results[0][d] - local.operands[0][d] - first))
    count = len(call.get("pad")) // 2
    flat = tuple(w for pair in reversed(widths[len(widths) - count :]) for w in pair)
    return call.replace(pad=flat)
