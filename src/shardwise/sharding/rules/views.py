"""Operators that rearrange or repeat elements: reshapes, permutations, diagonals, expansions.

The axes of a reshape are the common factors of both shapes; sizes in arguments become local ones.
"""

import dataclasses
from math import prod

import torch

from shardwise.ir import map_refs
from shardwise.ir.operators import operator
from shardwise.sharding.dims import refine_product
from shardwise.sharding.registry import keep_replicated, rule
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
    aligned,
    axes_of,
    axis_length,
    each,
    linear_rule,
    normalize,
    passes,
    with_dim,
)
from shardwise.sharding.rules.elementwise import elementwise_rule


# ---------------------------------------------------------------- reshapes
def regroup(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[range, range]]:
    """Return the smallest groups of neighbouring dims with equal products.

    >>> regroup((2, 16, 192), (32, 3, 64))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        first, second = i, j
        left = right = 1
        if i < len(source):
            left, i = source[i], i + 1
        if j < len(target):
            right, j = target[j], j + 1
        while left != right:
            if j == len(target) or (left < right and i < len(source)):
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        groups.append((range(first, i), range(second, j)))
    return groups


def factor_view(call: Call, *, localize: bool = True) -> NodeRule:
    """Return the rule of a reshape: a group's axes are the common refinement of both sides."""
    source, target = call.operands[0], call.results[0]
    if 0 in source:
        return replicated_rule(call, "a reshape of an empty tensor")
    axes: dict[str, Axis] = {}
    operand: list[Dim] = [()] * len(source)
    result: list[Dim] = [()] * len(target)
    for number, (left, right) in enumerate(regroup(source, target)):
        factors = refine_product(
            tuple(source[d] for d in left if source[d] != 1),
            tuple(target[d] for d in right if target[d] != 1),
        )
        for side, span, sizes, dims in (("i", left, source, operand), ("o", right, target, result)):
            remaining = list(enumerate(factors or ()))
            for d in span:
                if factors is None:
                    axes[f"{side}{d}"] = Axis(f"{side}{d}", sizes[d], frozen=True)
                    dims[d] = (f"{side}{d}",)
                    continue
                names: list[str] = []
                while prod(axes[name].size for name in names) < sizes[d]:
                    index, factor = remaining.pop(0)
                    names.append(f"g{number}_{index}")
                    axes[names[-1]] = Axis(names[-1], factor)
                dims[d] = tuple(names)
    return NodeRule(
        axes,
        (tuple(operand), *((tuple(result),) * (len(call.operands) - 1))),
        (tuple(result),),
        linear=passes(call, 0),
        localize=_reshape if localize else None,
        by_size=True,
    )


def _reshape(call: Call, local: Local) -> LocalCall:
    # A shard may have other strides than the full tensor, so that `view` becomes `reshape`.
    return LocalCall("aten.reshape.default", (call.get("self"), local.results[0]))


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten._reshape_alias")
def view(call: Call) -> NodeRule:
    """Apply to any reshape with explicit sizes."""
    return factor_view(call)


@rule("aten.flatten", "aten.unsqueeze", "aten.ravel", "aten.view_as", "aten.reshape_as")
def flatten(call: Call) -> NodeRule:
    """Keep the arguments, which hold for local sizes; `other` of `view_as` is like the result."""
    return factor_view(call, localize=False)


@rule("aten.unflatten")
def unflatten(call: Call) -> NodeRule:
    """Replace the sizes of the new dims by local ones."""

    def localize(call: Call, local: Local) -> LocalCall:
        dim = normalize(call.get("dim"), len(call.operands[0]))
        count = len(call.get("sizes"))
        return call.replace(sizes=local.results[0][dim : dim + count])

    return dataclasses.replace(factor_view(call), localize=localize)


