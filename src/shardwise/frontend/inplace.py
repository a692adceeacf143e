"""In-place operators as their functional counterparts.

Enters: one mutating call. Leaves: the same alias, holding a new value.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from shardwise.errors import CaptureError
from shardwise.frontend import normalize
from shardwise.frontend.aliasing import Alias, NotFunctional
from shardwise.frontend.builder import Builder, tensor_type
from shardwise.frontend.calls import append_call, fitted, refs
from shardwise.ir import Ref, TensorType

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
        operator, plain = normalize.fill_with_constant(builder, operator, plain)
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
