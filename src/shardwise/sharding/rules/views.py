"""Operators that only rename positions: factors are found, and the size argument is rewritten."""

from __future__ import annotations

from shardwise.sharding.dims import refine_product
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dim, NodeRule


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


def factor_view(source: tuple[int, ...], target: tuple[int, ...]) -> NodeRule:
    """The rule of a reshape: each group's axes are the common refinement of both sides."""
    axes: dict[str, Axis] = {}
    operand: list[Dim] = [()] * len(source)
    result: list[Dim] = [()] * len(target)
    if 0 in source:
        return NodeRule(axes={}, operands=(tuple(operand),), results=(tuple(result),), whole="empty")
    for number, (left, right) in enumerate(regroup(source, target)):
        factors = refine_product(
            tuple(source[d] for d in left if source[d] != 1),
            tuple(target[d] for d in right if target[d] != 1),
        )
        for side, sizes, dims in (("i", source, operand), ("o", target, result)):
            span = left if side == "i" else right
            remaining = list(enumerate(factors)) if factors is not None else []
            for d in span:
                names: list[str] = []
                if factors is None and sizes[d] != 1:
                    names = [f"{side}{number}_{d}"]
                    axes[names[0]] = Axis(names[0], sizes[d], frozen=True)
                size = 1
                while factors is not None and size < sizes[d]:
                    index, factor = remaining.pop(0)
                    name = f"g{number}_{index}"
                    axes[name] = Axis(name, factor)
                    names.append(name)
                    size *= factor
                dims[d] = tuple(names)
    return NodeRule(
        axes=axes,
        operands=(tuple(operand),),
        results=(tuple(result),),
        linear=(frozenset({0}),),
    )


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten")
@rule("aten.squeeze", "aten.unsqueeze")
def view(call: Call) -> NodeRule:
    """Reshapes; `flatten`, `squeeze` and `unsqueeze` need no size argument."""
    found = factor_view(call.operands[0], call.results[0])
    name = call.node.op.split(".")[1]
    size_arg = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "unflatten": "sizes"}
    if name == "view" and call.node.op != "aten.view.default":
        size_arg = {}
    return NodeRule(
        axes=found.axes,
        operands=found.operands,
        results=found.results,
        linear=found.linear,
        whole=found.whole,
        size_arg=size_arg.get(name),
    )


