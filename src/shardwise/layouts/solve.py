"""Solve the joint choice of layouts: build, reduce, eliminate or solve an integer program.

All mesh axes are chosen together. With several axes of parameters the joint options of a node are
the product of what it can do on each. If these are more than `MAX_JOINT`, one such axis is open
at a time, together with all axes that follow inputs, until no axis improves; a last joint problem
then combines what was chosen on the way. Such a solution says so in `restricted`.

Where elimination would need large tables, `LayoutMilp` decides:

    minimize    sum_v sum_s unary[v,s] x[v,s]  +  sum_e sum_ab table[e,a,b] w[e,a,b]
                + sum_stars sum_moves price[h,m] z[h,m]
    subject to  sum_s x[v,s] = 1                                     every variable v     (_choose)
                sum_b w[e,a,b] = x(a),  sum_a w[e,a,b] = x(b)        every pair e         (_pair)
                the same for every use k of a multi-use: w[k,h,n]                         (_star)
                z[h,m] >= sum over needs n with m on the way from h of w[k,h,n]
                x(R held on an axis) <= sum of x(uses of the same work on it)             (_whole)
                sum_v sum_s weight[v,s] x[v,s] <= limit                                   (_limit)
                x in {0, 1};  w, z >= 0

`x(a)` is the sum over the states of a variable with equal rows in a pair, or with equal holdings or
needs in a multi-use. With all x integral the w and z are so as well. The facility-location form of
z makes the relaxation integral for most graphs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.layouts.build import Built, build, check_feasible
from shardwise.layouts.factor_graph import (
    INF,
    Floats,
    Ints,
    Model,
    MultiUse,
    Reducer,
    Solved,
    Use,
    restore,
    solve_by_elimination,
)
from shardwise.layouts.options import Option, Options
from shardwise.layouts.problem import Assignment, LayoutSolution, LayoutTask, Prices
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import REPLICATE, Placement, Replicate

OBJECTIVE = 1e3  # about the least objective in the solver's units; it stops within 1e-6 of the best
GAP = 1e-6  # relative: far below what prices are known to


@dataclass(slots=True)
class _Rows:
    """A sparse matrix that is built row by row."""

    entries: list[float] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        for column, entry in terms:
            self.columns.append(column)
            self.entries.append(entry)
        self.starts.append(len(self.columns))
        self.low.append(low)
        self.high.append(high)


class LayoutMilp:
    """Writes and solves the program."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows = _Rows()
        self.first: dict[int, int] = {}

    def solve(self, time_limit_s: float) -> Solved:
        """Return the best states found in time."""
        model = self.model
        if not model.variables:
            return Solved(chosen={}, cost=model.constant, bound=model.constant, num_variables=0)
        for number in sorted(model.variables):
            self._choose(number)
        for key in sorted(model.pairs):
            self._pair(key)
        for star in model.stars:
            self._star(star)
        self._limit()
        return self._run(time_limit_s)

    def _variable(self, cost: float, *, integral: bool = False) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def _choose(self, number: int) -> None:
        variable = self.model.variables[number]
        columns = [self._variable(float(c), integral=True) for c in variable.unary]
        self.first[number] = columns[0]
        self.rows.add([(c, 1.0) for c in columns], 1.0, 1.0)

    def _members(self, number: int, groups: Ints) -> dict[int, list[tuple[int, float]]]:
        """Return the columns of a variable's states by group."""
        found: dict[int, list[tuple[int, float]]] = {}
        for state, group in enumerate(groups.tolist()):
            found.setdefault(group, []).append((self.first[number] + state, -1.0))
        return found

    def _pair(self, key: tuple[int, int]) -> None:
        a, b = key
        table = self.model.pairs[key]
        small, rows, columns = alike(table)
        self._transport(small, self._members(a, rows), self._members(b, columns))

    def _transport(
        self,
        costs: Floats,
        left: dict[int, list[tuple[int, float]]],
        right: dict[int, list[tuple[int, float]]],
    ) -> dict[tuple[int, int], int]:
        """Variables that carry each of the left groups to one of the right."""
        columns = {
            (a, b): self._variable(float(costs[a, b]))
            for a in left
            for b in right
            if costs[a, b] < INF
        }
        for a, members in left.items():
            out = [(columns[a, b], 1.0) for b in right if (a, b) in columns]
            self.rows.add([*out, *members], 0.0, 0.0)
        for b, members in right.items():
            into = [(columns[a, b], 1.0) for a in left if (a, b) in columns]
            self.rows.add([*into, *members], 0.0, 0.0)
        return columns

    def _star(self, star: MultiUse) -> None:
        held = self._members(star.producer, star.held)
        shared: dict[tuple[int, int], list[list[tuple[int, float]]]] = {}
        for use in star.uses:
            needs = sorted(set(use.need.tolist()))
            right = self._needs(use)
            costs = np.full((max(held) + 1, max(needs) + 1), INF)
            for h in held:
                for n in needs:
                    if star.steps[h, n] is not None:
                        costs[h, n] = 0.0
            columns = self._transport(costs, held, right)
            taken: dict[tuple[int, int], list[tuple[int, float]]] = {}
            for (h, n), column in columns.items():
                for step in star.steps[h, n] or ():
                    taken.setdefault((h, step), []).append((column, 1.0))
            for move, terms in taken.items():
                shared.setdefault(move, []).append(terms)
        for move in sorted(shared):
            self._move(star.prices[move], shared[move])
        self._whole(star, held)

    def _needs(self, use: Use) -> dict[int, list[tuple[int, float]]]:
        if use.variable is not None:
            return self._members(use.variable, use.need)
        one = self._variable(0.0)
        self.rows.add([(one, 1.0)], 1.0, 1.0)
        return {int(use.need[0]): [(one, -1.0)]}

    def _move(self, price: float, uses: list[list[tuple[int, float]]]) -> None:
        """Return a move that is paid once for all uses; of one use alone the transport pays."""
        if price == 0:
            return
        if len(uses) == 1:
            for column, _ in uses[0]:
                self.costs[column] += price
            return
        paid = self._variable(price)
        for terms in uses:
            self.rows.add([(paid, -1.0), *terms], -INF, 0.0)

    def _whole(self, star: MultiUse, held: dict[int, list[tuple[int, float]]]) -> None:
        for axis in sorted({a for h in held for a in star.whole[h]}):
            terms = [(c, 1.0) for h in held if axis in star.whole[h] for c, _ in held[h]]
            for use in star.uses:
                if use.variable is None:
                    continue
                for state, need in enumerate(use.need.tolist()):
                    if axis in star.same[need]:
                        terms.append((self.first[use.variable] + state, -1.0))
            self.rows.add(terms, -INF, 0.0)

    def _limit(self) -> None:
        if self.model.limit is None:
            return
        terms = [
            (self.first[number] + state, float(weight))
            for number, variable in sorted(self.model.variables.items())
            for state, weight in enumerate(variable.weight)
        ]
        scale = max((abs(w) for _, w in terms), default=1.0) or 1.0
        left = self.model.limit - self.model.weight
        self.rows.add([(c, w / scale) for c, w in terms], -INF, left / scale)

    def _scale(self, costs: Floats) -> float:
        """The unit of the objective, so that the solver's absolute tolerances do not matter."""
        least = self.model.constant
        least += sum(float(v.unary.min()) for v in self.model.variables.values())
        positive = costs[costs > 0]
        if least <= 0:
            return float(positive.min()) if positive.size else 1.0
        return least / OBJECTIVE

    def _run(self, time_limit_s: float) -> Solved:
        rows, model = self.rows, self.model
        matrix = csr_array(
            (rows.entries, rows.columns, rows.starts), shape=(len(rows.low), len(self.costs))
        )
        costs = np.asarray(self.costs)
        scale = self._scale(costs)
        upper = np.where(np.asarray(self.integral) == 1, 1.0, np.inf)
        result = milp(
            costs / scale,
            constraints=LinearConstraint(matrix, np.asarray(rows.low), np.asarray(rows.high)),
            integrality=np.asarray(self.integral),
            bounds=Bounds(0.0, upper),
            options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": GAP},
        )
        if result.x is None:
            raise InfeasiblePlan(*_reason(result.status, time_limit_s, model.limit))
        chosen = {}
        for number, variable in model.variables.items():
            first = self.first[number]
            state = int(np.argmax(result.x[first : first + len(variable)]))
            chosen[number] = int(variable.index[state])
        bound = result.fun if result.mip_dual_bound is None else result.mip_dual_bound
        return Solved(
            chosen=chosen,
            cost=float(result.fun) * scale + model.constant,
            bound=float(bound) * scale + model.constant,
            num_variables=len(self.costs),
        )


