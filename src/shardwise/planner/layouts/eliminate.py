"""The best states by eliminating one variable after the other, where tables stay small.

Enters: a reduced `Model`. Leaves: `Solved`, or None where a table would have more than
`MAX_ENTRIES` entries; then the integer program decides.

Every cost is a table over the states of some variables. Eliminating a variable adds up the tables
it is in and takes the least over its states. Graphs of layers are narrow: the values alive at one
point are few, so that this is quicker than the integer program, and exact as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from shardwise.planner.layouts.model import Floats, Ints, Model, Solved, Star

MAX_ENTRIES = 4_000_000  # of the largest table: 32 MB, some 30 ms to make
MAX_TOTAL = 40_000_000  # of all tables together

Scope = tuple[int, ...]


@dataclass(slots=True)
class _Eliminated:
    variable: int
    scope: Scope  # the other variables of its table
    best: Ints  # the best state for theirs


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
    done: list[_Eliminated] = []
    constant = model.constant
    for variable in order:
        mine = [entry for entry in tables if variable in entry[0]]
        tables = [entry for entry in tables if variable not in entry[0]]
        scope, table = _add(mine, variable, sizes)
        best = table.argmin(axis=-1)
        done.append(_Eliminated(variable, scope, best))
        least = np.take_along_axis(table, best[..., None], axis=-1)[..., 0]
        if scope:
            tables.append((scope, least))
        else:
            constant += float(least)
    if not np.isfinite(constant):
        return None  # the integer program says that nothing satisfies what is fixed
    states: dict[int, int] = {}
    for entry in reversed(done):
        states[entry.variable] = int(entry.best[tuple(states[v] for v in entry.scope)])
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


def _add(
    tables: list[tuple[Scope, Floats]], variable: int, sizes: dict[int, int]
) -> tuple[Scope, Floats]:
    """The sum of tables over all their variables, this one last."""
    scope = tuple(sorted({v for s, _ in tables for v in s} - {variable}))
    axes = (*scope, variable)
    place = {v: i for i, v in enumerate(axes)}
    total = np.zeros(tuple(sizes[v] for v in axes))
    for mine, table in tables:
        order = sorted(range(len(mine)), key=lambda i: place[mine[i]])
        shape = [sizes[v] if v in mine else 1 for v in axes]
        total += table.transpose(order).reshape(shape)
    return scope, total


def _scope(star: Star) -> Scope:
    return tuple(star.members())
