"""The joint choice of layouts: options, model, reduction, integer program, assignments.

Enters: a graph with its `Facts`, a `LayoutTask`, `Prices`. Leaves: `LayoutSolution`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from shardwise.ir import Graph
from shardwise.planner.layouts.build import Built, build, check_feasible
from shardwise.planner.layouts.eliminate import solve_by_elimination
from shardwise.planner.layouts.model import Solved
from shardwise.planner.layouts.options import Options
from shardwise.planner.layouts.program import Program
from shardwise.planner.layouts.reduce import Reducer, restore
from shardwise.planner.layouts.task import LayoutSolution, LayoutTask, Prices
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import REPLICATE, Placement, Replicate
from shardwise.sharding.task import Assignment


def solve_layouts(
    graph: Graph, facts: Facts, task: LayoutTask, prices: Prices, *, time_limit_s: float = 30.0
) -> LayoutSolution:
    """The cheapest layouts of all nodes and parameters over all mesh axes at once."""
    begun = time.monotonic()
    options = Options(graph, facts, task)
    if task.memory_limit_bytes is not None:  # most limits do not bind
        free = replace(task, memory_limit_bytes=None)
        found = _solve(graph, facts, free, options, prices, time_limit_s, begun)
        if _memory(found[0], found[1], prices, task) <= task.memory_limit_bytes:
            return _solution(graph, task, prices, found, begun)
    found = _solve(graph, facts, task, options, prices, time_limit_s, begun)
    return _solution(graph, task, prices, found, begun)


Found = tuple[Built, dict[int, int], Solved]


def _solve(
    graph: Graph,
    facts: Facts,
    task: LayoutTask,
    options: Options,
    prices: Prices,
    time_limit_s: float,
    begun: float,
) -> Found:
    built = build(graph, facts, task, options, prices)
    ledger = Reducer(built.model).run()
    check_feasible(built.model, built)
    solved = solve_by_elimination(built.model)
    if solved is None:
        solved = Program(built.model).solve(time_limit_s - (time.monotonic() - begun))
    return built, restore(ledger, solved.chosen), solved


def _memory(built: Built, chosen: dict[int, int], prices: Prices, task: LayoutTask) -> float:
    """Bytes of parameters and of what nodes save."""
    total = 0.0
    for value, variable in built.sources.items():
        if value in built.parameters:
            stored = built.storages[value][chosen[variable]]
            total += task.copies.get(value, 1) * prices.stored_bytes(value, stored)
    for name, variable in built.nodes.items():
        choice = built.options[name][chosen[variable]].choice
        total += task.copies.get(name, 1) * prices.saved_bytes(built.by_name[name], choice)
    return total


def _solution(
    graph: Graph, task: LayoutTask, prices: Prices, found: Found, begun: float
) -> LayoutSolution:
    built, chosen, solved = found
    assignments = []
    for i, axis in enumerate(task.axes):
        nodes = {
            name: built.options[name][chosen[variable]].choice[i]
            for name, variable in built.nodes.items()
        }
        stored = {
            value: _plain(built.storages[value][chosen[variable]][i])
            for value, variable in built.sources.items()
        }
        assignments.append(
            Assignment(
                axis=axis.name, ranks=axis.ranks, nodes=nodes, parameters=stored, cost=solved.cost
            )
        )
    return LayoutSolution(
        graph=graph,
        assignments=tuple(assignments),
        cost_s=solved.cost,
        bound_s=min(solved.bound, solved.cost),
        memory_bytes=_memory(built, chosen, prices, task),
        num_variables=solved.num_variables,
        seconds=time.monotonic() - begun,
    )


def _plain(placement: Placement) -> Placement:
    """The storage without what its uses make of its gradient."""
    return REPLICATE if isinstance(placement, Replicate) else placement
