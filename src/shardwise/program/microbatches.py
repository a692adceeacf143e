"""Values of the whole batch that micro-batches need: computed once, before the first of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from shardwise.dtypes import DTYPES, dtype_name
from shardwise.ir import Graph, Input, Node, Ref, TensorType, iter_refs, map_refs
from shardwise.ir.schema import bind
from shardwise.layouts.microbatch_axis import Timed
from shardwise.sharding.factors import Facts, node_rule
from shardwise.sharding.placements import PARTIAL_GRAD
from shardwise.sharding.rule import Call, replace_arguments


def take_beforehand(
    graph: Graph, facts: Facts, timed: Timed
) -> tuple[Graph, Facts, Timed, Graph | None]:
    """Return the graph with those values as inputs, and the graph that computes them, if there are
    any.
    """
    if not timed.beforehand:
        return graph, facts, timed, None
    wanted: dict[str, str] = {}
    nodes: list[Node] = []
    values = dict(graph.values)
    calls, rules, dims = dict(facts.calls), dict(facts.rules), dict(facts.dims)
    for node in graph.nodes:
        places = timed.beforehand.get(node.name)
        if places:
            node = _redirect(node, places, wanted)
            for name, given in wanted.items():
                values.setdefault(given, values[name])
                dims.setdefault(given, dims[name])
            calls[node.name] = Call.of(node, values)
            rules[node.name] = node_rule(graph, calls[node.name])
        nodes.append(node)
    inputs = tuple(
        Input(value=given, name=given, path=(given,), kind="beforehand")
        for given in wanted.values()
    )
    rewritten = dataclasses.replace(
        graph, nodes=_live(graph, nodes), values=values, inputs=(*graph.inputs, *inputs)
    )
    return (
        rewritten,
        dataclasses.replace(facts, calls=calls, rules=rules, dims=dims),
        dataclasses.replace(
            timed, values={**timed.values, **dict.fromkeys(wanted.values(), PARTIAL_GRAD)}
        ),
        restrict(graph, tuple(wanted)),
    )


def _redirect(node: Node, places: frozenset[int], wanted: dict[str, str]) -> Node:
    """Return the node with the operands at these places taken from inputs."""
    position = -1

    def replaced(ref: Ref) -> Ref:
        nonlocal position
        position += 1
        if position not in places:
            return ref
        return Ref(wanted.setdefault(ref.name, f"{ref.name}_of_batch"))

    args = map_refs(node.args, replaced)
    kwargs = tuple((key, map_refs(value, replaced)) for key, value in node.kwargs)
    return dataclasses.replace(node, args=args, kwargs=kwargs)


def _live(graph: Graph, nodes: list[Node]) -> tuple[Node, ...]:
    """Return the nodes without those whose results are now computed beforehand alone."""
    used = {b.mutation for b in graph.buffers} | {graph.loss}
    used |= {ref.name for ref in iter_refs(graph.outputs)}
    before = {name for node in graph.nodes for name in node.inputs}
    kept = []
    for node in reversed(nodes):
        unused_before = not before & set(node.outputs)
        if used & set(node.outputs) or unused_before:
            used |= set(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))


def restrict(graph: Graph, wanted: tuple[str, ...]) -> Graph:
    """Return the part of a graph that computes these values of the batch, as its outputs."""
    needed, nodes = set(wanted), []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs):
            needed |= set(node.inputs)
            nodes.append(node)
    return dataclasses.replace(
        graph,
        nodes=tuple(reversed(nodes)),
        inputs=tuple(i for i in graph.inputs if i.value in needed),
        parameters=(),
        buffers=tuple(
            dataclasses.replace(b, mutation=None) for b in graph.buffers if b.value in needed
        ),
        constants=tuple(c for c in graph.constants if c.value in needed),
        loss=None,
        outputs=tuple(Ref(name) for name in wanted),
        output_spec=None,
    )


# Mean losses as a sum divided by a count that is known from the labels.
#
# A micro-batch can then add its share of the sum while the count of the whole batch is computed
# beforehand.


MEAN, SUM = 1, 2
LOSSES = {
    "aten.cross_entropy_loss.default",
    "aten.nll_loss.default",
    "aten.nll_loss_nd.default",
    "aten.nll_loss2d.default",
}


def separate_means(graph: Graph) -> Graph:
    """Return the graph with every mean over labels as a sum and a count."""
    nodes: list[Node] = []
    values = dict(graph.values)
    for node in graph.nodes:
        arguments = bind(node) if node.op in LOSSES else {}
        if arguments.get("reduction") == MEAN:
            nodes += _Mean(node, arguments, values).nodes()
        else:
            nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), values=values)


class _Mean:
    """Writes the nodes of one loss."""

    def __init__(
        self, node: Node, arguments: dict[str, Any], values: dict[str, TensorType]
    ) -> None:
        self.node, self.arguments, self.values = node, arguments, values
        self.made: list[Node] = []

    def nodes(self) -> list[Node]:
        target = self.arguments["target"]
        kind = self.values[target.name]
        out = self.node.outputs[0]
        if kind.dtype.is_floating_point:  # probabilities: the mean goes over positions
            shape = self.values[self.arguments["self"].name].shape
            classes = shape[1] if len(shape) > 1 else shape[0]
            count: Any = max(1, kind.numel // max(1, classes))
        else:
            count = self._count(target, kind)
        given = self.values[out]
        if not DTYPES[dtype_name(given.dtype)].widened:
            total = self._summed(self.arguments["self"], given)
            self._add("div", "aten.div.Tensor", (total, count), given, outputs=(out,))
            return self.made
        # The sum of a batch is too large or too coarse for 16 bits.
        scores = self.values[self.arguments["self"].name]
        wide = self._add(
            "wide",
            "aten.to.dtype",
            (self.arguments["self"], torch.float32),
            TensorType(scores.shape, torch.float32),
        )
        float32 = TensorType(given.shape, torch.float32)
        total = self._summed(wide, float32)
        mean = self._add("div", "aten.div.Tensor", (total, count), float32)
        self._add("narrow", "aten.to.dtype", (mean, given.dtype), given, outputs=(out,))
        return self.made

    def _count(self, target: Ref, kind: TensorType) -> Ref:
        """How many targets are kept, or the sum of their classes' weights."""
        shape, ignored = kind.shape, self.arguments.get("ignore_index", -100)
        kept = self._add("kept", "aten.ne.Scalar", (target, ignored), TensorType(shape, torch.bool))
        weight = self.arguments.get("weight")
        if not isinstance(weight, Ref):
            return self._add("count", "aten.sum.default", (kept,), TensorType((), torch.int64))
        dtype = self.values[weight.name].dtype
        lost = self._add(
            "ignored", "aten.eq.Scalar", (target, ignored), TensorType(shape, torch.bool)
        )
        safe = self._add("safe", "aten.masked_fill.Scalar", (target, lost, 0), kind)
        flat = TensorType((kind.numel,), kind.dtype)
        places = self._add("places", "aten.reshape.default", (safe, (kind.numel,)), flat)
        picked = self._add(
            "picked",
            "aten.index_select.default",
            (weight, 0, places),
            TensorType((kind.numel,), dtype),
        )
        shaped = self._add(
            "weights", "aten.reshape.default", (picked, shape), TensorType(shape, dtype)
        )
        own = self._add(
            "own", "aten.masked_fill.Scalar", (shaped, lost, 0), TensorType(shape, dtype)
        )
        return self._add("count", "aten.sum.default", (own,), TensorType((), dtype))

    def _summed(self, scores: Ref, kind: TensorType) -> Ref:
        changes = {"self": scores, "reduction": SUM}
        call = replace_arguments(self.node, self.arguments, changes)
        name = f"{self.node.name}_sum"
        outputs = (f"{self.node.outputs[0]}_sum", *self.node.outputs[1:])
        self.values[outputs[0]] = kind
        self.made.append(
            dataclasses.replace(
                self.node, name=name, args=call.args, kwargs=call.kwargs, outputs=outputs
            )
        )
        return Ref(outputs[0])

    def _add(
        self,
        name: str,
        op: str,
        args: tuple[Any, ...],
        kind: TensorType,
        outputs: tuple[str, ...] = (),
    ) -> Ref:
        """One more node where the loss is, keyed apart from the user's own."""
        fresh = f"{self.node.name}_{name}"
        outputs = outputs or (fresh,)
        self.values[outputs[0]] = kind
        self.made.append(
            dataclasses.replace(
                self.node, name=fresh, op=op, args=args, kwargs=(), outputs=outputs, key=fresh
            )
        )
        return Ref(outputs[0])
