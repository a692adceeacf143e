"""Reductions, and operators that work along dims: sorting, scanning, Fourier transforms.

Sums and means over a sharded axis stay partial. Variances, norms, extremes and logical reductions
communicate inside a runtime operator and give every rank the full result. An operator that needs
a full dim at once, or picks an index along it, freezes that dim and leaves all others free.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardwise.sharding.registry import keep_replicated, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dim,
    Dims,
    Local,
    LocalCall,
    Localize,
    MeshAxis,
    NodeRule,
    replicated_rule,
)
from shardwise.sharding.rules.building_blocks import (
    aligned,
    axes_of,
    communicating,
    dtype_change,
    each,
    frozen_axes,
    guarded,
    is_float,
    linear_rule,
    normalize,
    op_name,
    passes,
    with_dim,
)

keep_replicated("counts over the full tensor", "aten.histogram")
keep_replicated("a norm of full matrices", "aten.nuclear_norm", "aten.linalg_matrix_norm")
keep_replicated("a norm over all elements", "aten.dist", "aten.renorm")
keep_replicated("ranks over all elements", "aten.median.default", "aten.nanmedian.default")
keep_replicated(
    "the shape of the result depends on data",
    *("aten.unique_consecutive", "aten._unique2", "aten._unique", "aten.unique_dim"),
)


# ---------------------------------------------------------------- reductions
@dataclass(frozen=True, slots=True)
class Reduction:
    """Which dims of the first operand are reduced, and whether they stay as ones."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    keepdim: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"d{d}" for d in self.dims)

    @property
    def count(self) -> int:
        return prod(self.shape[d] for d in self.dims)

    @property
    def result(self) -> Dims:
        remaining = (d for d in range(len(self.shape)) if self.keepdim or d not in self.dims)
        return tuple(() if d in self.dims else (f"d{d}",) for d in remaining)


def reduction_of(call: Call) -> Reduction:
    """Read `dim` and `keepdim` of any reduction; no dim, or an empty list, means all."""
    shape = call.operands[0]
    return Reduction(
        shape, tuple(sorted(dims_argument(call))) if shape else (), bool(call.get("keepdim", False))
    )


