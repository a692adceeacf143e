"""The cheapest solutions of a layout problem, in order: not one of them, but the first hundreds.

Enters: a `Model` (variables with states, costs between them). Leaves: `Near`s: states of all
variables with their cost, cheapest first.

Variables are decided one after the other. Beginnings that agree in all variables to which costs are
still to come have the same continuations, so of each such class the `most` cheapest are enough: the
first `most` solutions are exact. Only where classes are more than `WIDEST` the cheapest are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.layouts.factor_graph import Floats, Ints, Model

WIDEST = 4_000  # beginnings that are kept
DIGITS = 9  # by which costs are the same
LARGEST_TABLE = 1_000_000  # entries of the costs that several variables share; more count nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """The state of every variable, by its number, and what they cost together."""

    cost: float
    chosen: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """Solutions, cheapest first; `complete` if there are no others below what was asked for."""

    solutions: tuple[Near, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class _Factor:
    """Costs of the states of some variables together, in the order of the table's dimensions."""

    members: tuple[int, ...]
    table: Floats


def nearest(
    model: Model,
    most: int,
    below: float = float("inf"),
    told: Collection[int] = (),
    sizes: Mapping[int, Floats] | None = None,
) -> Nearest:
    """Up to `most` solutions that cost less than `below`, cheapest first.

    Of those that cost and weigh the same in every part, and have the same states of the variables
    `told`, there is the smallest, by the `sizes` of variables' states.
    """
    factors = _factors(model)
    order = _order(model, factors)
    place = {variable: at for at, variable in enumerate(order)}
    ends = [max(place[v] for v in factor.members) for factor in factors]
    costs, picks = np.array([model.constant]), np.zeros((1, 0), dtype=np.int64)
    complete = True
    for at, variable in enumerate(order):
        ending = [f for f, end in zip(factors, ends, strict=True) if end == at]
        costs, picks = _decide(model.variables[variable].unary, ending, place, costs, picks)
        kept = np.flatnonzero(costs < below)
        costs, picks = costs[kept], picks[kept]
        later = {v for f, end in zip(factors, ends, strict=True) if end > at for v in f.members}
        live = sorted(place[v] for v in later if place[v] <= at)
        counts = [len(model.variables[order[p]]) for p in live]
        kept = _cheapest(costs, _classes(picks[:, live], counts), most)
        complete &= len(kept) < WIDEST
        costs, picks = costs[kept], picks[kept]
    if not len(costs):
        return Nearest(solutions=(), complete=True)
    size = np.zeros(len(costs))
    for variable, made in (sizes or {}).items():
        size += made[picks[:, place[variable]]]
    cheap = np.lexsort((size, _rounded(costs)))[:most]
    parts = _parts(model, factors, order, picks[cheap], told)
    first = cheap[np.sort(np.unique(parts, axis=0, return_index=True)[1])]
    solutions = tuple(
        Near(cost=float(costs[i]), chosen=dict(zip(order, picks[i].tolist(), strict=True)))
        for i in first.tolist()
    )
    return Nearest(solutions=solutions, complete=complete and len(cheap) < most)


def nearest_lean(
    model: Model,
    most: int,
    per_byte: float,
    told: Collection[int] = (),
    sizes: Mapping[int, Floats] | None = None,
) -> Iterator[Near]:
    """Up to `most` solutions that are the cheapest where a byte costs so much, with their cost
    without that.
    """
    variables = {
        number: replace(v, unary=v.unary + per_byte * v.weight)
        for number, v in model.variables.items()
    }
    lean = replace(model, variables=variables)
    for near in nearest(lean, most, told=told, sizes=sizes).solutions:
        yield replace(near, cost=near.cost - per_byte * model.weigh(near.chosen))


def _factors(model: Model) -> list[_Factor]:
    found = [_Factor(key, table) for key, table in model.pairs.items()]
    for star in model.stars:
        members = tuple(star.members())
        if np.prod([len(model.variables[v]) for v in members]) <= LARGEST_TABLE:
            found.append(_Factor(members, star.table()))
    return found


def _order(model: Model, factors: Sequence[_Factor]) -> list[int]:
    """Nodes in their order; what nodes only read just before the first of them."""
    first: dict[int, float] = {}
    for factor in factors:
        producer, *users = factor.members
        if users and producer > min(users):
            first[producer] = min(first.get(producer, producer), min(users) - 0.5)
    return sorted(model.variables, key=lambda v: (first.get(v, v), v))


def _decide(
    unary: Floats, ending: Sequence[_Factor], place: Mapping[int, int], costs: Floats, picks: Ints
) -> tuple[Floats, Ints]:
    """Every beginning with every state of the next variable."""
    at, states = picks.shape[1], np.arange(len(unary))
    total = costs[:, None] + unary[None, :]
    for factor in ending:
        rows = [
            states[None, :] if place[v] == at else picks[:, place[v], None] for v in factor.members
        ]
        total = total + factor.table[tuple(rows)]
    longer = np.concatenate(
        [np.repeat(picks, len(states), axis=0), np.tile(states, len(costs))[:, None]], axis=1
    )
    return total.ravel(), longer


def _parts(
    model: Model,
    factors: Sequence[_Factor],
    order: Sequence[int],
    picks: Ints,
    told: Collection[int],
) -> Floats:
    """What every solution costs and weighs in every part, to `DIGITS`; the states of `told`."""
    at = {variable: picks[:, i] for i, variable in enumerate(order)}
    found = [np.zeros(len(picks))]
    for number, variable in model.variables.items():
        found += [variable.unary[at[number]], variable.weight[at[number]]]
    found += [f.table[tuple(at[v] for v in f.members)] for f in factors]
    rounded = [_rounded(column) for column in found]
    return np.stack([*rounded, *(at[v].astype(np.float64) for v in sorted(told))], axis=1)


def _rounded(column: Floats) -> Floats:
    """As parts of the largest, without the last digits."""
    largest = float(np.abs(column).max()) or 1.0
    return np.round(column / largest, DIGITS)


def _classes(live: Ints, sizes: Sequence[int]) -> Ints:
    """A number for every beginning: the same where the states of live variables are."""
    kind = np.zeros(len(live), dtype=np.int64)
    for column, size in zip(live.T, sizes, strict=True):
        kind = np.unique(kind * size + column, return_inverse=True)[1].ravel()
    return kind


def _cheapest(costs: Floats, kind: Ints, most: int) -> Ints:
    """The cheapest of every class of beginnings, and of all of them."""
    if not len(costs):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((costs, kind))
    sizes = np.bincount(kind)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = order[rank < most]
    if len(kept) > WIDEST:
        kept = kept[np.argsort(costs[kept], kind="stable")[:WIDEST]]
    return np.sort(kept)
