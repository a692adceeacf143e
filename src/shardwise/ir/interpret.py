"""Runs a graph node by node with real tensors: the reference for everything derived from it.

Enters: a `Graph` and tensors for its parameters, buffers and inputs. Leaves: every value by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.ir.graph import Graph, Node, map_refs

RandomOp = Callable[[Node, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def interpret(
    graph: Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor] | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    *,
    random: RandomOp | None = None,
) -> dict[str, torch.Tensor]:
    """Return all values of the graph; autograd works through them.

    Parameters, buffers and inputs are given by name. `random(node, function, args, kwargs)`
    replaces the execution of nodes that draw random numbers.
    """
    values = dict(_sources(graph, parameters, buffers or {}, inputs or {}))
    device = next((t.device for t in values.values()), torch.device("cpu"))
    values |= {constant.value: constant.data.to(device) for constant in graph.constants}
    for node in graph.nodes:
        args = map_refs(node.args, lambda ref: values[ref.name])
        kwargs = {key: map_refs(arg, lambda ref: values[ref.name]) for key, arg in node.kwargs}
        if not node.inputs and takes_device(node.op):
            kwargs["device"] = device
        function = resolve(graph, node.op)
        with _region(node):
            if random is not None and is_random(node):
                result = random(node, function, args, kwargs)
            else:
                result = function(*args, **kwargs)
        values.update(_results(node, result))
    return values


def resolve(graph: Graph, op: str) -> Callable[..., Any]:
    """Return the callable of a node's op: an ATen overload, a custom function, one of our own."""
    if op in graph.functions:
        apply: Callable[..., Any] = graph.functions[op].apply
        return apply
    if op == "shardwise.batch_norm.default":
        return batch_norm
    return _overload(op)


def batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch norm in training: the result, then the new running statistics, if there are any."""
    mean, var = (None if s is None else s.detach().clone() for s in (running_mean, running_var))
    out = torch.nn.functional.batch_norm(data, mean, var, weight, bias, True, momentum, eps)
    return (out, *(statistic for statistic in (mean, var) if statistic is not None))


@functools.cache
def _overload(op: str) -> Callable[..., Any]:
    namespace, name, overload = op.split(".")
    try:
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise ShardwiseError(
            f"operator {op} is not registered in this process",
            hint="import the module that defines it",
        ) from error
    return found


def takes_device(op: str) -> bool:
    """Whether the operator makes a tensor from nothing: `arange`, `zeros`; graphs omit devices."""
    if op.startswith(("autograd_function.", "shardwise.")):
        return False
    function: Any = _overload(op)
    return any(argument.name == "device" for argument in function._schema.arguments)


def is_random(node: Node) -> bool:
    """Return whether the node draws random numbers.

    Attention and recurrent layers do so only if their dropout is on.
    """
    if node.op.startswith(("autograd_function.", "shardwise.")):
        return False
    named = dict(node.kwargs)
    if node.op == "aten.scaled_dot_product_attention.default":
        return bool(named.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    if node.op in ("aten.lstm.input", "aten.gru.input"):
        return bool(node.args[5] and node.args[6])
    function: Any = _overload(node.op)
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
    for kind, sources, given in groups:
        for source in sources:
            names = (source.name, *getattr(source, "aliases", ()))
            found = next((given[name] for name in names if name in given), None)
            if found is None:
                raise ShardwiseError(f"no tensor for {kind} {source.name}", where=graph.name)
            yield source.value, found


@contextlib.contextmanager
def _region(node: Node) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not node.grad_enabled:
            stack.enter_context(torch.no_grad())
        if node.autocast is not None:
            device_type, dtype, enabled = node.autocast
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
        yield


def _results(node: Node, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    several = isinstance(result, tuple | list)
    tensors = [r for r in (result if several else (result,)) if isinstance(r, torch.Tensor)]
    return zip(node.outputs, tensors, strict=True)


__all__ = ["RandomOp", "batch_norm", "interpret", "is_random", "resolve", "takes_device"]
