"""The master problem: a linear program over the columns generated so far, and the generation loop.

A *column* is one path for data: a tree into a root, or a tree out of one. A *flow* is what columns
compete for: the trees into rank v, or the trees out of rank v. With a_k the fraction of the data on
column k, and l_rk how often that column uses resource r,

    minimize  t
    such that Σ_k l_rk a_k <= c_r t          for each resource r       (price y_r)
              Σ_{k of flow f} a_k = d_f      where the demand is fixed
              Σ_{k into v} a_k = x_v = Σ_{k out of v} a_k,  Σ_v x_v = 1   where roots are free

t is seconds per byte. Everything is per orbit of a symmetry: loads and capacities are summed over
the resources of an orbit, x over its ranks. An `Answer` holds the optimal weights and prices with
Σ_r c_r y_r = 1.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from shardwise.arrays import Floats, Ints

SLOWEST = 1e8  # times the time that is easily reached
DENSE = 100_000  # matrix entries below which presolve does not pay
NEGLIGIBLE = 1e-6  # fraction of a flow; smaller weights are rounding of the solver


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A tree of one flow: the parents of all ranks, and its load on each resource."""

    flow: int
    path: Ints
    load: Floats
    depth: int = 0

    @property
    def key(self) -> tuple[int, bytes]:
        return self.flow, self.path.tobytes()


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """Seconds per byte, the fraction of the data on each column, and the price of each resource."""

    time: float
    weights: Floats
    prices: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Master:
    """Capacities of the orbits of resources, and the demand of the flows.

    `demand` has a value per flow. It is None where the amount of each root is free and flows come
    in pairs, into a root and out of it: flows 2k and 2k+1 are a pair.
    """

    capacity: Floats
    num_flows: int
    demand: Floats | None

    def solve(self, columns: Sequence[Column]) -> Answer:
        """Return the optimal weights of these columns."""
        seconds = np.array([column.load for column in columns]).T / self.capacity[:, None]
        flows = np.array([column.flow for column in columns], dtype=np.int64)
        # Scaled by an easily reached time, t is near 1, which the solver's absolute tolerances
        # assume; columns many millions of times slower are not distinguished.
        reached = max(self._reached(flows, seconds), 1e-300)
        scaled = np.minimum(seconds / reached, SLOWEST)
        weights, prices = self._linear(flows.tolist(), scaled)
        weights = self._clean(np.maximum(weights, 0.0), flows)
        return Answer(
            time=float((seconds @ weights).max(initial=0.0)),
            weights=weights,
            prices=np.maximum(prices / self.capacity, 0.0),
        )

    def _clean(self, weights: Floats, flows: Ints) -> Floats:
        """Drop negligible weights and scale the others, so that each flow has its exact demand."""
        total = np.bincount(flows, weights=weights, minlength=self.num_flows)
        cleaned = np.where(weights > NEGLIGIBLE * total[flows], weights, 0.0)
        if self.demand is None:
            pairs = total.reshape(-1, 2).max(axis=1)
            demand = np.repeat(np.where(pairs > NEGLIGIBLE * pairs.sum(), pairs, 0.0), 2)
            demand = demand / (demand.sum() / 2)
        else:
            demand = self.demand
        assigned = np.bincount(flows, weights=cleaned, minlength=self.num_flows)
        factor = np.divide(demand, assigned, out=np.zeros_like(assigned), where=assigned > 0)
        return np.asarray(cleaned * factor[flows])

    def _linear(self, flows: list[int], seconds: Floats) -> tuple[Floats, Floats]:
        """Solve the linear program: return weights of columns, and prices times capacities.

        The solver gets the dual, in which columns are rows and flow f pays at most u_f:

            maximize  Σ_f d_f u_f, or z where roots are free
            such that u_f <= Σ_r l_rk y_r    for each column k of flow f   (weight a_k)
                      Σ_r y_r <= 1,  z <= u_in(v) + u_out(v) for each root v
        """
        rows, count = seconds.shape
        roots = 0 if self.demand is not None else self.num_flows // 2
        width = rows + self.num_flows + (1 if roots else 0)
        matrix = np.zeros((count + roots + 1, width))
        matrix[:count, :rows] = -seconds.T
        matrix[np.arange(count), rows + np.array(flows)] = 1.0
        if roots:
            pairs = count + np.arange(roots)
            for direction in (0, 1):
                matrix[pairs, rows + 2 * np.arange(roots) + direction] = -1.0
            matrix[pairs, -1] = 1.0
        matrix[-1, :rows] = 1.0
        gain = np.zeros(width)
        gain[rows : rows + self.num_flows] = 0.0 if self.demand is None else self.demand
        if roots:
            gain[-1] = 1.0
        bounds = np.full((width, 2), (-np.inf, np.inf))
        bounds[:rows, 0] = 0.0
        result = linprog(
            -gain,
            A_ub=matrix if matrix.size < DENSE else csr_array(matrix),
            b_ub=np.append(np.zeros(count + roots), 1.0),
            bounds=bounds,
            method="highs-ds",
            options={"presolve": matrix.size >= DENSE},
        )
        if result.x is None:
            raise RuntimeError(f"the linear program over {count} columns failed: {result.message}")
        return -result.ineqlin.marginals[:count], result.x[:rows]

    def _reached(self, flows: Ints, seconds: Floats) -> float:
        """Return the time if each flow uses its best column; free roots leave all data to one."""
        if not len(self.capacity):
            return 1.0
        best = np.full(self.num_flows, -1, dtype=np.int64)
        for index in np.argsort(-seconds.max(axis=0), kind="stable").tolist():
            best[flows[index]] = index
        if self.demand is not None:
            return float((seconds[:, best] @ self.demand).max())
        pairs = best.reshape(-1, 2)
        both = pairs[(pairs >= 0).all(axis=1)]
        return float((seconds[:, both[:, 0]] + seconds[:, both[:, 1]]).max(axis=0).min())

    def bound(self, costs: Floats) -> float:
        """Return the lower bound that follows from the cheapest column of each flow.

        `costs` are at prices with Σ c y = 1.
        """
        if self.demand is not None:
            return float(costs @ self.demand)
        return float((costs[0::2] + costs[1::2]).min(initial=np.inf))


