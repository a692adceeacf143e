"""Calls written in one plain way: no devices, no no-ops, no tracing artefacts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardwise.errors import CaptureError
from shardwise.frontend.aliasing import Alias, NotFunctional
from shardwise.frontend.builder import Builder, append_call, fitted, refs, tensor_type
from shardwise.ir import Ref, TensorType

Rule = Callable[[Builder, Any, tuple[Any, ...], dict[str, Any]], Any]
BATCH_NORM = "shardwise.batch_norm.default"
_PLACEMENT = ("device", "layout", "pin_memory")


def _call(builder: Builder, op: str, value: Any, args: tuple[Any, ...], **kwargs: Any) -> Any:
    return append_call(builder, op, value, args, kwargs)


def _cast(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`to`, `type_as`, `_to_copy`…: a cast, or nothing."""
    own = builder.types[builder.read(args[0])]
    if own.dtype == value.dtype:
        return builder.same(value, args[0])
    return _call(builder, "aten.to.dtype", value, (args[0], value.dtype))


def _contiguous(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Nothing, when memory is shared: it was contiguous already."""
    if builder.storages.get(value.untyped_storage()._cdata) is args[0].storage:
        return builder.same(value, args[0])
    return None


def _identity(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return builder.same(value, args[0])


def _detach(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if builder.read(args[0]) in builder.differentiable:
        return None
    return builder.same(value, args[0])


def _dropout(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return None if args[1] > 0 and args[2] else builder.same(value, args[0])


def _factory(op: str) -> Rule:
    """`zeros`, `arange`…: without placement, with an explicit dtype."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = {k: v for k, v in kwargs.items() if k not in _PLACEMENT and v is not None}
        if value.dtype.is_floating_point or value.dtype.is_complex or "dtype" in kept:
            kept["dtype"] = value.dtype
        return _call(builder, op, value, args, **kept)

    return rule


def _like(op: str) -> Rule:
    """`zeros_like`, `new_ones`…: without placement, the dtype only where it differs."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dropped = (*_PLACEMENT, "memory_format", "dtype")
        kept = {k: v for k, v in kwargs.items() if k not in dropped}
        if value.dtype != builder.types[builder.read(args[0])].dtype:
            kept["dtype"] = value.dtype
        return _call(builder, op, value, args, **kept)

    return rule


def _sized(op: str) -> Rule:
    """`expand_as`, `view_as`…: the size instead of the other tensor."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        type_ = tensor_type(value)
        if builder.types[builder.read(args[0])] == type_:
            return builder.same(value, args[0])
        return _call(builder, op, value, (args[0], type_.shape))

    return rule


def _cat(op: str) -> Rule:
    """Without the empty tensors that a cache starts from."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        parts = tuple(a for a in args[0] if builder.types[builder.read(a)].shape != (0,))
        if len(parts) == len(args[0]) or not parts:
            return None
        dtypes = {builder.types[builder.read(a)].dtype for a in parts}
        if dtypes != {value.dtype}:
            return None
        if len(parts) == 1:
            return builder.track(builder.read(parts[0]), value, None)
        return _call(builder, op, value, (parts, *args[1:]), **kwargs)

    return rule


def _batch_norm(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """In training one node with the new running statistics as further results."""
    data, weight, bias, mean, variance, training, momentum, eps, *_ = args
    if not training:
        return None
    return _update_statistics(builder, value, data, weight, bias, mean, variance, momentum, eps)


def _update_statistics(
    builder: Builder,
    value: torch.Tensor,
    data: Alias,
    weight: Alias | None,
    bias: Alias | None,
    mean: Alias | None,
    variance: Alias | None,
    momentum: float,
    eps: float,
) -> Alias:
    statistics = [alias for alias in (mean, variance) if alias is not None]
    operands = tuple(
        None if a is None else Ref(builder.read(a)) for a in (data, weight, bias, mean, variance)
    )
    types = [tensor_type(value), *(builder.types[builder.read(a)] for a in statistics)]
    outputs = builder.emit(BATCH_NORM, (*operands, momentum, eps), tuple(types))
    for alias, name in zip(statistics, outputs[1:], strict=True):
        builder.differentiable.discard(name)
        builder.write(alias, name)
    return builder.track(outputs[0], value, None)


def _functional_batch_norm(builder: Builder, value: Any, args: Any, kwargs: Any) -> Any:
    """Return the same node from torch's own functionalization: (out, mean, rstd, new mean, new
    var).
    """
    data, weight, bias, mean, variance, training, momentum, eps = args
    if not training:
        return None
    plain = tuple(
        None if a is None else Ref(builder.read(a)) for a in (data, weight, bias, mean, variance)
    )
    values = (value[0], value[3], value[4])
    types = tuple(map(tensor_type, values))
    out, new_mean, new_variance = builder.emit(BATCH_NORM, (*plain, momentum, eps), types)
    builder.differentiable -= {new_mean, new_variance}
    tracked = [
        builder.track(name, v, None)
        for name, v in zip((out, new_mean, new_variance), values, strict=True)
    ]
    return (tracked[0], None, None, tracked[1], tracked[2])


def _instance_norm(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if args[3] is not None and args[5]:
        raise CaptureError(
            "instance norm with running statistics is not supported in training",
            where=builder.region.origin.source or None,
            hint="track_running_stats=False",
        )
    return None


def _copy(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Functional `copy`, which has no derivative: its source, cast and broadcast."""
    return builder.track(fitted(builder, builder.read(args[1]), tensor_type(value)), value, None)


