"""Rewrite a graph so that its step can run in micro-batches.

A mean loss becomes a sum divided by a count, so that every micro-batch adds its share of the sum.
Values of the full batch that micro-batches need, such as this count, become inputs; a separate
graph computes them once per step, before the first micro-batch.
"""

import dataclasses
from itertools import count
from typing import Any

import torch

from shardwise.dtypes import DTYPES, dtype_name
from shardwise.ir import Graph, Input, Node, Ref, TensorType, map_refs
from shardwise.ir.graph import drop_unused, live_nodes
from shardwise.ir.operators import bind
from shardwise.layouts.microbatch_axis import MicrobatchAssignment
from shardwise.sharding.factors import Facts, node_rule
from shardwise.sharding.placements import PARTIAL_GRAD
from shardwise.sharding.rule import Call, replace_arguments


def extract_precomputed(
    graph: Graph, facts: Facts, timed: MicrobatchAssignment
) -> tuple[Graph, Facts, MicrobatchAssignment, Graph | None]:
    """Return the graph with precomputed values as inputs, and the graph that computes them.

    The latter is None if nothing is precomputed.
    """
    if not timed.precomputed:
        return graph, facts, timed, None
    inputs_by_value: dict[str, str] = {}
    nodes: list[Node] = []
    values = dict(graph.values)
    calls, rules, dims = dict(facts.calls), dict(facts.rules), dict(facts.dims)
    for node in graph.nodes:
        positions = timed.precomputed.get(node.name)
        if positions:
            node = _redirect(node, positions, inputs_by_value)
            for name, input_name in inputs_by_value.items():
                values.setdefault(input_name, values[name])
                dims.setdefault(input_name, dims[name])
            calls[node.name] = Call.of(node, values)
            rules[node.name] = node_rule(graph, calls[node.name])
        nodes.append(node)
    new_inputs = tuple(
        Input(value=input_name, name=input_name, path=(input_name,), kind="precomputed")
        for input_name in inputs_by_value.values()
    )
    rewritten = dataclasses.replace(
        graph,
        nodes=drop_unused(graph, nodes, graph.visible),
        values=values,
        inputs=(*graph.inputs, *new_inputs),
    )
    return (
        rewritten,
        dataclasses.replace(facts, calls=calls, rules=rules, dims=dims),
        dataclasses.replace(
            timed, values={**timed.values, **dict.fromkeys(inputs_by_value.values(), PARTIAL_GRAD)}
        ),
        restrict(graph, tuple(inputs_by_value)),
    )


def _redirect(node: Node, positions: frozenset[int], inputs_by_value: dict[str, str]) -> Node:
    """Return the node with the operands at these positions taken from inputs."""
    numbers = count()

    def replace(ref: Ref) -> Ref:
        if next(numbers) not in positions:
            return ref
        return Ref(inputs_by_value.setdefault(ref.name, f"{ref.name}_of_batch"))

    args, kwargs = map_refs((node.args, node.kwargs), replace)
    return dataclasses.replace(node, args=args, kwargs=kwargs)


def restrict(graph: Graph, outputs: tuple[str, ...]) -> Graph:
    """Return the part of a graph that computes these values, as its outputs."""
    nodes = live_nodes(graph.nodes, outputs)
    needed = {*outputs, *(name for node in nodes for name in node.inputs)}
    return dataclasses.replace(
        graph,
        nodes=nodes,
        inputs=tuple(i for i in graph.inputs if i.value in needed),
        parameters=(),
        buffers=tuple(
            dataclasses.replace(b, mutation=None) for b in graph.buffers if b.value in needed
        ),
        constants=tuple(c for c in graph.constants if c.value in needed),
        loss=None,
        outputs=tuple(Ref(name) for name in outputs),
        output_spec=None,
    )


# ---------------------------------------------------------------- mean losses
MEAN, SUM = 1, 2  # values of `reduction` in ATen
LOSSES = {
    "aten.cross_entropy_loss.default",
    "aten.nll_loss.default",
    "aten.nll_loss_nd.default",
    "aten.nll_loss2d.default",
}


