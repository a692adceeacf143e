"""The dynamic program is as good as trying all combinations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.layouts.beam import Available, Search, assign
from shardwise.plans.resolve import axis_task
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import analyze
from tests.unit.layouts.test_optimality import Net, chain, reused, tied, vector, views


def exhaustive(search: Search) -> float:
    """Return the minimum cost of all combinations of candidates."""
    nodes = search.graph.nodes
    options = [search.allowed.options(node) for node in nodes]

    def cheapest(index: int, available: dict[str, Available]) -> float:
        if index == len(nodes):
            return 0.0
        node, best = nodes[index], float("inf")
        present = {name: available.get(name) for name in node.inputs}
        for candidate in options[index]:
            move = search._move(node, candidate, present)
            if move is None:
                continue
            cost, after, _ = move
            results = {n: (p,) for n, p in zip(node.outputs, candidate.results, strict=True)}
            best = min(best, cost + cheapest(index + 1, {**available, **after, **results}))
        return best

    return cheapest(0, {})


def cost_of(search: Search, choices: dict[str, Candidate]) -> float:
    """Return the cost of an assignment by applying its choices one after the other."""
    available: dict[str, Available] = {}
    total = 0.0
    for node in search.graph.nodes:
        present = {n: available.get(n) for n in node.inputs}
        move = search._move(node, choices[node.name], present)
        assert move is not None
        total += move[0]
        results = choices[node.name].results
        available |= move[1] | {n: (p,) for n, p in zip(node.outputs, results, strict=True)}
    return total


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
@pytest.mark.parametrize("body", [chain, reused, tied, vector, views])
def test_finds_the_cheapest_of_all_combinations(
    body: Callable[..., Tensor], strategy: str, ranks: int
) -> None:
    graph = sw.capture(Net(body), (torch.ones(4, 6),))
    assert len(graph.nodes) <= 6
    facts = analyze(graph)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks))
    free = plan.with_(parameters={})  # let the search choose the layouts of all parameters
    ((axis, _),) = plan.mesh.axes
    task = axis_task(graph, free, axis, ranks)
    assignment = assign(graph, facts, task)
    search = Search(graph, facts, task, ())
    assert assignment.cost == pytest.approx(exhaustive(search), rel=1e-12)
    assert cost_of(search, dict(assignment.nodes)) == pytest.approx(assignment.cost, rel=1e-12)
