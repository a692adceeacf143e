"""Normalize traced calls: no devices, no-ops or tracing artefacts, and nothing in place.

`RULES` maps an operator to a function that returns its normalized result, or None to append the
call as it is. `convert` replaces in-place operators by their functional counterparts.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.frontend.builder import (
    Alias,
    Builder,
    NotFunctional,
    append_call,
    fitted,
    refs,
    tensor_type,
)
from shardwise.ir import Ref, TensorType

Rule = Callable[[Builder, Any, tuple[Any, ...], dict[str, Any]], Any]
BATCH_NORM = "shardwise.batch_norm.default"
_PLACEMENT = ("device", "layout", "pin_memory")


def _call(builder: Builder, op: str, value: Any, args: tuple[Any, ...], **kwargs: Any) -> Any:
    return append_call(builder, op, value, args, kwargs)


def _type(builder: Builder, alias: Alias) -> TensorType:
    return builder.types[builder.read(alias)]


def _dropped_if(is_noop: Callable[[Builder, Any, tuple[Any, ...]], bool]) -> Rule:
    """Drop calls that return their first argument unchanged."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return builder.same(value, args[0]) if is_noop(builder, value, args) else None

    return rule


def _keeps_type(builder: Builder, value: Any, args: tuple[Any, ...]) -> bool:
    return _type(builder, args[0]) == tensor_type(value)


def _shares_memory(builder: Builder, value: Any, args: tuple[Any, ...]) -> bool:
    return builder.storages.get(value.untyped_storage()._cdata) is args[0].storage


