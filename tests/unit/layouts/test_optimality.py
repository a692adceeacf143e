"""The integer program finds what trying everything finds."""

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
from shardwise.layouts.solve import LayoutMilp, solve_layouts
from shardwise.plans import Resolved
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Shard
from tests.support.tiers import thinned
from tests.unit.layouts.exhaustive import Exhaustive, lowered_cost, plan_for, resolutions
from tests.unit.layouts.prices import LinkPrices, RandomPrices

MESHES = {
    "tp2": (("tp", 2),),
    "tp3": (("tp", 3),),
    "tp4": (("tp", 4),),
    "dp2": (("dp", 2),),
    "dp2tp2": (("dp", 2), ("tp", 2)),
}


class Net(nn.Module):
    """Two matrices and a vector for a function of them."""

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


def drawn(steps: tuple[int, ...]) -> Callable[..., Tensor]:
    """A function whose steps are chosen by numbers; values of 4 x 8 and 4 x 6 take turns."""

    def body(x: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        wide = [F.linear(x, a)]
        for step in steps:
            last, other = wide[-1], wide[step // 7 % len(wide)]
            made = (
                lambda last, other: last.tanh(),
                lambda last, other: last + other,
                lambda last, other: last * v,
                lambda last, other: last.softmax(-1),
                lambda last, other: last * other,
                lambda last, other: F.linear(F.linear(last, b), a),
                lambda last, other: last.view(2, 2, 8).transpose(0, 1).reshape(4, 8),
            )[step % 7]
            wide.append(made(last, other))
        return wide[-1].sum()

    return body


BODIES = {f.__name__: f for f in (chain, reused, tied, vector, views, casts, branches, twice)}


@functools.cache
def captured(body: Callable[..., Tensor]) -> tuple[Graph, Facts]:
    graph = sw.capture(Net(body), {"x": torch.ones(4, 6)})
    return graph, analyze(graph)


def make_task(graph: Graph, mesh: str, **changes: object) -> LayoutTask:
    inputs = {i.value: Shard(0, ((1, 4, 1),)) for i in graph.inputs}
    axes = tuple(
        LayoutAxis(name=n, ranks=r, role="batch" if n == "dp" else "parameters", inputs=inputs)
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
        found = solve_layouts(graph, facts, task, prices)
        best = Exhaustive(graph, facts, task, prices, best=found.cost_s * 1.0001).run()
        assert found.cost_s == pytest.approx(best, rel=1e-5)
        assert found.gap < 1e-5


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
    graph, facts = captured(drawn(tuple(steps)))
    assume(len(graph.nodes) <= (8 if mesh != "dp2tp2" else 5))
    task = make_task(graph, mesh)
    prices = RandomPrices(graph=graph, seed=seed, free=free)
    found = solve_layouts(graph, facts, task, prices)
    best = Exhaustive(graph, facts, task, prices, best=found.cost_s * 1.0001 + 1e-9).run()
    assert found.cost_s == pytest.approx(best, rel=1e-5, abs=1e-9)


GRID = [(n, m, s) for n in ("chain", "reused", "vector") for m in ("tp2", "dp2") for s in range(3)]


@pytest.mark.parametrize(("name", "mesh", "seed"), thinned(GRID, lambda i, _: i % 3 == i // 3 % 3))
def test_equals_the_best_of_all_lowered_programs(name: str, mesh: str, seed: int) -> None:
    """Nothing of this package prices the programs but the options that a node has."""
    graph, facts = captured(BODIES[name])
    task = make_task(graph, mesh, move_parameters=True)
    prices = RandomPrices(graph=graph, seed=seed)
    found = solve_layouts(graph, facts, task, prices)
    best = min(lowered_cost(r, task, prices) for r in sampled(graph, facts, task, found))
    assert found.cost_s == pytest.approx(best, rel=1e-6)


def sampled(
    graph: Graph, facts: Facts, task: LayoutTask, found: LayoutSolution
) -> Iterator[Resolved]:
    """The solution, and every second to tenth of all that differ from it."""
    yield Resolved(
        graph=graph, plan=plan_for(graph, task), facts=facts, assignments=found.assignments
    )
    every = list(resolutions(graph, facts, task))
    yield from every[:: max(1, len(every) // 150)]


@pytest.mark.parametrize("mesh", ["tp2", "dp2tp2"])
@pytest.mark.parametrize("name", ["tied", "branches", "casts"])
def test_integer_program_equals_elimination(name: str, mesh: str) -> None:
    graph, facts = captured(BODIES[name])
    task = make_task(graph, mesh)
    for seed in range(2):
        prices = RandomPrices(graph=graph, seed=seed)
        built = build(Options(graph, facts, task), prices)
        program = LayoutMilp(built.model).solve(30.0)  # of the whole model, nothing reduced
        found = solve_layouts(graph, facts, task, prices)
        assert program.cost == pytest.approx(found.cost_s, rel=1e-6)
        assert program.bound == pytest.approx(found.cost_s, rel=1e-4)
