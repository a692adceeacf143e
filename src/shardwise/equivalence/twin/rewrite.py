"""A graph in new sizes: shapes of all values, and the arguments of nodes that are sizes.

Enters: a `Graph`, its rules and solved `Sizes`. Leaves: the rewritten `Graph`, tried on meta
tensors; where a node does not give the shapes expected of it, `Unscalable` says which sizes to
leave alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwise.equivalence.twin.sizes import Key, Sizes, Unscalable
from shardwise.ir import Constant, Graph, Node, TensorType, map_refs
from shardwise.ir.interpret import resolve, takes_device
from shardwise.sharding.rule import Call, NodeRule, Part, replace_arguments

# Arguments that are rewritten below; any other integer that equals the size of one of the node's
# axes (groups of a convolution, `repeats`, `k`) pins that axis.
SIZE_NAMES = {
    "size",
    "shape",
    "sizes",
    "split_size",
    "split_sizes",
    "normalized_shape",
    "start",
    "end",
    "length",
    "index",
    "num_classes",
    "padding_idx",
    "ignore_index",
    "dim",
    "dims",
    "dim0",
    "dim1",
    "step",
    "start_dim",
    "end_dim",
}


def node_keys(node: Node, graph: Graph) -> list[Key]:
    """All dims of a node's operands and results."""
    return [
        ("dim", value, str(i))
        for value in (*node.inputs, *node.outputs)
        for i in range(len(graph.values[value].shape))
    ]


def pinned(graph: Graph, calls: Mapping[str, Call], rules: Mapping[str, NodeRule]) -> Iterator[Key]:
    """Node axes whose size is also an argument that is not rewritten."""
    for node in graph.nodes:
        numbers = {
            n
            for name, value in calls[node.name].arguments.items()
            if name not in SIZE_NAMES and name != rules[node.name].size_arg
            for n in _integers(value)
        }
        for axis in rules[node.name].axes.values():
            if axis.size > 1 and axis.size in numbers:
                yield ("axis", node.name, axis.name)


def _integers(arg: Any) -> Iterator[int]:
    if isinstance(arg, int) and not isinstance(arg, bool):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from _integers(item)


def rewrite(
    graph: Graph, calls: Mapping[str, Call], rules: Mapping[str, NodeRule], sizes: Sizes
) -> Graph:
    """Return the graph in new sizes."""
    values = {
        name: TensorType(
            tuple(sizes.new(("dim", name, str(i))) for i in range(len(kind.shape))), kind.dtype
        )
        for name, kind in graph.values.items()
    }
    nodes = tuple(
        _rewrite_node(node, calls[node.name], rules[node.name], values, sizes)
        for node in graph.nodes
    )
    constants = tuple(
        Constant(value=c.value, data=crop(c.data, values[c.value].shape)) for c in graph.constants
    )
    scaled = dataclasses.replace(graph, nodes=nodes, values=values, constants=constants)
    _try_on_meta(scaled, rules)
    return scaled


def crop(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the first elements of a tensor along every dim."""
    return data[tuple(slice(0, size) for size in shape)].clone()


def _rewrite_node(
    node: Node, call: Call, rule: NodeRule, values: Mapping[str, TensorType], sizes: Sizes
) -> Node:
    results = [values[name].shape for name in node.outputs]
    changes: dict[str, Any] = {}
    given = call.arguments
    name = node.op.split(".")[1] if node.op.count(".") == 2 else ""
    if rule.size_arg is not None:
        changes[rule.size_arg] = results[0]
    elif name in ("slice", "narrow", "select"):
        changes = _positions(node, name, call, rule, values, sizes)
    elif name.startswith("split"):
        dim = given.get("dim", 0) % len(results[0])
        lengths = tuple(shape[dim] for shape in results)
        for key in ("split_size", "split_sizes"):
            if key in given:
                several = isinstance(given[key], tuple | list)
                changes[key] = lengths if several else lengths[0]
    elif "normalized_shape" in given:
        rank = len(given["normalized_shape"])
        changes["normalized_shape"] = values[node.inputs[0]].shape[-rank:]
    elif name == "arange":
        start, step = given.get("start", 0), given.get("step", 1)
        changes["end"] = start + step * results[0][0]
    elif "size" in given and not isinstance(given["size"], int) and results:
        changes["size"] = results[0]
    elif name == "reshape":
        changes["shape"] = results[0]
    elif name == "unflatten":
        dim = given["dim"] % len(call.operands[0])
        changes["sizes"] = results[0][dim : dim + len(given["sizes"])]
    elif name == "one_hot" and given.get("num_classes", -1) > 0:
        changes["num_classes"] = results[0][-1]
    elif given.get("padding_idx", -1) >= 0 and node.inputs:
        changes["padding_idx"] = min(given["padding_idx"], values[node.inputs[0]].shape[0] - 1)
    changes = {k: v for k, v in changes.items() if given.get(k) != v}
    if not changes:
        return node
    written = replace_arguments(node, given, changes)
    return dataclasses.replace(node, args=written.args, kwargs=written.kwargs)


def _positions(
    node: Node,
    name: str,
    call: Call,
    rule: NodeRule,
    values: Mapping[str, TensorType],
    sizes: Sizes,
) -> dict[str, Any]:
    """Return the bounds of a slice along a dim that has become smaller."""
    given = call.arguments
    dim = given.get("dim", 0) % len(call.operands[0])
    length = values[node.inputs[0]].shape[dim]
    if name == "select":
        index = given["index"]
        return {"index": index if index < 0 else min(index, length - 1)}
    part = rule.results[0][dim]
    if not isinstance(part, Part):
        return {}
    axis = ("axis", node.name, part.axis)
    start, stop = sizes.position(axis, part.start), sizes.position(axis, part.stop)
    if name == "narrow":
        return {"start": start, "length": stop - start}
    return {"start": start, "end": stop}


def _try_on_meta(graph: Graph, rules: Mapping[str, NodeRule]) -> None:
    """Run every node on meta tensors and compare shapes."""
    values = {
        name: torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        for name, kind in graph.values.items()
    }
    for node in graph.nodes:
        args = map_refs(node.args, lambda ref: values[ref.name])
        kwargs = {k: map_refs(v, lambda ref: values[ref.name]) for k, v in node.kwargs}
        if not node.inputs and takes_device(node.op):
            kwargs["device"] = "meta"
        everything, rule = node_keys(node, graph), rules[node.name]
        suspects = _frozen_keys(node, rule)
        where = f"{node.name} ({node.op})"
        try:
            with torch.no_grad():
                result = resolve(graph, node.op)(*args, **kwargs)
        except Exception as error:
            raise Unscalable(suspects, f"{where}: {error}", everything) from error
        several = isinstance(result, tuple | list)
        tensors = [r for r in (result if several else (result,)) if isinstance(r, torch.Tensor)]
        for name, tensor in zip(node.outputs, tensors, strict=True):
            expected = graph.values[name].shape
            if tuple(tensor.shape) != expected:
                why = f"{where}: {tuple(tensor.shape)} where {expected} is expected"
                raise Unscalable(suspects, why, everything)


def _frozen_keys(node: Node, rule: NodeRule) -> list[Key]:
    """Return the dims of a node that no cut may touch, such as the spatial ones of a
    convolution.
    """
    tensors = (
        *zip(node.inputs, rule.operands, strict=True),
        *zip(node.outputs, rule.results, strict=True),
    )
    return [
        ("dim", value, str(i))
        for value, dims in tensors
        for i, dim in enumerate(dims)
        if not isinstance(dim, Part) and any(rule.axes[axis].frozen for axis in dim)
    ]
