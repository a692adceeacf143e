"""Solve the joint choice of layouts: build, reduce, eliminate or solve an integer program.

All mesh axes are solved together. With several axes for parameters, the joint options of a node are
the product of its options on each. If there are more than `MAX_JOINT`, one such axis at a time is
open, together with all axes that follow inputs, until no axis improves; a last joint problem then
combines the choices made on the way. `LayoutSolution.restricted` reports this.

If elimination would need large tables, `LayoutMilp` decides:

    minimize    sum_v sum_s unary[v,s] x[v,s]  +  sum_e sum_ab table[e,a,b] w[e,a,b]
                + sum_multi_uses sum_moves price[h,m] z[h,m]
    subject to  sum_s x[v,s] = 1                                   every variable v  (_choose)
                sum_b w[e,a,b] = x(a),  sum_a w[e,a,b] = x(b)      every pair e      (_pair)
                the same for every use k of a multi-use: w[k,h,n]                    (_multi_use)
                z[h,m] >= sum over needs n with m on the path from h of w[k,h,n]     (_move)
                x(R on an axis) <= sum of x(uses of the same work on it)             (_replicated)
                x in {0, 1};  w, z >= 0

`x(a)` is the sum over the states of a variable with equal rows in a pair, or with equal holdings or
needs in a multi-use. If all x are integral, so are w and z. The facility-location form of z makes
the relaxation integral for most graphs.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardwise.arrays import Floats, Ints
from shardwise.errors import InfeasiblePlan
from shardwise.layouts.build import Built, build, check_feasible, without_grad
from shardwise.layouts.factor_graph import (
    INF,
    Model,
    MultiUse,
    Solved,
    Use,
    simplify,
    solve_by_elimination,
)
from shardwise.layouts.options import Option, Options
from shardwise.layouts.problem import Assignment, LayoutSolution, LayoutTask, Prices
from shardwise.sharding.candidates import Candidate

OBJECTIVE = 1e3  # the objective's lower bound in the solver's units; its tolerance is 1e-6
GAP = 1e-6  # relative: far below the accuracy of prices


Terms = list[tuple[int, float]]  # columns and their coefficients in a row


class LayoutMilp:
    """Builds and solves the integer program."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[Terms, float, float]] = []  # with bounds
        self.first: dict[int, int] = {}

    def solve(self, time_limit_s: float) -> Solved:
        """Return the best states found within the time limit."""
        model = self.model
        if not model.variables:
            return Solved(chosen={}, cost=0.0, bound=0.0)
        for number in sorted(model.variables):
            self._choose(number)
        for key in sorted(model.pairs):
            self._pair(key)
        for multi_use in model.multi_uses:
            self._multi_use(multi_use)
        return self._run(time_limit_s)

    def _variable(self, cost: float, *, integral: bool = False) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def _choose(self, number: int) -> None:
        costs = self.model.variables[number].unary.tolist()
        columns = [self._variable(c if c < INF else 0.0, integral=True) for c in costs]
        self.first[number] = columns[0]
        self.rows.append(([(c, 1.0) for c in columns], 1.0, 1.0))
        for column, cost in zip(columns, costs, strict=True):
            if cost == INF:
                self.rows.append(([(column, 1.0)], 0.0, 0.0))

    def _members(self, number: int, groups: Ints) -> dict[int, Terms]:
        """Return the columns of a variable's states by group."""
        columns: dict[int, Terms] = {}
        for state, group in enumerate(groups.tolist()):
            columns.setdefault(group, []).append((self.first[number] + state, -1.0))
        return columns

    def _pair(self, key: tuple[int, int]) -> None:
        a, b = key
        small, rows = np.unique(self.model.pairs[key], axis=0, return_inverse=True)
        small, columns = np.unique(small, axis=1, return_inverse=True)
        left, right = self._members(a, rows.reshape(-1)), self._members(b, columns.reshape(-1))
        self._transport(small, left, right)

    def _transport(
        self, costs: Floats, left: dict[int, Terms], right: dict[int, Terms]
    ) -> dict[tuple[int, int], int]:
        """Add variables that carry each of the left groups to one of the right."""
        columns = {
            (a, b): self._variable(float(costs[a, b]))
            for a in left
            for b in right
            if costs[a, b] < INF
        }
        for a, members in left.items():
            out = [(columns[a, b], 1.0) for b in right if (a, b) in columns]
            self.rows.append(([*out, *members], 0.0, 0.0))
        for b, members in right.items():
            into = [(columns[a, b], 1.0) for a in left if (a, b) in columns]
            self.rows.append(([*into, *members], 0.0, 0.0))
        return columns

    def _multi_use(self, multi_use: MultiUse) -> None:
        holdings = self._members(multi_use.producer, multi_use.holding)
        shared: dict[tuple[int, int], list[Terms]] = {}
        for use in multi_use.uses:
            needs = sorted(set(use.need.tolist()))
            right = self._needs(use)
            costs = np.full((max(holdings) + 1, max(needs) + 1), INF)
            for h, n in product(holdings, needs):
                if multi_use.steps[h, n] is not None:
                    costs[h, n] = 0.0
            columns = self._transport(costs, holdings, right)
            moves: dict[tuple[int, int], Terms] = {}
            for (h, n), column in columns.items():
                for step in multi_use.steps[h, n] or ():
                    moves.setdefault((h, step), []).append((column, 1.0))
            for move, terms in moves.items():
                shared.setdefault(move, []).append(terms)
        for move in sorted(shared):
            self._move(multi_use.prices[move], shared[move])
        self._replicated(multi_use, holdings)

    def _needs(self, use: Use) -> dict[int, Terms]:
        if use.variable is not None:
            return self._members(use.variable, use.need)
        one = self._variable(0.0)
        self.rows.append(([(one, 1.0)], 1.0, 1.0))
        return {int(use.need[0]): [(one, -1.0)]}

    def _move(self, price: float, uses: list[Terms]) -> None:
        """Add the price of a move, which all uses together pay once."""
        if price == 0:
            return
        if len(uses) == 1:  # no need for a variable: charge the transport
            for column, _ in uses[0]:
                self.costs[column] += price
            return
        paid = self._variable(price)
        for terms in uses:
            self.rows.append(([(paid, -1.0), *terms], -INF, 0.0))

    def _replicated(self, multi_use: MultiUse, holdings: dict[int, Terms]) -> None:
        replicated = multi_use.replicated
        for axis in sorted({a for h in holdings for a in replicated[h]}):
            terms = [(c, 1.0) for h in holdings if axis in replicated[h] for c, _ in holdings[h]]
            terms += [
                (self.first[use.variable] + state, -1.0)
                for use in multi_use.uses
                if use.variable is not None
                for state, need in enumerate(use.need.tolist())
                if axis in multi_use.same_work[need]
            ]
            self.rows.append((terms, -INF, 0.0))

    def _scale(self, costs: Floats) -> float:
        """Return a unit of the objective that makes the solver's absolute tolerances harmless."""
        lower_bound = sum(float(v.unary.min()) for v in self.model.variables.values())
        positive = costs[costs > 0]
        if lower_bound <= 0:
            return float(positive.min()) if positive.size else 1.0
        return lower_bound / OBJECTIVE

    def _run(self, time_limit_s: float) -> Solved:
        rows, model = self.rows, self.model
        columns, entries = zip(*(term for terms, _, _ in rows for term in terms), strict=True)
        starts = np.cumsum([0, *(len(terms) for terms, _, _ in rows)])
        matrix = csr_array((entries, columns, starts), shape=(len(rows), len(self.costs)))
        _, low, high = zip(*rows, strict=True)
        costs = np.asarray(self.costs)
        scale = self._scale(costs)
        upper = np.where(np.asarray(self.integral) == 1, 1.0, np.inf)
        result = milp(
            costs / scale,
            constraints=LinearConstraint(matrix, np.asarray(low), np.asarray(high)),
            integrality=np.asarray(self.integral),
            bounds=Bounds(0.0, upper),
            options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": GAP},
        )
        if result.x is None:
            if result.status == 1:
                raise InfeasiblePlan(f"no layouts were found in {time_limit_s:.1f} s")
            raise InfeasiblePlan("no layouts satisfy the constraints")
        chosen = {}
        for number, variable in model.variables.items():
            first = self.first[number]
            chosen[number] = int(np.argmax(result.x[first : first + len(variable)]))
        bound = result.fun if result.mip_dual_bound is None else result.mip_dual_bound
        return Solved(chosen=chosen, cost=float(result.fun) * scale, bound=float(bound) * scale)


