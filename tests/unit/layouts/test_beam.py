"""The dynamic program finds what trying everything finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.layouts.beam import Assignment, Held, Search, Task, assign
from shardwise.plans.resolve import axis_task
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import Facts, analyze


class Net(nn.Module):
    """Three matrices and a vector for a function of them."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(6, 8))
        self.v = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.a, self.b, self.v)


def chain(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, a)), b).sum()


def reused(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    y = F.linear(x, a)
    return (y * y.softmax(-1)).sum()


def tied(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.linear(x, a), a.t()).mean()


def vector(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return (F.linear(x, a, v) + v).relu().sum()


def views(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.linear(x, a).view(4, 2, 4).transpose(0, 1).amax(-1).sum()


def exhaustive(search: Search, facts: Facts) -> float:
    """The least cost over every combination of candidates."""
    nodes = search.graph.nodes
    options = [search.allowed.options(node) for node in nodes]

    def cheapest(index: int, held: dict[str, Held]) -> float:
        if index == len(nodes):
            return 0.0
        node, best = nodes[index], float("inf")
        present = {name: held.get(name) for name in node.inputs}
        for candidate in options[index]:
            moved = search._move(node, candidate, present)
            if moved is None:
                continue
            cost, after, _ = moved
            given = {n: (p,) for n, p in zip(node.outputs, candidate.results, strict=True)}
            best = min(best, cost + cheapest(index + 1, {**held, **after, **given}))
        return best

    return cheapest(0, {})


def cost_of(search: Search, chosen: dict[str, Candidate]) -> float:
    """What an assignment costs when its choices are taken one after the other."""
    held: dict[str, Held] = {}
    total = 0.0
    for node in search.graph.nodes:
        moved = search._move(node, chosen[node.name], {n: held.get(n) for n in node.inputs})
        assert moved is not None
        total += moved[0]
        results = chosen[node.name].results
        held |= moved[1] | {n: (p,) for n, p in zip(node.outputs, results, strict=True)}
    return total


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
@pytest.mark.parametrize("body", [chain, reused, tied, vector, views])
def test_the_cheapest_of_all_combinations(
    body: Callable[..., Tensor], strategy: str, ranks: int
) -> None:
    graph = sw.capture(Net(body), (torch.ones(4, 6),))
    assert len(graph.nodes) <= 6
    facts = analyze(graph)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks))
    free = plan.with_(parameters={})  # all parameters are the search's to decide
    ((axis, _),) = plan.mesh.axes
    task: Task = axis_task(graph, free, axis, ranks)
    found: Assignment = assign(graph, facts, task)
    search = Search(graph, facts, task, ())
    assert found.cost == pytest.approx(exhaustive(search, facts), rel=1e-12)
    assert cost_of(search, dict(found.nodes)) == pytest.approx(found.cost, rel=1e-12)
