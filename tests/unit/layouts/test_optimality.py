"""The joint layout search is as good as an exhaustive search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.ir import Graph
from shardwise.layouts.build import build
from shardwise.layouts.options import Options
from shardwise.layouts.problem import LayoutAxis, LayoutSolution, LayoutTask
from shardwise.layouts.solve import LayoutMilp
from shardwise.plans import Resolved
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Shard
from tests.support.tiers import thinned
from tests.unit.layouts.exhaustive import Exhaustive, lowered_cost, plan_for, resolutions
from tests.unit.layouts.prices import LinkPrices, RandomPrices, solve_layouts

MESHES = {
    "tp2": (("tp", 2),),
    "tp3": (("tp", 3),),
    "tp4": (("tp", 4),),
    "dp2": (("dp", 2),),
    "dp2tp2": (("dp", 2), ("tp", 2)),
}


class Net(nn.Module):
    """A function of an input, two matrices and a vector."""

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


def casts(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    w = a * 2
    return (F.linear(x, w) + w.sum(1)).tanh().sum()


def branches(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    y = F.linear(x, a)
    return (y.relu() + F.linear(y, b).sum() * y).mean()


def twice(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    y = F.linear(x, a, v)
    return (y.t() @ y).exp().sum()


def function_of(steps: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return a function with these steps, encoded as numbers; its values are 4 x 8."""

    def body(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        values = [F.linear(x, a)]
        for step in steps:
            last, earlier = values[-1], values[step // 7 % len(values)]
            step_function = (
                lambda last, earlier: last.tanh(),
                lambda last, earlier: last + earlier,
                lambda last, earlier: last * v,
                lambda last, earlier: last.softmax(-1),
                lambda last, earlier: last * earlier,
                lambda last, earlier: F.linear(F.linear(last, b), a),
                lambda last, earlier: last.view(2, 2, 8).transpose(0, 1).reshape(4, 8),
            )[step % 7]
            values.append(step_function(last, earlier))
        return values[-1].sum()

    return body


BODIES = {f.__name__: f for f in (chain, reused, tied, vector, views, casts, branches, twice)}


@functools.cache
def captured(body: Callable[..., Tensor]) -> tuple[Graph, Facts]:
    graph = sw.capture(Net(body), {"x": torch.ones(4, 6)})
    return graph, analyze(graph)


def make_task(graph: Graph, mesh: str, **changes: object) -> LayoutTask:
    inputs = {i.value: Shard(0, ((1, 4, 1),)) for i in graph.inputs}
    axes = tuple(
        LayoutAxis(name=n, ranks=r, role="batch", inputs=inputs)
        if n == "dp"
        else LayoutAxis(name=n, ranks=r)
        for n, r in MESHES[mesh]
    )
    return LayoutTask(axes=axes, **changes)  # type: ignore[arg-type]


BOTH = [(name, mesh) for name in BODIES for mesh in MESHES]


@pytest.mark.parametrize(("name", "mesh"), thinned(BOTH, lambda i, _: (i + i // 5) % 3 == 0))
def test_equals_exhaustive_search(name: str, mesh: str) -> None:
    graph, facts = captured(BODIES[name])
    task = make_task(graph, mesh)
    slow = {"latency_s": 1e-6, "launch_s": 1e-8, "link_bytes_per_s": 1e9, "flops_per_s": 1e7}
    for rates in ({}, slow):
        prices = LinkPrices(graph=graph, facts=facts, task=task, **rates)
        solution = solve_layouts(graph, facts, task, prices)
        best = Exhaustive(graph, facts, task, prices, best=solution.cost_s * 1.0001).run()
        assert solution.cost_s == pytest.approx(best, rel=1e-5)
        assert solution.gap < 1e-5


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 41), max_size=4),
    st.sampled_from(sorted(MESHES)),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.2, 0.6]),
)
def test_equals_exhaustive_search_at_random_prices(
    steps: list[int], mesh: str, seed: int, free: float
) -> None:
    graph, facts = captured(function_of(tuple(steps)))
    assume(len(graph.nodes) <= (8 if mesh != "dp2tp2" else 5))
    task = make_task(graph, mesh)
    prices = RandomPrices(graph=graph, seed=seed, free=free)
    solution = solve_layouts(graph, facts, task, prices)
    best = Exhaustive(graph, facts, task, prices, best=solution.cost_s * 1.0001 + 1e-9).run()
    assert solution.cost_s == pytest.approx(best, rel=1e-5, abs=1e-9)


GRID = [(n, m, s) for n in ("chain", "reused", "vector") for m in ("tp2", "dp2") for s in range(3)]


@pytest.mark.parametrize(("name", "mesh", "seed"), thinned(GRID, lambda i, _: i % 3 == i // 3 % 3))
def test_equals_the_best_of_all_lowered_programs(name: str, mesh: str, seed: int) -> None:
    """Check against lowered programs, which share only the options of nodes with the search."""
    graph, facts = captured(BODIES[name])
    task = make_task(graph, mesh, move_parameters=True)
    prices = RandomPrices(graph=graph, seed=seed)
    solution = solve_layouts(graph, facts, task, prices)
    best = min(lowered_cost(r, task, prices) for r in sampled(graph, facts, task, solution))
    assert solution.cost_s == pytest.approx(best, rel=1e-6)


def sampled(
    graph: Graph, facts: Facts, task: LayoutTask, solution: LayoutSolution
) -> Iterator[Resolved]:
    """Yield the solution and about 150 evenly spaced programs of all possible ones."""
    yield Resolved(
        graph=graph, plan=plan_for(graph, task), facts=facts, assignments=solution.assignments
    )
    programs = list(resolutions(graph, facts, task))
    yield from programs[:: max(1, len(programs) // 150)]


@pytest.mark.parametrize("mesh", ["tp2", "dp2tp2"])
@pytest.mark.parametrize("name", ["tied", "branches", "casts"])
def test_integer_program_equals_elimination(name: str, mesh: str) -> None:
    graph, facts = captured(BODIES[name])
    task = make_task(graph, mesh)
    for seed in range(2):
        prices = RandomPrices(graph=graph, seed=seed)
        built = build(Options(graph, facts, task), prices)
        program = LayoutMilp(built.model).solve(30.0)  # of the model without any reduction
        solution = solve_layouts(graph, facts, task, prices)
        assert program.cost == pytest.approx(solution.cost_s, rel=1e-6)
        assert program.bound == pytest.approx(solution.cost_s, rel=1e-4)
