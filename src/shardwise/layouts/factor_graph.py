"""x"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
INF = float("inf")


@dataclass(slots=True)
class Variable:
    """Costs of the states that are left; `index` are their numbers among all states."""

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

    def keep(self, kept: Ints) -> None:
        self.unary, self.weight = self.unary[kept], self.weight[kept]
        self.index = self.index[kept]


@dataclass(slots=True)
class Use:
    """A use of a star's value: which need each state of the variable has.

    The end of a value (the loss is whole) is a use without a variable, whose need is fixed.
    """

    variable: int | None
    need: Ints


@dataclass(slots=True)
class MultiUse:
    """A value with several uses.

    `held` says how each state of the producer holds it. `steps[h, n]` are the moves from holding
    `h` to need `n`, or None; `prices[h, step]` what each costs. `same[n]` are the mesh axes on
    which a need is for the same work, `whole[h]` those on which a holding is R and thereby asks
    for at least one such use.
    """

    value: str
    producer: int
    held: Ints
    uses: list[Use]
    steps: dict[tuple[int, int], tuple[int, ...] | None]
    prices: dict[tuple[int, int], float]
    same: dict[int, frozenset[int]]
    whole: dict[int, frozenset[int]]

    def cost(self, held: int, needs: Sequence[int]) -> float:
        """Return what one holding and the needs of all uses cost."""
        asked = self.whole[held]
        for need in needs:
            asked -= self.same[need]
        if asked:
            return INF
        taken: set[int] = set()
        for need in needs:
            path = self.steps[held, need]
            if path is None:
                return INF
            taken.update(path)
        return float(sum(self.prices[held, step] for step in sorted(taken)))

    def classes(self) -> tuple[list[int], list[list[int]]]:
        """Return the holdings and the needs of every use that are left, in order."""
        return sorted(set(self.held.tolist())), [sorted(set(u.need.tolist())) for u in self.uses]

    def num_entries(self) -> int:
        """Return how many costs `small_table` has."""
        holds, needs = self.classes()
        return len(holds) * prod(len(n) for n in needs)

    def small_table(self) -> Floats:
        """Return what each holding and each need of every use cost together."""
        holds, needs = self.classes()
        return np.stack([_held_table(self, held, needs) for held in holds])

    def table(self) -> Floats:
        """Return the costs for all states of the producer and of the uses that have a variable."""
        holds, needs = self.classes()
        rows = [np.searchsorted(holds, self.held)]
        rows += [np.searchsorted(n, u.need) for n, u in zip(needs, self.uses, strict=True)]
        table = self.small_table()[np.ix_(*rows)]
        ends = tuple(i + 1 for i, use in enumerate(self.uses) if use.variable is None)
        return np.asarray(table.squeeze(axis=ends))

    def members(self) -> list[int]:
        """Return the variables it joins, the producer first."""
        return [self.producer, *(u.variable for u in self.uses if u.variable is not None)]

    def keep(self, variable: int, kept: Ints) -> None:
        if variable == self.producer:
            self.held = self.held[kept]
        for use in self.uses:
            if use.variable == variable:
                use.need = use.need[kept]


@dataclass(slots=True)
class Model:
    """All variables and costs; `pairs[a, b]` with a < b."""

    variables: dict[int, Variable] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    stars: list[MultiUse] = field(default_factory=list)
    constant: float = 0.0
    weight: float = 0.0  # of what is decided
    limit: float | None = None

    def add_pair(self, a: int, b: int, table: Floats) -> None:
        """Add a cost between two variables."""
        if a > b:
            a, b, table = b, a, table.T
        known = self.pairs.get((a, b))
        self.pairs[a, b] = table if known is None else known + table

    def weigh(self, chosen: Mapping[int, int]) -> float:
        """Return the bytes of these states of all variables."""
        return sum(float(v.weight[chosen[number]]) for number, v in self.variables.items())

    def neighbours(self) -> dict[int, list[tuple[int, int]]]:
        """Return the pairs of every variable."""
        found: dict[int, list[tuple[int, int]]] = {v: [] for v in self.variables}
        for key in self.pairs:
            for variable in key:
                found[variable].append(key)
        return found

    def table(self, key: tuple[int, int], variable: int) -> Floats:
        """Return the table of a pair with this variable's states as rows."""
        table = self.pairs[key]
        return table if key[0] == variable else table.T

    def keep(self, variable: int, kept: Ints) -> None:
        """Keep these states of a variable only."""
        self.variables[variable].keep(kept)
        for key in [k for k in self.pairs if variable in k]:
            table = self.pairs[key]
            self.pairs[key] = table[kept] if key[0] == variable else table[:, kept]
        for star in self.stars:
            if variable in star.members():
                star.keep(variable, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """States by number among all states of a variable; the cost and its bound."""

    chosen: dict[int, int]
    cost: float
    bound: float
    num_variables: int


def _held_table(star: MultiUse, held: int, needs: list[list[int]]) -> Floats:
    """Return the costs of one holding over the needs of every use: each move once."""
    count = len(needs)

    def along(index: int, values: list[float]) -> Floats:
        shape = [1] * count
        shape[index] = len(values)
        return np.asarray(values, dtype=np.float64).reshape(shape)

    total = np.zeros([len(n) for n in needs])
    paths = [[star.steps[held, n] for n in mine] for mine in needs]
    for i, mine in enumerate(paths):
        total = total + along(i, [INF if path is None else 0.0 for path in mine])
    for step in sorted({s for mine in paths for path in mine for s in path or ()}):
        price = star.prices[held, step]
        if price > 0:
            spared = reduce(
                np.multiply,
                (
                    along(i, [float(step not in (path or ())) for path in mine])
                    for i, mine in enumerate(paths)
                ),
            )
            total = total + price * (1.0 - spared)
    for axis in sorted(star.whole[held]):
        lacking = reduce(
            np.multiply,
            (
                along(i, [float(axis not in star.same[n]) for n in mine])
                for i, mine in enumerate(needs)
            ),
        )
        total = np.where(np.broadcast_to(lacking, total.shape) > 0, INF, total)
    return total


MAX_COMPARED = 1_000_000  # elements of the largest array that dominance may make: 8 MB
MAX_JOINED = 40_000  # entries of a table that elimination may make


@dataclass(slots=True)
class Eliminated:
    """A variable's costs when it was eliminated, against each neighbour's states then."""

    variable: int
    unary: Floats
    index: Ints
    tables: list[tuple[int, Ints, Floats]] = field(default_factory=list)


class Reducer:
    """Reduces a model in place."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.ledger: list[Eliminated] = []
        self.dirty: set[int] = set(model.variables)
        self.tables: dict[str, tuple[tuple[list[int], list[list[int]]], Floats]] = {}

    def run(self) -> list[Eliminated]:
        """Reduce until nothing helps; return the ledger of eliminated variables."""
        while True:
            self._simplify_stars()
            self._normalize()
            while self.dirty:
                variable = min(self.dirty)
                self.dirty.discard(variable)
                if variable in self.model.variables:
                    self._dominate(variable)
            stars = len(self.model.stars)
            self._simplify_stars()
            if self._eliminate() == 0 and stars == len(self.model.stars) and not self.dirty:
                return self.ledger

    # ------------------------------------------------------------ pairs

    def _normalize(self) -> None:
        """Move what depends on one side only to that side; drop pairs that are then zero."""
        model = self.model
        for key in sorted(model.pairs):
            a, b = (model.variables[v] for v in key)
            table = model.pairs[key].copy()
            for variable, other in ((a, 1), (b, 0)):
                least = table.min(axis=other) if table.size else np.zeros(len(variable))
                finite = np.where(np.isfinite(least), least, 0.0)
                variable.unary = variable.unary + least
                table -= finite[:, None] if other == 1 else finite[None, :]
            if np.any(table > 0):
                model.pairs[key] = table
            else:
                del model.pairs[key]
        for number in list(model.variables):
            self._keep(number, np.isfinite(model.variables[number].unary))

    def _keep(self, variable: int, mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        """Keep the states of a mask; what the variable touches may then be reduced further."""
        if mask.all():
            return
        self.model.keep(variable, np.flatnonzero(mask))
        self._touch(variable)

    def _touch(self, variable: int) -> None:
        self.dirty.add(variable)
        for key in self.model.pairs:
            if variable in key:
                self.dirty |= set(key)
        for star in self.model.stars:
            if variable in star.members():
                self.dirty |= set(star.members())

    # ------------------------------------------------------------ dominance

    def _dominate(self, number: int) -> None:
        """Drop every state for which another one is at least as good in all surroundings."""
        model, variable = self.model, self.model.variables[number]
        size = len(variable)
        if size < 2:
            return
        better = variable.unary[:, None] - variable.unary[None, :]  # [s, t]: t instead of s gains
        if model.limit is not None:
            better = np.where(variable.weight[:, None] < variable.weight[None, :], -INF, better)
        for key in sorted(k for k in model.pairs if number in k):
            table = model.table(key, number)
            if size * size * table.shape[1] > MAX_COMPARED:
                return
            better = _plus(better, _least_gain(table, table))
        for star in model.stars:
            if number in star.members():
                better = _plus(better, self._star_gain(star, number))
        alive = np.ones(size, dtype=bool)
        np.fill_diagonal(better, -INF)
        for state in np.lexsort((-variable.index, -variable.unary)):
            if np.any(alive & (better[state] >= 0)):
                alive[state] = False
        self._keep(number, alive)

    def _star_gain(self, star: MultiUse, number: int) -> Floats:
        """Return the least that another state of a variable saves in a star."""
        use = next((u for u in star.uses if u.variable == number), None)
        holds, needs = star.classes()
        axis = 0 if use is None else 1 + star.uses.index(use)
        mine = holds if use is None else needs[axis - 1]
        if star.num_entries() * len(mine) > MAX_COMPARED:
            gain = np.full((len(mine), len(mine)), -INF)  # only those that are alike compare
            np.fill_diagonal(gain, 0.0)
        else:
            known = self.tables.get(star.value)
            if known is None or known[0] != (holds, needs):
                known = self.tables[star.value] = ((holds, needs), star.small_table())
            table = np.moveaxis(known[1], axis, 0).reshape(len(mine), -1)
            gain = _least_gain(table, table)
        rows = np.searchsorted(mine, star.held if use is None else use.need)
        return np.asarray(gain[np.ix_(rows, rows)])

    # ------------------------------------------------------------ stars

    def _simplify_stars(self) -> None:
        """Turn stars into pairs where at most one use is open, or nothing is shared."""
        model = self.model
        left = []
        for star in model.stars:
            held = set(star.held.tolist())
            needs = [set(u.need.tolist()) for u in star.uses]
            asks = any(star.whole[h] for h in held)
            several = [u for u, n in zip(star.uses, needs, strict=True) if len(n) > 1]
            if len(several) <= 1 or (len(star.uses) == 1):
                self._as_pair(star, several[0] if several else None)
            elif not asks and not _shares(star, held, needs):
                for use in star.uses:
                    self._as_pair(_single(star, use), use)
            else:
                left.append(star)
                continue
            self.dirty |= set(star.members())
        model.stars = left

    def _as_pair(self, star: MultiUse, use: Use | None) -> None:
        """Add a star whose other uses are fixed as a cost of the producer and this use."""
        fixed = [int(u.need[0]) for u in star.uses if u is not use]
        needs = [None] if use is None or use.variable is None else sorted(set(use.need.tolist()))
        if use is not None and use.variable is None:
            fixed.append(int(use.need[0]))
        holds = sorted(set(star.held.tolist()))
        small = np.array(
            [[star.cost(h, fixed if n is None else [*fixed, n]) for n in needs] for h in holds]
        )
        rows = np.searchsorted(holds, star.held)
        if needs == [None]:
            variable = self.model.variables[star.producer]
            variable.unary = variable.unary + small[rows, 0]
            return
        assert use is not None
        assert use.variable is not None
        columns = np.searchsorted(np.asarray(needs), use.need)
        self.model.add_pair(star.producer, use.variable, small[np.ix_(rows, columns)])

    # ------------------------------------------------------------ elimination

    def _eliminate(self) -> int:
        """Eliminate variables in few pairs; how many were."""
        model, count = self.model, 0
        joined = {v for star in model.stars for v in star.members()}
        near = {v: set(keys) for v, keys in model.neighbours().items()}
        queue = set(model.variables)
        while queue:
            number = min(queue)
            queue.discard(number)
            variable = model.variables[number]
            keys = sorted(near[number])
            varies = model.limit is not None and np.ptp(variable.weight) > 0 and len(variable) > 1
            if number in joined or len(keys) > 2 or varies or len(variable) == 0:
                continue
            sides = [b if a == number else a for a, b in keys]
            tables = [model.table(key, number) for key in keys]
            if len(keys) == 2 and tables[0].shape[1] * tables[1].shape[1] > MAX_JOINED:
                continue
            self.ledger.append(
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
                near[side].discard(key)
                self.dirty.add(side)
                queue.add(side)
            if len(sides) == 2:
                key = (min(sides), max(sides))
                for side in sides:
                    near[side].add(key)
            model.weight += float(variable.weight[0])
            del model.variables[number], near[number]
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


def restore(ledger: list[Eliminated], chosen: dict[int, int]) -> dict[int, int]:
    """Return the states of all variables, by number among all states, from those of the rest."""
    found = dict(chosen)
    for entry in reversed(ledger):
        cost = entry.unary.copy()
        for side, index, table in entry.tables:
            cost = cost + table[:, int(np.flatnonzero(index == found[side])[0])]
        found[entry.variable] = int(entry.index[int(np.argmin(cost))])
    return found


def _least_gain(mine: Floats, theirs: Floats) -> Floats:
    """[s, t]: the least of mine[s] - theirs[t] over the neighbour's states; both inf: any."""
    with np.errstate(invalid="ignore"):
        gain = mine[:, None, :] - theirs[None, :, :]
    gain[np.isnan(gain)] = INF
    return np.asarray(gain.min(axis=2))


def _plus(a: Floats, b: Floats) -> Floats:
    """Return the sum, in which a certain loss outweighs everything."""
    with np.errstate(invalid="ignore"):
        total = a + b
    total[np.isnan(total)] = -INF
    return np.asarray(total)


def _shares(star: MultiUse, held: set[int], needs: list[set[int]]) -> bool:
    """Return whether two uses could need the same move, other than for nothing."""
    for h in held:
        seen: set[int] = set()
        for mine in needs:
            steps = {s for n in mine for s in star.steps[h, n] or () if star.prices[h, s] > 0}
            if steps & seen:
                return True
            seen |= steps
    return False


def _single(star: MultiUse, use: Use) -> MultiUse:
    """Return the star with one use only."""
    return MultiUse(
        value=star.value,
        producer=star.producer,
        held=star.held,
        uses=[use],
        steps=star.steps,
        prices=star.prices,
        same=star.same,
        whole=star.whole,
    )


MAX_ENTRIES = 20_000_000  # of the largest table before the least is taken: some 50 ms
MAX_TOTAL = 80_000_000  # of all tables together

Scope = tuple[int, ...]


def solve_by_elimination(model: Model) -> Solved | None:
    """Return the best states of all variables, or None where this would take too long."""
    if model.limit is not None or any(len(v) == 0 for v in model.variables.values()):
        return None
    sizes = {number: len(variable) for number, variable in model.variables.items()}
    scopes = [*model.pairs, *(_scope(star) for star in model.stars)]
    order = elimination_order(sizes, scopes)
    if order is None:
        return None
    tables: list[tuple[Scope, Floats]] = [((n,), v.unary) for n, v in model.variables.items()]
    tables += list(model.pairs.items())
    tables += [(_scope(star), star.table()) for star in model.stars]
    done: list[tuple[int, list[tuple[Scope, Floats]]]] = []
    constant = model.constant
    for variable in order:
        mine = [entry for entry in tables if variable in entry[0]]
        tables = [entry for entry in tables if variable not in entry[0]]
        done.append((variable, mine))
        scope, least = _least(mine, variable, sizes)
        if scope:
            tables.append((scope, least))
        else:
            constant += float(least)
    if not np.isfinite(constant):
        return None  # the integer program says that nothing satisfies what is fixed
    states: dict[int, int] = {}
    for variable, mine in reversed(done):
        costs = np.zeros(sizes[variable])
        for scope, table in mine:
            costs += table[tuple(states.get(v, slice(None)) for v in scope)]
        states[variable] = int(np.argmin(costs))
    chosen = {n: int(model.variables[n].index[state]) for n, state in states.items()}
    return Solved(chosen=chosen, cost=constant, bound=constant, num_variables=sum(sizes.values()))


def elimination_order(sizes: dict[int, int], scopes: list[Scope]) -> list[int] | None:
    """Variables in the order of the smallest table each; None where one is too large."""
    near: dict[int, set[int]] = {v: set() for v in sizes}
    for scope in scopes:
        if prod(sizes[v] for v in scope) > MAX_ENTRIES:
            return None
        for v in scope:
            near[v] |= set(scope) - {v}
    cost = {v: prod(sizes[u] for u in near[v]) * sizes[v] for v in sizes}
    order, total = [], 0
    while cost:
        variable = min(cost, key=lambda v: (cost[v], v))
        total += cost[variable]
        if cost[variable] > MAX_ENTRIES or total > MAX_TOTAL:
            return None
        order.append(variable)
        others = near.pop(variable)
        del cost[variable]
        for v in others:
            near[v] = (near[v] | others) - {v, variable}
        for v in others:
            cost[v] = prod(sizes[u] for u in near[v]) * sizes[v]
    return order


def _least(
    tables: list[tuple[Scope, Floats]], variable: int, sizes: dict[int, int]
) -> tuple[Scope, Floats]:
    """The least over a variable's states of the sum of tables, over their other variables."""
    scope = tuple(sorted({v for s, _ in tables for v in s} - {variable}))
    rows = []
    for mine, table in sorted(tables, key=lambda entry: entry[1].size):
        order = sorted(range(len(mine)), key=lambda i: (mine[i] != variable, mine[i]))
        shape = [sizes[v] if v in mine else 1 for v in scope]
        rows.append(table.transpose(order).reshape([sizes[variable], *shape]))
    least = np.full([sizes[v] for v in scope], INF)
    for state in range(sizes[variable]):
        total = rows[0][state]
        for row in rows[1:]:
            total = total + row[state]
        np.minimum(least, total, out=least)
    return scope, least


def _scope(star: MultiUse) -> Scope:
    return tuple(star.members())
