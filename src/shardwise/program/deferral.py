"""Products with a parameter in a form whose weight gradients can wait.

Enters: a local call. Leaves: the same call through the runtime, where a schedule splits backward
into halves for inputs and for weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.ir import Ref
from shardwise.sharding.rule import LocalCall

Weights = Callable[[Any], bool]  # whether an argument is a parameter as it is stored


def deferred(call: LocalCall, is_weight: Weights, dims: Callable[[Any], int]) -> LocalCall:
    """Return the call as one of `pipeline.weight_grad`, if it multiplies with a parameter."""
    args, kwargs = call.args, dict(call.kwargs)
    weight = _WEIGHT.get(call.fn)
    if weight is None or len(args) <= weight or not is_weight(args[weight]):
        return call
    if call.fn in _CONVOLUTIONS:
        return _convolution(call, dims(args[weight]) - 2)
    if kwargs or len(args) > _MOST[call.fn]:
        return call
    return LocalCall(_NAMES[call.fn], args)


def _convolution(call: LocalCall, space: int) -> LocalCall:
    given = [*call.args, *([None] * (7 - len(call.args)))]
    x, weight, bias, stride, padding, dilation, groups = given
    if call.kwargs or isinstance(padding, str):
        return call
    sizes = [_spread(stride, 1, space), _spread(padding, 0, space), _spread(dilation, 1, space)]
    return LocalCall(
        "rt.conv", (x, weight, bias, *sizes, False, (0,) * space, 1 if groups is None else groups)
    )


def _spread(sizes: Any, default: int, space: int) -> tuple[int, ...]:
    """One number for every dim of space."""
    if sizes is None:
        return (default,) * space
    if isinstance(sizes, int):
        return (sizes,) * space
    return tuple(sizes) if len(sizes) == space else tuple(sizes) * space


_CONVOLUTIONS = {f"aten.conv{n}d.default" for n in (1, 2, 3)}
_NAMES = {
    "aten.linear.default": "rt.linear",
    "aten.addmm.default": "rt.addmm",
    "aten.matmul.default": "rt.matmul",
    "aten.mm.default": "rt.matmul",
    "aten.embedding.default": "rt.embedding",
}
_MOST = {
    "aten.linear.default": 3,
    "aten.addmm.default": 3,
    "aten.matmul.default": 2,
    "aten.mm.default": 2,
    "aten.embedding.default": 3,
}
_WEIGHT = {
    "aten.linear.default": 1,
    "aten.addmm.default": 2,
    "aten.matmul.default": 1,
    "aten.mm.default": 1,
    "aten.embedding.default": 0,
    **dict.fromkeys(_CONVOLUTIONS, 1),
}


def refers(arg: Any, names: frozenset[str]) -> bool:
    """Whether an argument is one of these values."""
    return isinstance(arg, Ref) and arg.name in names