# Column generation: add trees as long as they are cheaper than those in use.
#
# At any prices y with Σ c y = 1, the cost of the cheapest columns is a lower bound on the optimum,
# which does not depend on the accuracy of the linear solver. The solver's prices oscillate, so new
# columns are priced between the best prices so far and the solver's (Wentges' smoothing), which
# needs far fewer rounds.

Pricing = Callable[[Floats], tuple[list[Column], Floats]]

TOLERANCE = 1e-6  # relative gap at which column generation stops
MAX_ROUNDS = 400
SMOOTHING = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
    """All generated columns, the best solution over them, and the proven lower bound."""

    columns: tuple[Column, ...]
    answer: Answer
    bound: float
    prices: Floats


def generate(
    master: Master, start: Iterable[Column], price: Pricing, *, limit_s: float
) -> Generated:
    """Add columns until the bound is reached or `limit_s` CPU seconds have passed."""
    began = time.process_time()
    columns = {column.key: column for column in start}
    best_prices = _even(master)
    bound = 0.0
    answer = master.solve(list(columns.values()))
    smoothing = SMOOTHING
    for _ in range(MAX_ROUNDS if len(master.capacity) else 0):
        prices = smoothing * best_prices + (1 - smoothing) * answer.prices
        total = float(prices @ master.capacity)
        prices = prices / total if total > 0 else _even(master)
        cheapest, costs = price(prices)
        proved = master.bound(costs)
        if proved > bound:
            bound, best_prices = proved, prices
        new = {column.key: column for column in cheapest if column.key not in columns}
        if answer.time - bound <= TOLERANCE * answer.time:
            break
        if not new:
            if smoothing == 0.0:
                break
            smoothing = 0.0  # only the solver's own prices show that no column improves
            continue
        columns |= new
        before, answer = answer.time, master.solve(list(columns.values()))
        smoothing = SMOOTHING if answer.time < before else smoothing / 2
        if time.process_time() - began > limit_s:
            break
    bound = min(bound, answer.time)
    return Generated(
        columns=tuple(columns.values()), answer=answer, bound=bound, prices=best_prices
    )


def _even(master: Master) -> Floats:
    """Return prices at which every resource is equally scarce."""
    return np.asarray(1.0 / (master.capacity * max(len(master.capacity), 1)))
