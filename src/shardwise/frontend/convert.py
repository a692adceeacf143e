"""From export's fx graph to calls on values that never change.

Enters: an `ExportedProgram` and aliases of its placeholders. Leaves: a filled `Builder` and the
aliases of the graph's outputs. Regions are flattened, in-place writes become new values, and
`normalize` turns device- and tracing-specific calls into plain ones.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.frontend import inplace, normalize
from shardwise.frontend.aliasing import Alias, NotFunctional
from shardwise.frontend.builder import SYMBOLIC, Builder, tensor_type
from shardwise.frontend.calls import append_call, refs
from shardwise.frontend.functions import RECOMPUTE, Recorder
from shardwise.frontend.provenance import origin_of
from shardwise.ir import Ref, TensorType, map_refs

_SKIPPED = {
    *("aten._assert_tensor_metadata.default", "aten._assert_scalar.default"),
    *("aten._assert_async.msg", "aten._assert_async.default", "aten._functional_assert_async.msg"),
    *("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"),
    *("profiler._record_function_enter.default", "profiler._record_function_enter_new.default"),
    *("profiler._record_function_exit._RecordFunction",),
}


class Converter:
    """Walks one fx graph, with nested region graphs, into a `Builder`."""

    def __init__(self, builder: Builder, recorder: Recorder) -> None:
        self.builder, self.recorder = builder, recorder

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Convert the graph of `module`; the aliases of its outputs."""
        environment: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                environment[node] = next(given)
            elif node.op == "get_attr":
                environment[node] = operator.attrgetter(node.target)(module)
            elif node.op == "output":
                return tuple(_lookup(environment, node.args[0]))
            elif node.op == "call_function":
                environment[node] = self._call(node, environment)
            else:
                raise NotFunctional(f"fx node {node.op}")
        raise AssertionError("an fx graph ends in an output node")

    def _call(self, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
        args = _lookup(environment, node.args)
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        recompute = node.meta.get(RECOMPUTE, self.builder.region.recompute)
        with self.builder.inside(origin=origin_of(node.meta), recompute=recompute):
            return self._dispatch(node, args, _lookup(environment, node.kwargs))

    def _dispatch(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(str(target), args)
        value = node.meta.get("val")
        if isinstance(value, int):  # of a symbolic size, whose value is known by now
            return value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._symbolic(str(target), args)
        if not isinstance(target, torch._ops.OpOverload):
            return self._python(target, args)
        op = str(target)
        if op in _SKIPPED:
            return None
        if op == "shardwise_capture.function.default":
            return self._function(args, value)
        if target._schema.is_mutable:
            return inplace.convert(self.builder, node, target, args, kwargs)
        rule = normalize.RULES.get(op)
        if rule is not None:
            result = rule(self.builder, value, args, kwargs)
            if result is not None:
                return result
        return append_call(self.builder, op, value, args, kwargs)

    # ------------------------------------------------------------ special calls

    def _region(self, name: str, args: tuple[Any, ...]) -> Any:
        """Inline `wrap_with_set_grad_enabled` and `wrap_with_autocast`."""
        if name == "wrap_with_set_grad_enabled":
            enabled, module, *operands = args
            with self.builder.inside(grad_enabled=bool(enabled)):
                return self.run(module, operands)
        if name == "wrap_with_autocast":
            device_type, dtype, enabled, _, module, *operands = args
            dtype = dtype or torch.get_autocast_dtype(device_type)
            autocast = (device_type, dtype, True) if enabled else None
            with self.builder.inside(autocast=autocast):
                return self.run(module, operands)
        origin = self.builder.region.origin
        place = f"{origin.source}: {origin.source_text}" if origin.source else None
        raise NotFunctional(f"higher-order operator {name}", place)

    def _symbolic(self, op: str, args: tuple[Any, ...]) -> Alias:
        """Return a Python number that depends on data: legal only if nothing needs it."""
        plain = refs(self.builder, args)
        kept = tuple(ref for ref in pytree.tree_leaves(plain) if isinstance(ref, Ref))
        (name,) = self.builder.emit(SYMBOLIC, (op, *kept), (TensorType((), torch.int64),))
        return self.builder.source(name, TensorType((), torch.int64), "", differentiable=False)

    def _python(self, target: Any, args: tuple[Any, ...]) -> Any:
        if getattr(target, "__module__", "") == "torch._functorch.predispatch":
            raise NotFunctional("vmap")
        if not any(isinstance(leaf, Alias) for leaf in pytree.tree_leaves(args)):
            return target(*args)
        raise NotFunctional(f"call of {target}")

    def _function(self, args: tuple[Any, ...], value: Any) -> tuple[Alias, ...]:
        """Return a custom autograd function, kept whole."""
        tensors, key = args
        call = self.recorder.calls[key]
        names = [self.builder.read(alias) for alias in tensors]
        plain = map_refs(call.args, lambda ref: Ref(names[int(ref.name)]))
        types = tuple(tensor_type(v) for v in value)
        outputs = self.builder.emit(call.op, plain, types)
        return tuple(
            self.builder.track(name, v, None) for name, v in zip(outputs, value, strict=True)
        )


def _lookup(environment: dict[fx.Node, Any], value: Any) -> Any:
    if isinstance(value, fx.Node):
        return environment[value]
    if isinstance(value, tuple | list):
        return tuple(_lookup(environment, item) for item in value)
    if isinstance(value, dict):
        return {key: _lookup(environment, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_lookup(environment, x) for x in (value.start, value.stop, value.step)))
    return value
