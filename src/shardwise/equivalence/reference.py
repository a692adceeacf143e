"""Run the original model on one device in float64, as the reference of every plan.

A model may cast to float32 internally (norms, attention weights, the loss). Where ranks sum in
another order, such a cast would leave errors of 1e-7 that say nothing about the plan. Both the
original model and the captured graph therefore run with every narrowing cast widened to float64.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwise import runtime as rt
from shardwise.batch import flatten_batch, read_batch
from shardwise.dtypes import torch_pairs
from shardwise.equivalence.certificate import Jitter, jittered
from shardwise.errors import VerifyError
from shardwise.frontend.attention import masked_attention
from shardwise.frontend.convert import without_checkpoints
from shardwise.frontend.fake import plain_tensors
from shardwise.frontend.hooks import copy_hooks
from shardwise.frontend.objective import (
    Objective,
    find_loss,
    flatten_output,
    loss_of,
    output_leaf,
    run_objective,
)
from shardwise.ir import Constant, Graph, Node, Ref, map_refs, node_keys
from shardwise.ir.operators import interpret, is_random
from shardwise.plans import Plan
from shardwise.sharding.placements import Layout
from shardwise.sharding.registry import rule_for
from shardwise.sharding.rule import Call, Local

LEARNING_RATE = 1e-3
WIDE = torch_pairs("exact")
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_COMPLEX_CASTS = {getattr(torch.Tensor, name) for name in ("cfloat", "chalf")}
# Functions that access the tensor itself and must not get a widened copy.
_IN_PLACE = ("__get__", "__set__", "__setitem__", "requires_grad_", "backward", "set_", "copy_")


def widen(arg: Any) -> Any:
    """Return the argument with narrow floating dtypes replaced by wide ones."""
    if isinstance(arg, torch.dtype):
        return WIDE.get(arg, arg)
    if isinstance(arg, tuple | list):
        return type(arg)(widen(a) for a in arg) if type(arg) in (tuple, list) else arg
    return arg


def widen_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 or complex128; wider and integer tensors stay the same."""
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor


class KeepDouble(TorchFunctionMode):
    """While active, PyTorch calls use float64 where they request a narrower dtype.

    Tensors from outside the model (class weights in a closure, a constant) are widened when they
    are passed to a call.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        if func in _COMPLEX_CASTS:
            return args[0].to(torch.complex128)
        if func in (torch.tensor, torch.as_tensor):
            return widen_tensor(func(*args, **(kwargs or {})))  # rounded, as captured constants are
        wide = {key: widen(value) for key, value in (kwargs or {}).items()}
        args = tuple(widen(a) if isinstance(a, torch.dtype) else a for a in args)
        if func is torch.full and "dtype" not in wide and _is_float(args, 1):
            wide["dtype"] = torch.float64
        name = getattr(func, "__name__", "")
        if not (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
            args, wide = _widen_operands(args), _widen_operands(wide)
        return func(*args, **wide)


def double_functions(graph: Graph) -> contextlib.AbstractContextManager[object]:
    """Make custom autograd functions compute in float64, as in the reference, in this thread."""
    has_functions = any(node.op.startswith("autograd_function.") for node in graph.nodes)
    return KeepDouble() if has_functions else contextlib.nullcontext()


class TraceDouble(TorchFunctionMode):
    """While a float64 model is traced, widen the operands of calls that refuse mixed dtypes.

    Narrowing casts remain in the graph, so that it has every node that the plan may name;
    `widen_graph` widens them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        narrow = any(isinstance(leaf, torch.Tensor) and leaf.dtype in WIDE for leaf in leaves)
        is_mixed = len({arg.dtype for arg in args if isinstance(arg, torch.Tensor)}) > 1
        if narrow and is_mixed and _PRODUCT.fullmatch(getattr(func, "__name__", "")):
            return func(*_widen_operands(args), **_widen_operands(kwargs))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError):
            if not narrow:
                raise
            return func(*_widen_operands(args), **_widen_operands(kwargs))


# Real devices refuse products of mixed dtypes, but the fake tensors of a trace do not.
_PRODUCT = re.compile(r"linear|(__r?)?matmul(__)?|mm|addmm|bmm|baddbmm|conv(_transpose)?[123]d")


