"""Reductions: a cut reduced axis gives a partial sum, or is combined inside the operator.

Sums and means stay partial. Variances, norms, extremes and logical reductions talk to the other
ranks inside a runtime operator and give every rank the whole result. What picks an index along a
dim is frozen there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dims,
    Local,
    LocalCall,
    Localize,
    NodeRule,
    whole_rule,
)
from shardwise.sharding.rules.building_blocks import (
    aligned,
    broadcast,
    dtype_change,
    each,
    is_float,
    over,
)

keep_whole(
    "counts over the whole tensor",
    *("aten.histc", "aten.bincount", "aten.histogram"),
)
keep_whole("a norm of whole matrices", "aten.nuclear_norm", "aten.linalg_matrix_norm")
keep_whole("a norm over all elements", "aten.dist", "aten.renorm")


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
        kept = [() if d in self.dims else (f"d{d}",) for d in range(len(self.shape))]
        return tuple(k for d, k in enumerate(kept) if self.keepdim or d not in self.dims)


def reduction_of(call: Call) -> Reduction:
    """Read `dim` and `keepdim` of any reduction; no dim, or an empty list, means all."""
    shape = call.operands[0]
    given = call.get("dim")
    dims = given if isinstance(given, tuple | list) else () if given is None else (given,)
    rank = max(len(shape), 1)
    found = tuple(sorted({d % rank for d in dims})) if dims and shape else tuple(range(len(shape)))
    return Reduction(shape, found, bool(call.get("keepdim", False)))


def reduction_rule(
    call: Call,
    found: Reduction,
    *,
    reduce: str = "sum",
    frozen: bool = False,
    localize: Localize | None = None,
    linear: bool = False,
    talks: int = 0,
) -> NodeRule:
    """The rule of a reduction; `frozen` forbids to cut the reduced dims."""
    axes = {f"d{i}": Axis(f"d{i}", size) for i, size in enumerate(found.shape)}
    axes |= {
        name: Axis(name, axes[name].size, reduce=reduce, frozen=frozen, talks=talks)
        for name in found.names
    }
    return NodeRule(
        axes=axes,
        operands=(each(axes),),
        results=tuple(found.result for _ in call.results),
        linear=(frozenset({0}),) if linear and is_float(call) else (),
        localize=localize,
    )


def combine(fn: str, found: Reduction, *args: Any) -> Localize:
    """Call `fn(x, axis, dims, keepdim, …)` where a reduced axis is cut."""

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, found.names)
        if axis is None:
            return call.replace()
        x = call.node.args[0]
        options = dtype_change(call) if is_float(call) else ()
        return LocalCall(fn, (x, axis, found.dims, found.keepdim, *args), options)

    return localize


@rule("aten.sum", "aten.nansum", "aten.count_nonzero")
def total(call: Call) -> NodeRule:
    """Sums: partial along a cut axis."""
    found = reduction_of(call)
    return reduction_rule(call, found, linear=call.node.op.startswith("aten.sum."))


@rule("aten.mean")
def mean(call: Call) -> NodeRule:
    """Means: the local sum over the whole count, so that empty shards add nothing."""
    found = reduction_of(call)

    def localize(call: Call, local: Local) -> LocalCall:
        if over(local, found.names) is None:
            return call.replace()
        args = (call.node.args[0], found.dims, found.keepdim)
        return LocalCall("rt.partial_mean", args, (("count", found.count), *dtype_change(call)))

    return reduction_rule(call, found, localize=localize, linear=True)


def correction_of(call: Call) -> float:
    """`unbiased` or `correction` as a number; one by default."""
    if call.node.op.endswith(".correction"):
        given = call.get("correction")
        return 1.0 if given is None else float(given)
    return 1.0 if call.get("unbiased", True) else 0.0


@rule("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def variance(call: Call) -> NodeRule:
    """Variances: mean and squares are summed over ranks."""
    found = reduction_of(call)
    fn = "rt." + call.node.op.split(".")[1]
    local = combine(fn, found, correction_of(call), found.count)
    frozen = call.types[call.node.inputs[0]].dtype.is_complex
    return reduction_rule(call, found, reduce="same", frozen=frozen, localize=local, talks=2)


@rule("aten.amax", "aten.amin")
def extreme(call: Call) -> NodeRule:
    """Extremes: compared over ranks; the gradient is shared by all places that attain them."""
    found = reduction_of(call)
    frozen = call.types[call.node.inputs[0]].dtype in (torch.bool,)
    local = combine("rt." + call.node.op.split(".")[1], found)
    return reduction_rule(call, found, reduce="same", frozen=frozen, localize=local, talks=2)


@rule("aten.max.default", "aten.min.default")
def extreme_of_all(call: Call) -> NodeRule:
    """The largest or smallest element."""
    found = reduction_of(call)
    frozen = call.types[call.node.inputs[0]].dtype in (torch.bool,)
    local = combine("rt.amax" if ".max." in call.node.op else "rt.amin", found)
    return reduction_rule(call, found, reduce="same", frozen=frozen, localize=local, talks=2)


@rule("aten.any", "aten.all", "aten._is_all_true", "aten._is_any_true")
def logical(call: Call) -> NodeRule:
    """Whether any or all elements are true."""
    found = reduction_of(call)
    name = call.node.op.split(".")[1]
    local = combine("rt.any_true" if "any" in name else "rt.all_true", found)
    return reduction_rule(call, found, reduce="same", localize=local, talks=1)


@rule("aten.logsumexp")
def logsumexp(call: Call) -> NodeRule:
    """The maximum and the sum of exponentials over ranks."""
    found = reduction_of(call)
    return reduction_rule(
        call, found, reduce="same", localize=combine("rt.logsumexp", found), talks=2
    )


@rule("aten.linalg_vector_norm", "aten.norm")
def vector_norm(call: Call) -> NodeRule:
    """Norms: sums of powers over ranks for 1 and 2, else frozen along the dims."""
    order = call.get("ord", call.get("p", 2))
    found = reduction_of(call)
    known = order in (None, 1, 2)
    local = combine("rt.vector_norm", found, 2 if order is None else order)
    return reduction_rule(
        call, found, reduce="same", frozen=not known, localize=local if known else None, talks=1
    )


@rule("aten.prod", "aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin", "aten.aminmax")
@rule("aten.median", "aten.nanmedian", "aten.mode", "aten.nanmean", "aten.frobenius_norm")
@rule("aten.linalg_norm")
def along_dim(call: Call) -> NodeRule:
    """What looks at a whole dim at once is frozen there; the other dims are free."""
    return reduction_rule(call, reduction_of(call), frozen=True)


@rule("aten.cosine_similarity", "aten.pairwise_distance")
def similarity(call: Call) -> NodeRule:
    """Compares rows of two tensors along one dim, which stays together."""
    first, second = call.operands
    rank = max(len(first), len(second))
    if not rank:
        return whole_rule(call, "compares scalars")
    full = broadcast(first, second)
    dim = call.get("dim", -1) % rank
    keepdim = bool(call.get("keepdim", False))
    axes = {f"d{i}": Axis(f"d{i}", n, frozen=i == dim) for i, n in enumerate(full)}
    names = each(axes)
    result = [() if i == dim else name for i, name in enumerate(names) if keepdim or i != dim]
    return NodeRule(
        axes=axes,
        operands=(aligned(first, full, names), aligned(second, full, names)),
        results=(tuple(result),),
    )
