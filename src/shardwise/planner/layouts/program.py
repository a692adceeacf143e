"""The integer program of what is left of a model.

Enters: a reduced `Model`. Leaves: a state for every variable, the cost, and the dual bound.

    minimize    sum_v sum_s unary[v,s] x[v,s]  +  sum_e sum_ab table[e,a,b] w[e,a,b]
                + sum_stars sum_moves price[h,m] z[h,m]
    subject to  sum_s x[v,s] = 1                                     every variable v     (_choose)
                sum_b w[e,a,b] = x(a),  sum_a w[e,a,b] = x(b)        every pair e         (_pair)
                the same for every use k of a star: w[k,h,n]                              (_star)
                z[h,m] >= sum over needs n with m on the way from h of w[k,h,n]
                x(R held on an axis) <= sum of x(uses of the same work on it)             (_whole)
                sum_v sum_s weight[v,s] x[v,s] <= limit                                   (_limit)
                x in {0, 1};  w, z >= 0

`x(a)` is the sum over the states of a variable that behave alike in a pair (equal rows), or that
hold or need the value alike in a star. With all x integral the w and z are so as well. The
facility-location form of z makes the relaxation integral for most graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardwise.errors import InfeasiblePlan
from shardwise.planner.layouts.model import INF, Floats, Ints, Model, Solved, Star, Use

OBJECTIVE = 1e3  # about the least objective in the solver's units; it stops within 1e-6 of the best
GAP = 1e-6  # relative: far below what prices are known to


@dataclass(slots=True)
class _Rows:
    """A sparse matrix being written, row by row."""

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


class Program:
    """Writes and solves the program."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows = _Rows()
        self.first: dict[int, int] = {}

    def solve(self, time_limit_s: float) -> Solved:
        """The best states found in time."""
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
        """The columns of a variable's states by group."""
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

    def _star(self, star: Star) -> None:
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
        """A move that is paid once for all uses; of one use alone the transport pays."""
        if price == 0:
            return
        if len(uses) == 1:
            for column, _ in uses[0]:
                self.costs[column] += price
            return
        paid = self._variable(price)
        for terms in uses:
            self.rows.add([(paid, -1.0), *terms], -INF, 0.0)

    def _whole(self, star: Star, held: dict[int, list[tuple[int, float]]]) -> None:
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
    """The table without equal rows and columns, and where each row and column went."""
    small, rows = np.unique(table, axis=0, return_inverse=True)
    small, columns = np.unique(small, axis=1, return_inverse=True)
    return small, rows.reshape(-1), columns.reshape(-1)
