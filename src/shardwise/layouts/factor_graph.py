"""The joint layout problem as variables with states and costs between them, and its reduction.

A `Variable` is a node (its states are joint options) or a source (its states are storages). The
cost of a solution is the sum of

- `unary[s]` of every variable's state `s`;
- `table[s, t]` of every pair of variables: moving a value from its producer to its only user;
- for every `MultiUse`, a value with several uses: each of the moves that its uses need, once.

States also have a weight in bytes.

`simplify` turns a `MultiUse` into pairs where that changes no cost: if the need of at most one use
is open, or if its uses share no move. `solve_by_elimination` then eliminates one variable after the
other while tables stay below `MAX_ENTRIES` entries. Graphs of layers are narrow: few values are
live at any point, so this is faster than the integer program, and also exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod

import numpy as np

from shardwise.arrays import Floats, Ints

INF = float("inf")


@dataclass(slots=True)
class Variable:
    """The cost and the bytes of every state."""

    unary: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.unary)


@dataclass(slots=True)
class Use:
    """A use of a value: the number of the need that each state of the variable has.

    The end of a value (the loss ends replicated) is a use without a variable and with a fixed need.
    """

    variable: int | None
    need: Ints


@dataclass(slots=True)
class MultiUse:
    """A value with several uses.

    `holding` is the number of the holding (the placements of the value) by state of the producer.
    `steps[h, n]` are the moves from holding `h` to need `n`, or None if impossible;
    `prices[h, step]` is the price of each. `same_work[n]` are the mesh axes on which a need is for
    the same work on every rank, `replicated[h]` those on which a holding is R and therefore
    requires at least one such use.
    """

    value: str
    producer: int
    holding: Ints
    uses: list[Use]
    steps: dict[tuple[int, int], tuple[int, ...] | None]
    prices: dict[tuple[int, int], float]
    same_work: dict[int, frozenset[int]]
    replicated: dict[int, frozenset[int]]

    def cost(self, holding: int, needs: Sequence[int]) -> float:
        """Return the cost of one holding and one need of every use."""
        unserved = self.replicated[holding]
        for need in needs:
            unserved -= self.same_work[need]
        if unserved:
            return INF
        steps: set[int] = set()
        for need in needs:
            path = self.steps[holding, need]
            if path is None:
                return INF
            steps.update(path)
        return float(sum(self.prices[holding, step] for step in sorted(steps)))

    def table(self) -> Floats:
        """Return the costs by state of the producer and of the uses that have a variable."""
        holdings = sorted(set(self.holding.tolist()))
        needs = [sorted(set(use.need.tolist())) for use in self.uses]
        rows = [np.searchsorted(holdings, self.holding)]
        rows += [np.searchsorted(n, u.need) for n, u in zip(needs, self.uses, strict=True)]
        small = np.stack([_holding_table(self, holding, needs) for holding in holdings])
        ends = tuple(i + 1 for i, use in enumerate(self.uses) if use.variable is None)
        return np.asarray(small[np.ix_(*rows)].squeeze(axis=ends))

    def members(self) -> list[int]:
        """Return the variables of the producer and of the uses, in this order."""
        return [self.producer, *(u.variable for u in self.uses if u.variable is not None)]


@dataclass(slots=True)
class Model:
    """All variables and costs; `pairs[a, b]` with a < b."""

    variables: dict[int, Variable] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    multi_uses: list[MultiUse] = field(default_factory=list)

    def add_pair(self, a: int, b: int, table: Floats) -> None:
        """Add a cost between two variables."""
        if a > b:
            a, b, table = b, a, table.T
        self.pairs[a, b] = self.pairs[a, b] + table if (a, b) in self.pairs else table

    def weigh(self, states: Mapping[int, int]) -> float:
        """Return the bytes of one state of every variable."""
        return sum(float(v.weight[states[number]]) for number, v in self.variables.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The state of every variable; the cost and its bound."""

    chosen: dict[int, int]
    cost: float
    bound: float


def _holding_table(multi_use: MultiUse, holding: int, needs: list[list[int]]) -> Floats:
    """Return the costs of one holding by need of every use; each move is paid once."""
    total = np.zeros([len(n) for n in needs])
    paths = [[multi_use.steps[holding, n] for n in use] for use in needs]
    for blocked in np.ix_(*([INF if path is None else 0.0 for path in use] for use in paths)):
        total = total + blocked
    for step in sorted({s for use in paths for path in use for s in path or ()}):
        price = multi_use.prices[holding, step]
        if price > 0:
            unused = ([float(step not in (path or ())) for path in use] for use in paths)
            total = total + price * (1.0 - reduce(np.multiply, np.ix_(*unused)))
    for axis in sorted(multi_use.replicated[holding]):
        differs = ([float(axis not in multi_use.same_work[n]) for n in use] for use in needs)
        none_same = reduce(np.multiply, np.ix_(*differs))
        total = np.where(np.broadcast_to(none_same, total.shape) > 0, INF, total)
    return total


def simplify(model: Model) -> None:
    """Turn multi-uses into pairs if at most one use is open, or if the uses share no move."""
    remaining = []
    for multi_use in model.multi_uses:
        holdings = set(multi_use.holding.tolist())
        needs = [set(u.need.tolist()) for u in multi_use.uses]
        constrained = any(multi_use.replicated[h] for h in holdings)
        several = [u for u, n in zip(multi_use.uses, needs, strict=True) if len(n) > 1]
        if len(several) <= 1 or len(multi_use.uses) == 1:
            _add_pair(model, multi_use, several[0] if several else None)
        elif not constrained and not _shares(multi_use, holdings, needs):
            for use in multi_use.uses:
                _add_pair(model, replace(multi_use, uses=[use]), use)
        else:
            remaining.append(multi_use)
    model.multi_uses = remaining


