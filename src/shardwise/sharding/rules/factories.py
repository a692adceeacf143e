"""Operators that make tensors from sizes: a shard has its own sizes, or its own offset."""

from __future__ import annotations

from typing import Any

from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule
from shardwise.sharding.rules.building_blocks import axes_of, only_cut, passes


@rule("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.scalar_tensor")
def constant(call: Call) -> NodeRule:
    """The same value everywhere: only the size is local."""
    axes, dims = axes_of(call.results[0])
    operands: tuple[Dims, ...] = tuple(() for _ in call.operands)  # a fill value
    size = "size" if "size" in call.arguments else None
    return NodeRule(axes=axes, operands=operands, results=(dims,), size_arg=size)


@rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def constant_like(call: Call) -> NodeRule:
    """The same shape as the operand, cut as it is."""
    axes, dims = axes_of(call.results[0])
    zeros = call.node.op.startswith("aten.zeros_like")
    return NodeRule(
        axes=axes,
        operands=(dims, *(() for _ in call.operands[1:])),
        results=(dims,),
        linear=passes(call, 0) if zeros else (),
    )


@rule("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
@rule("aten.new_empty_strided", "aten.empty_strided", "aten.empty_permuted")
def constant_new(call: Call) -> NodeRule:
    """The operand gives dtype and device only.

    Where a dim has the result's size at the same place they are cut together, so that an operand
    that is cut already is not gathered for nothing; else a cut of the operand changes nothing.
    """
    target = call.results[0]
    axes, dims = axes_of(target)
    operands = []
    for shape in call.operands:
        found = []
        for d, size in enumerate(shape):
            if d < len(target) and size == target[d]:
                found.append(dims[d])
            else:
                axes[f"o{d}"] = Axis(f"o{d}", size, reduce="same")
                found.append((f"o{d}",))
        operands.append(tuple(found))
    strided = "strided" in call.node.op or "permuted" in call.node.op
    if strided:
        axes = {name: Axis(name, axis.size, frozen=True) for name, axis in axes.items()}
    return NodeRule(
        axes=axes,
        operands=tuple(operands),
        results=(dims,),
        size_arg=None if strided else "size",
    )


def placed(call: Call) -> tuple[tuple[str, Any], ...]:
    """The dtype and device arguments of a call that makes a tensor."""
    return (("dtype", call.types[call.node.outputs[0]].dtype), ("device", call.get("device")))


def one_axis(call: Call) -> tuple[dict[str, Axis], Dims]:
    """The axis of a vector that is cut by one mesh axis at most."""
    axes = {"d0": Axis("d0", call.results[0][0], once=True)}
    return axes, (("d0",),)


@rule("aten.arange")
def arange(call: Call) -> NodeRule:
    """`start + step * i` for the positions i of the shard."""
    axes, dims = one_axis(call)

    def localize(call: Call, local: Local) -> LocalCall:
        cut = only_cut(local, local.result_layouts[0], "d0", 0)
        if cut is None:
            return call.replace()
        first = (call.get("start", 0), call.get("step", 1))
        return LocalCall("rt.arange", (*first, *cut), placed(call))

    return NodeRule(axes=axes, operands=(), results=(dims,), localize=localize)


@rule("aten.linspace")
def linspace(call: Call) -> NodeRule:
    """Evenly spaced numbers; the ends may be tensors."""
    axes, dims = one_axis(call)

    def localize(call: Call, local: Local) -> LocalCall:
        cut = only_cut(local, local.result_layouts[0], "d0", 0)
        if cut is None:
            return call.replace()
        ends = (call.get("start"), call.get("end"), call.get("steps"))
        return LocalCall("rt.linspace", (*ends, *cut), placed(call))

    operands: tuple[Dims, ...] = tuple(() for _ in call.operands)
    return NodeRule(axes=axes, operands=operands, results=(dims,), localize=localize)


def matrix_cuts(local: Local, rank: int) -> tuple[tuple[str, Any], ...]:
    """`row_axis, row_of, column_axis, column_of` of the last two dims, as far as they are cut."""
    found: list[tuple[str, Any]] = []
    for label, dim in (("row", rank - 2), ("column", rank - 1)):
        cut = only_cut(local, local.result_layouts[0], f"d{dim}", dim)
        if cut is not None:
            found += [(f"{label}_of", cut[0]), (f"{label}_axis", cut[1])]
    return tuple(found)


def matrix_axes(shape: tuple[int, ...]) -> tuple[dict[str, Axis], Dims]:
    """All dims free, the last two by one mesh axis each."""
    axes, dims = axes_of(shape)
    for d in (len(shape) - 2, len(shape) - 1):
        axes[f"d{d}"] = Axis(f"d{d}", shape[d], once=True)
    return axes, dims


@rule("aten.eye")
def eye(call: Call) -> NodeRule:
    """Ones where row and column are the same."""
    axes, dims = matrix_axes(call.results[0])

    def localize(call: Call, local: Local) -> LocalCall:
        cuts = matrix_cuts(local, 2)
        if not cuts:
            return call.replace()
        return LocalCall("rt.eye", call.results[0], (*cuts, *placed(call)))

    return NodeRule(axes=axes, operands=(), results=(dims,), localize=localize)


@rule("aten.tril", "aten.triu")
def triangle(call: Call) -> NodeRule:
    """A triangle of the last two dims, seen from the offset of the shard."""
    shape = call.operands[0]
    axes, dims = matrix_axes(shape)

    def localize(call: Call, local: Local) -> LocalCall:
        cuts = matrix_cuts(local, len(shape))
        if not cuts:
            return call.replace()
        name = call.node.op.split(".")[1]
        return LocalCall(f"rt.{name}", (call.get("self"), call.get("diagonal", 0)), cuts)

    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=(dims,),
        linear=passes(call, 0),
        localize=localize,
    )


keep_whole(
    "a small table of positions that every rank makes for itself",
    "aten.tril_indices",
    "aten.triu_indices",
    "aten.logspace",
    "aten.hann_window",
    "aten.hamming_window",
    "aten.range",
    "aten.vander",
    "aten.cartesian_prod",
    "aten.combinations",
)
