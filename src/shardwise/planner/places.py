"""The nodes at which a pipeline stage may begin, and those that a person names.

Enters: a graph, and places or module paths. Leaves: indices of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, node_keys
from shardwise.ir.interpret import is_random
from shardwise.layouts.microbatch_axis import values_of_inputs


def unfit(graph: Graph) -> dict[int, str]:
    """The nodes at which no stage may begin, and why."""
    free = values_of_inputs(graph)
    reasons = {0: "it is the first node of the model"}
    for index, node in enumerate(graph.nodes):
        if all(name in free for name in node.outputs):
            reasons.setdefault(index, "it depends on the batch alone")
        elif is_random(node):
            reasons.setdefault(index, "it draws random numbers")
    changed = {b.value: b for b in graph.buffers if b.mutation}
    changed |= {b.mutation: b for b in graph.buffers if b.mutation}
    uses: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for name in (*node.inputs, *node.outputs):
            if name in changed:
                uses.setdefault(changed[name].name, []).append(index)
    for buffer, places in uses.items():
        for index in range(places[0] + 1, places[-1] + 1):
            reasons.setdefault(index, f"all uses of the buffer {buffer} belong to one stage")
    return reasons


def find_places(graph: Graph, cuts: Sequence[str]) -> tuple[int, ...]:
    """The first node of every stage, given where all but the first begin.

    A cut is a node's place, or a module path: the first node of that module which can be.
    """
    places = {place: index for index, place in enumerate(node_keys(graph).values())}
    reasons = unfit(graph)
    starts = (0, *(_find(graph, cut, places, reasons) for cut in cuts))
    for (a, b), cut in zip(pairwise(starts), cuts, strict=True):
        if b <= a:
            raise PlanError(
                f"cut {cut!r} is node {b}, the stage before it begins at node {a}",
                where="cuts",
                hint="give cuts in the order of the model, each once",
            )
    return starts


def _find(graph: Graph, cut: str, places: dict[str, int], reasons: dict[int, str]) -> int:
    if cut in places:
        index = places[cut]
        if index in reasons:
            later = [place for place, i in places.items() if i > index and i not in reasons]
            raise PlanError(
                f"no stage can begin at {cut!r}: {reasons[index]}",
                where=graph.nodes[index].origin,
                hint=f"the next place is {later[0]!r}" if later else None,
            )
        return index
    inside = [
        i for i, n in enumerate(graph.nodes) if n.module == cut or n.module.startswith(f"{cut}.")
    ]
    fit = [i for i in inside if i not in reasons]
    if fit:
        return fit[0]
    if inside:
        why = f"none of its {len(inside)} nodes can be the first ({reasons[inside[0]]})"
    else:
        modules = dict.fromkeys(node.module for node in graph.nodes)
        why = f"{graph.name} has no such node or module{did_you_mean(cut, [*modules, *places])}"
    raise PlanError(
        f"no stage can begin at {cut!r}: {why}",
        where="cuts",
        hint="a place that shardwise explain lists, or a module path",
    )