@rule("aten.squeeze")
def squeeze(call: Call) -> NodeRule:
    """Drop dims of one, but no dim of which sharding leaves one element."""
    source = call.operands[0]
    rank = len(source)
    dim_argument = call.get("dim", range(rank))
    chosen = {
        normalize(d, rank)
        for d in ([dim_argument] if isinstance(dim_argument, int) else dim_argument)
    }
    dropped = tuple(d for d in range(rank) if d in chosen and source[d] == 1)
    axes, dims = axes_of(source)

    def localize(call: Call, local: Local) -> LocalCall:
        if not dropped:
            return LocalCall("aten.alias.default", (call.get("self"),))
        return LocalCall("aten.squeeze.dims", (call.get("self"), dropped))

    result = tuple(dims[d] for d in range(rank) if d not in dropped)
    return linear_rule(call, axes, dims, result, localize=localize)


@rule("aten.view.dtype")
def view_dtype(call: Call) -> NodeRule:
    """Freeze the last dim where reading the same bits as another dtype changes its size."""
    if call.operands == call.results:
        return elementwise_rule(call)
    axes, dims = axes_of(call.operands[0], frozen=(len(call.operands[0]) - 1,))
    axes["last"] = Axis("last", call.results[0][-1], frozen=True)
    return NodeRule(axes, (dims,), ((*dims[:-1], ("last",)),))


@rule("aten.view_as_complex", "aten.view_as_real")
def view_as_complex(call: Call) -> NodeRule:
    """Freeze the last dim of two, which becomes, or comes from, a complex number."""
    source, target = call.operands[0], call.results[0]
    longer = max(source, target, key=len)
    axes, dims = axes_of(longer, frozen=(len(longer) - 1,))
    return linear_rule(call, axes, dims[: len(source)], dims[: len(target)])


# ---------------------------------------------------------------- permutations and diagonals
@rule("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.matrix_H", "aten.mT")
@rule("aten.mH", "aten.adjoint", "aten.movedim", "aten.moveaxis", "aten.swapaxes", "aten.swapdims")
def permute(call: Call) -> NodeRule:
    """Read the order of dims off a call with distinct sizes."""
    probe = torch.empty(tuple(range(2, 2 + len(call.operands[0]))), device="meta")
    args, kwargs = map_refs((call.node.args, tuple(call.node.kwargs)), lambda _: probe)
    permuted = operator(call.node.op)(*args, **dict(kwargs))
    axes, dims = axes_of(call.operands[0])
    result = tuple(dims[size - 2] for size in permuted.shape)
    return linear_rule(call, axes, dims, result)


def _diagonal(
    call: Call, shape: tuple[int, ...], first: int, second: int, size: int
) -> tuple[dict[str, Axis], Dims, Dims]:
    """Return the axes, the dims of `shape`, and the dims with two replaced by their diagonal."""
    rank = len(shape)
    pair = {normalize(call.get("dim1", first), rank), normalize(call.get("dim2", second), rank)}
    axes, dims = axes_of(shape, frozen=pair)
    axes["diagonal"] = Axis("diagonal", size, frozen=True)
    return axes, dims, (*(dims[d] for d in range(rank) if d not in pair), ("diagonal",))


@rule("aten.diagonal", "aten.linalg_diagonal")
def diagonal(call: Call) -> NodeRule:
    """Freeze the two dims that become one at the end."""
    axes, dims, result = _diagonal(call, call.operands[0], 0, 1, call.results[0][-1])
    return linear_rule(call, axes, dims, result)


@rule("aten.diag_embed")
def diag_embed(call: Call) -> NodeRule:
    """Freeze the two dims that the last one becomes."""
    axes, dims, operand = _diagonal(call, call.results[0], -2, -1, call.operands[0][-1])
    return linear_rule(call, axes, operand, dims)


@rule("aten.diagonal_scatter")
def diagonal_scatter(call: Call) -> NodeRule:
    """Freeze the two dims whose diagonal is overwritten."""
    axes, dims, written = _diagonal(call, call.operands[0], 0, 1, call.shape("src")[-1])
    return NodeRule(axes, (dims, written), (dims,), linear=passes(call, 0, 1))


keep_replicated("a diagonal matrix of a vector has no dim to shard", "aten.diag", "aten.trace")


@rule("aten.glu")
def glu(call: Call) -> NodeRule:
    """Take each shard's part of both halves: `a * sigmoid(b)`."""
    dim = normalize(call.get("dim", -1), len(call.operands[0]))
    axes, dims = axes_of(call.results[0])
    axes["halves"] = Axis("halves", 2, frozen=True)
    operand = with_dim(dims, dim, ("halves", f"d{dim}"))
    return NodeRule(axes, (operand,), (dims,))


