"""The joint choice of layouts: options, model, reduction, solution, assignments.

Enters: a graph with its `Facts`, a `LayoutTask`, `Prices`. Leaves: `LayoutSolution`.

All mesh axes are chosen together. With several axes of parameters the joint options of a node are
the product of what it can do on each. Where these are more than `MAX_JOINT`, one such axis is open
at a time, with all axes that follow inputs, until no axis improves; of what was chosen on the way a
joint choice is made. Such a solution says so in `restricted`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.ir import Graph
from shardwise.planner.layouts.build import Built, build, check_feasible
from shardwise.planner.layouts.eliminate import solve_by_elimination
from shardwise.planner.layouts.model import Solved
from shardwise.planner.layouts.options import Option, Options
from shardwise.planner.layouts.program import Program
from shardwise.planner.layouts.reduce import Reducer, restore
from shardwise.planner.layouts.task import LayoutSolution, LayoutTask, Prices
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import REPLICATE, Placement, Replicate
from shardwise.sharding.task import Assignment

MAX_JOINT = 1_500  # options of all nodes together: some seconds to solve
MAX_ROUNDS = 3  # over all axes of parameters


def solve_layouts(
    graph: Graph, facts: Facts, task: LayoutTask, prices: Prices, *, time_limit_s: float = 30.0
) -> LayoutSolution:
    """The cheapest layouts of all nodes and parameters over all mesh axes at once."""
    return solve_options(Options(graph, facts, task), prices, time_limit_s=time_limit_s)


def solve_options(
    options: Options, prices: Prices, *, time_limit_s: float = 30.0
) -> LayoutSolution:
    """The same, where what nodes may do is known already."""
    begun = time.monotonic()
    search = _Search(options, prices, begun + time_limit_s)
    found = search.find(None)
    limit = options.task.memory_limit_bytes
    if limit is not None and search.memory(found) > limit:  # most limits do not bind
        found = search.find(limit)
    return LayoutSolution(
        graph=options.graph,
        assignments=search.assignments(found),
        cost_s=found.solved.cost,
        bound_s=min(found.solved.bound, found.solved.cost),
        memory_bytes=search.memory(found),
        num_variables=found.solved.num_variables,
        restricted=search.restricted,
        seconds=time.monotonic() - begun,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A solution of one model: the state of every variable."""

    built: Built
    chosen: dict[int, int]
    solved: Solved

    def choice(self, name: str) -> tuple[Candidate, ...]:
        return self.built.options[name][self.chosen[self.built.nodes[name]]].choice


class _Search:
    """The problem with all axes open, or with one axis of parameters after the other."""

    def __init__(self, options: Options, prices: Prices, deadline: float) -> None:
        self.options, self.prices, self.deadline = options, prices, deadline
        self.task = options.task
        self.wide = [
            i
            for i, (axis, row) in enumerate(zip(self.task.axes, options.rows, strict=True))
            if not axis.follows_inputs and any(len(found) > 1 for found in row.values())
        ]
        self.restricted = ""
        if len(self.wide) > 1 and options.num_joint() > MAX_JOINT:
            names = ", ".join(self.task.axes[i].name for i in self.wide)
            self.restricted = f"of the axes {names} one is open at a time"

    def find(self, limit: float | None) -> _Found:
        """The best solution within a bound on bytes."""
        return self._descend(limit) if self.restricted else self._solve(self.options.of, limit)

    def _solve(self, joint: dict[str, tuple[Option, ...]], limit: float | None) -> _Found:
        built = build(self.options, self.prices, joint=joint, limit=limit)
        ledger = Reducer(built.model).run()
        check_feasible(built.model, built)
        solved = solve_by_elimination(built.model)
        if solved is None:
            solved = Program(built.model).solve(self.deadline - time.monotonic())
        return _Found(built, restore(ledger, solved.chosen), solved)

    def _descend(self, limit: float | None) -> _Found:
        """Open one axis of parameters at a time; the others begin with the same work."""
        options = self.options
        now = {i: {n: (row[0],) for n, row in options.rows[i].items()} for i in self.wide}
        seen = {i: {n: dict.fromkeys(c) for n, c in row.items()} for i, row in now.items()}
        best: _Found | None = None
        for _ in range(MAX_ROUNDS):
            before = float("inf") if best is None else best.solved.cost
            for axis in self.wide:
                if best is not None and time.monotonic() > self.deadline:
                    return best
                fixed = {i: row for i, row in now.items() if i != axis}
                best = self._solve(options.joint(fixed), limit)
                now[axis] = {name: (best.choice(name)[axis],) for name in now[axis]}
                for name, chosen in now[axis].items():
                    seen[axis][name] |= dict.fromkeys(chosen)
            assert best is not None
            if best.solved.cost >= before * (1 - 1e-6):
                break
        assert best is not None
        if time.monotonic() > self.deadline:
            return best
        left = {i: {name: tuple(cs) for name, cs in row.items()} for i, row in seen.items()}
        joint = self._solve(options.joint(left), limit)
        return joint if joint.solved.cost <= best.solved.cost else best

    def memory(self, found: _Found) -> float:
        """Bytes of parameters and of what nodes save."""
        total, built, copies = 0.0, found.built, self.task.copies
        for value, variable in built.sources.items():
            if value in built.parameters:
                stored = built.storages[value][found.chosen[variable]]
                total += copies.get(value, 1) * self.prices.stored_bytes(value, stored)
        for node in self.options.graph.nodes:
            saved = self.prices.saved_bytes(node, found.choice(node.name))
            total += copies.get(node.name, 1) * saved
        return total

    def assignments(self, found: _Found) -> tuple[Assignment, ...]:
        """What every node does and how every parameter is stored, by mesh axis."""
        return assignments_of(self.task, found.built, found.chosen, found.solved.cost)


def assignments_of(
    task: LayoutTask, built: Built, chosen: Mapping[int, int], cost: float
) -> tuple[Assignment, ...]:
    """A solution, by the states of variables, as an assignment of every mesh axis."""
    return tuple(
        Assignment(
            axis=axis.name,
            ranks=axis.ranks,
            nodes={
                name: built.options[name][chosen[variable]].choice[i]
                for name, variable in built.nodes.items()
            },
            parameters={
                value: _plain(built.storages[value][chosen[variable]][i])
                for value, variable in built.sources.items()
            },
            cost=cost,
        )
        for i, axis in enumerate(task.axes)
    )


def _plain(placement: Placement) -> Placement:
    """The storage without what its uses make of its gradient."""
    return REPLICATE if isinstance(placement, Replicate) else placement
