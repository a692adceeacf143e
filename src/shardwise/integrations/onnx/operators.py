"""ONNX operators as calls of torch, one function for each.

A function takes the `Call` with its attributes and the values of its inputs, None for omitted ones,
and returns one value or a tuple. To add an operator, add a function with `@operator`; its inputs
that are annotated as tensors arrive as such.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce, wraps
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import CaptureError

Value: TypeAlias = Any  # a tensor, a NumPy array known without running the model, a list, or None
Operator: TypeAlias = Callable[..., Any]

_DTYPES = {  # numbers of TensorProto.DataType
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32,
    7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A node of the file: its operator, place, attributes, and the module that it is part of."""

    op: str
    name: str
    opset: int
    attributes: Mapping[str, Any]
    num_outputs: int
    run: Operator | None
    module: Any

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def error(self, message: str, hint: str | None = None) -> CaptureError:
        """Return the error that the node cannot be captured."""
        return CaptureError(message, where=f"node {self.name}", hint=hint)

    def known(self, value: Value, what: str) -> np.ndarray[Any, Any]:
        """Return a value that must be known without running the model."""
        if isinstance(value, np.ndarray):
            return value
        raise self.error(
            f"{what} depends on the values of tensors",
            hint="export the model with fixed shapes, or make it an initializer",
        )

    def integers(self, value: Value, what: str) -> list[int]:
        """Return sizes, axes or other integers as a list."""
        return [int(v) for v in self.known(value, what).reshape(-1)]


