"""Everything in float64: casts to narrower types inside a model are widened for a check.

A model may cast to float32 on the way (norms, attention weights, the loss). Where parts are summed
in another order such a cast would leave errors of 1e-7 that say nothing about the plan. Both
the original and the captured graph are therefore run with every such cast widened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.dtypes import torch_pairs
from shardwise.ir import Constant, Graph, Node, TensorType

WIDE = torch_pairs("exact")
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_COMPLEX_CASTS = {getattr(torch.Tensor, name) for name in ("cfloat", "chalf")}
# Reading a tensor, or writing into it, needs the tensor itself and not a copy of it.
_ITSELF = ("__get__", "__set__", "__setitem__", "requires_grad_", "backward", "set_", "copy_")


def widen(arg: Any) -> Any:
    """Return the argument with narrow floating dtypes replaced by wide ones."""
    if isinstance(arg, torch.dtype):
        return WIDE.get(arg, arg)
    if isinstance(arg, tuple | list):
        return type(arg)(widen(a) for a in arg) if type(arg) in (tuple, list) else arg
    return arg


def widen_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 or complex128, if it is narrower; the same one otherwise."""
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor


class KeepDouble(TorchFunctionMode):
    """While active, PyTorch calls make and keep float64 where they ask for less.

    Tensors from outside of the model (class weights in a closure, a constant) are widened where a
    call takes them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        if func in _COMPLEX_CASTS:
            return args[0].to(torch.complex128)
        wide = {key: widen(value) for key, value in (kwargs or {}).items()}
        args = tuple(widen(a) if isinstance(a, torch.dtype) else a for a in args)
        if func is torch.full and "dtype" not in wide and _is_float(args, 1):
            wide["dtype"] = torch.float64
        name = getattr(func, "__name__", "")
        if not (name in _ITSELF or (name.endswith("_") and not name.endswith("__"))):
            args, wide = _widen_operands(args), _widen_operands(wide)
        return func(*args, **wide)


class TraceDouble(TorchFunctionMode):
    """While a float64 model is traced: widen the operands of calls that refuse to mix types.

    Casts to narrower types stay in the graph, which then has every node that the plan may speak of;
    `widen_graph` widens them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        narrow = _any_narrow((args, kwargs))
        if narrow and _PRODUCT.fullmatch(getattr(func, "__name__", "")) and _is_mixed(args):
            return func(*_widen_operands(args), **_widen_operands(kwargs))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError):
            if not narrow:
                raise
            return func(*_widen_operands(args), **_widen_operands(kwargs))


# Products refuse to mix dtypes on devices, but not on the tensors without data of a trace.
_PRODUCT = re.compile(r"linear|(__r?)?matmul(__)?|mm|addmm|bmm|baddbmm|conv(_transpose)?[123]d")


def _is_mixed(args: tuple[Any, ...]) -> bool:
    return len({arg.dtype for arg in args if isinstance(arg, torch.Tensor)}) > 1


def _any_narrow(arg: Any) -> bool:
    if isinstance(arg, torch.Tensor):
        return arg.dtype in WIDE
    if type(arg) in (tuple, list):
        return any(_any_narrow(a) for a in arg)
    return type(arg) is dict and any(_any_narrow(a) for a in arg.values())


def _widen_operands(arg: Any) -> Any:
    """Return the arguments with all floating-point tensors in float64."""
    if isinstance(arg, torch.Tensor):
        if type(arg) not in (torch.Tensor, torch.nn.Parameter) or arg.requires_grad:
            return widen_tensor(arg)
        with _disable_current_modes():  # while tracing: a constant, not a computed value
            return widen_tensor(arg)
    if type(arg) in (tuple, list):
        return type(arg)(_widen_operands(a) for a in arg)
    return {k: _widen_operands(a) for k, a in arg.items()} if type(arg) is dict else arg


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Make floating-point tensors float64 where code does not say which type it wants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widen_graph(graph: Graph) -> Graph:
    """Return the graph with float64 for every narrower floating type."""
    return dataclasses.replace(
        graph,
        nodes=tuple(_widen_node(node) for node in graph.nodes),
        values={name: TensorType(t.shape, widen(t.dtype)) for name, t in graph.values.items()},
        constants=tuple(
            Constant(value=c.value, data=widen_tensor(c.data)) for c in graph.constants
        ),
    )


def _is_float(args: tuple[Any, ...], place: int) -> bool:
    return len(args) > place and isinstance(args[place], float)


def _widen_node(node: Node) -> Node:
    kwargs = {key: widen(value) for key, value in node.kwargs}
    if node.op == "aten.full.default" and kwargs.get("dtype") is None and _is_float(node.args, 1):
        kwargs["dtype"] = torch.float64  # without a type it would be that of the process
    return dataclasses.replace(node, args=widen(node.args), kwargs=tuple(kwargs.items()))