def _reason(status: int, time_limit_s: float, limit: float | None) -> tuple[str]:
    if status == 1:
        return (f"no layouts were found in {time_limit_s:.1f} s",)
    if limit is not None:
        return (f"no layouts satisfy what is fixed within {limit / 2**30:.2f} GiB",)
    return ("no layouts satisfy what is fixed",)


def alike(table: Floats) -> tuple[Floats, Ints, Ints]:
    """Return the table without equal rows and columns, and where each row and column went."""
    small, rows = np.unique(table, axis=0, return_inverse=True)
    small, columns = np.unique(small, axis=1, return_inverse=True)
    return small, rows.reshape(-1), columns.reshape(-1)


MAX_JOINT = 1_500  # options of all nodes together: some seconds to solve
MAX_ROUNDS = 3  # over all axes of parameters


def solve_layouts(
    graph: Graph, facts: Facts, task: LayoutTask, prices: Prices, *, time_limit_s: float = 30.0
) -> LayoutSolution:
    """Return the cheapest layouts of all nodes and parameters over all mesh axes at once."""
    return solve_options(Options(graph, facts, task), prices, time_limit_s=time_limit_s)


def solve_options(
    options: Options, prices: Prices, *, time_limit_s: float = 30.0
) -> LayoutSolution:
    """Return the same, where what nodes may do is known already."""
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
        """Return the best solution within a bound on bytes."""
        return self._descend(limit) if self.restricted else self._solve(self.options.of, limit)

    def _solve(self, joint: dict[str, tuple[Option, ...]], limit: float | None) -> _Found:
        built = build(self.options, self.prices, joint=joint, limit=limit)
        ledger = Reducer(built.model).run()
        check_feasible(built.model, built)
        solved = solve_by_elimination(built.model)
        if solved is None:
            solved = LayoutMilp(built.model).solve(self.deadline - time.monotonic())
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
        """Return what every node does and how every parameter is stored, by mesh axis."""
        return assignments_of(self.task, found.built, found.chosen, found.solved.cost)


def assignments_of(
    task: LayoutTask, built: Built, chosen: Mapping[int, int], cost: float
) -> tuple[Assignment, ...]:
    """Return a solution, by the states of variables, as an assignment of every mesh axis."""
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
    """Return the storage without what its uses make of its gradient."""
    return REPLICATE if isinstance(placement, Replicate) else placement
