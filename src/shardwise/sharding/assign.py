"""Layouts for one mesh axis: a choice for every node, found by dynamic programming.

Enters: a graph's `Facts` and a `Task` (what is fixed, what may be cut). Leaves: an `Assignment`.
With a beam as wide as the number of states the answer is optimal for the costs of `costs` among
what `allowed` admits.
"""

from __future__ import annotations

from shardwise.ir import Graph
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import REPLICATE, Placement
from shardwise.sharding.search import Search, State
from shardwise.sharding.task import Assignment, Task

__all__ = ["Assignment", "Task", "assign"]


def assign(
    graph: Graph, facts: Facts, task: Task, earlier: tuple[Assignment, ...] = ()
) -> Assignment:
    """The cheapest choices for one mesh axis, given those of earlier axes."""
    search = Search(graph, facts, task, earlier)
    states = [State(0.0, ())]
    for index, node in enumerate(graph.nodes):
        states = search.step(index, node, states)
    best = min(states, key=lambda s: s.cost)
    nodes: dict[str, Candidate] = {}
    parameters: dict[str, Placement] = {}
    state: State | None = best
    for node in reversed(graph.nodes):
        assert state is not None
        assert state.chosen is not None
        nodes[node.name] = state.chosen
        parameters.update(state.stored)
        state = state.previous
    for parameter in graph.parameters:
        parameters.setdefault(parameter.value, task.parameters.get(parameter.value, REPLICATE))
    ordered = {node.name: nodes[node.name] for node in graph.nodes}
    return Assignment(
        axis=task.axis, ranks=task.ranks, nodes=ordered, parameters=parameters, cost=best.cost
    )
