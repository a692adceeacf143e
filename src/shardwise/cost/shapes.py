"""Results of ATen calls on meta tensors, without torch's own rules where these are slow.

Enters: an operator and meta operands. Leaves: its results on meta.

torch computes shapes of many operators in Python, at 0.2 to 5 ms a call. Elementwise operators need
that once for the types of their operands: the shape is the broadcast one. A few others that are
in every model have their rule here; the rest is torch's. Tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.operators.support import widened

broadcast_shapes: Callable[..., torch.Size] = torch.broadcast_shapes  # torch leaves it untyped
_PLAIN = (int, float, bool, complex, str, torch.dtype, type(None))


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` for meta tensors."""
    rule = _RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if is_elementwise(func):
        key = _types(func, args, kwargs)
        if key is not None:
            dtype = _DTYPES.get(key)
            if dtype is None:
                found = func(*args, **kwargs)
                _DTYPES[key] = found.dtype
                return found
            return _broadcast(args, dtype)
    return func(*args, **kwargs)


@cache
def is_elementwise(func: Any) -> bool:
    """Whether the result is one new tensor of the operands' broadcast shape."""
    schema = func._schema
    return (
        torch.Tag.pointwise in func.tags
        and len(schema.returns) == 1
        and not schema.is_mutable
        and not func.is_view
        and not any(a.name in ("memory_format", "layout") for a in schema.arguments)
    )


_DTYPES: dict[tuple[Any, ...], torch.dtype] = {}  # what the types of operands give, once asked


def _types(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the result's dtype follows from; None where the call is not a plain one."""
    found: list[Any] = [func]
    for arg in args:
        if isinstance(arg, Tensor):
            found.append((arg.dtype, arg.dim() == 0))
        elif isinstance(arg, _PLAIN):
            found.append(arg if isinstance(arg, torch.dtype | str) else type(arg))
        else:
            return None
    for name, arg in kwargs.items():
        if not isinstance(arg, _PLAIN):
            return None
        found.append((name, arg if isinstance(arg, torch.dtype | str) else type(arg)))
    return tuple(found)


def _broadcast(args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    given = [a for a in args if isinstance(a, Tensor)]
    shape = given[0].shape
    if len(given) > 1 and any(t.shape != shape for t in given[1:]):
        shape = broadcast_shapes(*(t.shape for t in given))
    for tensor in given:
        if tensor.shape == shape:
            return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="meta")


# ---------------------------------------------------------------- rules of single operators


def _like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dtype = torch.float32 if half_to_float else x.dtype
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    kept = x.dim() - len(shape)
    size = [*x.shape[:kept], *(1 for _ in shape)]
    dtype = widened(x.dtype)
    mean = torch.empty(size, dtype=dtype, device="meta")
    return _like(x), mean, torch.empty_like(mean)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    given = (x, weight, bias)
    return tuple(
        _like(t) if wanted and t is not None else None
        for t, wanted in zip(given, mask, strict=True)
    )


def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    size = target.shape if reduction == 0 and x.dim() == 2 else ()
    return x.new_empty(size), x.new_empty(())


def _nll_loss_backward(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return _like(x)


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if x.shape == mask.shape:
        return torch.empty_like(x)
    return torch.empty(broadcast_shapes(x.shape, mask.shape), dtype=x.dtype, device="meta")


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax.default: _log_softmax,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.masked_fill.Scalar: _masked_fill,
}
