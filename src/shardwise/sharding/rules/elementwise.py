"""Operators that act on each element: any axis may be cut; linear ones pass partial sums."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.ir import Ref
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dims, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import broadcast_dims, broadcastable, passes

UNARY = """
    abs absolute neg negative exp log sqrt rsqrt reciprocal sin cos tanh sigmoid relu gelu silu erf
    square pow softplus leaky_relu hardtanh hardsigmoid hardswish log_sigmoid bitwise_not
    logical_not ceil floor round clamp clip clamp_min clamp_max isnan isinf isfinite isneginf
    isposinf isreal sign signbit nan_to_num elu celu selu mish relu6 expm1 log1p log2 log10 exp2
    tan atan sinh cosh asin acos asinh acosh atanh arctan arcsin arccos threshold hardshrink
    softshrink logit erfc erfinv special_expit special_erf trunc fix frac sgn angle conj
    conj_physical resolve_conj resolve_neg real imag digamma lgamma sinc deg2rad rad2deg clone
    contiguous detach alias to _to_copy float double half bool int long positive lift_fresh_copy
    lift fill i0
"""
BINARY = """
    add sub subtract mul multiply div divide true_divide rsub remainder fmod floor_divide maximum
    minimum fmax fmin max.other min.other eq ne lt le gt ge not_equal less less_equal greater
    greater_equal __and__ __or__ __xor__ __lshift__ __rshift__ bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift logical_and logical_or logical_xor where masked_fill
    atan2 arctan2 xlogy special_xlogy special_xlog1py lerp addcmul addcdiv copy hypot ldexp
    logaddexp logaddexp2 expand_as polar complex isclose heaviside copysign nextafter gcd lcm
    float_power
"""
# Linear in all tensor operands together, or in the first one while the others are held.
TOGETHER = """
    add sub subtract rsub neg negative clone contiguous to _to_copy alias detach positive float
    double complex conj conj_physical resolve_conj resolve_neg real imag deg2rad rad2deg
    lift_fresh_copy lift
"""
FIRST = ("div", "divide", "true_divide", "expand_as")
LinearSets = Callable[[Call], tuple[frozenset[int], ...]]


def elementwise_rule(call: Call, linear: tuple[frozenset[int], ...] = ()) -> NodeRule:
    """Axes are the dims of the first result; operands are broadcast to it."""
    result = call.results[0]
    if not all(broadcastable(shape, result) for shape in (*call.operands, *call.results)):
        return whole_rule(call, f"operands do not broadcast to {result}")
    axes = {f"d{i}": Axis(f"d{i}", size) for i, size in enumerate(result)}
    return NodeRule(
        axes=axes,
        operands=tuple(broadcast_dims(shape, result) for shape in call.operands),
        results=tuple(broadcast_dims(shape, result) for shape in call.results),
        linear=linear,
    )


def linear_sets(call: Call) -> tuple[frozenset[int], ...]:
    """In which operands the call is linear."""
    name = call.node.op.split(".")[1]
    count = len(call.operands)
    if name in TOGETHER.split():
        tensors = sum(isinstance(call.get(a), Ref) for a in ("self", "other"))
        affine = name in {"add", "sub", "subtract", "rsub"} and tensors < 2  # x + 1 is not linear
        return () if affine or _narrows(call) else passes(call, *range(count))
    if name in ("mul", "multiply"):
        return tuple(p for i in range(count) for p in passes(call, i))
    if name in FIRST:
        return passes(call, 0) if call.get("rounding_mode") is None else ()
    special = SPECIAL.get(name)
    return special(call) if special else ()


def _narrows(call: Call) -> bool:
    """A sum is rounded once, its terms one by one: partial sums stay in the wider type."""
    sizes = [call.types[n].dtype.itemsize for n in call.node.inputs]
    real = call.node.op.split(".")[1] in ("real", "imag")
    return not real and call.types[call.node.outputs[0]].dtype.itemsize < max(sizes, default=0)


def _tensors(call: Call, *names: str) -> tuple[int, ...]:
    return tuple(call.position(name) for name in names if call.has(name))


def _where(call: Call) -> tuple[frozenset[int], ...]:
    constants = [call.get(name) for name in ("self", "other") if not call.has(name)]
    return passes(call, *_tensors(call, "self", "other")) if not any(constants) else ()


def _masked_fill(call: Call) -> tuple[frozenset[int], ...]:
    if not call.has("value") and call.get("value") != 0:
        return ()
    return passes(call, *_tensors(call, "self", "value"))


def _overwrite(source: str) -> LinearSets:
    """The result is the source alone: the overwritten operand's values do not matter."""

    def sets(call: Call) -> tuple[frozenset[int], ...]:
        if not call.has(source):
            return ()
        at = call.position(source)
        return (*passes(call, at), *passes(call, 0, at))

    return sets


def _lerp(call: Call) -> tuple[frozenset[int], ...]:
    return passes(call, 0, 1)


def _addcmul(call: Call) -> tuple[frozenset[int], ...]:
    return (*passes(call, 0, 1), *passes(call, 0, 2))


SPECIAL: dict[str, LinearSets] = {
    "where": _where,
    "masked_fill": _masked_fill,
    "copy": _overwrite("src"),
    "fill": _overwrite("value"),
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _lerp,
}


@rule(*(f"aten.{name}" for name in (*UNARY.split(), *BINARY.split())))
def elementwise(call: Call) -> NodeRule:
    """Broadcasting element-wise operators."""
    return elementwise_rule(call, linear_sets(call))


@rule("aten.type_as", "aten.to.other")
def type_as(call: Call) -> NodeRule:
    """Only the dtype of `other` is used: it is cut like the result where its shape allows."""
    result = call.results[0]
    axes = {f"d{i}": Axis(f"d{i}", size) for i, size in enumerate(result)}
    other = call.shape("other")
    dims: Dims = broadcast_dims(other, result) if broadcastable(other, result) else ()
    if not dims:
        axes |= {f"o{i}": Axis(f"o{i}", size, frozen=True) for i, size in enumerate(other)}
        dims = tuple((f"o{i}",) for i in range(len(other)))
    return NodeRule(
        axes=axes,
        operands=(broadcast_dims(result, result), dims),
        results=(broadcast_dims(result, result),),
        linear=() if _narrows(call) else passes(call, 0),
    )


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(call: Call) -> NodeRule:
    """One slope for all, or one for each channel (dim 1)."""
    shape, slope = call.operands
    axes = {f"d{i}": Axis(f"d{i}", size) for i, size in enumerate(shape)}
    own = broadcast_dims(shape, shape)
    if len(slope) == len(shape):
        dims: Dims = broadcast_dims(slope, shape)
    else:
        dims = tuple(("d1",) if size != 1 and len(shape) > 1 else () for size in slope)
    return NodeRule(axes=axes, operands=(own, dims), results=(own,))
