"""Look up the operators of a graph, bind their arguments, and run them.

`interpret` runs a graph node by node with real tensors: the reference for everything derived
from it.

>>> operator("aten.linear.default")
<OpOverload(op='aten.linear', overload='default')>
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.ir.graph import Graph, Node, Ref, map_refs

RandomOp = Callable[[Node, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a nested argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def operator(name: str) -> Any:
    """Return the `OpOverload` of `namespace.op.overload`, or None if it is not registered."""
    try:
        return attrgetter(name)(torch.ops)
    except (AttributeError, RuntimeError):
        return None


@cache
def signature(name: str) -> tuple[tuple[str, Any], ...] | None:
    """Return `(argument, default)` in schema order (`...`: none); None for an op without schema."""
    op = operator(name)
    if not isinstance(op, torch._ops.OpOverload):
        return None
    return tuple(
        (a.name, a.default_value if a.has_default_value() else ...) for a in op._schema.arguments
    )


def bind(node: Node) -> dict[str, Any]:
    """Return the node's arguments by name with defaults; by position if it has no schema."""
    arguments = signature(node.op)
    if arguments is None:
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    bound = {name: default for name, default in arguments if default is not ...}
    for (name, _), arg in zip(arguments, node.args, strict=False):
        bound[name] = arg
    return bound | dict(node.kwargs)


def op_name(node: Node) -> str:
    """Return `embedding` for `aten.embedding.default`."""
    return node.op.split(".")[1] if node.op.count(".") == 2 else ""


_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")


def indexed_dim(node: Node, index: str) -> tuple[str, int] | None:
    """Return the table and the dim that a node indexes with a value, if it does."""
    op = op_name(node)
    if op not in ("embedding", "gather", "index_select", "scatter", "index"):
        return None
    arguments = bind(node)
    if op == "embedding":
        return (arguments["weight"].name, 0) if arguments.get("indices") == Ref(index) else None
    if op == "index":
        indices = list(arguments.get("indices") or ())
        return (
            (arguments["self"].name, indices.index(Ref(index))) if Ref(index) in indices else None
        )
    if arguments.get("index") != Ref(index):
        return None
    return arguments["self"].name, arguments.get("dim", 0)


def index_ranges(graph: Graph, node: Node) -> Iterator[tuple[str, int, int, int | None]]:
    """Yield the values that a node uses as indices: name, minimum, table size, ignored index."""
    for name in dict.fromkeys(node.inputs):
        if graph.values[name].dtype in (torch.bool, torch.uint8):
            continue
        table = indexed_dim(node, name)
        if table is not None:
            shape = graph.values[table[0]].shape
            if shape:
                size = shape[table[1]]
                yield name, -size if op_name(node) == "index" else 0, size, None
    arguments = bind(node) if op_name(node) in (*_LOSSES, "one_hot") else {}
    if op_name(node) == "one_hot" and arguments.get("num_classes", -1) > 0:
        yield arguments["self"].name, 0, arguments["num_classes"], None
    elif op_name(node) in _LOSSES and isinstance(arguments["target"], Ref):
        target = arguments["target"].name
        if not graph.values[target].dtype.is_floating_point:
            scores = graph.values[arguments["self"].name].shape
            size = scores[1 if len(scores) > 1 else 0]
            yield target, 0, size, arguments.get("ignore_index", -100)


# ---------------------------------------------------------------- running a graph
def interpret(
    graph: Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor] | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    *,
    random: RandomOp | None = None,
) -> dict[str, torch.Tensor]:
    """Return all values of the graph; autograd works through them.

    Parameters, buffers and inputs are mappings from names. `random(node, function, args, kwargs)`
    replaces the execution of nodes that draw random numbers.
    """
    *_, values = run_nodes(graph, parameters, buffers or {}, inputs or {}, random=random)
    return values


def run_nodes(
    graph: Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    random: RandomOp | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the values so far: those of the sources, then again after every node."""
    values = dict(_sources(graph, parameters, buffers, inputs))
    device = next((t.device for t in values.values()), torch.device("cpu"))
    values |= {constant.value: constant.data.to(device) for constant in graph.constants}
    yield values
    for node in graph.nodes:
        args = map_refs(node.args, lambda ref: values[ref.name])
        kwargs = {key: map_refs(arg, lambda ref: values[ref.name]) for key, arg in node.kwargs}
        if not node.inputs and takes_device(node.op):
            kwargs["device"] = device
        function = resolve(graph, node.op)
        with contextlib.ExitStack() as region:
            if not node.grad_enabled:
                region.enter_context(torch.no_grad())
            if node.autocast is not None:
                region.enter_context(torch.autocast(*node.autocast, cache_enabled=False))
            if random is not None and is_random(node):
                result = random(node, function, args, kwargs)
            else:
                result = function(*args, **kwargs)
        values.update(zip(node.outputs, tensors(result), strict=True))
        yield values


def resolve(graph: Graph, op: str) -> Callable[..., Any]:
    """Return the callable of an op: an operator, a custom autograd function, or `batch_norm`."""
    if op in graph.functions:
        apply: Callable[..., Any] = graph.functions[op].apply
        return apply
    if op == "shardwise.batch_norm.default":
        return batch_norm
    function: Callable[..., Any] | None = operator(op)
    if function is None:
        raise ShardwiseError(
            f"operator {op} is not registered in this process",
            hint="import the module that defines it",
        )
    return function


def batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Apply batch norm in training; return the result and new running statistics, if any."""
    mean, var = (None if s is None else s.detach().clone() for s in (running_mean, running_var))
    out = torch.nn.functional.batch_norm(data, mean, var, weight, bias, True, momentum, eps)
    return (out, *(statistic for statistic in (mean, var) if statistic is not None))


def takes_device(op: str) -> bool:
    """Return whether an operator such as `arange` takes a device, which graphs omit."""
    return any(name == "device" for name, _ in signature(op) or ())


def is_random(node: Node) -> bool:
    """Return whether the node draws random numbers.

    Attention and recurrent layers do so only with dropout.
    """
    if node.op.startswith(("autograd_function.", "shardwise.")):
        return False
    if node.op == "aten.scaled_dot_product_attention.default":
        return bool(bind(node)["dropout_p"])
    if node.op in ("aten.lstm.input", "aten.gru.input"):
        return bool(node.args[5] and node.args[6])
    function = operator(node.op)
    return torch.Tag.nondeterministic_seeded in function.tags or "dropout" in node.op


def _sources(
    graph: Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    groups: tuple[tuple[str, tuple[Any, ...], Mapping[str, torch.Tensor]], ...] = (
        ("parameter", graph.parameters, parameters),
        ("buffer", graph.buffers, buffers),
        ("input", graph.inputs, inputs),
    )
    for kind, sources, by_name in groups:
        for source in sources:
            names = (source.name, *getattr(source, "aliases", ()))
            tensor = next((by_name[name] for name in names if name in by_name), None)
            if tensor is None:
                raise ShardwiseError(f"no tensor for {kind} {source.name}", where=graph.name)
            yield source.value, tensor
