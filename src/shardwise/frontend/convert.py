"""Convert export's fx graph to calls on values that never change.

Regions are flattened; `functionalize` turns in-place writes into new values, and device- and
tracing-specific calls into plain ones.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.frontend import functionalize
from shardwise.frontend.builder import (
    SYMBOLIC,
    Alias,
    Builder,
    NotFunctional,
    append_call,
    refs,
    tensor_type,
)
from shardwise.frontend.errors import origin_of
from shardwise.frontend.tracing import patched
from shardwise.ir import Ref, TensorType, map_refs

# ---------------------------------------------------------------- functions and checkpoints
# Export traces through `Function.forward` and loses `backward`. While capturing, `Function.apply`
# records one opaque operator instead; checkpointed regions mark their nodes with a group name.
RECOMPUTE = "shardwise_recompute"
_GENERATOR = "_checkpoint_without_reentrant_generator"  # torch's, of `use_reentrant=False`
_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_LIBRARY = torch.library.Library("shardwise_capture", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("function(Tensor[] tensors, int key) -> Tensor[]")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One `cls.apply(*args)`; the tensors in `args` are `Ref("0")`, `Ref("1")`… in order."""

    op: str
    cls: Any  # the class, or a `FlatFunction`
    args: tuple[Any, ...]


class FlatFunction:
    """A custom function whose arguments have dicts or other containers, as a function of leaves."""

    def __init__(self, cls: Any, spec: pytree.TreeSpec) -> None:
        self.cls, self.spec = cls, spec
        self.__module__, self.__qualname__ = cls.__module__, cls.__qualname__

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, FlatFunction) and self.cls is other.cls
        return same and self.spec == other.spec  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of the user's function."""
        args: tuple[Any, ...] = pytree.tree_unflatten(list(leaves), self.spec)
        return args

    def apply(self, *leaves: Any) -> Any:
        """Call the user's function."""
        return self.cls.apply(*self.arguments(leaves))


@dataclass(slots=True)
class Recorder:
    """The custom functions and checkpoints of one capture."""

    calls: list[FunctionCall] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # structure of each call's results
    num_groups: int = 0
    depth: int = 0

    def name(self, cls: Any) -> str:
        """Return the operator of a custom function; classes that share a name are numbered.

        A class that a function defines anew has the same name each time.
        """
        base = f"autograd_function.{cls.__module__}.{cls.__qualname__}"
        classes = {call.op: call.cls for call in self.calls}
        names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
        return next(name for name in names if classes.get(name, cls) == cls)


_active: list[Recorder] = []


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Patch `Function.apply` and checkpointing inside a `with` block."""
    original = torch.autograd.Function.__dict__["apply"]
    generator = torch_checkpoint._checkpoint_without_reentrant_generator

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if recorder.depth or get_proxy_mode() is None or cls.__module__.startswith("torch._"):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction:
            with _group(recorder):
                return args[0](*args[2:])
        return record_call(recorder, cls, args, kwargs)

    def without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if recorder.depth or get_proxy_mode() is None:
            yield from generator(function, *args, **kwargs)
            return
        with _group(recorder):
            yield

    _active.append(recorder)
    try:
        with patched(
            (torch.autograd.Function, "apply", classmethod(apply)),
            (torch_checkpoint, _GENERATOR, without_reentrant),
        ):
            yield
    finally:
        _active.pop()


def without_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Run checkpointed regions without recomputation: the same results, activations saved."""

    def direct(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return patched(
        (torch_checkpoint, _GENERATOR, direct),
        (torch_checkpoint.CheckpointFunction, "apply", lambda run, _, *args: run(*args)),
    )


@contextlib.contextmanager
def _group(recorder: Recorder) -> Iterator[None]:
    """Mark the nodes traced inside as one recompute group; outer groups absorb inner ones."""
    name = f"checkpoint_{recorder.num_groups}"
    recorder.num_groups += 1
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)))
    yield
    node = last.next
    while node.op != "root":
        node.meta[RECOMPUTE] = name
        node = node.next