def _strided_scatter(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Only without gradients: torch's derivative of it is wrong (2.13)."""
    if any(builder.read(alias) in builder.differentiable for alias in args[:2]):
        raise CaptureError(
            "forward writes in place through as_strided, or a view that torch expresses by it",
            where=builder.region.origin.source or None,
            hint="write through slices, or compute a new tensor",
        )
    return None


def _constant(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return a literal's copy: the constant itself; writes go to the copy's own memory."""
    return builder.track(builder.read(args[0]), value, None)


def fill_with_constant(
    builder: Builder, operator: Any, plain: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """`x[...] = 3.0` is traced as a fill with a lifted tensor; make it a number again."""
    data = builder.constants.get(plain[1].name)
    if data is None or data.numel() != 1:
        return operator, plain
    return torch.ops.aten.fill.Scalar, (plain[0], data.item(), *plain[2:])


def _broadcast(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`broadcast_tensors`: each one expanded, where that changes anything."""
    return tuple(
        builder.same(result, alias)
        if builder.types[builder.read(alias)] == tensor_type(result)
        else _call(builder, "aten.expand.default", result, (alias, tensor_type(result).shape))
        for alias, result in zip(args[0], value, strict=True)
    )


def _unless_same(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Shape operators that keep the shape: nothing."""
    if builder.types[builder.read(args[0])] == tensor_type(value):
        return builder.same(value, args[0])
    return None


def _slice(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Give a slice an explicit start: 0 if it has none, as when sizes are symbolic."""
    same = _unless_same(builder, value, args, kwargs)
    if same is not None or kwargs or len(args) < 3 or args[2] is not None:
        return same
    return _call(builder, "aten.slice.Tensor", value, (*args[:2], 0, *args[3:]))


def _neutral(number: int) -> Rule:
    """`x + 0`, `x * 1`: nothing."""

    def rule(builder: Builder, value: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if kwargs or isinstance(args[1], Alias) or args[1] != number:
            return None
        if not isinstance(args[0], Alias):
            return None
        return _unless_same(builder, value, args, kwargs)

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
    "aten.contiguous.default": _contiguous,
    "aten.detach.default": _detach,
    "aten.lift_fresh_copy.default": _constant,
    "aten.expand_as.default": _sized("aten.expand.default"),
    "aten.broadcast_to.default": _sized("aten.expand.default"),
    "aten.view_as.default": _sized("aten.view.default"),
    "aten.reshape_as.default": _sized("aten.reshape.default"),
}
for _name in ("alias.default", "lift_fresh.default", "lift.default", "positive.default"):
    RULES[f"aten.{_name}"] = _identity
for _name in (
    *("expand.default", "view.default", "reshape.default", "flatten.using_ints"),
    *("squeeze.dim", "squeeze.default", "squeeze.dims", "_unsafe_view.default"),
):
    RULES[f"aten.{_name}"] = _unless_same
for _name in ("cat.default", "concat.default", "concatenate.default"):
    RULES[f"aten.{_name}"] = _cat("aten.cat.default")
for _name in (
    *("to.dtype", "to.dtype_layout", "to.device", "to.other", "to.prim_Device", "to.prim_dtype"),
    *("to.prim_other", "type_as.default", "_to_copy.default", "float.default"),
):
    RULES[f"aten.{_name}"] = _cast
for _name in ("dropout.default", "feature_dropout.default", "alpha_dropout.default"):
    RULES[f"aten.{_name}"] = _dropout
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


# In-place operators as their functional counterparts.


_VIEWS = {"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_"}
_REFUSED = {"resize_", "set_", "as_strided_", "resize_as_"}


def convert(
    builder: Builder,
    node: fx.Node,
    target: torch._ops.OpOverload[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Convert one in-place call; the alias it returns is the one it was given."""
    name, overload = target._schema.name.split("::")[1], target._overloadname
    written = [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    functional = _functional_name(name)
    if written == ["out"] and isinstance(kwargs.get("out"), Alias):
        return _compute_into(builder, target, args, dict(kwargs))
    if len(written) != 1 or functional is None or not isinstance(args[0], Alias):
        raise NotFunctional(f"{target} writes to {', '.join(written)}")
    alias = args[0]
    if name in _REFUSED:
        raise CaptureError(f"{name} changes a tensor's memory", where=builder.region.origin.source)
    value = node.meta["val"]
    if name in _VIEWS:
        return append_call(builder, f"aten.{functional}.{overload}", value, args, kwargs)
    if name == "detach_":
        if builder.read(alias) in builder.differentiable:
            _store(builder, alias, "aten.detach.default", (_ref(builder, alias),))
        return alias
    if name == "copy_":
        builder.write(alias, _copied(builder, alias, args[1]))
        return alias
    if name == "zero_":
        own = _ref(builder, alias)
        if own.name in builder.differentiable:  # gradients are zeros, not None
            _store(builder, alias, "aten.fill.Scalar", (own, 0))
        else:
            _store(builder, alias, "aten.zeros_like.default", (own,))
        return alias
    if name in ("dropout_", "feature_dropout_", "alpha_dropout_") and not _drops(args):
        return alias
    _compute(builder, node, alias, target, functional, args, kwargs)
    return alias


def _compute(
    builder: Builder,
    node: fx.Node,
    alias: Alias,
    target: torch._ops.OpOverload[Any, Any],
    functional: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """The general case: the functional operator, cast back to the overwritten tensor's dtype."""
    namespace = target.namespace
    packet = getattr(getattr(torch.ops, namespace), functional, None)
    operator = getattr(packet, target._overloadname, None)
    if operator is None:
        raise NotFunctional(f"{target} has no functional counterpart")
    plain, named = refs(builder, args), {k: refs(builder, v) for k, v in kwargs.items()}
    if functional == "fill" and isinstance(plain[1], Ref):
        operator, plain = fill_with_constant(builder, operator, plain)
    own = builder.types[plain[0].name]
    type_ = _result_type(operator, node, own)
    (name,) = builder.emit(str(operator), plain, (type_,), tuple(sorted(named.items())))
    if type_.dtype != own.dtype:
        (name,) = builder.emit("aten.to.dtype", (Ref(name), own.dtype), (own,))
    if type_.shape != own.shape:
        raise NotFunctional(f"{target} changes the shape")
    builder.write(alias, name)


def _compute_into(
    builder: Builder,
    target: torch._ops.OpOverload[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Alias:
    """`op(..., out=tensor)`: the operator that returns its result, written to `out`."""
    alias: Alias = kwargs.pop("out")
    packet = target.overloadpacket
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    overloads = [getattr(packet, name) for name in packet.overloads()]
    fitting = (
        o for o in overloads if [(a.name, str(a.type)) for a in o._schema.arguments] == wanted
    )
    operator = next(fitting, None)
    if operator is None:
        raise NotFunctional(f"{target} has no functional counterpart")
    own = builder.types[builder.read(alias)]
    plain, named = refs(builder, args), {k: refs(builder, v) for k, v in kwargs.items()}
    (name,) = builder.emit(str(operator), plain, (own,), tuple(sorted(named.items())))
    builder.write(alias, name)
    return alias


def _result_type(
    operator: torch._ops.OpOverload[Any, Any], node: fx.Node, own: TensorType
) -> TensorType:
    """Return the functional result's type: the overwritten one's unless dtypes are mixed."""
    values = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    tensors = [v for v in _flat(values) if isinstance(v, torch.Tensor)]
    numbers = [v for v in _flat(values) if isinstance(v, float) and not own.dtype.is_floating_point]
    if all(t.dtype == own.dtype for t in tensors) and not numbers:
        return own
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    with getattr(tensors[0], "fake_mode", contextlib.nullcontext()):
        return tensor_type(operator(*values, **kwargs))


def _flat(values: Any) -> list[Any]:
    if isinstance(values, tuple | list):
        return [leaf for item in values for leaf in _flat(item)]
    return [values]


def _copied(builder: Builder, alias: Alias, source: Any) -> str:
    """`copy_`: the source, broadcast and cast to what it overwrites."""
    own = builder.types[builder.read(alias)]
    if not isinstance(source, Alias):
        raise NotFunctional("copy_ of a number")
    name = builder.read(source)
    if not builder.region.grad_enabled and name in builder.differentiable:
        (name,) = builder.emit("aten.detach.default", (Ref(name),), (builder.types[name],))
    name = fitted(builder, name, own)
    if alias.view is None and builder.read(alias) in builder.differentiable:
        # What is overwritten keeps a gradient: zeros, not None.
        (zeros,) = builder.emit("aten.fill.Scalar", (_ref(builder, alias), 0), (own,))
        (name,) = builder.emit("aten.add.Tensor", (Ref(zeros), Ref(name)), (own,))
    return name


def _store(builder: Builder, alias: Alias, op: str, args: tuple[Any, ...]) -> None:
    own = builder.types[builder.read(alias)]
    (name,) = builder.emit(op, args, (own,))
    builder.write(alias, name)


def _ref(builder: Builder, alias: Alias) -> Ref:
    return Ref(builder.read(alias))


def _drops(args: tuple[Any, ...]) -> bool:
    return bool(args[1] > 0 and args[2])


def _functional_name(name: str) -> str | None:
    """`add_` -> `add`, `__ior__` -> `__or__`; None if the name is not that of an in-place op."""
    if name.startswith("__i") and name.endswith("__"):
        return "__" + name[3:]
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return None
