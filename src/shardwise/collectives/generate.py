"""Column generation: ways are added while they are cheaper than what they would replace.

Enters: a `Master` and a function that finds the cheapest way of every flow at given prices.
Leaves: `Generated`: columns, the answer over them, and the best bound that prices proved. At any
prices y with Σ c y = 1, the cheapest ways cost no more than the optimum: that bound needs no trust
in the linear solver. Prices are taken between the best ones so far and the solver's, which
oscillate; this needs far fewer rounds (Wentges' smoothing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.arrays import Floats
from shardwise.collectives.master import Answer, Column, Master

Pricing = Callable[[Floats], tuple[list[Column], Floats]]

TOLERANCE = 1e-6  # relative; where the search for better columns ends
MAX_ROUNDS = 400
SMOOTHING = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
    """All columns that were seen, their best use, and what is proved."""

    columns: tuple[Column, ...]
    answer: Answer
    bound: float
    prices: Floats


def generate(
    master: Master, start: Iterable[Column], price: Pricing, *, limit_s: float
) -> Generated:
    """Add columns until the bound is met, or `limit_s` CPU seconds are over."""
    began = time.process_time()
    columns = {column.key: column for column in start}
    best_prices = _even(master)
    bound = 0.0
    answer = master.solve(list(columns.values()))
    if not len(master.capacity):
        return Generated(
            columns=tuple(columns.values()), answer=answer, bound=0.0, prices=best_prices
        )
    smoothing = SMOOTHING
    for _ in range(MAX_ROUNDS):
        tried = _normal(smoothing * best_prices + (1 - smoothing) * answer.prices, master)
        found, costs = price(tried)
        proved = master.bound(costs)
        if proved > bound:
            bound, best_prices = proved, tried
        new = {column.key: column for column in found if column.key not in columns}
        if answer.time - bound <= TOLERANCE * answer.time:
            break
        if not new:
            if smoothing == 0.0:
                break
            smoothing = 0.0  # the solver's own prices decide whether there is nothing left
            continue
        columns |= new
        before, answer = answer.time, master.solve(list(columns.values()))
        smoothing = SMOOTHING if answer.time < before else smoothing / 2
        if time.process_time() - began > limit_s:
            break
    return Generated(
        columns=tuple(columns.values()),
        answer=answer,
        bound=min(bound, answer.time),
        prices=best_prices,
    )


def _even(master: Master) -> Floats:
    """Prices at which every resource would be equally scarce."""
    return np.asarray(1.0 / (master.capacity * max(len(master.capacity), 1)))


def _normal(prices: Floats, master: Master) -> Floats:
    total = float(prices @ master.capacity)
    return prices / total if total > 0 else _even(master)