# ---------------------------------------------------------------- expansions
@rule("aten.expand", "aten.broadcast_to")
def expand(call: Call) -> NodeRule:
    """Pass the local result's shape as the size; new axes are in the result only."""
    axes, dims = axes_of(call.results[0])
    operand = aligned(call.operands[0], call.results[0], dims)
    return NodeRule(axes, (operand,), (dims,), linear=passes(call, 0), size_arg="size")


@rule("aten.broadcast_tensors")
def broadcast_tensors(call: Call) -> NodeRule:
    """Broadcast all operands to one common shape."""
    axes, dims = axes_of(call.results[0])
    return NodeRule(
        axes,
        tuple(aligned(shape, call.results[0], dims) for shape in call.operands),
        tuple(dims for _ in call.results),
        linear=passes(call, *range(len(call.operands))),
    )


@rule("aten.meshgrid")
def meshgrid(call: Call) -> NodeRule:
    """Vary operand i along dim i of every result; `xy` swaps the first two dims."""
    axes, dims = axes_of([prod(shape) for shape in call.operands])
    if call.get("indexing") == "xy" and len(dims) > 1:
        dims = (dims[1], dims[0], *dims[2:])
    return NodeRule(
        axes,
        tuple(((f"d{i}",),) if s else () for i, s in enumerate(call.operands)),
        tuple(dims for _ in call.results),
        linear=passes(call, *range(len(call.operands))),
    )


@rule("aten.repeat", "aten.tile")
def repeat(call: Call) -> NodeRule:
    """Make dim i of the result `(repeats, size)`; the repeats are an axis of the result alone."""
    source, target = call.operands[0], call.results[0]
    new = len(target) - len(source)
    axes: dict[str, Axis] = {}
    argument = "repeats" if "repeats" in call.arguments else "dims"
    repeats = tuple(call.get(argument))
    for d, times in enumerate((1,) * (len(target) - len(repeats)) + repeats):
        axes[f"r{d}"] = Axis(f"r{d}", times)
        if d >= new:
            axes[f"d{d}"] = Axis(f"d{d}", source[d - new])

    def localize(call: Call, local: Local) -> LocalCall:
        layout = local.result_layouts[0]
        lengths = (axis_length(axes[f"r{d}"], local, layout, d, target) for d in range(len(target)))
        return call.replace(**{argument: tuple(lengths)})

    return linear_rule(
        call,
        axes,
        each(f"d{d}" for d in range(new, len(target))),
        tuple((f"r{d}", f"d{d}")[: 1 + (d >= new)] for d in range(len(target))),
        localize=localize,
    )


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> NodeRule:
    """Repeat every element: grouped key heads become `(head, repeats)`."""
    source = call.operands[0]
    axes, dims = axes_of(source)
    axes["times"] = Axis("times", call.get("repeats"))
    flat = call.get("dim") is None
    dim = 0 if flat else normalize(call.get("dim"), len(source))
    result: Dims = ((*axes,),) if flat else with_dim(dims, dim, (f"d{dim}", "times"))

    def localize(call: Call, local: Local) -> LocalCall:
        shape = call.results[0]
        times = axis_length(axes["times"], local, local.result_layouts[0], dim, shape)
        return call.replace(repeats=times, output_size=None)

    return linear_rule(call, axes, dims, result, localize=localize)


@rule("aten.repeat_interleave.self_Tensor")
def repeat_interleave_tensor(call: Call) -> NodeRule:
    """Freeze the repeated dim: the numbers of repeats are data."""
    if call.get("dim") is None:
        return replicated_rule(call, "repeats by data over all dims")
    dim = normalize(call.get("dim"), len(call.operands[0]))
    axes, dims = axes_of(call.operands[0], frozen=(dim,))
    axes["long"] = Axis("long", call.results[0][dim], frozen=True)
    axes["counts"] = Axis("counts", prod(call.shape("repeats")), frozen=True)
    return NodeRule(
        axes,
        (dims, each("counts" for _ in call.shape("repeats"))),
        (with_dim(dims, dim, ("long",)),),
        linear=passes(call, 0),
    )
