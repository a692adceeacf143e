"""The joint layout problem as variables with states and costs between them, and its reduction.

A `Variable` is a node (its states are joint options) or a source (its states are storages). The
cost of a solution is the sum of

- `unary[s]` of every variable's state `s`;
- `table[s, t]` of every pair of variables: moving a value from its producer to its only user;
- for every `MultiUse`, a value with several uses: each of the moves that its uses need, once.

States may also have a weight in bytes, whose sum is bounded.

`Reducer` gives the same model fewer states and variables, and a list from which `restore` recovers
the states of eliminated variables:

1. Costs of a pair that depend on one side only move to that variable.
2. A state is dropped if another one is no worse whatever the neighbours do (dominance).
3. A multi-use becomes a pair if the need of at most one use is open, or if its uses share no move.
4. A variable in at most two pairs is eliminated: the pair of its neighbours gets the minimum over
   its states. Chains of views, casts and pointwise nodes vanish in this way.

Every step preserves at least one best solution. A variable whose states differ in weight is not
eliminated if the weight is bounded.

`solve_by_elimination` then eliminates one variable after the other while tables stay below
`MAX_ENTRIES` entries. Graphs of layers are narrow: few values are live at any point, so this is
faster than the integer program, and also exact.
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
    """Costs of the remaining states; `index` holds their numbers among all states."""

    unary: Floats
    weight: Floats
    index: Ints

    @staticmethod
    def of(unary: Sequence[float], weight: Sequence[float]) -> Variable:
        return Variable(
            np.asarray(unary, dtype=np.float64),
            np.asarray(weight, dtype=np.float64),
            np.arange(len(unary), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.unary)

    def keep(self, states: Ints) -> None:
        self.unary, self.weight = self.unary[states], self.weight[states]
        self.index = self.index[states]


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

    def classes(self) -> tuple[list[int], list[list[int]]]:
        """Return the remaining holdings, and the remaining needs of every use, in order."""
        return sorted(set(self.holding.tolist())), [sorted(set(u.need.tolist())) for u in self.uses]

    def num_entries(self) -> int:
        """Return the number of entries of `small_table`."""
        holdings, needs = self.classes()
        return len(holdings) * prod(len(n) for n in needs)

    def small_table(self) -> Floats:
        """Return the costs by holding and by need of every use."""
        holdings, needs = self.classes()
        return np.stack([_holding_table(self, holding, needs) for holding in holdings])

    def table(self) -> Floats:
        """Return the costs by state of the producer and of the uses that have a variable."""
        holdings, needs = self.classes()
        rows = [np.searchsorted(holdings, self.holding)]
        rows += [np.searchsorted(n, u.need) for n, u in zip(needs, self.uses, strict=True)]
        table = self.small_table()[np.ix_(*rows)]
        ends = tuple(i + 1 for i, use in enumerate(self.uses) if use.variable is None)
        return np.asarray(table.squeeze(axis=ends))

    def members(self) -> list[int]:
        """Return the variables of the producer and of the uses, in this order."""
        return [self.producer, *(u.variable for u in self.uses if u.variable is not None)]

    def keep(self, variable: int, states: Ints) -> None:
        if variable == self.producer:
            self.holding = self.holding[states]
        for use in self.uses:
            if use.variable == variable:
                use.need = use.need[states]


@dataclass(slots=True)
class Model:
    """All variables and costs; `pairs[a, b]` with a < b."""

    variables: dict[int, Variable] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    multi_uses: list[MultiUse] = field(default_factory=list)
    constant: float = 0.0
    weight: float = 0.0  # of eliminated variables
    limit: float | None = None

    def add_pair(self, a: int, b: int, table: Floats) -> None:
        """Add a cost between two variables."""
        if a > b:
            a, b, table = b, a, table.T
        self.pairs[a, b] = self.pairs[a, b] + table if (a, b) in self.pairs else table

    def weigh(self, states: Mapping[int, int]) -> float:
        """Return the bytes of one state of every variable."""
        return sum(float(v.weight[states[number]]) for number, v in self.variables.items())

    def table(self, key: tuple[int, int], variable: int) -> Floats:
        """Return the table of a pair with this variable's states as rows."""
        table = self.pairs[key]
        return table if key[0] == variable else table.T

    def keep(self, variable: int, states: Ints) -> None:
        """Drop all other states of a variable."""
        self.variables[variable].keep(states)
        for key in [k for k in self.pairs if variable in k]:
            table = self.pairs[key]
            self.pairs[key] = table[states] if key[0] == variable else table[:, states]
        for multi_use in self.multi_uses:
            multi_use.keep(variable, states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The state of every variable, by number among all its states; the cost and its bound."""

    chosen: dict[int, int]
    cost: float
    bound: float
    num_variables: int


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


MAX_COMPARED = 1_000_000  # elements of the largest temporary array of dominance: 8 MB
MAX_JOINED = 40_000  # entries of a table that results from eliminating a variable


@dataclass(slots=True)
class Eliminated:
    """The costs of a variable at its elimination, by the states of its neighbours at that time."""

    variable: int
    unary: Floats
    index: Ints
    tables: list[tuple[int, Ints, Floats]] = field(default_factory=list)


class Reducer:
    """Reduces a model in place."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.eliminated: list[Eliminated] = []
        self.dirty: set[int] = set(model.variables)
        self.tables: dict[str, tuple[tuple[list[int], list[list[int]]], Floats]] = {}

    def run(self) -> list[Eliminated]:
        """Reduce until nothing changes; return the eliminated variables in order."""
        while True:
            self._simplify_multi_uses()
            self._normalize()
            while self.dirty:
                variable = min(self.dirty)
                self.dirty.discard(variable)
                if variable in self.model.variables:
                    self._dominate(variable)
            before = len(self.model.multi_uses)
            self._simplify_multi_uses()
            if self._eliminate() == 0 and before == len(self.model.multi_uses) and not self.dirty:
                return self.eliminated

    # ------------------------------------------------------------ pairs
    def _normalize(self) -> None:
        """Move costs that depend on one side only to that side; drop pairs that become zero."""
        model = self.model
        for key in sorted(model.pairs):
            a, b = (model.variables[v] for v in key)
            table = model.pairs[key].copy()
            for variable, other in ((a, 1), (b, 0)):
                minimum = table.min(axis=other) if table.size else np.zeros(len(variable))
                finite = np.where(np.isfinite(minimum), minimum, 0.0)
                variable.unary = variable.unary + minimum
                table -= finite[:, None] if other == 1 else finite[None, :]
            if np.any(table > 0):
                model.pairs[key] = table
            else:
                del model.pairs[key]
        for number in list(model.variables):
            self._keep(number, np.isfinite(model.variables[number].unary))

    def _keep(self, variable: int, mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        """Keep the states of a mask; the neighbours may then be reduced further."""
        if mask.all():
            return
        self.model.keep(variable, np.flatnonzero(mask))
        self._touch(variable)

    def _touch(self, variable: int) -> None:
        self.dirty.add(variable)
        for key in self.model.pairs:
            if variable in key:
                self.dirty |= set(key)
        for multi_use in self.model.multi_uses:
            if variable in multi_use.members():
                self.dirty |= set(multi_use.members())

    # ------------------------------------------------------------ dominance
    def _dominate(self, number: int) -> None:
        """Drop every state for which another one is at least as good in all surroundings."""
        model, variable = self.model, self.model.variables[number]
        size = len(variable)
        if size < 2:
            return
        gain = variable.unary[:, None] - variable.unary[None, :]  # [s, t]: saved by t instead of s
        if model.limit is not None:
            gain = np.where(variable.weight[:, None] < variable.weight[None, :], -INF, gain)
        for key in sorted(k for k in model.pairs if number in k):
            table = model.table(key, number)
            if size * size * table.shape[1] > MAX_COMPARED:
                return
            gain = _plus(gain, _min_gain(table))
        for multi_use in model.multi_uses:
            if number in multi_use.members():
                gain = _plus(gain, self._multi_use_gain(multi_use, number))
        alive = np.ones(size, dtype=bool)
        np.fill_diagonal(gain, -INF)
        for state in np.lexsort((-variable.index, -variable.unary)):
            if np.any(alive & (gain[state] >= 0)):
                alive[state] = False
        self._keep(number, alive)

    def _multi_use_gain(self, multi_use: MultiUse, number: int) -> Floats:
        """Return the least that another state of a variable saves in a multi-use."""
        use = next((u for u in multi_use.uses if u.variable == number), None)
        classes = holdings, needs = multi_use.classes()
        axis = 0 if use is None else 1 + multi_use.uses.index(use)
        own = holdings if use is None else needs[axis - 1]
        if multi_use.num_entries() * len(own) > MAX_COMPARED:
            gain = np.full((len(own), len(own)), -INF)  # compare only equal holdings or needs
            np.fill_diagonal(gain, 0.0)
        else:
            cached = self.tables.get(multi_use.value)
            if cached is None or cached[0] != classes:
                cached = self.tables[multi_use.value] = classes, multi_use.small_table()
            gain = _min_gain(np.moveaxis(cached[1], axis, 0).reshape(len(own), -1))
        rows = np.searchsorted(own, multi_use.holding if use is None else use.need)
        return np.asarray(gain[np.ix_(rows, rows)])

    # ------------------------------------------------------------ multi-uses
    def _simplify_multi_uses(self) -> None:
        """Turn multi-uses into pairs if at most one use is open, or if the uses share no move."""
        model = self.model
        remaining = []
        for multi_use in model.multi_uses:
            holdings = set(multi_use.holding.tolist())
            needs = [set(u.need.tolist()) for u in multi_use.uses]
            constrained = any(multi_use.replicated[h] for h in holdings)
            several = [u for u, n in zip(multi_use.uses, needs, strict=True) if len(n) > 1]
            if len(several) <= 1 or len(multi_use.uses) == 1:
                self._as_pair(multi_use, several[0] if several else None)
            elif not constrained and not _shares(multi_use, holdings, needs):
                for use in multi_use.uses:
                    self._as_pair(replace(multi_use, uses=[use]), use)
            else:
                remaining.append(multi_use)
                continue
            self.dirty |= set(multi_use.members())
        model.multi_uses = remaining

    def _as_pair(self, multi_use: MultiUse, use: Use | None) -> None:
        """Add the costs of the producer and one use; the needs of all other uses are fixed."""
        if use is not None and use.variable is None:
            use = None
        fixed = [int(u.need[0]) for u in multi_use.uses if u is not use]
        holdings = sorted(set(multi_use.holding.tolist()))
        rows = np.searchsorted(holdings, multi_use.holding)
        if use is None or use.variable is None:
            variable = self.model.variables[multi_use.producer]
            costs = np.array([multi_use.cost(h, fixed) for h in holdings])
            variable.unary = variable.unary + costs[rows]
            return
        needs = sorted(set(use.need.tolist()))
        small = np.array([[multi_use.cost(h, [*fixed, n]) for n in needs] for h in holdings])
        columns = np.searchsorted(np.asarray(needs), use.need)
        self.model.add_pair(multi_use.producer, use.variable, small[np.ix_(rows, columns)])

    # ------------------------------------------------------------ elimination
    def _eliminate(self) -> int:
        """Eliminate variables in at most two pairs; return their number."""
        model, count = self.model, 0
        joined = {v for multi_use in model.multi_uses for v in multi_use.members()}
        pairs: dict[int, set[tuple[int, int]]] = {v: set() for v in model.variables}
        for key in model.pairs:
            for number in key:
                pairs[number].add(key)
        queue = set(model.variables)
        while queue:
            number = min(queue)
            queue.discard(number)
            variable = model.variables[number]
            keys = sorted(pairs[number])
            varies = model.limit is not None and np.ptp(variable.weight) > 0 and len(variable) > 1
            if number in joined or len(keys) > 2 or varies or len(variable) == 0:
                continue
            sides = [b if a == number else a for a, b in keys]
            tables = [model.table(key, number) for key in keys]
            if len(keys) == 2 and tables[0].shape[1] * tables[1].shape[1] > MAX_JOINED:
                continue
            self.eliminated.append(
                Eliminated(
                    number,
                    variable.unary,
                    variable.index,
                    [(s, model.variables[s].index, t) for s, t in zip(sides, tables, strict=True)],
                )
            )
            self._fold(number, sides, tables)
            for key, side in zip(keys, sides, strict=True):
                del model.pairs[key]
                pairs[side].discard(key)
                self.dirty.add(side)
                queue.add(side)
            if len(sides) == 2:
                key = (min(sides), max(sides))
                for side in sides:
                    pairs[side].add(key)
            model.weight += float(variable.weight[0])
            del model.variables[number], pairs[number]
            count += 1
        return count

    def _fold(self, number: int, sides: list[int], tables: list[Floats]) -> None:
        model, unary = self.model, self.model.variables[number].unary
        if not sides:
            model.constant += float(unary.min())
        elif len(sides) == 1:
            other = model.variables[sides[0]]
            other.unary = other.unary + (tables[0] + unary[:, None]).min(axis=0)
        else:
            best = np.full((tables[0].shape[1], tables[1].shape[1]), INF)
            for state in range(len(unary)):
                row = tables[0][state][:, None] + tables[1][state][None, :]
                np.minimum(best, unary[state] + row, out=best)
            model.add_pair(sides[0], sides[1], best)


def restore(eliminated: list[Eliminated], remaining: dict[int, int]) -> dict[int, int]:
    """Return the states of all variables from those of the remaining ones."""
    states = dict(remaining)
    for entry in reversed(eliminated):
        cost = entry.unary.copy()
        for side, index, table in entry.tables:
            cost = cost + table[:, int(np.flatnonzero(index == states[side])[0])]
        states[entry.variable] = int(entry.index[int(np.argmin(cost))])
    return states


def _min_gain(table: Floats) -> Floats:
    """Return at [s, t] the minimum of table[s] - table[t] over the neighbour's states."""
    with np.errstate(invalid="ignore"):
        gain = table[:, None, :] - table[None, :, :]
    gain[np.isnan(gain)] = INF  # both are impossible: no restriction
    return np.asarray(gain.min(axis=2))


def _plus(a: Floats, b: Floats) -> Floats:
    """Return the sum; an infinite loss outweighs any gain."""
    with np.errstate(invalid="ignore"):
        total = a + b
    total[np.isnan(total)] = -INF
    return np.asarray(total)


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


def solve_by_elimination(model: Model) -> Solved | None:
    """Return the best states of all variables, or None if that would take too long."""
    if model.limit is not None or any(len(v) == 0 for v in model.variables.values()):
        return None
    sizes = {number: len(variable) for number, variable in model.variables.items()}
    scopes = [*model.pairs, *(tuple(m.members()) for m in model.multi_uses)]
    order = elimination_order(sizes, scopes)
    if order is None:
        return None
    tables: list[tuple[Scope, Floats]] = [((n,), v.unary) for n, v in model.variables.items()]
    tables += list(model.pairs.items())
    tables += [(tuple(m.members()), m.table()) for m in model.multi_uses]
    done: list[tuple[int, list[tuple[Scope, Floats]]]] = []
    constant = model.constant
    for variable in order:
        own = [entry for entry in tables if variable in entry[0]]
        tables = [entry for entry in tables if variable not in entry[0]]
        done.append((variable, own))
        scope, minimum = _minimize(own, variable, sizes)
        if scope:
            tables.append((scope, minimum))
        else:
            constant += float(minimum)
    if not np.isfinite(constant):
        return None  # infeasible: leave the error message to the integer program
    states: dict[int, int] = {}
    for variable, own in reversed(done):
        costs = np.zeros(sizes[variable])
        for scope, table in own:
            costs += table[tuple(states.get(v, slice(None)) for v in scope)]
        states[variable] = int(np.argmin(costs))
    chosen = {n: int(model.variables[n].index[state]) for n, state in states.items()}
    return Solved(chosen=chosen, cost=constant, bound=constant, num_variables=sum(sizes.values()))


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
        variable = min(cost, key=lambda v: (cost[v], v))
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
