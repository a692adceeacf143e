"""The primitives of JAX as calls of torch, one function for each.

A function takes the `Equation` with its parameters and the values of its inputs, and returns one
value or a tuple. A value is a tensor, or an array of NumPy or JAX if it depends on neither
parameters nor batch; inputs that are annotated as tensors arrive as such. To add a primitive, add a
function with `@primitive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.extend import core
from torch import Tensor

from shardwise.errors import CaptureError

Value: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]

MAX_CONSTANT = 1 << 16  # larger arrays are computed by torch, not stored as constants
PRIMITIVES: dict[str, Function] = {}


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """Return the type of an array, with which JAX traces functions."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)  # type: ignore[no-untyped-call]


def primitive(*names: str) -> Callable[[Function], Function]:
    """Register a function for primitives of JAX, and convert its inputs to tensors."""

    def register(function: Function) -> Function:
        _, *parameters = signature(function, eval_str=True).parameters.values()
        kinds = [p.annotation is Tensor for p in parameters]

        @wraps(function)
        def run(eqn: Equation, *inputs: Value) -> Any:
            given = enumerate(inputs)
            last = len(kinds) - 1
            return function(
                eqn, *(eqn.run.tensor(v) if kinds[min(n, last)] else v for n, v in given)
            )

        PRIMITIVES.update(dict.fromkeys(names, run))
        return function

    return register


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation of a jaxpr: its primitive, parameters and results, and the user's line."""

    name: str
    bind: Callable[..., Any]  # runs the primitive in JAX
    params: Mapping[str, Any]
    operand_types: tuple[Any, ...]  # with shape and dtype
    results: tuple[Any, ...]  # types as well
    where: str
    run: Interpreter

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result, with the words of a random key as further dims."""
        result = self.results[0]
        words = result.dtype._impl.key_shape if hasattr(result.dtype, "_impl") else ()
        return (*result.shape, *words)

    def error(self, message: str, hint: str | None = None) -> CaptureError:
        """Return the error that the equation cannot be captured."""
        return CaptureError(message, where=self.where, hint=hint)

    def tensors(self, *values: Value) -> list[Tensor]:
        """Return all values as tensors."""
        return [self.run.tensor(value) for value in values]

    def operands(self, *values: Value) -> list[Any]:
        """Return arrays as tensors, but scalars as numbers, as long as there is one tensor."""
        numbers = [
            value.item() if not isinstance(value, Tensor) and np.ndim(value) == 0 else value
            for value in values
        ]
        if not any(isinstance(value, Tensor) for value in values):
            numbers[0] = self.run.tensor(values[0])
        return [v if isinstance(v, bool | int | float) else self.run.tensor(v) for v in numbers]


@dataclass(slots=True)
class Interpreter:
    """Runs jaxprs on torch tensors.

    `widened` maps dtypes of the jaxpr to those that the module was cast to. Custom derivatives
    matter only if the results are differentiated.
    """

    device: torch.device
    widened: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    is_differentiated: bool = True

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Return the results of a jaxpr."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [v.val if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
            inputs = [
                np.asarray(v) if isinstance(v, bool | int | float | complex) else v for v in inputs
            ]
            values.update(zip(eqn.outvars, self._equation(eqn, inputs), strict=True))
        return [v.val if isinstance(v, core.Literal) else values[v] for v in jaxpr.outvars]

    def tensor(self, value: Value) -> Tensor:
        """Return a value as a tensor."""
        if isinstance(value, Tensor):
            return value
        array = np.asarray(value)
        if array.dtype.name == "bfloat16":
            return torch.tensor(array.astype(np.float32).tolist(), device=self.device).bfloat16()
        result = torch.tensor(array.tolist(), dtype=self.dtype(array.dtype), device=self.device)
        return result.reshape(array.shape)

    def dtype(self, dtype: Any) -> torch.dtype:
        """Return torch's dtype for one of NumPy or JAX; 32-bit unsigned integers have 64 bits."""
        name = np.dtype(dtype).name
        result: torch.dtype = getattr(torch, {"uint32": "int64", "uint16": "int32"}.get(name, name))
        return self.widened.get(result, result)

    def _equation(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        results = tuple(var.aval for var in eqn.outvars)
        small = all(math.prod(aval.shape) <= MAX_CONSTANT for aval in results)
        if small and not any(isinstance(value, Tensor) for value in inputs):
            return self._known(eqn, inputs)
        where = jax._src.source_info_util.summarize(eqn.source_info)
        operands = tuple(var.aval for var in eqn.invars)
        equation = Equation(name, partial(_bind, eqn), eqn.params, operands, results, where, self)
        function = PRIMITIVES.get(name)
        if function is None:
            raise equation.error(
                f"JAX's primitive {name} is not supported", hint="write it with other functions"
            )
        try:
            value = function(equation, *inputs)
        except (TypeError, ValueError, IndexError, KeyError, NotImplementedError) as error:
            raise equation.error(f"{name}: {error}") from error
        values = value if isinstance(value, tuple | list) else (value,)
        return [self._wrapped(v, aval) for v, aval in zip(values, results, strict=True)]

    def _known(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Compute an equation with JAX."""
        with jax.ensure_compile_time_eval():
            value = _bind(eqn, *inputs)
        return value if eqn.primitive.multiple_results else [value]

    def _wrapped(self, value: Value, aval: Any) -> Value:
        """Keep unsigned integers in their range, which torch represents in wider ones."""
        if isinstance(value, Tensor) and aval.dtype == np.uint32:
            return value & 0xFFFFFFFF
        return value


def _bind(eqn: Any, *args: Any) -> Any:
    """Run an equation in JAX."""
    prepared = eqn.primitive.get_bind_params(eqn.params)
    functions, params = prepared if isinstance(prepared, tuple) else ((), prepared)
    return eqn.primitive.bind(*functions, *args, **params)


# ------------------------------------------------------------ element by element
_SAME_NAME = (  # as in torch
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma",
    "erf", "erfc", "exp", "exp2", "expm1", "floor", "imag", "lgamma", "log", "log1p", "neg", "real",
    "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
)  # fmt: skip
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    "cholesky": torch.linalg.cholesky, "conj": torch.conj_physical, "erf_inv": torch.erfinv,
    "is_finite": torch.isfinite, "logistic": torch.sigmoid, "stop_gradient": torch.Tensor.detach,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {"add_any": torch.add} | {
    name: getattr(torch, name) for name in ("add", "eq", "ge", "gt", "le", "lt", "mul", "ne", "sub")
}
for _name, _one in _UNARY.items():
    PRIMITIVES[_name] = lambda eqn, x, f=_one: f(eqn.run.tensor(x))
PRIMITIVES |= {  # those of one expression
    "broadcast_to": lambda eqn, x: eqn.run.tensor(x).expand(eqn.shape),
    "cbrt": lambda eqn, x: torch.sign(x) * torch.pow(torch.abs(x), 1 / 3),
    "clamp": lambda eqn, low, x, high: torch.minimum(
        torch.maximum(*eqn.tensors(x, low)), eqn.run.tensor(high)
    ),
    "concatenate": lambda eqn, *values: torch.cat(eqn.tensors(*values), eqn["dimension"]),
    "convert_element_type": lambda eqn, x: eqn.run.tensor(x).to(eqn.run.dtype(eqn["new_dtype"])),
    **dict.fromkeys(
        ("expand_dims", "reshape", "squeeze"),
        lambda eqn, x, *dynamic: eqn.run.tensor(x).reshape(eqn.shape),
    ),
    "integer_pow": lambda eqn, x: torch.pow(x, eqn["y"]),
    "pow": lambda eqn, a, b: torch.pow(*eqn.operands(a, b)),
    "rev": lambda eqn, x: eqn.run.tensor(x).flip(list(eqn["dimensions"])),
    "split": lambda eqn, x: torch.split(eqn.run.tensor(x), list(eqn["sizes"]), eqn["axis"]),
    "stack": lambda eqn, *values: torch.stack(eqn.tensors(*values), eqn["axis"]),
    "tile": lambda eqn, x: eqn.run.tensor(x).repeat(*eqn["reps"]),
    "transpose": lambda eqn, x: eqn.run.tensor(x).permute(*eqn["permutation"]),
    "unstack": lambda eqn, x: eqn.run.tensor(x).unbind(eqn["axis"]),
}


PRIMITIVES |= dict.fromkeys(
    ("copy", "copy_p", "device_put", "layout_constraint", "name", "optimization_barrier",
     "random_clone", "reduce_precision", "sharding_constraint"),
    lambda eqn, *values: values,
)  # fmt: skip


@primitive(*_BINARY)
def binary(eqn: Equation, a: Value, b: Value) -> Value:
    a, b = eqn.operands(a, b)
    if not isinstance(a, Tensor):  # torch's comparisons need a tensor first
        a = torch.full_like(b, a, dtype=b.dtype)
    return _BINARY[eqn.name](a, b)


_OF_TENSORS: dict[str, Callable[..., Tensor]] = {  # not of a tensor and a number
    "and": torch.bitwise_and, "atan2": torch.atan2, "complex": torch.complex, "max": torch.maximum,
    "min": torch.minimum, "nextafter": torch.nextafter, "not": torch.bitwise_not,
    "or": torch.bitwise_or, "rem": torch.fmod, "xor": torch.bitwise_xor,
}  # fmt: skip
for _name, _function in _OF_TENSORS.items():
    PRIMITIVES[_name] = lambda eqn, *values, f=_function: f(*eqn.tensors(*values))


@primitive("div")
def divide(eqn: Equation, a: Value, b: Value) -> Value:
    a, b = eqn.operands(a, b)
    tensor = a if isinstance(a, Tensor) else b
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc" if is_integer else None)


@primitive("shift_left", "shift_right_arithmetic", "shift_right_logical")
def shift(eqn: Equation, a: Tensor, b: Tensor) -> Value:
    if eqn.name == "shift_left":
        return torch.bitwise_left_shift(a, b)
    if eqn.name == "shift_right_logical" and np.dtype(eqn.results[0].dtype).kind != "u":
        raise eqn.error("logical shifts of signed integers are not supported")
    return torch.bitwise_right_shift(a, b)  # unsigned values are not negative here


@primitive("round")
def round_(eqn: Equation, x: Tensor) -> Value:
    if int(eqn["rounding_method"]) == 1:  # to even
        return torch.round(x)
    return torch.trunc(x + torch.sign(x) * 0.5)


@primitive("select_n")
def select(eqn: Equation, which: Tensor, result: Tensor, *others: Tensor) -> Value:
    if len(others) == 1:
        return torch.where(which.bool(), others[0], result)
    for number, case in enumerate(others, 1):
        result = torch.where(which == number, case, result)
    return result


@primitive("bitcast_convert_type")
def bitcast(eqn: Equation, x: Tensor) -> Value:
    new = np.dtype(eqn["new_dtype"])
    old = np.dtype(eqn.operand_types[0].dtype)
    if (old, new) == (np.uint32, np.int32):
        return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
    if (old, new) == (np.int32, np.uint32):
        return x.long()
    if (old, new) != (np.uint32, np.float32):
        raise eqn.error(f"bitcasts of {old} to {new} are not supported")
    # By arithmetic, so that the value is the same where the module computes in float64.
    exponent, fraction = (x >> 23) & 0xFF, x & 0x7FFFFF
    digits = torch.where(exponent > 0, fraction | 0x800000, fraction).to(eqn.run.dtype(new))
    value = torch.ldexp(digits, exponent.clamp_min(1) - 150)
    return torch.where(x >= 1 << 31, -value, value)


_ELEMENTWISE = {*_UNARY, *_BINARY, *_OF_TENSORS, "div", "and", "or", "xor", "not", "round",
                "select_n", "clamp", "convert_element_type", "integer_pow", "pow", "cbrt",
                "copy", "copy_p", "name"} - {"cholesky"}  # fmt: skip
_UNIFORM = {*_ELEMENTWISE, "broadcast_in_dim"}  # of a scalar: an array of equal elements


def is_elementwise(jaxpr: Any, shape: tuple[int, ...]) -> bool:
    """Return whether elements of arrays of this shape depend only on those in the same place.

    Arrays of other shapes are allowed as long as all of their elements are one scalar.
    """
    varying = {v for v in jaxpr.invars if v.aval.shape}
    if any(v.aval.shape != shape for v in varying) or jaxpr.constvars:
        return False
    for eqn in jaxpr.eqns:
        operands = {v for v in eqn.invars if not isinstance(v, core.Literal)} & varying
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None:
            if not is_elementwise(getattr(inner, "jaxpr", inner), shape):
                return False
        elif eqn.primitive.name not in (_ELEMENTWISE if operands else _UNIFORM):
            return False
        if operands and any(v.aval.shape != shape for v in eqn.outvars):
            return False
        varying.update(eqn.outvars if operands else ())
    return True


# ------------------------------------------------------------ shapes
@primitive("broadcast_in_dim")
def broadcast_in_dim(eqn: Equation, x: Tensor, *dynamic: Value) -> Value:
    sizes = [1] * len(eqn.shape)
    for dim, n in zip(eqn["broadcast_dimensions"], x.shape, strict=True):
        sizes[dim] = n
    return x.reshape(sizes).expand(eqn.shape)


@primitive("slice")
def slice_(eqn: Equation, x: Tensor) -> Value:
    strides = eqn["strides"] or [1] * len(eqn["start_indices"])
    bounds = zip(eqn["start_indices"], eqn["limit_indices"], strides, strict=True)
    return x[tuple(slice(a, b, step) for a, b, step in bounds)]


@primitive("pad")
def pad(eqn: Equation, x: Tensor, fill: Tensor) -> Value:
    for dim, (low, high, inner) in enumerate(eqn["padding_config"]):
        if inner and x.shape[dim] > 1:  # put `inner` elements between two neighbours
            x = x.unsqueeze(dim + 1)
            between = fill.expand(*x.shape[: dim + 1], inner, *x.shape[dim + 2 :])
            x = torch.cat([x, between], dim + 1).flatten(dim, dim + 1)
            x = x.narrow(dim, 0, x.shape[dim] - inner)
        low_cut, high_cut = max(-low, 0), max(-high, 0)
        x = x.narrow(dim, low_cut, x.shape[dim] - low_cut - high_cut)
        parts = [fill.expand(*x.shape[:dim], max(n, 0), *x.shape[dim + 1 :]) for n in (low, high)]
        x = torch.cat([p for p in (parts[0], x, parts[1]) if p.shape[dim]], dim)
    return x


@primitive("iota")
def iota(eqn: Equation, *dynamic: Value) -> Value:
    dim, dtype = eqn["dimension"], eqn.run.dtype(eqn["dtype"])
    line = torch.arange(eqn.shape[dim], device=eqn.run.device, dtype=dtype)
    return line.reshape([-1 if d == dim else 1 for d in range(len(eqn.shape))]).expand(eqn.shape)


@primitive("iota_2x32_shape")
def counters(eqn: Equation) -> Value:
    line = torch.arange(math.prod(eqn.shape), device=eqn.run.device).reshape(eqn.shape)
    return line >> 32, line & 0xFFFFFFFF


# ------------------------------------------------------------ reductions and sorting
_REDUCTIONS: Mapping[str, Any] = {
    "reduce_max": torch.amax,
    "reduce_min": torch.amin,
    "reduce_sum": lambda x, axes: x.sum(axes, dtype=x.dtype),
}


@primitive(*_REDUCTIONS)
def reduce(eqn: Equation, x: Tensor) -> Value:
    return _REDUCTIONS[eqn.name](x, list(eqn["axes"])) if eqn["axes"] else x


@primitive("reduce_prod", "reduce_and", "reduce_or")
def reduce_each(eqn: Equation, x: Tensor) -> Value:
    for dim in sorted(eqn["axes"], reverse=True):
        if eqn.name == "reduce_prod":
            x = x.prod(dim, dtype=x.dtype)
        else:
            x = x.all(dim) if eqn.name == "reduce_and" else x.any(dim)
    return x


@primitive("argmax", "argmin")
def arg_extreme(eqn: Equation, x: Tensor) -> Value:
    (dim,) = eqn["axes"]
    return getattr(torch, eqn.name)(x, dim).to(eqn.run.dtype(eqn["index_dtype"]))


_CUMULATIVE: Mapping[str, Any] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": lambda x, dim: torch.cummax(x, dim).values,
    "cummin": lambda x, dim: torch.cummin(x, dim).values,
    "cumlogsumexp": torch.logcumsumexp,
}


@primitive(*_CUMULATIVE)
def cumulative(eqn: Equation, x: Tensor) -> Value:
    dim = eqn["axis"]
    x = x.flip(dim) if eqn["reverse"] else x
    result = _CUMULATIVE[eqn.name](x, dim).to(x.dtype)
    return result.flip(dim) if eqn["reverse"] else result


@primitive("sort")
def sort(eqn: Equation, *operands: Tensor) -> Value:
    dim, order = eqn["dimension"], None
    for key in reversed(operands[: eqn["num_keys"]]):  # stable sorts, the least important first
        key = key if order is None else key.gather(dim, order)
        step = torch.sort(key, stable=True, dim=dim).indices
        order = step if order is None else order.gather(dim, step)
    assert order is not None
    return tuple(x.gather(dim, order) for x in operands)


@primitive("top_k")
def top_k(eqn: Equation, x: Tensor) -> Value:
    axis = eqn.params.get("axis", -1)
    values, places = torch.sort(x, stable=True, dim=axis, descending=True)
    k = eqn["k"]
    indices = places.narrow(axis, 0, k).to(eqn.run.dtype(eqn.results[1].dtype))
    return values.narrow(axis, 0, k), indices


# ------------------------------------------------------------ products and windows
@primitive("dot_general")
def dot_general(eqn: Equation, a: Tensor, b: Tensor) -> Value:
    (a_sums, b_sums), (a_batch, b_batch) = eqn["dimension_numbers"]
    dtype = eqn.run.dtype(eqn.results[0].dtype)
    a, b = (x if x.dtype == dtype else x.to(dtype) for x in (a, b))
    if not a_batch and b.dim() == 2 and tuple(a_sums) == (a.dim() - 1,):
        # A linear layer, in the form for which sharding rules are best known.
        return F.linear(a, b if tuple(b_sums) == (1,) else b.T)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names_a, names_b = [""] * a.dim(), [""] * b.dim()
    for dim_a, dim_b in (*zip(a_batch, b_batch, strict=True), *zip(a_sums, b_sums, strict=True)):
        names_a[dim_a] = names_b[dim_b] = next(letters)
    names_a = [name or next(letters) for name in names_a]
    names_b = [name or next(letters) for name in names_b]
    batch = "".join(names_a[d] for d in a_batch)
    free_a = "".join(n for d, n in enumerate(names_a) if d not in (*a_batch, *a_sums))
    free_b = "".join(n for d, n in enumerate(names_b) if d not in (*b_batch, *b_sums))
    equation = f"{''.join(names_a)},{''.join(names_b)}->{batch}{free_a}{free_b}"
    return torch.einsum(equation, a, b)


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@primitive("conv_general_dilated")
def convolution(eqn: Equation, x: Tensor, kernel: Tensor) -> Value:
    numbers, window = eqn["dimension_numbers"], len(eqn["window_strides"])
    if window not in _CONVOLUTIONS or eqn["batch_group_count"] != 1:
        raise eqn.error("convolutions of 1, 2 or 3 dims without batch groups are supported")
    x, kernel = x.permute(*numbers.lhs_spec), kernel.permute(*numbers.rhs_spec)
    for dim, gap in enumerate(eqn["lhs_dilation"], 2):  # transposed convolutions
        if gap > 1:
            x = torch.stack([x, *[torch.zeros_like(x)] * (gap - 1)], dim + 1).flatten(dim, dim + 1)
            x = x.narrow(dim, 0, x.shape[dim] - gap + 1)
    x = _padded(x, eqn["padding"], 0.0)
    result = _CONVOLUTIONS[window](
        x, kernel, None, eqn["window_strides"], 0, eqn["rhs_dilation"], eqn["feature_group_count"]
    )
    return result.permute(*np.argsort(numbers.out_spec).tolist())


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], fill: float) -> Tensor:
    flat = [side for pair in reversed(pads) for side in pair]
    return F.pad(x, flat, value=fill) if any(flat) else x


@primitive("reduce_window_max", "reduce_window_min", "reduce_window_sum")
def reduce_window(eqn: Equation, x: Tensor) -> Value:
    sizes, strides = eqn["window_dimensions"], eqn["window_strides"]
    dims = [d for d, n in enumerate(sizes) if n > 1 or strides[d] > 1 or any(eqn["padding"][d])]
    gaps, base = eqn["window_dilation"], eqn["base_dilation"]
    if not 1 <= len(dims) <= 3 or any(n != 1 for n in base):
        raise eqn.error("windows over 1, 2 or 3 dims without base dilation are supported")
    others = [d for d in range(x.dim()) if d not in dims]
    moved = x.permute(*others, *dims)
    flat = moved.reshape(1, -1, *moved.shape[len(others) :])
    kernel, step, gap = ([given[d] for d in dims] for given in (sizes, strides, gaps))
    pads = [eqn["padding"][d] for d in dims]
    if eqn.name == "reduce_window_sum":
        if any(n != 1 for n in gap):
            raise eqn.error("dilated sums of windows are not supported")
        pool: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(dims)]
        result = pool(_padded(flat, pads, 0.0), kernel, step) * math.prod(kernel)
    else:
        sign = 1 if eqn.name == "reduce_window_max" else -1
        pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(dims)]
        result = sign * pool(_padded(sign * flat, pads, -math.inf), kernel, step, 0, gap)
    result = result.reshape(*moved.shape[: len(others)], *result.shape[2:])
    return result.permute(*np.argsort([*others, *dims]).tolist())
