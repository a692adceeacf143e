"""The best states by eliminating one variable after the other, where tables stay small.

Enters: a reduced `Model`. Leaves: `Solved`, or None where a table would have more than
`MAX_ENTRIES` entries; then the integer program decides.

Every cost is a table over the states of some variables. Eliminating a variable adds up the tables
it is in and takes the least over its states. Graphs of layers are narrow: the values alive at one
point are few, so that this is quicker than the integer program, and exact as well.
"""

from __future__ import annotations

from math import prod

import numpy as np

from shardwise.planner.layouts.model import INF, Floats, Model, Solved, Star

MAX_ENTRIES = 20_000_000  # of the largest table before the least is taken: some 50 ms
MAX_TOTAL = 80_000_000  # of all tables together

Scope = tuple[int, ...]


def solve_by_elimination(model: Model) -> Solved | None:
    """The best states of all variables, or None where this would take too long."""
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


def _scope(star: Star) -> Scope:
    return tuple(star.members())