def separate_means(graph: Graph) -> Graph:
    """Return the graph with every mean loss written as a sum divided by a count of labels."""
    nodes: list[Node] = []
    values = dict(graph.values)
    for node in graph.nodes:
        arguments = bind(node) if node.op in LOSSES else {}
        is_mean = arguments.get("reduction") == MEAN
        nodes += _MeanLoss(node, arguments, values).nodes() if is_mean else [node]
    return dataclasses.replace(graph, nodes=tuple(nodes), values=values)


class _MeanLoss:
    """Write the nodes of one loss."""

    def __init__(
        self, node: Node, arguments: dict[str, Any], values: dict[str, TensorType]
    ) -> None:
        self.node, self.arguments, self.values = node, arguments, values
        self.result: list[Node] = []

    def nodes(self) -> list[Node]:
        target = self.arguments["target"]
        kind = self.values[target.name]
        out = self.node.outputs[0]
        if kind.dtype.is_floating_point:  # class probabilities: every position counts as one
            shape = self.values[self.arguments["self"].name].shape
            classes = shape[1] if len(shape) > 1 else shape[0]
            count: Any = max(1, kind.numel // max(1, classes))
        else:
            count = self._count(target, kind)
        mean_type = self.values[out]
        if not DTYPES[dtype_name(mean_type.dtype)].widened:
            total = self._summed(self.arguments["self"], mean_type)
            self._add("div", "aten.div.Tensor", (total, count), mean_type, outputs=(out,))
            return self.result
        # The sum of a batch is too large or too coarse for 16 bits.
        scores = self.arguments["self"]
        wide_scores = TensorType(self.values[scores.name].shape, torch.float32)
        wide = self._add("wide", "aten.to.dtype", (scores, torch.float32), wide_scores)
        float32 = TensorType(mean_type.shape, torch.float32)
        total = self._summed(wide, float32)
        mean = self._add("div", "aten.div.Tensor", (total, count), float32)
        self._add("narrow", "aten.to.dtype", (mean, mean_type.dtype), mean_type, outputs=(out,))
        return self.result

    def _count(self, target: Ref, kind: TensorType) -> Ref:
        """Return the number of targets that are not ignored, or the sum of their class weights."""
        shape, count = kind.shape, kind.numel
        mask, index = TensorType(shape, torch.bool), self.arguments.get("ignore_index", -100)
        used = self._add("kept", "aten.ne.Scalar", (target, index), mask)
        weight = self.arguments.get("weight")
        if not isinstance(weight, Ref):
            return self._add("count", "aten.sum.default", (used,), TensorType((), torch.int64))
        dtype = self.values[weight.name].dtype
        flat, weights = TensorType((count,), dtype), TensorType(shape, dtype)
        ignored = self._add("ignored", "aten.eq.Scalar", (target, index), mask)
        safe = self._add("safe", "aten.masked_fill.Scalar", (target, ignored, 0), kind)
        rows = TensorType((count,), kind.dtype)
        row = self._add("places", "aten.reshape.default", (safe, (count,)), rows)
        picked = self._add("picked", "aten.index_select.default", (weight, 0, row), flat)
        shaped = self._add("weights", "aten.reshape.default", (picked, shape), weights)
        counted = self._add("own", "aten.masked_fill.Scalar", (shaped, ignored, 0), weights)
        return self._add("count", "aten.sum.default", (counted,), TensorType((), dtype))

    def _summed(self, scores: Ref, kind: TensorType) -> Ref:
        changes = {"self": scores, "reduction": SUM}
        call = replace_arguments(self.node, changes)
        outputs = (f"{self.node.outputs[0]}_sum", *self.node.outputs[1:])
        changed = {"name": f"{self.node.name}_sum", "args": call.args, "kwargs": call.kwargs}
        return self._append(kind, outputs=outputs, **changed)

    def _add(
        self,
        name: str,
        op: str,
        args: tuple[Any, ...],
        kind: TensorType,
        outputs: tuple[str, ...] = (),
    ) -> Ref:
        # Added nodes get keys of their own, so that the keys of the user's nodes do not change.
        new = f"{self.node.name}_{name}"
        changed = {"name": new, "key": new, "op": op, "args": args, "kwargs": ()}
        return self._append(kind, outputs=outputs or (new,), **changed)

    def _append(self, kind: TensorType, *, outputs: tuple[str, ...], **changed: Any) -> Ref:
        self.values[outputs[0]] = kind
        self.result.append(dataclasses.replace(self.node, outputs=outputs, **changed))
        return Ref(outputs[0])
