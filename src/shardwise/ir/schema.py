"""Look up operators by name, and a node's arguments by their schema names.

>>> operator("aten.linear.default")
<OpOverload(op='aten.linear', overload='default')>
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

import torch

from shardwise.ir.graph import Node, Ref


def operator(name: str) -> Any:
    """Return the `OpOverload` of `namespace.op.overload`, or None if it is not registered."""
    try:
        return attrgetter(name)(torch.ops)
    except (AttributeError, RuntimeError):
        return None


@cache
def signature(name: str) -> tuple[tuple[str, Any], ...] | None:
    """Return `(argument, default)` in schema order (`...`: none); None for an op without schema."""
    op = operator(name)
    if not isinstance(op, torch._ops.OpOverload):
        return None
    return tuple(
        (a.name, a.default_value if a.has_default_value() else ...) for a in op._schema.arguments
    )


def bind(node: Node) -> dict[str, Any]:
    """Return the node's arguments by name with defaults; by position if it has no schema."""
    arguments = signature(node.op)
    if arguments is None:
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    bound = {name: default for name, default in arguments if default is not ...}
    for (name, _), arg in zip(arguments, node.args, strict=False):
        bound[name] = arg
    return bound | dict(node.kwargs)


def op_name(node: Node) -> str:
    """Return `embedding` for `aten.embedding.default`."""
    return node.op.split(".")[1] if node.op.count(".") == 2 else ""


def indexed_dim(node: Node, index: str) -> tuple[str, int] | None:
    """Return the table and the dim that a node indexes with a value, if it does."""
    op = op_name(node)
    if op not in ("embedding", "gather", "index_select", "scatter", "index"):
        return None
    arguments = bind(node)
    if op == "embedding":
        return (arguments["weight"].name, 0) if arguments.get("indices") == Ref(index) else None
    if op == "index":
        indices = list(arguments.get("indices") or ())
        return (
            (arguments["self"].name, indices.index(Ref(index))) if Ref(index) in indices else None
        )
    if arguments.get("index") != Ref(index):
        return None
    return arguments["self"].name, arguments.get("dim", 0)
