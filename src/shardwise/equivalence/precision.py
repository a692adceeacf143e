"""Everything in float64: casts to narrower types inside a model are widened for a check.

A model may cast to float32 on the way (norms, attention weights, the loss). Where parts are summed
in another order such a cast would leave errors of 1e-7 that say nothing about the plan. Both
the original and the captured graph are therefore run with every such cast widened.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.ir import Constant, Graph, Node, TensorType

NARROW = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def widen(arg: Any) -> Any:
    """The argument with narrow floating dtypes replaced by float64."""
    if isinstance(arg, torch.dtype):
        return torch.float64 if arg in NARROW else arg
    if isinstance(arg, tuple | list):
        return type(arg)(widen(a) for a in arg) if type(arg) in (tuple, list) else arg
    return arg


class KeepDouble(TorchFunctionMode):
    """While active, PyTorch calls make and keep float64 where they ask for less."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        wide = {key: widen(value) for key, value in (kwargs or {}).items()}
        if func is torch.full and "dtype" not in wide and _is_float(args, 1):
            wide["dtype"] = torch.float64
        return func(*(widen(a) if isinstance(a, torch.dtype) else a for a in args), **wide)


def widen_graph(graph: Graph) -> Graph:
    """The graph with float64 for every narrower floating type."""
    return dataclasses.replace(
        graph,
        nodes=tuple(_widen_node(node) for node in graph.nodes),
        values={name: TensorType(t.shape, widen(t.dtype)) for name, t in graph.values.items()},
        constants=tuple(
            Constant(value=c.value, data=c.data.double() if c.data.dtype in NARROW else c.data)
            for c in graph.constants
        ),
    )


def _is_float(args: tuple[Any, ...], place: int) -> bool:
    return len(args) > place and isinstance(args[place], float)


def _widen_node(node: Node) -> Node:
    kwargs = {key: widen(value) for key, value in node.kwargs}
    if node.op == "aten.full.default" and kwargs.get("dtype") is None and _is_float(node.args, 1):
        kwargs["dtype"] = torch.float64  # without a type it would be that of the process
    return dataclasses.replace(node, args=widen(node.args), kwargs=tuple(kwargs.items()))