OPERATORS: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register a function for operators of ONNX, and convert its inputs to tensors."""

    def register(function: Operator) -> Operator:
        _, *parameters = signature(function).parameters.values()
        kinds = [p.annotation in (Tensor, Tensor | None) for p in parameters]

        @wraps(function)
        def run(call: Call, *inputs: Value, **outer: Any) -> Any:
            given = dict(enumerate(inputs))
            places = [
                n for n, v in given.items() if v is not None and kinds[min(n, len(kinds) - 1)]
            ]
            given |= zip(places, tensors(*(given[n] for n in places)), strict=True)
            return function(call, *given.values(), **outer)

        OPERATORS.update(dict.fromkeys(names, run))
        return function

    return register


def tensor(value: Value, other: Tensor | None = None) -> Tensor:
    """Return a value as a tensor on the device of `other`, and in its dtype if both are floats.

    Both have the same dtype in the file. They differ where the module was cast to another dtype.
    """
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        result = torch.tensor(array.astype(np.float32).tolist(), dtype=torch.bfloat16)
    else:
        dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
        result = torch.tensor(array.tolist(), dtype=dtype).reshape(array.shape)
    if other is None:
        return result
    both = result.is_floating_point() and other.is_floating_point()
    return result.to(other.device, other.dtype if both else result.dtype)


def tensors(*values: Value) -> list[Tensor]:
    """Return several values as tensors on one device."""
    present = [v for v in values if isinstance(v, Tensor)]
    other = next((v for v in present if v.is_floating_point()), present[0] if present else None)
    return [tensor(v, other) for v in values]


# ------------------------------------------------------------ element by element
_SAME_NAME = (  # as in torch
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp",
    "Floor", "IsNaN", "Log", "Neg", "Reciprocal", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt",
    "Tan", "Tanh",
)  # fmt: skip
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAME},
    "BitwiseNot": torch.bitwise_not, "Det": torch.linalg.det, "HardSwish": F.hardswish,
    "Identity": lambda x: x, "Mish": F.mish, "Not": torch.logical_not, "Relu": F.relu,
    "Softplus": F.softplus, "Softsign": F.softsign,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "And": torch.logical_and, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "Equal": torch.eq,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "MatMul": torch.matmul, "Mul": torch.mul, "Or": torch.logical_or,
    "Sub": torch.sub, "Xor": torch.logical_xor,
}  # fmt: skip
for _name, _function in _UNARY.items():
    OPERATORS[_name] = lambda call, x, f=_function: f(x)
for _name, _two in _BINARY.items():
    OPERATORS[_name] = lambda call, a, b, f=_two: f(*tensors(a, b))
OPERATORS |= {  # those of one expression
    "Celu": lambda call, x: F.celu(x, call.get("alpha", 1.0)),
    "Concat": lambda call, *values: torch.cat(tensors(*values), call.get("axis")),
    "Elu": lambda call, x: F.elu(x, call.get("alpha", 1.0)),
    "Gelu": lambda call, x: F.gelu(x, approximate=call.get("approximate", "none")),
    "HardSigmoid": lambda call, x: torch.clamp(
        call.get("alpha", 0.2) * x + call.get("beta", 0.5), 0, 1
    ),
    "LeakyRelu": lambda call, x: F.leaky_relu(x, call.get("alpha", 0.01)),
    "LogSoftmax": lambda call, x: torch.log_softmax(x, call.get("axis", -1)),
    "NonZero": lambda call, x: torch.nonzero(x).T,
    "SequenceAt": lambda call, items, at: items[int(call.known(at, "the position"))],
    "SequenceConstruct": lambda call, *values: list(values),
    "Shape": lambda call, x: np.array(x.shape, np.int64)[call.get("start", 0) : call.get("end")],
    "Size": lambda call, x: np.array(x.numel(), np.int64),
    "Softmax": lambda call, x: torch.softmax(x, call.get("axis", -1)),
    "ThresholdedRelu": lambda call, x: x.where(x > call.get("alpha", 1.0), torch.zeros_like(x)),
    "Tile": lambda call, x, given: x.repeat(call.integers(given, "the repeats")),
    "Transpose": lambda call, x: x.permute(call.get("perm") or list(range(x.dim()))[::-1]),
    "Where": lambda call, condition, a, b: torch.where(*tensors(condition, a, b)),
}


@operator("Pow")
def power(call: Call, base: Value, exponent: Value) -> Value:
    """Keep the dtype of the base, and the exponent a number where it is one."""
    if isinstance(exponent, np.ndarray) and exponent.size == 1:
        return torch.pow(base, exponent.item())
    base, exponent = tensors(base, exponent)
    return torch.pow(base, exponent).to(base.dtype)


@operator("Div")
def divide(call: Call, a: Tensor, b: Tensor) -> Value:
    rounding = None if a.is_floating_point() or a.is_complex() else "trunc"
    return torch.div(a, b, rounding_mode=rounding)


@operator("Mod")
def modulo(call: Call, a: Tensor, b: Tensor) -> Value:
    return torch.fmod(a, b) if call.get("fmod", 0) else torch.remainder(a, b)


@operator("BitShift")
def bit_shift(call: Call, a: Tensor, b: Tensor) -> Value:
    return a << b if call.get("direction") == "LEFT" else a >> b


@operator("Max", "Min", "Sum", "Mean")
def several(call: Call, *values: Tensor) -> Value:
    function = {"Max": torch.maximum, "Min": torch.minimum}.get(call.op, torch.add)
    total: Tensor = reduce(function, values)
    return total / len(values) if call.op == "Mean" else total


@operator("Clip")
def clip(call: Call, x: Tensor, low: Value = None, high: Value = None) -> Value:
    bounds = [v.item() if isinstance(v, np.ndarray) else v for v in (low, high)]
    if bounds == [None, None]:
        return x
    if any(isinstance(v, Tensor) for v in bounds):
        x = x if low is None else torch.maximum(x, tensor(low, x))
        return x if high is None else torch.minimum(x, tensor(high, x))
    return torch.clamp(x, *bounds)


@operator("IsInf")
def is_inf(call: Call, x: Tensor) -> Value:
    positive, negative = call.get("detect_positive", 1), call.get("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    return torch.isposinf(x) if positive else torch.isneginf(x)


@operator("Selu")
def selu(call: Call, x: Tensor) -> Value:
    alpha, gamma = call.get("alpha", 1.67326319217681885), call.get("gamma", 1.05070102214813232)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("PRelu")
def prelu(call: Call, x: Tensor, slope: Tensor) -> Value:
    return torch.where(x < 0, x * slope, x)


@operator("Swish")
def swish(call: Call, x: Tensor) -> Value:
    alpha = call.get("alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("Shrink")
def shrink(call: Call, x: Tensor) -> Value:
    bias, limit = call.get("bias", 0.0), call.get("lambd", 0.5)
    zero = torch.zeros_like(x)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, zero))


@operator("Cast")
def cast(call: Call, x: Tensor) -> Value:
    dtype = _DTYPES.get(call.get("to"))
    if dtype is None:
        raise call.error(f"casts to data type {call.get('to')} are not supported")
    return x.to(dtype)


@operator("CastLike")
def cast_like(call: Call, x: Tensor, other: Tensor) -> Value:
    return x.to(other.dtype)


# ------------------------------------------------------------ reductions
def _axes(call: Call, given: Value) -> list[int] | None:
    """Return the axes of a reduction: an attribute in old opsets, an input in new ones."""
    axes = call.get("axes") if given is None else call.integers(given, "the axes")
    return list(axes) if axes is not None and len(axes) else None


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": _sum,
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: _sum(x * x, axes, keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: _sum(x, axes, keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
}


@operator(*_REDUCTIONS)
def reduction(call: Call, x: Tensor, given: Value = None) -> Value:
    axes = _axes(call, given)
    if axes is None and call.get("noop_with_empty_axes", 0):
        return x
    axes = list(range(x.dim())) if axes is None else axes
    if not axes:  # of a scalar
        return _REDUCTIONS[call.op](x.reshape(1), [0], False)
    return _REDUCTIONS[call.op](x, axes, bool(call.get("keepdims", 1)))


@operator("ArgMax", "ArgMin")
def arg_extreme(call: Call, x: Tensor) -> Value:
    axis, keep = call.get("axis", 0), bool(call.get("keepdims", 1))
    function = torch.argmax if call.op == "ArgMax" else torch.argmin
    if not call.get("select_last_index", 0):
        return function(x, axis, keepdim=keep)
    return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep)


@operator("CumSum", "CumProd")
def cumulative(call: Call, x: Tensor, given: Value) -> Value:
    (axis,) = call.integers(given, "the axis")
    x = x.flip(axis) if call.get("reverse", 0) else x
    function, neutral = (torch.cumsum, 0) if call.op == "CumSum" else (torch.cumprod, 1)
    if call.get("exclusive", 0):
        first = torch.full_like(x.narrow(axis, 0, 1), neutral)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    result = function(x, axis, dtype=x.dtype)
    return result.flip(axis) if call.get("reverse", 0) else result


@operator("Hardmax")
def hardmax(call: Call, x: Tensor) -> Value:
    axis = call.get("axis", -1)
    first = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, first, torch.ones_like(x))


@operator("TopK")
def top_k(call: Call, x: Tensor, given: Value) -> Value:
    (k,) = call.integers(given, "k")
    axis = call.get("axis", -1)
    # A stable sort, because ONNX takes the first of equal elements and torch.topk any of them.
    values, indices = torch.sort(x, stable=True, dim=axis, descending=bool(call.get("largest", 1)))
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


# ------------------------------------------------------------ shapes and indices
@operator("Reshape")
def reshape(call: Call, x: Tensor, given: Value) -> Value:
    sizes = call.integers(given, "the new shape")
    if not call.get("allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(call: Call, x: Tensor) -> Value:
    axis = call.get("axis", 1)
    axis += x.dim() if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Squeeze")
def squeeze(call: Call, x: Tensor, given: Value = None) -> Value:
    axes = _axes(call, given)
    if axes is None:
        return x.squeeze()
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        if x.shape[axis] != 1:
            raise call.error(f"axis {axis} of shape {tuple(x.shape)} is not of size 1")
        x = x.squeeze(axis)
    return x


@operator("Unsqueeze")
def unsqueeze(call: Call, x: Tensor, given: Value = None) -> Value:
    axes = _axes(call, given) or []
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Split")
def split(call: Call, x: Tensor, given: Value = None) -> Value:
    axis = call.get("axis", 0)
    if given is None:
        length = -(-x.shape[axis] // call.num_outputs)
        sizes = [length] * (call.num_outputs - 1)
        sizes.append(x.shape[axis] - sum(sizes))
    else:
        sizes = call.integers(given, "the sizes of the parts")
    return torch.split(x, sizes, axis)


@operator("Slice")
def slice_(
    call: Call, x: Tensor, starts: Value, ends: Value, axes: Value = None, steps: Value = None
) -> Value:
    first, last = call.integers(starts, "the start"), call.integers(ends, "the end")
    dims = call.integers(axes, "the axes") if axes is not None else list(range(len(first)))
    strides = call.integers(steps, "the steps") if steps is not None else [1] * len(first)
    for begin, end, dim, step in zip(first, last, dims, strides, strict=True):
        length = x.shape[dim]
        if step > 0:
            index = [slice(None)] * (dim % x.dim()) + [slice(begin, end, step)]
            x = x[tuple(index)]
        else:  # torch has no negative steps: reverse, then slice
            places = list(range(length))[slice(begin, end if end > -length - 1 else None, step)]
            x = x.index_select(dim, torch.tensor(places, device=x.device, dtype=torch.int64))
    return x


@operator("Gather")
def gather(call: Call, x: Value, indices: Value) -> Value:
    axis = call.get("axis", 0)
    x = tensor(x, indices if isinstance(indices, Tensor) else None)
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        return x.select(axis, int(indices))
    places = tensor(indices, x)
    if axis == 0 and x.dim() == 2 and isinstance(indices, Tensor):
        return F.embedding(places, x)  # an embedding table; ids are not negative
    index = (slice(None),) * (axis % x.dim()) + (places.long(),)
    return x[index]


@operator("GatherElements")
def gather_elements(call: Call, x: Tensor, indices: Tensor) -> Value:
    axis = call.get("axis", 0)
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


@operator("GatherND")
def gather_nd(call: Call, x: Tensor, indices: Tensor) -> Value:
    batch = call.get("batch_dims", 0)
    lead = []
    for i, n in enumerate(x.shape[:batch]):
        sizes = [-1 if i == j else 1 for j in range(indices.dim() - 1)]
        lead.append(torch.arange(n, device=x.device).reshape(sizes))
    return x[(*lead, *indices.unbind(-1))]


_SCATTER = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("Scatter", "ScatterElements")
def scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Value:
    axis, how = call.get("axis", 0), call.get("reduction", "none")
    places = torch.where(indices < 0, indices + x.shape[axis], indices)
    if how == "none":
        return x.scatter(axis, places, updates)
    if how == "add":
        return x.scatter_add(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _SCATTER[how], include_self=True)


@operator("ScatterND")
def scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Value:
    how = call.get("reduction", "none")
    if how in ("none", "add"):
        return torch.index_put(x, indices.unbind(-1), updates, accumulate=how == "add")
    sizes = x.shape[: indices.shape[-1]]
    flat = torch.zeros_like(indices[..., 0])
    for place, n in zip(indices.unbind(-1), sizes, strict=True):
        flat = flat * n + torch.where(place < 0, place + n, place)
    inner = x.shape[indices.shape[-1] :]
    rows = x.reshape(math.prod(sizes), -1)
    places = flat.reshape(-1, 1).expand(-1, rows.shape[1])
    values = updates.reshape(-1, rows.shape[1])
    result = rows.scatter_reduce(0, places, values, _SCATTER[how], include_self=True)
    return result.reshape(*sizes, *inner)


@operator("Expand")
def expand(call: Call, x: Tensor, given: Value) -> Value:
    sizes = call.integers(given, "the new shape")
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(sizes)))


@operator("Pad")
def pad(call: Call, x: Tensor, given: Value, value: Value = None, axes: Value = None) -> Value:
    pads = call.integers(given, "the padding")
    dims = call.integers(axes, "the axes") if axes is not None else list(range(x.dim()))
    half, mode = len(pads) // 2, call.get("mode", "constant")
    fill = 0.0 if value is None else call.known(value, "the padded value").item()
    for axis, before, after in zip(dims, pads[:half], pads[half:], strict=True):
        dim = axis % x.dim()
        if mode == "constant" or min(before, after) < 0:
            around = [0, 0] * (x.dim() - 1 - dim) + [before, after]
            x = F.pad(x, around, value=fill)
        elif before or after:
            n = x.shape[dim]
            places = np.pad(np.arange(n), (before, after), mode=mode)
            x = x.index_select(dim, tensor(places, x))
    return x


@operator("DepthToSpace")
def depth_to_space(call: Call, x: Tensor) -> Value:
    n, c, h, w = x.shape
    block = call.get("blocksize")
    if call.get("mode", "DCR") == "DCR":
        x = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(n, c // block**2, h * block, w * block)


@operator("SpaceToDepth")
def space_to_depth(call: Call, x: Tensor) -> Value:
    n, c, h, w = x.shape
    block = call.get("blocksize")
    x = x.reshape(n, c, h // block, block, w // block, block)
    x = x.permute((0, 3, 5, 1, 2, 4) if call.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4))
    return x.reshape(n, c * block**2, h // block, w // block)


@operator("Constant")
def constant(call: Call) -> Value:
    for name, value in call.attributes.items():
        if name == "value":
            return np.asarray(value)
        kind = np.float32 if name.startswith("value_float") else np.int64
        return np.array(value, kind)
    raise call.error("a constant without a value")


@operator("ConstantOfShape")
def constant_of_shape(call: Call, given: Value) -> Value:
    value = call.get("value", np.zeros(1, np.float32))
    return torch.full(call.integers(given, "the shape"), value.item(), dtype=tensor(value).dtype)


@operator("Range")
def range_(call: Call, start: Value, limit: Value, delta: Value) -> Value:
    raise call.error("the length of a range depends on the values of tensors")


@operator("OneHot")
def one_hot(call: Call, indices: Tensor, depth: Value, values: Value) -> Value:
    (number,) = call.integers(depth, "the depth")
    off, on = tensors(*tensor(values, indices).unbind(0))
    axis = call.get("axis", -1)
    places = indices.long()
    classes = torch.arange(number, device=indices.device)
    axis += indices.dim() + 1 if axis < 0 else 0
    classes = classes.reshape([-1 if i == axis else 1 for i in range(indices.dim() + 1)])
    hit = torch.where(places < 0, places + number, places).unsqueeze(axis) == classes
    return torch.where(hit, on, off)


@operator("Trilu")
def trilu(call: Call, x: Tensor, given: Value = None) -> Value:
    (k,) = call.integers(given, "the diagonal") if given is not None else (0,)
    return torch.triu(x, k) if call.get("upper", 1) else torch.tril(x, k)


@operator("EyeLike")
def eye_like(call: Call, x: Tensor) -> Value:
    dtype = _DTYPES[call.get("dtype")] if call.get("dtype") else x.dtype
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return (rows[:, None] + call.get("k", 0) == columns).to(dtype)


@operator("Compress")
def compress(call: Call, x: Tensor, condition: Value) -> Value:
    axis = call.get("axis")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    places = np.flatnonzero(call.known(condition, "the condition"))
    return x.index_select(axis, tensor(places, x))


@operator("ReverseSequence")
def reverse_sequence(call: Call, x: Tensor, lengths: Value) -> Value:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    steps = torch.arange(x.shape[time], device=x.device)
    ends = tensor(lengths, x)[:, None]
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # batch, time
    x = x.movedim((batch, time), (0, 1))
    x = x.gather(1, places.reshape(*places.shape, *[1] * (x.dim() - 2)).expand(x.shape))
    return x.movedim((0, 1), (batch, time))


# ------------------------------------------------------------ random numbers
@operator("RandomNormalLike", "RandomUniformLike", "Bernoulli")
def random_like(call: Call, x: Tensor) -> Value:
    dtype = _DTYPES[call.get("dtype")] if call.get("dtype") else x.dtype
    if call.op == "Bernoulli":
        return torch.bernoulli(x).to(dtype)
    if call.op == "RandomNormalLike":
        noise = torch.randn_like(x, dtype=dtype)
        return noise * call.get("scale", 1.0) + call.get("mean", 0.0)
    low, high = call.get("low", 0.0), call.get("high", 1.0)
    return torch.rand_like(x, dtype=dtype) * (high - low) + low


@operator("RandomNormal", "RandomUniform")
def random_new(call: Call) -> Value:
    zeros = torch.zeros(call.get("shape"), dtype=_DTYPES[call.get("dtype", 1)])
    return random_like(replace(call, op=f"{call.op}Like"), zeros)


# ------------------------------------------------------------ sequences and control flow
@operator("SequenceInsert")
def sequence_insert(
    call: Call, sequence: list[Value], value: Value, position: Value = None
) -> Value:
    place = len(sequence) if position is None else int(call.known(position, "the position"))
    return [*sequence[:place], value, *sequence[place:]]


@operator("SplitToSequence")
def split_to_sequence(call: Call, x: Tensor, given: Value = None) -> Value:
    axis = call.get("axis", 0)
    if given is None:
        parts = list(torch.split(x, 1, axis))
        return parts if call.get("keepdims", 1) else [p.squeeze(axis) for p in parts]
    sizes = call.known(given, "the sizes of the parts")
    return list(torch.split(x, int(sizes) if sizes.ndim == 0 else [int(n) for n in sizes], axis))


@operator("ConcatFromSequence")
def concat_from_sequence(call: Call, sequence: list[Value]) -> Value:
    parts, axis = tensors(*sequence), call.get("axis")
    return torch.stack(parts, axis) if call.get("new_axis", 0) else torch.cat(parts, axis)


@operator("If")
def if_(call: Call, condition: Value, *, outer: Mapping[str, Value]) -> Value:
    taken = bool(call.known(condition, "the condition"))
    body = call.get("then_branch" if taken else "else_branch")
    return tuple(call.module.run_body(body, (), outer))


@operator("Loop")
def loop(
    call: Call, trips: Value, condition: Value, *state: Value, outer: Mapping[str, Value]
) -> Value:
    if trips is None:
        raise call.error("a loop without a number of iterations is not supported")
    body, carried = call.get("body"), list(state)
    collected: list[Sequence[Value]] = []
    goes_on = condition is None or bool(call.known(condition, "the condition"))
    for trip in range(int(call.known(trips, "the number of iterations"))):
        if not goes_on:
            break
        arguments = (np.array(trip, np.int64), np.array(True), *carried)
        again, *results = call.module.run_body(body, arguments, outer)
        goes_on = bool(call.known(again, "the condition"))
        carried, scanned = results[: len(carried)], results[len(carried) :]
        collected.append(scanned)
    return (*carried, *map(_stack, zip(*collected, strict=True)))


@operator("Scan")
def scan(call: Call, *values: Value, outer: Mapping[str, Value]) -> Value:
    body, number = call.get("body"), call.get("num_scan_inputs")
    carried, scanned = list(values[:-number]), tensors(*values[-number:])
    axes = call.get("scan_input_axes") or [0] * number
    backwards = call.get("scan_input_directions") or [0] * number
    length = scanned[0].shape[axes[0]]
    collected: list[Sequence[Value]] = []
    for step in range(length):
        pieces = [
            x.select(axis, length - 1 - step if flip else step)
            for x, axis, flip in zip(scanned, axes, backwards, strict=True)
        ]
        results = call.module.run_body(body, (*carried, *pieces), outer)
        carried, outputs = results[: len(carried)], results[len(carried) :]
        collected.append(outputs)
    columns = list(zip(*collected, strict=True))
    out_axes = call.get("scan_output_axes") or [0] * len(columns)
    flips = call.get("scan_output_directions") or [0] * len(columns)
    stacks = (
        _stack(items[::-1] if flip else items, axis)
        for items, axis, flip in zip(columns, out_axes, flips, strict=True)
    )
    return (*carried, *stacks)


def _stack(items: Sequence[Value], axis: int = 0) -> Value:
    if all(isinstance(item, np.ndarray) for item in items):
        return np.stack(items, axis)
    return torch.stack(tensors(*items), axis)