MAX_JOINT = 1_500  # options of all nodes together: some seconds to solve
MAX_ROUNDS = 3  # over all axes for parameters


def solve(options: Options, prices: Prices, *, time_limit_s: float) -> LayoutSolution:
    """Return the cheapest layouts of all nodes and parameters over all mesh axes at once."""
    search = _Search(options, prices, time.monotonic() + time_limit_s)
    solution = search.run()
    solved = solution.solved
    return LayoutSolution(
        graph=options.graph,
        assignments=assignments_of(options.task, solution.built, solution.chosen, solved.cost),
        cost_s=solved.cost,
        bound_s=min(solved.bound, solved.cost),
        restricted=search.restricted,
    )


@dataclass(frozen=True, slots=True)
class _ModelSolution:
    """A solution of one model: the state of every variable."""

    built: Built
    chosen: dict[int, int]
    solved: Solved

    def choice(self, name: str) -> tuple[Candidate, ...]:
        return self.built.options[name][self.chosen[self.built.nodes[name]]].choice


class _Search:
    """The problem with all axes open, or with one axis for parameters after the other."""

    def __init__(self, options: Options, prices: Prices, deadline: float) -> None:
        self.options, self.prices, self.deadline = options, prices, deadline
        self.task = options.task
        self.wide = [
            i
            for i, (axis, row) in enumerate(zip(self.task.axes, options.rows, strict=True))
            if not axis.follows_inputs and any(len(choices) > 1 for choices in row.values())
        ]
        self.restricted = ""
        if len(self.wide) > 1 and options.num_joint() > MAX_JOINT:
            names = ", ".join(self.task.axes[i].name for i in self.wide)
            self.restricted = f"of the axes {names} one is open at a time"

    def run(self) -> _ModelSolution:
        """Return the best solution."""
        return self._descend() if self.restricted else self._solve(self.options.of)

    def _solve(self, joint: dict[str, tuple[Option, ...]]) -> _ModelSolution:
        built = build(self.options, self.prices, joint)
        simplify(built.model)
        solved = solve_by_elimination(built.model)
        if solved is None:
            check_feasible(built)
            solved = LayoutMilp(built.model).solve(self.deadline - time.monotonic())
        return _ModelSolution(built, solved.chosen, solved)

    def _descend(self) -> _ModelSolution:
        """Open one axis for parameters at a time; all start with the same work on every rank."""
        options = self.options
        now = {i: {n: (row[0],) for n, row in options.rows[i].items()} for i in self.wide}
        tried = {i: {n: dict.fromkeys(c) for n, c in row.items()} for i, row in now.items()}
        best: _ModelSolution | None = None
        for _ in range(MAX_ROUNDS):
            before = float("inf") if best is None else best.solved.cost
            for axis in self.wide:
                if best is not None and time.monotonic() > self.deadline:
                    return best
                fixed = {i: row for i, row in now.items() if i != axis}
                best = self._solve(options.joint(fixed))
                now[axis] = {name: (best.choice(name)[axis],) for name in now[axis]}
                for name, chosen in now[axis].items():
                    tried[axis][name] |= dict.fromkeys(chosen)
            assert best is not None
            if best.solved.cost >= before * (1 - 1e-6):
                break
        assert best is not None
        if time.monotonic() > self.deadline:
            return best
        narrow = {i: {name: tuple(cs) for name, cs in row.items()} for i, row in tried.items()}
        joint = self._solve(options.joint(narrow))
        return joint if joint.solved.cost <= best.solved.cost else best


def assignments_of(
    task: LayoutTask, built: Built, chosen: Mapping[int, int], cost: float
) -> tuple[Assignment, ...]:
    """Return the assignment of every mesh axis for the chosen states of all variables."""
    return tuple(
        Assignment(
            axis=axis.name,
            ranks=axis.ranks,
            nodes={
                name: built.options[name][chosen[variable]].choice[i]
                for name, variable in built.nodes.items()
            },
            parameters={
                value: without_grad(built.storages[value][chosen[variable]][i])
                for value, variable in built.sources.items()
            },
            cost=cost,
        )
        for i, axis in enumerate(task.axes)
    )