def record_call(
    recorder: Recorder, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record `cls.apply(*args)` as one opaque operator and return its results."""
    if kwargs:
        raise CaptureError(f"{cls.__qualname__}.apply is called with keyword arguments")
    tensors: list[torch.Tensor] = []
    function: Any = cls
    if any(isinstance(arg, dict) for arg in pytree.tree_leaves(args, is_leaf=_is_dict)):
        leaves, spec = pytree.tree_flatten(args)
        function, args = FlatFunction(cls, spec), tuple(leaves)
    template = tuple(_template(cls, i, arg, tensors) for i, arg in enumerate(args))
    key = len(recorder.calls)
    recorder.calls.append(FunctionCall(op=recorder.name(function), cls=function, args=template))
    recorder.outputs.append(None)
    results = iter(torch.ops.shardwise_capture.function.default(tensors, key))
    structure = recorder.outputs[key]
    if not isinstance(structure, tuple):
        return next(results)
    return tuple(next(results) if x is torch.Tensor else x for x in structure)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _template(cls: type, position: int, arg: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        tensors.append(arg)
        return Ref(str(len(tensors) - 1))
    if isinstance(arg, tuple | list):
        return tuple(_template(cls, position, item, tensors) for item in arg)
    if isinstance(arg, _CONSTANTS):
        return arg
    raise CaptureError(
        f"argument {position} of {cls.__qualname__}.apply is a {type(arg).__name__}; "
        "a custom autograd function is one node, so its arguments must be tensors or constants",
        hint="pass the tensors it needs as arguments, or use plain PyTorch operations",
    )


def _run_forward(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    """Run a function's forward on fake tensors, for the shapes and dtypes of its results."""
    recorder = _active[-1]
    call = recorder.calls[key]
    args = map_refs(call.args, lambda ref: tensors[int(ref.name)])
    cls = call.cls
    if isinstance(cls, FlatFunction):
        cls, args = cls.cls, cls.arguments(args)
    context = _Context(args)
    recorder.depth += 1
    try:
        with torch.no_grad():
            results = _forward(cls, context, args)
    finally:
        recorder.depth -= 1
    if context.dirty:
        raise CaptureError(f"{cls.__qualname__} modifies its inputs in place (mark_dirty)")
    several = isinstance(results, tuple | list)
    if several and len(results) == 1:
        raise CaptureError(
            f"{cls.__qualname__}.forward returns a tuple of one value",
            hint="return the tensor itself",
        )
    flat = tuple(results) if several else (results,)
    structure = tuple(torch.Tensor if isinstance(x, torch.Tensor) else x for x in flat)
    recorder.outputs[key] = structure if several else torch.Tensor
    return [torch.empty_like(x) for x in flat if isinstance(x, torch.Tensor)]


torch.library.register_fake("shardwise_capture::function", _run_forward, lib=_LIBRARY)


def _forward(cls: Any, context: _Context, args: tuple[Any, ...]) -> Any:
    if cls.setup_context is torch.autograd.Function.setup_context:
        return cls.forward(context, *args)
    results = cls.forward(*args)
    inspect.unwrap(cls.setup_context)(context, args, results)
    return results


class _Context:
    """A substitute for `ctx` while a forward runs only for its shapes."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, torch.Tensor) for arg in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *_: Any) -> None:
        pass

    set_materialize_grads = mark_non_differentiable


# ---------------------------------------------------------------- the graph
_SKIPPED = {
    *("aten._assert_tensor_metadata.default", "aten._assert_scalar.default"),
    *("aten._assert_async.msg", "aten._assert_async.default", "aten._functional_assert_async.msg"),
    *("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"),
    *("profiler._record_function_enter.default", "profiler._record_function_enter_new.default"),
    *("profiler._record_function_exit._RecordFunction",),
}


class Converter:
    """Convert an fx graph, with the graphs of nested regions, into calls of a `Builder`."""

    def __init__(self, builder: Builder, recorder: Recorder) -> None:
        self.builder, self.recorder = builder, recorder

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Convert the graph of `module` and return the aliases of its outputs."""
        environment: dict[fx.Node, Any] = {}
        operands = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                environment[node] = next(operands)
            elif node.op == "get_attr":
                environment[node] = operator.attrgetter(node.target)(module)
            elif node.op == "output":
                return tuple(fx.node.map_arg(node.args[0], environment.__getitem__))
            elif node.op == "call_function":
                environment[node] = self._call(node, environment)
            else:
                raise NotFunctional(f"fx node {node.op}")
        raise AssertionError("an fx graph ends in an output node")

    def _call(self, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
        operands: Any = (node.args, node.kwargs)
        args, kwargs = fx.node.map_arg(operands, environment.__getitem__)
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        recompute = node.meta.get(RECOMPUTE, self.builder.region.recompute)
        is_refused = bool(free_unbacked_symbols(node.meta.get("val")))  # if a result needs it
        is_refused |= isinstance(node.target, torch._ops.HigherOrderOperator)
        with self.builder.inside(**origin_of(node.meta, innermost=is_refused), recompute=recompute):
            return self._dispatch(node, args, kwargs)

    def _dispatch(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(str(target), args)
        value = node.meta.get("val")
        if isinstance(value, int):  # a symbolic size whose value is known by now
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
            return functionalize.convert(self.builder, node, args, kwargs)
        if op == "aten.as_strided.default":
            return functionalize.strided(self.builder, node, args[0])
        rule = functionalize.RULES.get(op)
        result = None if rule is None else rule(self.builder, value, args, kwargs)
        if result is not None:
            return result
        if "embedding" in op:
            args, kwargs = _with_dense_gradient(target, args, kwargs)
        return append_call(self.builder, op, value, args, kwargs)

    def _region(self, name: str, args: tuple[Any, ...]) -> Any:
        """Inline `wrap_with_set_grad_enabled` and `wrap_with_autocast`."""
        if name == "wrap_with_set_grad_enabled":
            enabled, module, *operands = args
            with self.builder.inside(grad_enabled=bool(enabled)):
                return self.run(module, operands)
        if name == "wrap_with_autocast":
            device_type, dtype, enabled, _, module, *operands = args
            dtype = dtype or torch.get_autocast_dtype(device_type)
            with self.builder.inside(autocast=(device_type, dtype, True) if enabled else None):
                return self.run(module, operands)
        region = self.builder.region
        place = f"{region.source}: {region.source_text}" if region.source else None
        raise NotFunctional(f"higher-order operator {name}", place)

    def _symbolic(self, op: str, args: tuple[Any, ...]) -> Alias:
        """Return a Python number that depends on data; it is an error only if something uses it."""
        plain = refs(self.builder, args)
        tensors = tuple(ref for ref in pytree.tree_leaves(plain) if isinstance(ref, Ref))
        (name,) = self.builder.emit(SYMBOLIC, (op, *tensors), (TensorType((), torch.int64),))
        return self.builder.source(name, TensorType((), torch.int64), "", differentiable=False)

    def _python(self, target: Any, args: tuple[Any, ...]) -> Any:
        if getattr(target, "__module__", "") == "torch._functorch.predispatch":
            raise NotFunctional("vmap")
        if not any(isinstance(leaf, Alias) for leaf in pytree.tree_leaves(args)):
            return target(*args)
        raise NotFunctional(f"call of {target}")

    def _function(self, args: tuple[Any, ...], value: Any) -> tuple[Alias, ...]:
        """Append the call of a custom autograd function as one node."""
        tensors, key = args
        call = self.recorder.calls[key]
        names = [self.builder.read(alias) for alias in tensors]
        plain = map_refs(call.args, lambda ref: Ref(names[int(ref.name)]))
        outputs = self.builder.emit(call.op, plain, tuple(map(tensor_type, value)))
        return tuple(
            self.builder.track(name, v, None) for name, v in zip(outputs, value, strict=True)
        )


def _with_dense_gradient(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn `sparse=True` of an embedding off: a sparse gradient cannot be sharded or summed.

    The dense gradient has the same values.
    """
    names = [argument.name for argument in target._schema.arguments]
    dense = tuple(False if name == "sparse" else x for name, x in zip(names, args, strict=False))
    return dense, {name: arg for name, arg in kwargs.items() if name != "sparse"}
