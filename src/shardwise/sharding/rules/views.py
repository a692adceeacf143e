"""Reshapes: dims are regrouped, their common factors are the axes, sizes become local ones."""

from __future__ import annotations

import dataclasses

from shardwise.sharding.dims import refine_product
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dim, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import axes_of, normalize, passes
from shardwise.sharding.rules.elementwise import elementwise_rule


def regroup(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[range, range]]:
    """The smallest groups of neighbouring dims with equal products.

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
            if left < right and i < len(source):
                left, i = left * source[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            else:
                left, i = left * source[i], i + 1
        groups.append((range(first, i), range(second, j)))
    return groups


def factor_view(call: Call, *, localize: bool = True) -> NodeRule:
    """The rule of a reshape: each group's axes are the common refinement of both sides."""
    source, target = call.operands[0], call.results[0]
    if 0 in source:
        return whole_rule(call, "a reshape of an empty tensor")
    axes: dict[str, Axis] = {}
    operand: list[Dim] = [()] * len(source)
    result: list[Dim] = [()] * len(target)
    for number, (left, right) in enumerate(regroup(source, target)):
        factors = refine_product(
            tuple(source[d] for d in left if source[d] != 1),
            tuple(target[d] for d in right if target[d] != 1),
        )
        for side, span, sizes, dims in (
            ("i", left, source, operand),
            ("o", right, target, result),
        ):
            if factors is None:
                for d in span:
                    axes[f"{side}{d}"] = Axis(f"{side}{d}", sizes[d], frozen=True)
                    dims[d] = (f"{side}{d}",)
            else:
                _spread(axes, dims, [(d, sizes[d]) for d in span], f"g{number}_", factors)
    return NodeRule(
        axes=axes,
        operands=(tuple(operand), *((tuple(result),) * (len(call.operands) - 1))),
        results=(tuple(result),),
        linear=passes(call, 0),
        localize=_reshape if localize else None,
        by_size=True,
    )


def _spread(
    axes: dict[str, Axis],
    dims: list[Dim],
    span: list[tuple[int, int]],
    prefix: str,
    factors: tuple[int, ...],
) -> None:
    """Give the dims of a group its factors, in order."""
    remaining = list(enumerate(factors))
    for d, target in span:
        names: list[str] = []
        size = 1
        while size < target:
            index, factor = remaining.pop(0)
            axes[f"{prefix}{index}"] = Axis(f"{prefix}{index}", factor)
            names.append(f"{prefix}{index}")
            size *= factor
        dims[d] = tuple(names)


def _reshape(call: Call, local: Local) -> LocalCall:
    """A shard may have other strides than the whole, so that `view` becomes `reshape`."""
    return LocalCall("aten.reshape.default", (call.get("self"), local.results[0]))


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten._reshape_alias")
def view(call: Call) -> NodeRule:
    """Any reshape with explicit sizes."""
    return factor_view(call)


@rule("aten.flatten", "aten.unsqueeze", "aten.ravel", "aten.view_as", "aten.reshape_as")
def flatten(call: Call) -> NodeRule:
    """Reshapes whose arguments hold for local sizes; `other` of `view_as` is like the result."""
    return factor_view(call, localize=False)


@rule("aten.unflatten")
def unflatten(call: Call) -> NodeRule:
    """One dim becomes several: their local sizes are the argument."""

    def localize(call: Call, local: Local) -> LocalCall:
        dim = normalize(call.get("dim"), len(call.operands[0]))
        count = len(call.get("sizes"))
        return call.replace(sizes=local.results[0][dim : dim + count])

    return dataclasses.replace(factor_view(call), localize=localize)


@rule("aten.squeeze")
def squeeze(call: Call) -> NodeRule:
    """Dims of one vanish; a dim that a cut leaves with one element must not."""
    source = call.operands[0]
    rank = len(source)
    given = call.get("dim", range(rank))
    chosen = {normalize(d, rank) for d in ([given] if isinstance(given, int) else given)}
    gone = tuple(d for d in range(rank) if d in chosen and source[d] == 1)
    axes, dims = axes_of(source)

    def localize(call: Call, local: Local) -> LocalCall:
        if not gone:
            return LocalCall("aten.alias.default", (call.get("self"),))
        return LocalCall("aten.squeeze.dims", (call.get("self"), gone))

    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=(tuple(dims[d] for d in range(rank) if d not in gone),),
        linear=passes(call, 0),
        localize=localize,
    )


@rule("aten.view.dtype")
def view_dtype(call: Call) -> NodeRule:
    """The same bits as another dtype: the last dim is frozen where its size changes."""
    if call.operands == call.results:
        return elementwise_rule(call)
    rank = len(call.operands[0])
    axes, dims = axes_of(call.operands[0], frozen=(rank - 1,))
    axes["last"] = Axis("last", call.results[0][-1], frozen=True)
    return NodeRule(axes=axes, operands=(dims,), results=((*dims[:-1], ("last",)),))


@rule("aten.view_as_complex", "aten.view_as_real")
def view_as_complex(call: Call) -> NodeRule:
    """The last dim of two becomes, or comes from, a complex number."""
    source, target = call.operands[0], call.results[0]
    longer = source if len(source) > len(target) else target
    axes, dims = axes_of(longer, frozen=(len(longer) - 1,))
    return NodeRule(
        axes=axes,
        operands=(dims[: len(source)],),
        results=(dims[: len(target)],),
        linear=passes(call, 0),
    )