def _add_pair(model: Model, multi_use: MultiUse, use: Use | None) -> None:
    """Add the costs of the producer and one use; the needs of all other uses are fixed."""
    if use is not None and use.variable is None:
        use = None
    fixed = [int(u.need[0]) for u in multi_use.uses if u is not use]
    holdings = sorted(set(multi_use.holding.tolist()))
    rows = np.searchsorted(holdings, multi_use.holding)
    if use is None or use.variable is None:
        variable = model.variables[multi_use.producer]
        costs = np.array([multi_use.cost(h, fixed) for h in holdings])
        variable.unary = variable.unary + costs[rows]
        return
    needs = sorted(set(use.need.tolist()))
    small = np.array([[multi_use.cost(h, [*fixed, n]) for n in needs] for h in holdings])
    columns = np.searchsorted(np.asarray(needs), use.need)
    model.add_pair(multi_use.producer, use.variable, small[np.ix_(rows, columns)])


def _shares(multi_use: MultiUse, holdings: set[int], needs: list[set[int]]) -> bool:
    """Return whether two uses could need the same move, unless it is free."""
    steps, prices = multi_use.steps, multi_use.prices
    for h in holdings:
        earlier: set[int] = set()
        for use in needs:
            priced = {s for n in use for s in steps[h, n] or () if prices[h, s] > 0}
            if priced & earlier:
                return True
            earlier |= priced
    return False


MAX_ENTRIES = 20_000_000  # of the largest table before taking the minimum: some 50 ms
MAX_TOTAL = 80_000_000  # of all tables together

Scope = tuple[int, ...]


def impossible_variable(model: Model) -> int | None:
    """Return a variable none of whose states goes with any states of its neighbours, if any."""
    possible = {number: np.isfinite(v.unary) for number, v in model.variables.items()}
    dropped = True
    while dropped:
        dropped = False
        for (a, b), table in model.pairs.items():
            for number, other, costs in ((a, b, table), (b, a, table.T)):
                serves = np.isfinite(costs[:, possible[other]]).any(axis=1)
                dropped |= bool((possible[number] & ~serves).any())
                possible[number] &= serves
    return next((number for number, states in possible.items() if not states.any()), None)


def solve_by_elimination(model: Model) -> Solved | None:
    """Return the best states of all variables, or None if that would take too long."""
    sizes = {number: len(variable) for number, variable in model.variables.items()}
    scopes = [*model.pairs, *(tuple(m.members()) for m in model.multi_uses)]
    order = elimination_order(sizes, scopes)
    if order is None:
        return None
    tables: list[tuple[Scope, Floats]] = [((n,), v.unary) for n, v in model.variables.items()]
    tables += list(model.pairs.items())
    tables += [(tuple(m.members()), m.table()) for m in model.multi_uses]
    done: list[tuple[int, list[tuple[Scope, Floats]]]] = []
    cost = 0.0
    for variable in order:
        own = [entry for entry in tables if variable in entry[0]]
        tables = [entry for entry in tables if variable not in entry[0]]
        done.append((variable, own))
        scope, minimum = _minimize(own, variable, sizes)
        if scope:
            tables.append((scope, minimum))
        else:
            cost += float(minimum)
    if not np.isfinite(cost):
        return None  # infeasible: leave the error message to the integer program
    states: dict[int, int] = {}
    for variable, own in reversed(done):
        costs = np.zeros(sizes[variable])
        for scope, table in own:
            costs += table[tuple(states.get(v, slice(None)) for v in scope)]
        states[variable] = int(np.argmin(costs))
    return Solved(chosen=states, cost=cost, bound=cost)


def elimination_order(sizes: dict[int, int], scopes: list[Scope]) -> list[int] | None:
    """Return the variables ordered greedily by table size, or None if a table is too large."""
    neighbours: dict[int, set[int]] = {v: set() for v in sizes}
    for scope in scopes:
        if prod(sizes[v] for v in scope) > MAX_ENTRIES:
            return None
        for v in scope:
            neighbours[v] |= set(scope) - {v}
    cost = {v: prod(sizes[u] for u in neighbours[v]) * sizes[v] for v in sizes}
    order, total = [], 0
    while cost:
        # Chains of views, casts and pointwise nodes first, in graph order.
        variable = min(cost, key=lambda v: (cost[v] if len(neighbours[v]) > 2 else 0, v))
        total += cost[variable]
        if cost[variable] > MAX_ENTRIES or total > MAX_TOTAL:
            return None
        order.append(variable)
        adjacent = neighbours.pop(variable)
        del cost[variable]
        for v in adjacent:
            neighbours[v] = (neighbours[v] | adjacent) - {v, variable}
        for v in adjacent:
            cost[v] = prod(sizes[u] for u in neighbours[v]) * sizes[v]
    return order


def _minimize(
    tables: list[tuple[Scope, Floats]], variable: int, sizes: dict[int, int]
) -> tuple[Scope, Floats]:
    """Return the minimum of the sum of tables over a variable's states, and its scope."""
    scope = tuple(sorted({v for s, _ in tables for v in s} - {variable}))
    rows = []
    for own, table in sorted(tables, key=lambda entry: entry[1].size):
        order = sorted(range(len(own)), key=lambda i: (own[i] != variable, own[i]))
        shape = [sizes[v] if v in own else 1 for v in scope]
        rows.append(table.transpose(order).reshape([sizes[variable], *shape]))
    minimum = np.full([sizes[v] for v in scope], INF)
    for state in range(sizes[variable]):
        total = rows[0][state]
        for row in rows[1:]:
            total = total + row[state]
        np.minimum(minimum, total, out=minimum)
    return scope, minimum
