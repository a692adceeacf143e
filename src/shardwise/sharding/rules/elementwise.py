"""Operators that act on each element: any axis may be cut; linear ones pass partial sums."""

from __future__ import annotations

from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dims, NodeRule

UNARY = """abs neg exp log sqrt rsqrt reciprocal sin cos tanh sigmoid relu gelu silu erf square pow
    softplus leaky_relu hardtanh hardsigmoid hardswish log_sigmoid bitwise_not logical_not ceil floor
    round clamp clamp_min clamp_max isnan isinf isfinite sign nan_to_num elu celu selu mish relu6
    expm1 log1p log2 log10 exp2 tan atan sinh cosh asin acos threshold hardshrink softshrink
    logit erfc erfinv trunc frac sgn angle conj conj_physical real imag clone contiguous detach
    alias to _to_copy type_as float positive lift_fresh_copy fill nan_to_num""".split()
BINARY = """add sub mul div rsub remainder floor_divide maximum minimum eq ne lt le gt ge
    __and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor
    where masked_fill atan2 xlogy fmod lerp addcmul addcdiv copy hypot pow clamp max min
    floor_divide true_divide ldexp logaddexp expand_as polar complex""".split()
# Linear in all tensor operands together / in the first one alone.
JOINTLY_LINEAR = {"add", "sub", "neg", "clone", "contiguous", "to", "_to_copy", "alias", "detach"}
FIRST_LINEAR = {"div", "mul", "type_as", "real", "imag", "conj", "expand_as"}


def broadcast_dims(shape: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    """Dims of an operand aligned at the right with the result; a dim of one has no axis.

    >>> broadcast_dims((4, 1), (2, 4, 8))
    (('d1',), ())
    """
    offset = len(result) - len(shape)
    return tuple(
        (f"d{i + offset}",) if size != 1 or result[i + offset] == 1 else ()
        for i, size in enumerate(shape)
    )


def elementwise_rule(call: Call, linear: tuple[frozenset[int], ...] = ()) -> NodeRule:
    """Axes are the dims of the first result; operands are broadcast to it."""
    result = call.results[0]
    axes = {f"d{i}": Axis(f"d{i}", size) for i, size in enumerate(result)}
    return NodeRule(
        axes=axes,
        operands=tuple(broadcast_dims(shape, result) for shape in call.operands),
        results=tuple(broadcast_dims(shape, result) for shape in call.results),
        linear=linear,
    )


def linear_sets(call: Call) -> tuple[frozenset[int], ...]:
    """In which operands the call is linear; partial integers and booleans never pass."""
    name = call.node.op.split(".")[1]
    count = len(call.operands)
    dtypes = [call.types[n].dtype for n in (*call.node.inputs, *call.node.outputs)]
    if not all(d.is_floating_point or d.is_complex for d in dtypes):
        return ()
    if name in JOINTLY_LINEAR:
        scalars = name in {"add", "sub"} and count == 1  # x + 1 is not linear
        return () if scalars else (frozenset(range(count)),)
    if name == "mul":
        return tuple(frozenset({i}) for i in range(count))
    if name in FIRST_LINEAR and call.get("rounding_mode") is None:
        return (frozenset({0}),)
    return ()


@rule(*(f"aten.{name}" for name in dict.fromkeys((*UNARY, *BINARY))))
def elementwise(call: Call) -> NodeRule:
    """Broadcasting element-wise operators."""
    return elementwise_rule(call, linear_sets(call))
