"""Operators by name, and a node's arguments by their schema names.

>>> operator("aten.linear.default")
<OpOverload(op='aten.linear', overload='default')>
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardwise.ir.graph import Node


@cache
def operator(name: str) -> Any:
    """The `OpOverload` of `namespace.op.overload`, or None when torch does not know it."""
    found: Any = torch.ops
    for piece in name.split("."):
        try:
            found = getattr(found, piece)
        except (AttributeError, RuntimeError):
            return None
    return found


@cache
def signature(name: str) -> tuple[tuple[str, Any], ...] | None:
    """`(argument, default)` in schema order; a missing default is `...`. None: no schema."""
    op = operator(name)
    if not isinstance(op, torch._ops.OpOverload):
        return None
    return tuple(
        (a.name, a.default_value if a.has_default_value() else ...) for a in op._schema.arguments
    )


def bind(node: Node) -> dict[str, Any]:
    """The node's arguments by name, defaults filled in; positions where there is no schema."""
    arguments = signature(node.op)
    if arguments is None:
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    bound = {name: default for name, default in arguments if default is not ...}
    for (name, _), arg in zip(arguments, node.args, strict=False):
        bound[name] = arg
    return bound | dict(node.kwargs)
