"""Reading and writing along one dim: gather, scatter, and selection by a vector of indices.

The dim that is read or written stays whole. Where values are added (`scatter_add`, `index_add`),
the source's dim may be cut: every rank adds its part, and the results are partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dim, Dims, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import axes_of, normalize, only_cut, part, passes
from shardwise.sharding.rules.concat import with_dim


@rule("aten.index_select")
def index_select(call: Call) -> NodeRule:
    """Rows of a dim that stays whole; the index may be cut."""
    source = call.operands[0]
    dim = normalize(call.get("dim"), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    axes["i"] = Axis("i", call.results[0][dim] if source else 1)
    index: Dims = tuple(("i",) for _ in call.shape("index"))
    return NodeRule(
        axes=axes,
        operands=(dims, index),
        results=(with_dim(dims, dim, ("i",)) if source else (),),
        linear=passes(call, 0),
    )


def matched(
    axes: dict[str, Axis], shape: Sequence[int], dim: int, along: Dim, source: Sequence[int]
) -> Dims | None:
    """Dims of an index: `along` at `dim`, else the first positions of the tensor's own dims."""
    found: list[Dim] = []
    for d, size in enumerate(shape):
        if d == dim:
            found.append(along)
        elif size > source[d]:
            return None
        else:
            found.append(part(axes, f"d{d}", 0, size))
    return tuple(found)


@rule("aten.gather")
def gather(call: Call) -> NodeRule:
    """`out[i][j] = x[index[i][j]][j]`: the gathered dim of x stays whole."""
    source, target = call.operands[0], call.results[0]
    dim = normalize(call.get("dim"), len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    axes["i"] = Axis("i", target[dim] if target else 1)
    index = matched(axes, target, dim, ("i",), source)
    if index is None or not source:
        return whole_rule(call, "a scalar, or an index larger than the tensor")
    return NodeRule(
        axes=axes,
        operands=(dims, index),
        results=(index,),
        linear=passes(call, 0),
    )


@rule("aten.take_along_dim")
def take_along_dim(call: Call) -> NodeRule:
    """`gather` with the other dims broadcast."""
    source, index, target = call.operands[0], call.shape("indices"), call.results[0]
    if call.get("dim") is None or len(source) != len(index):
        return whole_rule(call, "taken from the flattened tensor")
    dim = normalize(call.get("dim"), len(source))
    axes, dims = axes_of(target)
    axes["whole"] = Axis("whole", source[dim], frozen=True)

    def own(shape: tuple[int, ...]) -> Dims:
        return tuple(() if shape[d] == 1 and target[d] != 1 else dims[d] for d in range(len(shape)))

    return NodeRule(
        axes=axes,
        operands=(with_dim(own(source), dim, ("whole",)), with_dim(own(index), dim, dims[dim])),
        results=(dims,),
        linear=passes(call, 0),
    )


@rule("aten.take")
def take(call: Call) -> NodeRule:
    """Elements of the flattened tensor, which stays whole."""
    axes, dims = axes_of(call.results[0], prefix="i")
    more, source = axes_of(call.operands[0], frozen=range(len(call.operands[0])))
    return NodeRule(
        axes=axes | more, operands=(source, dims), results=(dims,), linear=passes(call, 0)
    )


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: Call) -> NodeRule:
    """`x[index[i][j]][j] = src[i][j]`, or `+=`."""
    source, index = call.operands[0], call.shape("index")
    if not source or not index:
        return whole_rule(call, "a scalar")
    dim = normalize(call.get("dim"), len(source))
    dtype = call.types[call.node.outputs[0]].dtype
    mode = call.get("reduce")
    adds = call.node.op.startswith("aten.scatter_add") or mode in ("sum", "add")
    kept = call.get("include_self", True)
    axes, dims = axes_of(source, frozen=(dim,))
    axes["i"] = Axis("i", index[dim], frozen=not adds or not kept or dtype == torch.bool)
    positions = matched(axes, index, dim, ("i",), source)
    operands: list[Dims | None] = [dims, positions]
    if call.has("src"):
        shape = call.shape("src")
        if shape[dim] == index[dim]:
            operands.append(matched(axes, shape, dim, ("i",), source))
        else:
            axes["i"] = Axis("i", index[dim], frozen=True)
            axes["longer"] = Axis("longer", shape[dim], frozen=True)
            operands.append(matched(axes, shape, dim, ("longer",), source))
    if None in operands:
        return whole_rule(call, "an index or source larger than the tensor")
    return NodeRule(
        axes=axes,
        operands=tuple(o for o in operands if o is not None),
        results=(dims,),
        linear=_scatter_linear(call, adds and kept),
        additive=frozenset({0}) if adds and kept else frozenset(),
    )


def _scatter_linear(call: Call, adds: bool) -> tuple[frozenset[int], ...]:
    if call.get("reduce") is not None and not adds:
        return ()
    if call.has("src"):
        return passes(call, 0, call.position("src"))
    return passes(call, 0) if call.get("value") == 0 else ()


@rule("aten.index_add", "aten.index_copy", "aten.index_fill")
def index_add(call: Call) -> NodeRule:
    """Rows of a source go to the rows that an index names."""
    source = call.operands[0]
    if not source:
        return whole_rule(call, "a scalar")
    dim = normalize(call.get("dim"), len(source))
    adds = call.node.op.startswith("aten.index_add")
    dtype = call.types[call.node.outputs[0]].dtype
    axes, dims = axes_of(source, frozen=(dim,))
    rows = call.shape("index")
    axes["i"] = Axis("i", rows[0] if rows else 1, frozen=not adds or dtype == torch.bool)
    operands: list[Dims] = [dims, tuple(("i",) for _ in rows)]
    linear = passes(call, 0) if call.get("value") == 0 else ()
    if call.has("source"):
        shape = call.shape("source")
        if len(shape) != len(source):
            return whole_rule(call, "a scalar source")
        operands.append(with_dim(dims, dim, ("i",)))
        linear = passes(call, 0, call.position("source"))
    elif call.has("value"):
        operands.append(())
        linear = passes(call, 0, call.position("value"))
    return NodeRule(
        axes=axes,
        operands=tuple(operands),
        results=(dims,),
        linear=linear,
        additive=frozenset({0}) if adds else frozenset(),
    )


@rule("aten.one_hot")
def one_hot(call: Call) -> NodeRule:
    """A new last dim of classes; a shard of it compares with its own class numbers."""
    target = call.results[0]
    last = len(target) - 1
    axes, dims = axes_of(target)
    axes[f"d{last}"] = Axis(f"d{last}", target[last], once=True)

    def localize(call: Call, local: Local) -> LocalCall:
        cut = only_cut(local, local.result_layouts[0], f"d{last}", last)
        if cut is None:
            return call.replace(num_classes=target[last])
        return LocalCall("rt.one_hot", (call.get("self"), *cut))

    return NodeRule(axes=axes, operands=(dims[:-1],), results=(dims,), localize=localize)


keep_whole("the length of the result depends on data", "aten.bincount")
keep_whole("elements of the flattened tensor are written", "aten.put")
