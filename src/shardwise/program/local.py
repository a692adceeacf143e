"""What one rank runs for a node: its call in local sizes.

Enters: a node, the choice on every mesh axis, and the layouts that follow. Leaves: a `LocalCall`
whose tensor operands keep their order and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.ir import Node, TensorType
from shardwise.sharding.candidates import Choice, Cut, Pass
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Coordinate, Layout, local_shape
from shardwise.sharding.rule import Local, LocalCall, replace_arguments


def local_call(
    node: Node,
    facts: Facts,
    types: Mapping[str, TensorType],
    choices: Iterable[tuple[str, Choice]],
    needs: tuple[Layout, ...],
    gives: tuple[Layout, ...],
    coordinate: Coordinate,
) -> LocalCall:
    """Return the call of the rank at `coordinate`; `choices` are pairs of mesh axis and choice."""
    rule, call = facts.rules[node.name], facts.calls[node.name]
    results = tuple(
        local_shape(layout, types[name].shape, coordinate)
        for name, layout in zip(node.outputs, gives, strict=True)
    )
    if rule.localize is not None:
        cuts: dict[str, tuple[str, ...]] = {}
        partial: list[str] = []
        for axis, choice in choices:
            if isinstance(choice, Cut):
                cuts[choice.axis] = (*cuts.get(choice.axis, ()), axis)
            if isinstance(choice, Pass):
                partial.append(axis)
        local = Local(
            cuts=cuts,
            operands=tuple(
                local_shape(layout, types[name].shape, coordinate)
                for name, layout in zip(node.inputs, needs, strict=True)
            ),
            results=results,
            result_layouts=gives,
            operand_layouts=needs,
            coordinate=coordinate,
            partial=tuple(partial),
        )
        return rule.localize(call, local)
    if rule.size_arg is not None:
        return replace_arguments(node, call.arguments, {rule.size_arg: results[0]})
    return LocalCall(node.op, node.args, node.kwargs)