def _cast(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write `to`, `type_as`, `_to_copy`… as a cast, or as nothing."""
    if _type(builder, args[0]).dtype == value.dtype:
        return builder.same(value, args[0])
    return _call(builder, "aten.to.dtype", value, (args[0], value.dtype))


def _factory(op: str) -> Rule:
    """Write `zeros`, `arange`… without placement and with an explicit dtype."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {k: v for k, v in kwargs.items() if k not in _PLACEMENT and v is not None}
        if value.dtype.is_floating_point or value.dtype.is_complex or "dtype" in named:
            named["dtype"] = value.dtype
        return _call(builder, op, value, args, **named)

    return rule


def _like(op: str) -> Rule:
    """Write `zeros_like`, `new_ones`… without placement, and with a dtype only if it differs."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dropped = (*_PLACEMENT, "memory_format", "dtype")
        named = {k: v for k, v in kwargs.items() if k not in dropped}
        if value.dtype != _type(builder, args[0]).dtype:
            named["dtype"] = value.dtype
        return _call(builder, op, value, args, **named)

    return rule


def _sized(op: str) -> Rule:
    """Write `expand_as`, `view_as`… with a size instead of the other tensor."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if _keeps_type(builder, value, args):
            return builder.same(value, args[0])
        return _call(builder, op, value, (args[0], tensor_type(value).shape))

    return rule


def _cat(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Drop the empty tensors that a cache starts from."""
    parts = tuple(a for a in args[0] if _type(builder, a).shape != (0,))
    if len(parts) == len(args[0]) or {_type(builder, a).dtype for a in parts} != {value.dtype}:
        return None
    if len(parts) == 1:
        return builder.track(builder.read(parts[0]), value, None)
    return _call(builder, "aten.cat.default", value, (parts, *args[1:]), **kwargs)


def _batch_norm(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Write batch norm in training as one node whose further results are the new statistics."""
    data, weight, bias, mean, variance, training, momentum, eps, *_ = args
    if not training:
        return None
    statistics = [alias for alias in (mean, variance) if alias is not None]
    operands = refs(builder, (data, weight, bias, mean, variance))
    types = (tensor_type(value), *(_type(builder, a) for a in statistics))
    outputs = builder.emit(BATCH_NORM, (*operands, momentum, eps), types)
    for alias, name in zip(statistics, outputs[1:], strict=True):
        builder.differentiable.discard(name)
        builder.write(alias, name)
    return builder.track(outputs[0], value, None)


def _functional_batch_norm(builder: Builder, value: Any, args: Any, kwargs: Any) -> Any:
    """Write the same node for torch's functional form: (out, mean, rstd, new mean, new var)."""
    *tensors, training, momentum, eps = args
    if not training:
        return None
    values = (value[0], value[3], value[4])
    operands = (*refs(builder, tensors), momentum, eps)
    names = builder.emit(BATCH_NORM, operands, tuple(map(tensor_type, values)))
    builder.differentiable.difference_update(names[1:])
    out, new_mean, new_variance = (
        builder.track(name, v, None) for name, v in zip(names, values, strict=True)
    )
    return (out, None, None, new_mean, new_variance)


def _instance_norm(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if args[3] is not None and args[5]:
        raise CaptureError(
            "instance norm with running statistics is not supported in training",
            where=builder.region.source or None,
            hint="track_running_stats=False",
        )
    return None


def _copy(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Replace functional `copy`, which has no derivative, by its source, cast and broadcast."""
    return builder.track(fitted(builder, builder.read(args[1]), tensor_type(value)), value, None)


def _strided_scatter(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Refuse it where gradients flow: torch's derivative is wrong (2.13)."""
    if any(builder.read(alias) in builder.differentiable for alias in args[:2]):
        raise CaptureError(
            "forward writes in place through as_strided, or a view that torch expresses by it",
            where=builder.region.source or None,
            hint="write through slices, or compute a new tensor",
        )
    return None


def strided(builder: Builder, node: fx.Node, alias: Alias) -> Alias:
    """Write `as_strided`, which reads memory, as a selection of elements.

    Generated code may hold the same tensor in another order of memory. Leading dims that stay as
    they are can be sharded.
    """
    source, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    order = sorted(range(source.dim()), key=lambda d: (-source.stride(d), d))
    held, start = source.permute(order), value.storage_offset() - source.storage_offset()
    ends = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    if not held.is_contiguous() or start < 0 or start + ends >= held.numel():
        raise CaptureError(
            "as_strided reads memory outside of its tensor",
            where=builder.region.source or None,
            hint="call it on x.contiguous(), or use x.unfold(dim, size, step)",
        )
    own, new = (tuple(zip(t.shape, t.stride(), strict=True)) for t in (held, value))
    kept = 0
    while kept < min(len(own), len(new)) - 1 and own[kept] == new[kept] and not start:
        kept += 1
    rows, size = value.shape[:kept], held[(0,) * kept].numel()

    def emit(op: str, shape: Sequence[int], *args: Any, dtype: torch.dtype = torch.int64) -> Ref:
        return Ref(builder.emit(f"aten.{op}", args, (TensorType(tuple(shape), dtype),))[0])

    tensor, dtype = Ref(builder.read(alias)), value.dtype
    if order != sorted(order):
        tensor = emit("permute.default", held.shape, tensor, tuple(order), dtype=dtype)
    tensor = emit("reshape.default", (*rows, size), tensor, (*rows, size), dtype=dtype)
    rest, steps = value.shape[kept:], value.stride()[kept:]
    index = emit("arange.default", (size,), size)
    index = emit("as_strided.default", rest, index, tuple(rest), tuple(steps), start)
    index = emit("reshape.default", (rest.numel(),), index, (rest.numel(),))
    tensor = emit("index_select.default", (*rows, rest.numel()), tensor, kept, index, dtype=dtype)
    result = emit("reshape.default", value.shape, tensor, tuple(value.shape), dtype=dtype)
    return builder.track(result.name, value, None)


def _constant(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Replace the copy of a literal by the constant; writes go to the copy's own memory."""
    return builder.track(builder.read(args[0]), value, None)


def _broadcast(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Write `broadcast_tensors` as one `expand` for each tensor that changes."""
    expand = _sized("aten.expand.default")
    return tuple(expand(builder, v, (a,), {}) for a, v in zip(args[0], value, strict=True))


def _slice(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Drop a slice of everything; give others an explicit start, which symbolic sizes omit."""
    if _keeps_type(builder, value, args):
        return builder.same(value, args[0])
    if kwargs or len(args) < 3 or args[2] is not None:
        return None
    return _call(builder, "aten.slice.Tensor", value, (*args[:2], 0, *args[3:]))


def _neutral(number: int) -> Rule:
    """Drop `x + 0` and `x * 1`."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        is_noop = not kwargs and not isinstance(args[1], Alias) and args[1] == number
        if is_noop and isinstance(args[0], Alias) and _keeps_type(builder, value, args):
            return builder.same(value, args[0])
        return None

    return rule


RULES: dict[str, Rule] = {
    "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit_functional.default": _functional_batch_norm,
    "aten.instance_norm.default": _instance_norm,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.add.Tensor": _neutral(0),
    "aten.mul.Tensor": _neutral(1),
    "aten.copy.default": _copy,
    "aten.as_strided_scatter.default": _strided_scatter,
    "aten.slice.Tensor": _slice,
    "aten.contiguous.default": _dropped_if(_shares_memory),
    "aten.detach.default": _dropped_if(lambda b, _, args: b.read(args[0]) not in b.differentiable),
    "aten.lift_fresh_copy.default": _constant,
    "aten.expand_as.default": _sized("aten.expand.default"),
    "aten.broadcast_to.default": _sized("aten.expand.default"),
    "aten.view_as.default": _sized("aten.view.default"),
    "aten.reshape_as.default": _sized("aten.reshape.default"),
}
for _name in ("alias.default", "lift_fresh.default", "lift.default", "positive.default"):
    RULES[f"aten.{_name}"] = _dropped_if(lambda *_: True)
for _name in (
    *("expand.default", "view.default", "reshape.default", "flatten.using_ints"),
    *("squeeze.dim", "squeeze.default", "squeeze.dims", "_unsafe_view.default"),
):
    RULES[f"aten.{_name}"] = _dropped_if(_keeps_type)
for _name in ("cat.default", "concat.default", "concatenate.default"):
    RULES[f"aten.{_name}"] = _cat
for _name in (
    *("to.dtype", "to.dtype_layout", "to.device", "to.other", "to.prim_Device", "to.prim_dtype"),
    *("to.prim_other", "type_as.default", "_to_copy.default", "float.default"),
):
    RULES[f"aten.{_name}"] = _cast
for _name in ("dropout.default", "feature_dropout.default", "alpha_dropout.default"):
    RULES[f"aten.{_name}"] = _dropped_if(lambda _, __, args: not _drops(args))
for _name in (
    *("zeros.default", "ones.default", "full.default", "empty.memory_format", "eye.default"),
    *("eye.m", "arange.default", "arange.start", "arange.start_step", "linspace.default"),
    *("rand.default", "randn.default", "randint.default", "randint.low", "scalar_tensor.default"),
    *("tril_indices.default", "triu_indices.default", "logspace.default", "randperm.default"),
    *("hann_window.default", "hamming_window.default", "linspace.Tensor_Tensor"),
):
    RULES[f"aten.{_name}"] = _factory(f"aten.{_name}")
for _name in (
    *("zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default"),
    *("rand_like.default", "randn_like.default", "new_zeros.default", "new_ones.default"),
    *("new_full.default", "new_empty.default", "randint_like.default"),
):
    RULES[f"aten.{_name}"] = _like(f"aten.{_name}")


# ---------------------------------------------------------------- in-place operators
_VIEWS = {"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_"}
_REFUSED = {"resize_", "set_", "as_strided_", "resize_as_"}


def convert(builder: Builder, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert one in-place call; return the alias of the tensor that it changes."""
    target: Any = node.target
    name, overload = target._schema.name.split("::")[1], target._overloadname
    written = [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    functional = _functional_name(name)
    if written == ["out"] and isinstance(kwargs.get("out"), Alias):
        return _compute_into(builder, target, args, dict(kwargs))
    if len(written) != 1 or functional is None or not isinstance(args[0], Alias):
        raise NotFunctional(f"{target} writes to {', '.join(written)}")
    alias = args[0]
    if name in _REFUSED:
        raise CaptureError(f"{name} changes a tensor's memory", where=builder.region.source)
    value = node.meta["val"]
    if name in _VIEWS:
        return append_call(builder, f"aten.{functional}.{overload}", value, args, kwargs)
    own = Ref(builder.read(alias))
    if name == "detach_":
        if own.name in builder.differentiable:
            _store(builder, alias, "aten.detach.default", (own,))
    elif name == "copy_":
        builder.write(alias, _copied(builder, alias, args[1]))
    elif name == "zero_" and own.name in builder.differentiable:  # its gradient is zeros, not None
        _store(builder, alias, "aten.fill.Scalar", (own, 0))
    elif name == "zero_":
        _store(builder, alias, "aten.zeros_like.default", (own,))
    elif name not in ("dropout_", "feature_dropout_", "alpha_dropout_") or _drops(args):
        _compute(builder, node, functional, args, kwargs)
    return alias


def _compute(
    builder: Builder, node: fx.Node, functional: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call the functional operator and cast its result to the overwritten tensor's dtype."""
    target: Any = node.target
    packet = getattr(getattr(torch.ops, target.namespace), functional, None)
    operator = getattr(packet, target._overloadname, None)
    if operator is None:
        raise NotFunctional(f"{target} has no functional counterpart")
    plain, named = refs(builder, args), {k: refs(builder, v) for k, v in kwargs.items()}
    if functional == "fill" and isinstance(plain[1], Ref):
        data = builder.constants.get(plain[1].name)
        if data is not None and data.numel() == 1:  # `x[...] = 3.0` is traced with a lifted tensor
            operator, plain = torch.ops.aten.fill.Scalar, (plain[0], data.item(), *plain[2:])
    own = builder.types[plain[0].name]
    type_ = _result_type(operator, node, own)
    (name,) = builder.emit(str(operator), plain, (type_,), tuple(sorted(named.items())))
    if type_.dtype != own.dtype:
        (name,) = builder.emit("aten.to.dtype", (Ref(name), own.dtype), (own,))
    if type_.shape != own.shape:
        raise NotFunctional(f"{target} changes the shape")
    builder.write(args[0], name)


def _compute_into(
    builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Alias:
    """Convert `op(..., out=tensor)`: call the overload that returns its result, and write it."""
    alias: Alias = kwargs.pop("out")
    packet = target.overloadpacket

    def arguments(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if a.name != "out"]

    others = [getattr(packet, name) for name in packet.overloads()]
    others = [o for o in others if o is not target and not o._schema.is_mutable]
    operator = next((o for o in others if arguments(o) == arguments(target)), None)
    if operator is None:
        raise NotFunctional(f"{target} has no functional counterpart")
    own = _type(builder, alias)
    plain, named = refs(builder, args), {k: refs(builder, v) for k, v in kwargs.items()}
    (name,) = builder.emit(str(operator), plain, (own,), tuple(sorted(named.items())))
    builder.write(alias, name)
    return alias


def _result_type(
    operator: torch._ops.OpOverload[Any, Any], node: fx.Node, own: TensorType
) -> TensorType:
    """Return the functional result's type: that of the overwritten tensor unless dtypes differ."""
    values = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    leaves = pytree.tree_leaves(values)
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    numbers = [v for v in leaves if isinstance(v, float) and not own.dtype.is_floating_point]
    if all(t.dtype == own.dtype for t in tensors) and not numbers:
        return own
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    with getattr(tensors[0], "fake_mode", contextlib.nullcontext()):
        return tensor_type(operator(*values, **kwargs))


def _copied(builder: Builder, alias: Alias, source: Any) -> str:
    """Return the source of a `copy_`, broadcast and cast to the tensor that it overwrites."""
    if not isinstance(source, Alias):
        raise NotFunctional("copy_ of a number")
    own = _type(builder, alias)
    name = builder.read(source)
    if not builder.region.grad_enabled and name in builder.differentiable:
        (name,) = builder.emit("aten.detach.default", (Ref(name),), (builder.types[name],))
    name = fitted(builder, name, own)
    if alias.view is None and builder.read(alias) in builder.differentiable:
        # The overwritten value keeps a gradient, of zeros: autograd would not return None.
        (zeros,) = builder.emit("aten.fill.Scalar", (Ref(builder.read(alias)), 0), (own,))
        (name,) = builder.emit("aten.add.Tensor", (Ref(zeros), Ref(name)), (own,))
    return name


def _store(builder: Builder, alias: Alias, op: str, args: tuple[Any, ...]) -> None:
    (name,) = builder.emit(op, args, (_type(builder, alias),))
    builder.write(alias, name)


def _drops(args: tuple[Any, ...]) -> bool:
    return bool(args[1] > 0 and args[2])


def _functional_name(name: str) -> str | None:
    """Return `add` for `add_`, `__or__` for `__ior__`; None for an op that is not in place."""
    if name.startswith("__i") and name.endswith("__"):
        return "__" + name[3:]
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return None
