"""Sorting, ranking, scanning and counting: whole along their dim, free along all others."""

from __future__ import annotations

from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dim, NodeRule, whole_rule
from shardwise.sharding.rules.axes import axes_of, broadcast_dims, normalize
from shardwise.sharding.rules.permutations import along


@rule("aten.sort", "aten.argsort", "aten.topk", "aten.msort", "aten.renorm")
@rule("aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp", "aten.diff")
def ordered(call: Call) -> NodeRule:
    """The order along a dim depends on all of it."""
    dim = call.get("dim", 0 if call.node.op.startswith("aten.msort") else -1)
    if not isinstance(dim, int) or not call.operands[0]:
        return whole_rule(call, "a scalar, or a named dim")
    return along(call, {normalize(dim, len(call.operands[0]))})


@rule("aten.cumsum")
def cumsum(call: Call) -> NodeRule:
    """A running sum: linear, but whole along its dim."""
    if not call.operands[0] or not isinstance(call.get("dim"), int):
        return whole_rule(call, "a scalar, or a named dim")
    return along(call, {normalize(call.get("dim"), len(call.operands[0]))}, linear=True)


@rule("aten.argmax", "aten.argmin", "aten.kthvalue", "aten.median.dim", "aten.mode")
@rule("aten.nanmedian.dim", "aten.quantile", "aten.count_nonzero.dim")
def ranked(call: Call) -> NodeRule:
    """A position or a rank along one dim, which vanishes or becomes one."""
    source, dim = call.operands[0], call.get("dim")
    if not isinstance(dim, int) or not source or len(call.operands) > 1:
        return whole_rule(call, "ranks over all elements")
    dim = normalize(dim, len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    kept: tuple[Dim, ...] = ((),) if call.get("keepdim") else ()
    result = (*dims[:dim], *kept, *dims[dim + 1 :])
    return NodeRule(axes=axes, operands=(dims,), results=tuple(result for _ in call.results))


@rule("aten.bucketize", "aten.searchsorted", "aten.isin")
def bucketize(call: Call) -> NodeRule:
    """Every element is compared with all of a sorted list, which stays whole."""
    target = call.results[0]
    axes, dims = axes_of(target)
    table = {"bucketize": "boundaries", "searchsorted": "sorted_sequence", "isin": "test_elements"}
    name = table[call.node.op.split(".")[1]]
    if not call.has(name):
        return whole_rule(call, "compared with one number")
    shape = call.shape(name)
    if len(shape) > 1 and name == "sorted_sequence":
        return _searchsorted_rows(call)
    more, listed = axes_of(shape, prefix="s", frozen=range(len(shape)))
    at = call.position(name)
    others = [s for i, s in enumerate(call.operands) if i != at]
    if any(len(s) > len(target) for s in others):
        return whole_rule(call, "a sorter, or operands that do not match")
    operands = [broadcast_dims(s, target) for s in others]
    operands.insert(at, listed)
    return NodeRule(axes=axes | more, operands=tuple(operands), results=(dims,))


def _searchsorted_rows(call: Call) -> NodeRule:
    """One sorted list for every row."""
    target = call.results[0]
    if len(call.operands) != 2 or len(call.operands[1]) != len(target):
        return whole_rule(call, "a sorter, or one value for each row")
    axes, dims = axes_of(target)
    axes["sorted"] = Axis("sorted", call.operands[0][-1], frozen=True)
    return NodeRule(axes=axes, operands=((*dims[:-1], ("sorted",)), dims), results=(dims,))


@rule("aten.histc")
def histc(call: Call) -> NodeRule:
    """Counts add up over shards where the range is given; else it depends on all elements."""
    if call.get("min", 0) == call.get("max", 0):
        return whole_rule(call, "the range of a histogram depends on all elements")
    axes, dims = axes_of(call.operands[0])
    axes["bins"] = Axis("bins", call.results[0][0], frozen=True)
    return NodeRule(axes=axes, operands=(dims,), results=((("bins",),),))


keep_whole(
    "the shape of the result depends on data",
    "aten.unique_consecutive",
    "aten._unique2",
    "aten._unique",
    "aten.unique_dim",
)
keep_whole("ranks over all elements", "aten.median.default", "aten.nanmedian.default")
