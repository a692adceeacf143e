"""Values of the whole batch that micro-batches need: computed once, before the first of them.

Enters: a graph whose time axis is solved. Leaves: the graph in which such values are inputs, and
the graph that computes them from the batch.
"""

from __future__ import annotations

import dataclasses

from shardwise.ir import Graph, Input, Node, Ref, iter_refs, map_refs
from shardwise.layouts.microbatch_axis import Timed
from shardwise.sharding.factors import Facts, node_rule
from shardwise.sharding.placements import PARTIAL_GRAD
from shardwise.sharding.rule import Call


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
