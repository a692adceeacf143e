"""Identify a local call by all that its cost depends on, and run calls on meta tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwise.ir import Ref, TensorType, format_arg
from shardwise.runtime.operators import widened
from shardwise.sharding.rule import MeshAxis

_IGNORED = frozenset({"key"})  # names the source of random numbers


@dataclass(slots=True, kw_only=True, eq=False)
class Signature:
    """One local call; calls of different layers with the same cost are equal."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    firsts: tuple[int, ...]  # for every operand, the first one that is the same value
    types: tuple[TensorType, ...]
    grads: frozenset[int]
    parameters: frozenset[int]
    results: tuple[TensorType, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    autocast: tuple[str, torch.dtype, bool] | None
    function: Callable[..., Any] | None
    device: str  # "cuda" or "cpu": some operators are one kernel on CUDA, several on a CPU
    key: tuple[Any, ...]
    _hash: int

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.key == other.key

    def __str__(self) -> str:
        """`aten.add.Tensor(float32[4, 8], float32[8]) grads 0,1 parameters 1`."""
        count = iter(range(len(self.firsts)))
        arguments = [_text(a, self, count) for a in self.args]
        arguments += [f"{k}={_text(v, self, count)}" for k, v in self.kwargs]
        text = f"{self.op}({', '.join(arguments)})"
        for name, positions in (("grads", self.grads), ("parameters", self.parameters)):
            if positions:
                text += f" {name} {','.join(map(str, sorted(positions)))}"
        if any(self.strides):
            text += f" strides {format_arg(self.strides)}"
        if self.autocast is not None:
            text += f" autocast {format_arg(self.autocast)}"
        return text


def call_signature(
    op: str,
    args: tuple[Any, ...],
    kwargs: Sequence[tuple[str, Any]] = (),
    types: Sequence[TensorType] = (),
    grads: frozenset[int] = frozenset(),
    parameters: frozenset[int] = frozenset(),
    *,
    results: Sequence[TensorType] = (),
    strides: Sequence[tuple[int, ...] | None] = (),
    autocast: tuple[str, torch.dtype, bool] | None = None,
    function: Callable[..., Any] | None = None,
    device: str = "cuda",
) -> Signature:
    """Return the signature of a call; operands with the same name are one tensor.

    `types`, `grads` and `parameters` refer to the positions of `Ref`s in `args` and `kwargs`,
    including repeats. `results` are the local types of the results, if known; random numbers and
    calls that cannot run on meta tensors need them. `strides` are those of operands that are not
    contiguous. `function` runs an `op` that is not registered.
    """
    pairs = tuple(kwargs)
    if pairs and op.startswith("rt."):
        pairs = tuple(pair for pair in pairs if pair[0] not in _IGNORED)
    names: dict[str, int] = {}
    firsts: list[int] = []
    frozen = _freeze(args, names, firsts), _freeze(pairs, names, firsts)
    if len(firsts) != len(types):
        raise ValueError(f"{op} has {len(firsts)} tensor operands, got {len(types)} types")
    fields = {
        "firsts": tuple(firsts),
        "types": tuple(types),
        "grads": grads,
        "parameters": parameters & grads,
        "results": tuple(results),
        "strides": tuple(strides) or (None,) * len(firsts),
        "autocast": autocast,
        "function": function,
        "device": device,
    }
    key = (op, frozen, *fields.values())
    return Signature(op=op, args=args, kwargs=pairs, **fields, key=key, _hash=hash(key))  # type: ignore[arg-type]


def _freeze(arg: Any, names: dict[str, int], firsts: list[int]) -> Any:
    """Return a hashable value without names, in which 1, 1.0 and True differ."""
    if isinstance(arg, Ref):
        firsts.append(names.setdefault(arg.name, len(firsts)))
        return Ref
    if isinstance(arg, tuple | list):
        return tuple([_freeze(item, names, firsts) for item in arg])
    if isinstance(arg, float | bool | complex):
        return (type(arg), repr(arg))
    return arg


def _text(arg: Any, signature: Signature, count: Any) -> str:
    if isinstance(arg, Ref):
        position = next(count)
        first = signature.firsts[position]
        kind = str(signature.types[position])
        return kind if first == position else f"{kind}=%{first}"
    if isinstance(arg, tuple | list):
        return "[" + ", ".join(_text(item, signature, count) for item in arg) + "]"
    if isinstance(arg, MeshAxis):
        return ".".join(arg.names)
    return format_arg(arg)


# ------------------------------------------------------------ calls on meta tensors
#
# torch computes the shapes of many operators in Python, at 0.2 to 5 ms a call. For elementwise
# operators that is needed once per combination of dtypes, as the shape is the broadcast one.


broadcast_shapes: Callable[..., torch.Size] = torch.broadcast_shapes  # torch leaves it untyped
_PLAIN = (int, float, bool, complex, str, torch.dtype, type(None))


def call_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)` for meta tensors."""
    if func is torch.ops.aten.native_layer_norm.default:
        return _layer_norm(*args)
    key = _types(func, args, kwargs) if is_elementwise(func) else None
    if key is not None and key in _DTYPES:
        return _broadcast(args, _DTYPES[key])
    result = func(*args, **kwargs)
    if key is not None:
        _DTYPES[key] = result.dtype
    return result


@cache
def is_elementwise(func: Any) -> bool:
    """Return whether the result is one new tensor of the operands' broadcast shape."""
    schema = func._schema
    return (
        torch.Tag.pointwise in func.tags
        and len(schema.returns) == 1
        and not schema.is_mutable
        and not func.is_view
        and not any(a.name in ("memory_format", "layout") for a in schema.arguments)
    )


_DTYPES: dict[tuple[Any, ...], torch.dtype] = {}  # of results, by the types of operands


def _types(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that determines the result's dtype; None for arguments of other types."""
    key: list[Any] = [func]
    for name, arg in (*enumerate(args), *kwargs.items()):
        if isinstance(arg, Tensor) and isinstance(name, int):
            key.append((arg.dtype, arg.dim() == 0))
        elif isinstance(arg, _PLAIN):
            key.append((name, arg if isinstance(arg, torch.dtype | str) else type(arg)))
        else:
            return None
    return tuple(key)


def _broadcast(args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    operands = [a for a in args if isinstance(a, Tensor)]
    shape = operands[0].shape
    if any(t.shape != shape for t in operands[1:]):
        shape = broadcast_shapes(*(t.shape for t in operands))
    for tensor in operands:
        if tensor.shape == shape:
            return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer_norm(x: Tensor, shape: Any, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results on a GPU: there, unlike in torch's meta kernel, statistics are wide."""
    size = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    mean = torch.empty(size, dtype=widened(x.dtype), device="meta")
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    return result, mean, torch.empty_like(mean)


# ------------------------------------------------------------ autocast
#
# torch does not cast meta tensors, so this module casts the operands of a call.


_LOWER = {
    "__matmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "attention", "einsum", "gru", "linear", "lstm", "matmul", "mm", "mv",
    "prelu", "scaled_dot_product_attention",
}  # fmt: skip
_FLOAT32_CPU = {
    "avg_pool3d", "binary_cross_entropy", "cdist", "cosine_embedding_loss", "cross_entropy",
    "cross_entropy_loss", "grid_sampler", "hinge_embedding_loss", "huber_loss", "kl_div",
    "l1_loss", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "nll_loss",
    "nll_loss_nd", "poisson_nll_loss", "prod", "smooth_l1_loss", "soft_margin_loss",
    "triplet_margin_loss",
}  # fmt: skip
_FLOAT32_CUDA = {
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cross_entropy", "cross_entropy_loss", "cumprod", "cumsum", "dist",
    "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss",
    "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "margin_ranking_loss",
    "mse_loss", "nll_loss", "norm", "pow", "prod", "reciprocal", "rsqrt", "sinh",
    "smooth_l1_loss", "softmax", "softplus", "sum", "tan", "triplet_margin_loss",
}  # fmt: skip

Region = tuple[str, torch.dtype, bool]


def under_autocast(
    op: str, function: Callable[..., Any], region: Region | None
) -> Callable[..., Any]:
    """Return `function` as it runs inside an autocast region."""
    if region is None or not region[2]:
        return function
    name = op.split(".")[1] if "." in op else op
    if name in _LOWER:
        target = region[1]
    elif name in (_FLOAT32_CPU if region[0] == "cpu" else _FLOAT32_CUDA):
        target = torch.float32
    else:
        return function

    def cast(operand: Tensor) -> Tensor:
        is_cast = operand.dtype.is_floating_point and operand.dtype != torch.float64
        return operand.to(target) if is_cast else operand

    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        cast_args, cast_kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return function(*cast_args, **cast_kwargs)

    return cast_and_call