def _widen_operands(arg: Any) -> Any:
    """Return the arguments with all floating-point tensors in float64."""
    if isinstance(arg, torch.Tensor):
        if type(arg) not in (torch.Tensor, torch.nn.Parameter) or arg.requires_grad:
            return widen_tensor(arg)
        with _disable_current_modes():  # a trace should see a constant, not a computed value
            return widen_tensor(arg)
    if type(arg) in (tuple, list):
        return type(arg)(_widen_operands(a) for a in arg)
    return {k: _widen_operands(a) for k, a in arg.items()} if type(arg) is dict else arg


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Make float64 the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widen_graph(graph: Graph) -> Graph:
    """Return the graph with float64 for every narrower floating-point dtype."""
    return dataclasses.replace(
        graph,
        nodes=tuple(_widen_node(node) for node in graph.nodes),
        values={
            name: dataclasses.replace(t, dtype=widen(t.dtype)) for name, t in graph.values.items()
        },
        constants=tuple(
            Constant(value=c.value, data=widen_tensor(c.data)) for c in graph.constants
        ),
    )


def _is_float(args: tuple[Any, ...], place: int) -> bool:
    return len(args) > place and isinstance(args[place], float)


def _widen_node(node: Node) -> Node:
    kwargs = {key: widen(value) for key, value in node.kwargs}
    if node.op == "aten.full.default" and kwargs.get("dtype") is None and _is_float(node.args, 1):
        kwargs["dtype"] = torch.float64  # the default dtype may differ
    return dataclasses.replace(node, args=widen(node.args), kwargs=tuple(kwargs.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One training step of the model: the state before and after, and the results."""

    state: Mapping[str, torch.Tensor]  # before the step, including non-persistent buffers
    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor | None]
    state_after: Mapping[str, torch.Tensor]
    batches: tuple[Mapping[str, torch.Tensor], ...] = ()  # named inputs of each micro-batch


def double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return a float64 copy of the model and the batch on the CPU."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise VerifyError(
            "the model has no weights (meta tensors)",
            hint="verify a real instance, or a smaller configuration of the same model",
        )
    # `weight_norm` and `prune` store the weight that a hook computed, which deepcopy refuses.
    stored = [t for module in model.modules() for t in plain_tensors(module) if not t.is_leaf]
    twin = copy.deepcopy(model, {id(t): t.detach().clone() for t in stored}).cpu()
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.data = widen_tensor(tensor.data)
    for original, copied in zip(model.parameters(), twin.parameters(), strict=True):
        copy_hooks(original, copied)
    call = read_batch(batch)
    return twin, call.batch_with([widen_tensor(t.detach().cpu()) for _, t in call.tensors])


def run_reference(
    model: nn.Module, batch: Any, loss_fn: Objective = None, *, more: Sequence[Any] = ()
) -> Reference:
    """Run forward, backward and one AdamW step of a model, which is modified.

    With `more` batches, gradients and losses are averaged over all of them, as by accumulation.
    """
    batches = [batch, *more]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: t.detach().clone() for name, t in tensors.items()}
    model.zero_grad(set_to_none=True)
    losses, outputs = [], []
    for batch in batches:
        with KeepDouble(), without_checkpoints(), masked_attention():
            output = run_objective(model, read_batch(batch), batch, loss_fn)
            loss = find_loss(output, batch, loss_of(loss_fn, model)) / len(batches)
            if not loss.requires_grad:
                raise VerifyError("the loss does not depend on a trainable parameter")
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        outputs.append([output_leaf(leaf) for leaf in flatten_output(output)[0]])
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    gradients = {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained:
        torch.optim.AdamW(trained, lr=LEARNING_RATE).step()
    return Reference(
        state=state,
        loss=torch.stack(losses).sum(),
        outputs=tuple(join_outputs(leaf) for leaf in zip(*outputs, strict=True)),
        gradients=gradients,
        state_after={
            name: t.detach().clone()
            for name, t in (*model.named_parameters(), *model.named_buffers())
        },
        batches=tuple(flatten_batch(batch)[0] for batch in batches),
    )


def join_outputs(parts: Sequence[Any]) -> Any:
    """Join an output of several batches: concatenate rows, average numbers, add up counts."""
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        return first
    if len(parts) == 1:
        return first.detach()
    detached = [part.detach() for part in parts]
    if first.dim():
        return torch.cat(detached)
    total = torch.stack(detached).sum(0)
    return total / len(parts) if first.is_floating_point() else total


# ------------------------------------------------------------ the captured graph
#
# The captured graph is the reference of models that draw random numbers: its random nodes use the
# same keyed generator as the program of every rank. Its run also records every value and gradient
# (`Truth`), with which the values of the program are compared.


def draws(graph: Graph) -> bool:
    """Return whether the graph has nodes that draw random numbers."""
    return any(is_random(node) for node in graph.nodes)


def keyed_random(graph: Graph, rng: rt.Rng) -> Callable[..., Any]:
    """Return a function for `interpret(random=…)` that runs a random node as a single rank does."""
    keys = node_keys(graph)

    def run(node: Node, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call.of(node, graph.values)
        rule = rule_for(call)
        if rule is None or rule.localize is None:
            return function(*args, **kwargs)
        shapes = [graph.values[name].shape for name in node.outputs]
        local = Local(
            sharded={},
            operands=call.operands,
            results=tuple(shapes),
            result_layouts=tuple(Layout(()) for _ in shapes),
            operand_layouts=tuple(Layout(()) for _ in node.inputs),
            coordinate={},
        )
        statement = rule.localize(call, local)
        if not statement.fn.startswith("rt."):
            return function(*args, **kwargs)
        named = pytree.tree_leaves((node.args, dict(node.kwargs)))
        passed = pytree.tree_leaves((args, {name: kwargs[name] for name, _ in node.kwargs}))
        tensors = {n.name: t for n, t in zip(named, passed, strict=True) if isinstance(n, Ref)}
        bound = map_refs((statement.args, statement.kwargs), lambda ref: tensors[ref.name])
        options = dict(bound[1])
        if "key" in options:
            options |= {"key": keys[node.name], "rng": rng}
        return getattr(rt, statement.fn.removeprefix("rt."))(*bound[0], **options)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The graph's values in its first micro-batch, and the gradients of the loss for them."""

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


def run_graph(
    graph: Graph,
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    batches: Sequence[Mapping[str, torch.Tensor]],
    jitter: Jitter | None = None,
) -> tuple[Reference, Truth]:
    """Run forward, backward and one AdamW step of the graph on one device.

    `batches` are the named inputs of each micro-batch, of which the first is recorded.
    """
    if jitter is not None:
        state = {name: jitter.change(tensor.detach()) for name, tensor in state.items()}
        batches = [{n: jitter.change(t.detach()) for n, t in b.items()} for b in batches]
    parameters = {
        p.name: state[p.name].detach().clone().requires_grad_(p.requires_grad)
        for p in graph.parameters
    }
    buffers = {b.name: state[b.name].detach().clone() for b in graph.buffers}
    count = len(batches)
    mesh = rt.ProcessMesh({}, num_microbatches=count, timed=False)
    random = keyed_random(graph, rt.Rng(plan.seed, plan.rng, mesh))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients: dict[str, torch.Tensor | None] = dict.fromkeys(parameters)
    truth: Truth | None = None
    assert graph.loss is not None
    losses, outputs = [], []
    for mesh.microbatch, inputs in enumerate(batches):
        with double_functions(graph), jittered(jitter):
            values = interpret(graph, parameters, buffers, inputs, random=random)
            loss = values[graph.loss] / count
            # An operator without effect, such as `to` of the same dtype, returns its input: both
            # names have one tensor, whose gradient arrives from the uses of both.
            first = {id(v): n for n, v in reversed(values.items())}
            named = {
                n: v
                for n, v in values.items()
                if v.requires_grad and truth is None and first[id(v)] == n
            }
            targets = [*trained.values(), *named.values()]
            grads = torch.autograd.grad(loss, targets, allow_unused=True)
        for name, gradient in zip(trained, grads, strict=False):
            gradients[name] = _sum(gradients[name], _dense(gradient))
        by_value = zip(named, grads[len(trained) :], strict=True)
        truth = truth or Truth(
            values={n: v.detach() for n, v in values.items()},
            gradients={n: g for n, gradient in by_value if (g := _dense(gradient)) is not None},
        )
        losses.append(loss.detach())
        outputs.append([values[x.name] if isinstance(x, Ref) else x for x in graph.outputs])
        buffers = {b.name: values[b.mutation or b.value].detach() for b in graph.buffers}
    for hook in graph.hooks:
        grad = gradients[hook.parameter]
        if grad is not None:
            parameter = parameters[hook.parameter].detach()
            gradients[hook.parameter] = hook.function(grad.clone(), parameter)
    after = {name: p.detach().clone() for name, p in parameters.items()}
    for name in trained:
        after[name].grad = gradients[name]
    if trained:
        torch.optim.AdamW([after[name] for name in trained], lr=LEARNING_RATE).step()
    after |= {name: value.clone() for name, value in buffers.items()}
    assert truth is not None
    reference = Reference(
        state=dict(state),
        loss=torch.stack(losses).sum(),
        outputs=tuple(join_outputs(leaf) for leaf in zip(*outputs, strict=True)),
        gradients=gradients,
        state_after=after,
        batches=tuple(batches),
    )
    return reference, truth


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b
