"""Operators that reorder dims, and those that work along some dims and keep them full.

Sorting, ranking, scanning and counting are of the second kind: free along all other dims.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.ir import map_refs
from shardwise.ir.schema import operator
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dim, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import axes_of, broadcast_dims, normalize, passes


def permutation(call: Call) -> tuple[int, ...]:
    """For every dim of the result, the operand's dim: read off a call with distinct sizes."""
    probe = torch.empty(tuple(range(2, 2 + len(call.operands[0]))), device="meta")
    args, kwargs = map_refs((call.node.args, tuple(call.node.kwargs)), lambda _: probe)
    result = operator(call.node.op)(*args, **dict(kwargs))
    return tuple(size - 2 for size in result.shape)


@rule("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.matrix_H", "aten.mT")
@rule("aten.mH", "aten.adjoint", "aten.movedim", "aten.moveaxis", "aten.swapaxes", "aten.swapdims")
def permute(call: Call) -> NodeRule:
    """Dims change places."""
    axes, dims = axes_of(call.operands[0])
    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=(tuple(dims[d] for d in permutation(call)),),
        linear=passes(call, 0),
    )


def along(call: Call, dims: set[int], *, linear: bool = False) -> NodeRule:
    """A call that works along `dims` of its first operand and leaves the order of the others.

    Other operands and all results must have the same rank; dims of another size than the first
    operand's have a frozen axis of their own.
    """
    source = call.operands[0]
    axes, own = axes_of(source, frozen=dims)

    def match(prefix: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        found: list[tuple[str, ...]] = []
        for d, size in enumerate(shape):
            if size == source[d]:
                found.append((f"d{d}",))
            else:
                axes[f"{prefix}{d}"] = Axis(f"{prefix}{d}", size, frozen=True)
                axes[f"d{d}"] = Axis(f"d{d}", source[d], frozen=True)
                found.append((f"{prefix}{d}",))
        return tuple(found)

    if any(len(shape) != len(source) for shape in (*call.operands, *call.results)):
        return whole_rule(call, "operands and results have different numbers of dims")
    operands = tuple(match(f"o{i}_", shape) for i, shape in enumerate(call.operands[1:]))
    results = tuple(match(f"r{i}_", shape) for i, shape in enumerate(call.results))
    return NodeRule(
        axes=axes,
        operands=(own, *operands),
        results=results,
        linear=passes(call, *range(len(call.operands))) if linear else (),
    )


def dims_argument(call: Call, name: str = "dim") -> set[int]:
    """The dims that an argument names; all of them when it is missing or empty."""
    rank = len(call.operands[0])
    given = call.get(name)
    if given is None or given == () or given == []:
        return set(range(rank))
    return {normalize(d, rank) for d in ([given] if isinstance(given, int) else given)}


@rule("aten.roll", "aten.flip")
def roll(call: Call) -> NodeRule:
    """The rolled or flipped dims stay whole: elements would change ranks."""
    return along(call, dims_argument(call, "dims"), linear=True)


@rule("aten.fliplr", "aten.flipud", "aten.rot90")
def flip_fixed(call: Call) -> NodeRule:
    """Flips of the first two dims."""
    return along(call, {0, 1}, linear=True)


FOURIER = "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn"


@rule(*(f"aten.fft_{name}" for name in FOURIER.split()), "aten.fft_fftshift", "aten.fft_ifftshift")
def fourier(call: Call) -> NodeRule:
    """Fourier transforms: the transformed dims stay whole."""
    rank = len(call.operands[0])
    dims = dims_argument(call)
    if call.get("dim") is None and call.get("s"):
        dims = set(range(rank - len(call.get("s")), rank))
    return replace(along(call, dims, linear=True), localize=_unless_empty)


def _unless_empty(call: Call, local: Local) -> LocalCall:
    if 0 not in local.results[0]:
        return call.replace()
    dtype = call.types[call.node.outputs[0]].dtype
    return LocalCall("rt.nothing", (call.get("self"), local.results[0], dtype))


@rule("aten.diagonal", "aten.linalg_diagonal")
def diagonal(call: Call) -> NodeRule:
    """Two dims become one at the end; they stay whole."""
    rank = len(call.operands[0])
    pair = {normalize(call.get("dim1", 0), rank), normalize(call.get("dim2", 1), rank)}
    axes, dims = axes_of(call.operands[0], frozen=pair)
    axes["diagonal"] = Axis("diagonal", call.results[0][-1], frozen=True)
    rest = tuple(dims[d] for d in range(rank) if d not in pair)
    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=((*rest, ("diagonal",)),),
        linear=passes(call, 0),
    )


@rule("aten.diag_embed")
def diag_embed(call: Call) -> NodeRule:
    """The last dim becomes two; they stay whole."""
    rank = len(call.results[0])
    pair = {normalize(call.get("dim1", -2), rank), normalize(call.get("dim2", -1), rank)}
    axes, dims = axes_of(call.results[0], frozen=pair)
    axes["diagonal"] = Axis("diagonal", call.operands[0][-1], frozen=True)
    rest = tuple(dims[d] for d in range(rank) if d not in pair)
    return NodeRule(
        axes=axes,
        operands=((*rest, ("diagonal",)),),
        results=(dims,),
        linear=passes(call, 0),
    )


@rule("aten.glu")
def glu(call: Call) -> NodeRule:
    """`a * sigmoid(b)` of the two halves of a dim: a shard takes its part of both."""
    source = call.operands[0]
    dim = normalize(call.get("dim", -1), len(source))
    axes, dims = axes_of(call.results[0])
    axes["halves"] = Axis("halves", 2, frozen=True)
    operand = (*dims[:dim], ("halves", f"d{dim}"), *dims[dim + 1 :])
    return NodeRule(axes=axes, operands=(operand,), results=(dims,))


keep_whole("a diagonal matrix of a vector has no dim to cut", "aten.diag", "aten.trace")


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
