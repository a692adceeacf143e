"""Operators that repeat values: new axes are in the result only, and may be cut there."""

from __future__ import annotations

from math import prod

from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dim, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import (
    axes_of,
    axis_length,
    broadcast_dims,
    normalize,
    passes,
)


@rule("aten.expand", "aten.broadcast_to")
def expand(call: Call) -> NodeRule:
    """A dim of one becomes many; the size argument is the local result's shape."""
    axes, dims = axes_of(call.results[0])
    return NodeRule(
        axes=axes,
        operands=(broadcast_dims(call.operands[0], call.results[0]),),
        results=(dims,),
        linear=passes(call, 0),
        size_arg="size",
    )


@rule("aten.broadcast_tensors")
def broadcast_tensors(call: Call) -> NodeRule:
    """All operands in one common shape."""
    axes, dims = axes_of(call.results[0])
    return NodeRule(
        axes=axes,
        operands=tuple(broadcast_dims(shape, call.results[0]) for shape in call.operands),
        results=tuple(dims for _ in call.results),
        linear=passes(call, *range(len(call.operands))),
    )


@rule("aten.meshgrid")
def meshgrid(call: Call) -> NodeRule:
    """Operand i varies along dim i of every result; `xy` swaps the first two dims."""
    axes = {f"d{i}": Axis(f"d{i}", prod(shape)) for i, shape in enumerate(call.operands)}
    names: list[Dim] = [(name,) for name in axes]
    if call.get("indexing") == "xy" and len(names) > 1:
        names[0], names[1] = names[1], names[0]
    return NodeRule(
        axes=axes,
        operands=tuple(((f"d{i}",),) if s else () for i, s in enumerate(call.operands)),
        results=tuple(tuple(names) for _ in call.results),
        linear=passes(call, *range(len(call.operands))),
    )


@rule("aten.repeat", "aten.tile")
def repeat(call: Call) -> NodeRule:
    """Dim i of the result is `(repeats, size)`: the repeats are an axis of the result alone."""
    source, target = call.operands[0], call.results[0]
    new = len(target) - len(source)
    axes: dict[str, Axis] = {}
    operand: list[Dim] = []
    result: list[Dim] = []
    given = tuple(call.get("repeats", call.get("dims")))
    repeats = (1,) * (len(target) - len(given)) + given
    for d, times in enumerate(repeats):
        axes[f"r{d}"] = Axis(f"r{d}", times)
        if d >= new:
            axes[f"d{d}"] = Axis(f"d{d}", source[d - new])
            operand.append((f"d{d}",))
        result.append((f"r{d}", f"d{d}") if d >= new else (f"r{d}",))

    def localize(call: Call, local: Local) -> LocalCall:
        layout = local.result_layouts[0]
        times = tuple(
            axis_length(axes[f"r{d}"], local, layout, d, target) for d in range(len(target))
        )
        return call.replace(**{"repeats" if "repeats" in call.arguments else "dims": times})

    return NodeRule(
        axes=axes,
        operands=(tuple(operand),),
        results=(tuple(result),),
        linear=passes(call, 0),
        localize=localize,
    )


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> NodeRule:
    """Every element `repeats` times: grouped key heads become `(head, repeats)`."""
    source = call.operands[0]
    axes, dims = axes_of(source)
    axes["times"] = Axis("times", call.get("repeats"))
    flat = call.get("dim") is None
    dim = 0 if flat else normalize(call.get("dim"), len(source))
    if flat:
        result: tuple[Dim, ...] = ((*axes,),)
    else:
        result = tuple((f"d{i}", "times") if i == dim else d for i, d in enumerate(dims))

    def localize(call: Call, local: Local) -> LocalCall:
        shape = call.results[0]
        times = axis_length(axes["times"], local, local.result_layouts[0], dim, shape)
        return call.replace(repeats=times, output_size=None)

    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=(result,),
        linear=passes(call, 0),
        localize=localize,
    )


@rule("aten.repeat_interleave.self_Tensor")
def repeat_interleave_tensor(call: Call) -> NodeRule:
    """The numbers of repeats are data: the repeated dim stays whole."""
    if call.get("dim") is None:
        return whole_rule(call, "repeats by data over all dims")
    dim = normalize(call.get("dim"), len(call.operands[0]))
    axes, dims = axes_of(call.operands[0], frozen=(dim,))
    axes["long"] = Axis("long", call.results[0][dim], frozen=True)
    axes["counts"] = Axis("counts", prod(call.shape("repeats")), frozen=True)
    return NodeRule(
        axes=axes,
        operands=(dims, tuple(("counts",) for _ in call.shape("repeats"))),
        results=(tuple(("long",) if i == dim else d for i, d in enumerate(dims)),),
        linear=passes(call, 0),
    )
