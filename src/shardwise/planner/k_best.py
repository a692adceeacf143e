"""Enumerate the k cheapest solutions of a layout problem.

Variables are decided one after the other. Prefixes that agree in all variables with undecided
neighbours have the same continuations, so it suffices to extend the `k` cheapest of each such
class, and the `k` solutions are exact. If there are more than `MAX_PREFIXES` prefixes, only the
cheapest are extended.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.arrays import Floats, Ints
from shardwise.layouts.factor_graph import Model

MAX_PREFIXES = 4_000
DIGITS = 9  # costs that agree in them are equal
MAX_TABLE = 1_000_000  # entries of the costs of several variables; larger tables are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The state of every variable, by its number, and their total cost."""

    cost: float
    chosen: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KBest:
    """Solutions, cheapest first; `complete` if no other solution is below the limit."""

    solutions: tuple[LayoutChoice, ...]
    complete: bool


# Variables, and the costs of their states together, in the order of the table's dimensions.
_Factor = tuple[tuple[int, ...], Floats]


def k_best(
    model: Model,
    k: int,
    below: float = float("inf"),
    distinguished: Collection[int] = (),
    sizes: Mapping[int, Floats] | None = None,
) -> KBest:
    """Return up to `k` solutions that cost less than `below`, cheapest first.

    Of solutions with equal costs and weights in every part, and equal states of the `distinguished`
    variables, only the one with the smallest `sizes` is returned.
    """
    factors = _factors(model)
    order = _order(model, factors)
    place = {variable: at for at, variable in enumerate(order)}
    ends = [max(place[v] for v in members) for members, _ in factors]
    costs, picks = np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    complete = True
    for at, variable in enumerate(order):
        ending = [f for f, end in zip(factors, ends, strict=True) if end == at]
        costs, picks = _decide(model.variables[variable].unary, ending, place, costs, picks)
        selected = np.flatnonzero(costs < below)
        costs, picks = costs[selected], picks[selected]
        later = {v for f, end in zip(factors, ends, strict=True) if end > at for v in f[0]}
        live = sorted(place[v] for v in later if place[v] <= at)
        counts = [len(model.variables[order[p]]) for p in live]
        selected = _cheapest(costs, _classes(picks[:, live], counts), k)
        complete &= len(selected) < MAX_PREFIXES
        costs, picks = costs[selected], picks[selected]
    if not len(costs):
        return KBest(solutions=(), complete=True)
    size = np.zeros(len(costs))
    for variable, by_state in (sizes or {}).items():
        size += by_state[picks[:, place[variable]]]
    cheap = np.lexsort((size, _rounded(costs)))[:k]
    parts = _parts(model, factors, order, picks[cheap], distinguished)
    first = cheap[np.sort(np.unique(parts, axis=0, return_index=True)[1])]
    solutions = tuple(
        LayoutChoice(cost=float(costs[i]), chosen=dict(zip(order, picks[i].tolist(), strict=True)))
        for i in first.tolist()
    )
    return KBest(solutions=solutions, complete=complete and len(cheap) < k)


def k_best_lean(
    model: Model,
    k: int,
    per_byte: float,
    distinguished: Collection[int] = (),
    sizes: Mapping[int, Floats] | None = None,
) -> Iterator[LayoutChoice]:
    """Yield the `k` cheapest solutions with a price on bytes, which their costs do not include."""
    variables = {
        number: replace(v, unary=v.unary + per_byte * v.weight)
        for number, v in model.variables.items()
    }
    lean = replace(model, variables=variables)
    for choice in k_best(lean, k, distinguished=distinguished, sizes=sizes).solutions:
        yield replace(choice, cost=choice.cost - per_byte * model.weigh(choice.chosen))


def _factors(model: Model) -> list[_Factor]:
    factors: list[_Factor] = list(model.pairs.items())
    for multi_use in model.multi_uses:
        members = tuple(multi_use.members())
        if np.prod([len(model.variables[v]) for v in members]) <= MAX_TABLE:
            factors.append((members, multi_use.table()))
    return factors


def _order(model: Model, factors: Sequence[_Factor]) -> list[int]:
    """Return nodes in graph order, and the values that they only read before their first reader."""
    first: dict[int, float] = {}
    for (producer, *users), _ in factors:
        if users and producer > min(users):
            first[producer] = min(first.get(producer, producer), min(users) - 0.5)
    return sorted(model.variables, key=lambda v: (first.get(v, v), v))


def _decide(
    unary: Floats, ending: Sequence[_Factor], place: Mapping[int, int], costs: Floats, picks: Ints
) -> tuple[Floats, Ints]:
    """Extend every prefix by every state of the next variable."""
    at, states = picks.shape[1], np.arange(len(unary))
    total = costs[:, None] + unary[None, :]
    for members, table in ending:
        rows = (states[None, :] if place[v] == at else picks[:, place[v], None] for v in members)
        total = total + table[tuple(rows)]
    longer = np.concatenate(
        [np.repeat(picks, len(states), axis=0), np.tile(states, len(costs))[:, None]], axis=1
    )
    return total.ravel(), longer


def _parts(
    model: Model,
    factors: Sequence[_Factor],
    order: Sequence[int],
    picks: Ints,
    distinguished: Collection[int],
) -> Floats:
    """Return rounded costs and weights of every solution, and states of `distinguished`."""
    at = {variable: picks[:, i] for i, variable in enumerate(order)}
    columns = [np.zeros(len(picks))]
    for number, variable in model.variables.items():
        columns += [variable.unary[at[number]], variable.weight[at[number]]]
    columns += [table[tuple(at[v] for v in members)] for members, table in factors]
    rounded = [_rounded(column) for column in columns]
    return np.stack([*rounded, *(at[v].astype(np.float64) for v in sorted(distinguished))], axis=1)


def _rounded(column: Floats) -> Floats:
    """Return the values as rounded fractions of the largest."""
    largest = float(np.abs(column).max()) or 1.0
    return np.round(column / largest, DIGITS)


def _classes(live: Ints, sizes: Sequence[int]) -> Ints:
    """Return a number per prefix, equal for prefixes with equal states of live variables."""
    kind = np.zeros(len(live), dtype=np.int64)
    for column, size in zip(live.T, sizes, strict=True):
        kind = np.unique(kind * size + column, return_inverse=True)[1].ravel()
    return kind


def _cheapest(costs: Floats, kind: Ints, k: int) -> Ints:
    """Return the `k` cheapest prefixes of every class, and at most `MAX_PREFIXES` in total."""
    if not len(costs):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((costs, kind))
    sizes = np.bincount(kind)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    selected = order[rank < k]
    if len(selected) > MAX_PREFIXES:
        selected = selected[np.argsort(costs[selected], kind="stable")[:MAX_PREFIXES]]
    return np.sort(selected)