def dims_argument(call: Call, name: str = "dim") -> set[int]:
    """Return the dims that an argument names; all of them if it is missing or empty."""
    rank = len(call.operands[0])
    dims = call.get(name)
    if dims is None or dims == () or dims == []:
        return set(range(rank))
    return {normalize(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}


def reduction_rule(
    call: Call,
    reduction: Reduction,
    *,
    reduce: str = "sum",
    frozen: bool = False,
    localize: Localize | None = None,
    linear: bool = False,
    num_collectives: int = 0,
) -> NodeRule:
    """Return the rule of a reduction; `frozen` forbids sharding the reduced dims."""
    axes, dims = axes_of(reduction.shape)
    for name in reduction.names:
        size = axes[name].size
        axes[name] = Axis(name, size, reduce=reduce, frozen=frozen, num_collectives=num_collectives)
    return NodeRule(
        axes,
        (dims,),
        tuple(reduction.result for _ in call.results),
        linear=(frozenset({0}),) if linear and is_float(call) else (),
        localize=localize,
    )


def combined(
    call: Call, fn: str, *args: Any, num_collectives: int, frozen: bool = False
) -> NodeRule:
    """Return the rule that calls `fn(x, axis, dims, keepdim, …)` if a reduced axis is sharded."""
    reduction = reduction_of(call)

    def localize(call: Call, local: Local, axis: MeshAxis) -> LocalCall:
        options = dtype_change(call) if is_float(call) else ()
        full_args = (call.node.args[0], axis, reduction.dims, reduction.keepdim, *args)
        return LocalCall(fn, full_args, options)

    return reduction_rule(
        call,
        reduction,
        reduce="same",
        frozen=frozen,
        localize=communicating(reduction.names, localize),
        num_collectives=num_collectives,
    )


@rule("aten.sum", "aten.nansum", "aten.count_nonzero")
def total(call: Call) -> NodeRule:
    """Leave sums partial along a sharded axis."""
    return reduction_rule(call, reduction_of(call), linear=call.node.op.startswith("aten.sum."))


@rule("aten.histc")
def histc(call: Call) -> NodeRule:
    """Count each rank's elements; without a range, bins follow from all elements."""
    if call.get("min", 0) == call.get("max", 0):
        return replicated_rule(call, "the range of the bins follows from the full tensor")
    axes, dims = axes_of(call.operands[0])
    axes["bins"] = Axis("bins", call.results[0][0], frozen=True)
    return NodeRule(axes, (dims,), (each(["bins"]),))


@rule("aten.mean")
def mean(call: Call) -> NodeRule:
    """Divide the local sum by the full count, so that empty shards add nothing."""
    reduction = reduction_of(call)

    def localize(call: Call, local: Local, axis: MeshAxis) -> LocalCall:
        args = (call.node.args[0], reduction.dims, reduction.keepdim)
        options = (("count", reduction.count), *dtype_change(call))
        return LocalCall("rt.partial_mean", args, options)

    partial = communicating(reduction.names, localize)
    return reduction_rule(call, reduction, localize=partial, linear=True)


@rule("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def variance(call: Call) -> NodeRule:
    """Sum means and squares over ranks."""
    if call.node.op.endswith(".correction"):
        value = call.get("correction")
        correction = 1.0 if value is None else float(value)
    else:
        correction = 1.0 if call.get("unbiased", True) else 0.0
    frozen = call.types[call.node.inputs[0]].dtype.is_complex
    args = (correction, reduction_of(call).count)
    return combined(call, f"rt.{op_name(call)}", *args, num_collectives=2, frozen=frozen)


@rule("aten.amax", "aten.amin", "aten.max.default", "aten.min.default")
def extreme(call: Call) -> NodeRule:
    """Compare extremes over ranks; all places that attain them share the gradient."""
    frozen = call.types[call.node.inputs[0]].dtype == torch.bool
    fn = "rt.amax" if "max" in op_name(call) else "rt.amin"
    return combined(call, fn, num_collectives=2, frozen=frozen)


@rule("aten.any", "aten.all", "aten._is_all_true", "aten._is_any_true")
def logical(call: Call) -> NodeRule:
    """Combine over ranks whether any or all elements are true."""
    fn = "rt.any_true" if "any" in op_name(call) else "rt.all_true"
    return combined(call, fn, num_collectives=1)


@rule("aten.logsumexp")
def logsumexp(call: Call) -> NodeRule:
    """Combine the maximum and the sum of exponentials over ranks."""
    return combined(call, "rt.logsumexp", num_collectives=2)


@rule("aten.linalg_vector_norm", "aten.norm")
def vector_norm(call: Call) -> NodeRule:
    """Sum powers over ranks for orders 1 and 2; freeze the dims for others."""
    order = call.get("ord", call.get("p", 2))
    order = 2 if order is None else order
    return combined(call, "rt.vector_norm", order, num_collectives=1, frozen=order not in (1, 2))


@rule("aten.prod", "aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin", "aten.aminmax")
@rule("aten.median", "aten.nanmedian", "aten.mode", "aten.nanmean", "aten.frobenius_norm")
@rule("aten.linalg_norm")
def along_dim(call: Call) -> NodeRule:
    """Freeze the reduced dims, all elements of which are needed at once."""
    return reduction_rule(call, reduction_of(call), frozen=True)


@rule("aten.kthvalue", "aten.median.dim", "aten.nanmedian.dim", "aten.quantile")
def ranked(call: Call) -> NodeRule:
    """Freeze the one dim along which elements are ranked; it vanishes or becomes one."""
    source, dim = call.operands[0], call.get("dim")
    if not isinstance(dim, int) or not source or len(call.operands) > 1:
        return replicated_rule(call, "ranks over all elements")
    dim = normalize(dim, len(source))
    axes, dims = axes_of(source, frozen=(dim,))
    remaining: tuple[Dim, ...] = ((),) if call.get("keepdim") else ()
    result = with_dim(dims, dim, *remaining)
    return NodeRule(axes, (dims,), tuple(result for _ in call.results))


@rule("aten.cosine_similarity", "aten.pairwise_distance")
def similarity(call: Call) -> NodeRule:
    """Freeze the dim along which rows of two tensors are compared."""
    first, second = call.operands
    rank = max(len(first), len(second))
    if not rank:
        return replicated_rule(call, "compares scalars")
    full = tuple(torch.broadcast_shapes(first, second))  # type: ignore[no-untyped-call]
    dim = call.get("dim", -1) % rank
    axes, dims = axes_of(full, frozen=(dim,))
    remaining: tuple[Dim, ...] = ((),) if call.get("keepdim", False) else ()
    return NodeRule(
        axes,
        (aligned(first, full, dims), aligned(second, full, dims)),
        (with_dim(dims, dim, *remaining),),
    )


# ---------------------------------------------------------------- along dims
def along(call: Call, dims: set[int], *, linear: bool = False) -> NodeRule:
    """Return the rule of a call that works along `dims` and keeps the order of all dims.

    Other operands and all results must have the rank of the first operand; dims whose size differs
    from the first operand's get a frozen axis of their own.
    """
    source = call.operands[0]
    axes, own = axes_of(source, frozen=dims)

    def match(prefix: str, shape: tuple[int, ...]) -> Dims:
        names = [f"{prefix}{d}" if size != source[d] else f"d{d}" for d, size in enumerate(shape)]
        for d, name in enumerate(names):
            if shape[d] != source[d]:
                axes.update(frozen_axes({name: shape[d], f"d{d}": source[d]}))
        return each(names)

    if any(len(shape) != len(source) for shape in (*call.operands, *call.results)):
        return replicated_rule(call, "operands and results have different numbers of dims")
    operands = tuple(match(f"o{i}_", shape) for i, shape in enumerate(call.operands[1:]))
    results = tuple(match(f"r{i}_", shape) for i, shape in enumerate(call.results))
    return NodeRule(
        axes,
        (own, *operands),
        results,
        linear=passes(call, *range(len(call.operands))) if linear else (),
    )


@rule("aten.roll", "aten.flip")
def roll(call: Call) -> NodeRule:
    """Freeze the rolled or flipped dims: elements would change ranks."""
    return along(call, dims_argument(call, "dims"), linear=True)


@rule("aten.fliplr", "aten.flipud", "aten.rot90")
def flip_fixed(call: Call) -> NodeRule:
    """Freeze the first two dims."""
    return along(call, {0, 1}, linear=True)


FOURIER = """
    fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn
    fftshift ifftshift
"""


@rule(*(f"aten.fft_{name}" for name in FOURIER.split()))
def fourier(call: Call) -> NodeRule:
    """Freeze the transformed dims."""
    rank = len(call.operands[0])
    dims = dims_argument(call)
    if call.get("dim") is None and call.get("s"):
        dims = set(range(rank - len(call.get("s")), rank))
    axes, own = axes_of(call.operands[0], frozen=dims)
    axes |= frozen_axes({f"y{d}": call.results[0][d] for d in sorted(dims)})
    result = tuple((f"y{d}",) if d in dims else own[d] for d in range(rank))
    return linear_rule(call, axes, own, result, localize=guarded())


@rule("aten.sort", "aten.argsort", "aten.topk", "aten.msort", "aten.cumsum")
@rule("aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp", "aten.diff")
def ordered(call: Call) -> NodeRule:
    """Freeze the dim along which elements are sorted or accumulated."""
    dim = call.get("dim", 0 if op_name(call) == "msort" else -1)
    if not isinstance(dim, int) or not call.operands[0]:
        return replicated_rule(call, "a scalar, or a named dim")
    return along(call, {normalize(dim, len(call.operands[0]))}, linear=op_name(call) == "cumsum")


@rule("aten.bucketize", "aten.searchsorted", "aten.isin")
def bucketize(call: Call) -> NodeRule:
    """Freeze the list with which every element is compared."""
    target = call.results[0]
    axes, dims = axes_of(target)
    table = {"bucketize": "boundaries", "searchsorted": "sorted_sequence", "isin": "test_elements"}
    name = table[op_name(call)]
    if not call.has(name):
        return replicated_rule(call, "compared with one number")
    shape = call.shape(name)
    if len(shape) > 1 and name == "sorted_sequence":  # one sorted list for every row
        if len(call.operands) != 2 or len(call.operands[1]) != len(target):
            return replicated_rule(call, "a sorter, or one value for each row")
        axes["sorted"] = Axis("sorted", shape[-1], frozen=True)
        return NodeRule(axes, ((*dims[:-1], ("sorted",)), dims), (dims,))
    more, listed = axes_of(shape, prefix="s", frozen=range(len(shape)))
    at = call.position(name)
    compared = [s for i, s in enumerate(call.operands) if i != at]
    if any(len(s) > len(target) for s in compared):
        return replicated_rule(call, "a sorter, or operands that do not match")
    operands = [aligned(s, target, dims) for s in compared]
    operands.insert(at, listed)
    return NodeRule(axes | more, tuple(operands), (dims,))
