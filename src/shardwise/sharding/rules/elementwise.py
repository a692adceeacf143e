"""Operators that act on each element: every axis is free, and linear ones pass partial sums."""

from collections.abc import Callable

from shardwise.ir import Ref
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Call, Dims, NodeRule, replicated_rule
from shardwise.sharding.rules.building_blocks import (
    aligned,
    axes_of,
    broadcastable,
    op_name,
    passes,
    positions,
)

UNARY = """
    abs absolute neg negative exp log sqrt rsqrt reciprocal sin cos tanh sigmoid relu gelu silu erf
    square pow softplus leaky_relu hardtanh hardsigmoid hardswish log_sigmoid bitwise_not
    logical_not ceil floor round clamp clip clamp_min clamp_max isnan isinf isfinite isneginf
    isposinf isreal sign signbit nan_to_num elu celu selu mish relu6 expm1 log1p log2 log10 exp2
    tan atan sinh cosh asin acos asinh acosh atanh arctan arcsin arccos threshold hardshrink
    softshrink logit erfc erfinv special_expit special_erf trunc fix frac sgn angle conj
    conj_physical resolve_conj resolve_neg real imag digamma lgamma sinc deg2rad rad2deg clone
    contiguous detach alias to _to_copy positive lift_fresh_copy lift fill i0
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
# Linear in all tensor operands together, or in the first one while the others are fixed.
TOGETHER = """
    add sub subtract rsub neg negative clone contiguous to _to_copy alias detach positive
    complex conj conj_physical resolve_conj resolve_neg real imag deg2rad rad2deg
    lift_fresh_copy lift
"""
FIRST = ("div", "divide", "true_divide", "expand_as")
LinearSets = Callable[[Call], tuple[frozenset[int], ...]]


def elementwise_rule(call: Call, linear: tuple[frozenset[int], ...] = ()) -> NodeRule:
    """Return the rule whose axes are the first result's dims; operands are broadcast to it."""
    result = call.results[0]
    if not all(broadcastable(shape, result) for shape in (*call.operands, *call.results)):
        return replicated_rule(call, f"operands do not broadcast to {result}")
    axes, dims = axes_of(result)
    return NodeRule(
        axes,
        tuple(aligned(shape, result, dims) for shape in call.operands),
        tuple(aligned(shape, result, dims) for shape in call.results),
        linear=linear,
    )


def linear_sets(call: Call) -> tuple[frozenset[int], ...]:
    """Return the sets of operands in which the call is linear."""
    name = op_name(call)
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
    """Return whether the result is narrower than an operand.

    Partial sums stay in the wider dtype: a sum would be rounded once, its terms one by one.
    """
    sizes = [call.types[n].dtype.itemsize for n in call.node.inputs]
    real = op_name(call) in ("real", "imag")
    return not real and call.types[call.node.outputs[0]].dtype.itemsize < max(sizes, default=0)


def _selects(*names: str) -> LinearSets:
    """Return the sets of an operator that selects elements of these arguments.

    It is linear in the tensors among them if all others are zero.
    """

    def sets(call: Call) -> tuple[frozenset[int], ...]:
        constants = [call.get(name) for name in names if not call.has(name)]
        return () if any(constants) else passes(call, *positions(call, *names))

    return sets


def _overwrite(source: str) -> LinearSets:
    """Return the sets of an operator whose result is the source, whatever it overwrites."""

    def sets(call: Call) -> tuple[frozenset[int], ...]:
        if not call.has(source):
            return ()
        at = call.position(source)
        return (*passes(call, at), *passes(call, 0, at))

    return sets


SPECIAL: dict[str, LinearSets] = {
    "where": _selects("self", "other"),
    "masked_fill": _selects("self", "value"),
    "copy": _overwrite("src"),
    "fill": _overwrite("value"),
    "lerp": lambda call: passes(call, 0, 1),
    "addcmul": lambda call: (*passes(call, 0, 1), *passes(call, 0, 2)),
    "addcdiv": lambda call: passes(call, 0, 1),
}


@rule(*(f"aten.{name}" for name in (*UNARY.split(), *BINARY.split())))
def elementwise(call: Call) -> NodeRule:
    """Broadcast the operands."""
    return elementwise_rule(call, linear_sets(call))


@rule("aten.type_as", "aten.to.other")
def type_as(call: Call) -> NodeRule:
    """Use only the dtype of `other`, which is sharded like the result if its shape allows it."""
    result, other = call.results[0], call.shape("other")
    axes, own = axes_of(result)
    if broadcastable(other, result):
        dims: Dims = aligned(other, result, own)
    else:
        more, dims = axes_of(other, "o", frozen=range(len(other)))
        axes |= more
    return NodeRule(axes, (own, dims), (own,), linear=() if _narrows(call) else passes(call, 0))


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(call: Call) -> NodeRule:
    """Use one slope for all elements, or one for each channel (dim 1)."""
    shape, slope = call.operands
    axes, own = axes_of(shape)
    if len(slope) == len(shape):
        dims: Dims = aligned(slope, shape, own)
    else:
        dims = tuple(("d1",) if size != 1 and len(shape) > 1 else () for size in slope)
    return NodeRule(axes, (own, dims), (own,))
