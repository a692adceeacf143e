"""All-to-all: choose routes from every rank to every other, direct or through other ranks, and the
fraction of a rank's data that each carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.arrays import Floats, Ints
from shardwise.collectives.master_lp import Column, Master, generate
from shardwise.collectives.network import Network, Symmetry
from shardwise.collectives.spec import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The ranks from sender to receiver; `weight` is the fraction of a rank's data."""

    ranks: tuple[int, ...]
    weight: float


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routes, the seconds per byte they take, and the lower bound."""

    routes: tuple[Route, ...]
    s_per_byte: float
    bound: float


class RouteProblem:
    """The routing problem, with one flow per orbit of pairs of ranks."""

    def __init__(self, network: Network, demand: Demand, symmetry: Symmetry) -> None:
        assert demand.shares is not None
        self.network, self.symmetry = network, symmetry
        count = network.num_ranks
        shares = demand.shares
        self.pairs = [
            (a, b)
            for a in symmetry.representatives()
            for b in range(count)
            if a != b and shares[b] > 0
        ]
        # Only pairs that start at a representative; one stands for its whole orbit.
        sizes = np.bincount(symmetry.rank_orbit, minlength=count)
        _, self.orbit = np.unique(symmetry.resource_orbit, return_inverse=True)
        capacity = np.bincount(self.orbit, weights=network.capacity)
        self.master = Master(
            capacity=capacity.astype(np.float64),
            num_flows=len(self.pairs),
            demand=np.array([shares[b] * float(sizes[a]) for a, b in self.pairs]),
        )
        self.prices: Floats = np.zeros(0)

    def solve(self, limit_s: float) -> Routing:
        """Return the fastest routes."""
        start, _ = self.price(np.zeros(len(self.master.capacity)))
        generated = generate(self.master, start, self.price, limit_s=limit_s)
        self.prices = generated.prices
        routes = [
            Route(ranks=tuple(int(r) for r in turn[column.path]), weight=float(weight) / each)
            for column, weight in zip(generated.columns, generated.answer.weights, strict=True)
            if weight > 1e-9 * self.master.demand[column.flow]  # type: ignore[index]
            for each in [float(self.symmetry.order)]
            for turn in self.symmetry.elements
        ]
        return Routing(
            routes=tuple(routes), s_per_byte=generated.answer.time, bound=generated.bound
        )

    def price(self, prices: Floats) -> tuple[list[Column], Floats]:
        """Return the cheapest route of every pair; ties go to the fewest hops."""
        exact = self.network.prices(prices[self.orbit])
        small = 1e-9 * max(float(exact.mean()) if len(exact) else 0.0, 1e-300)
        cost = self.network.matrix(exact + small)
        following = _next_hops(cost)
        columns, costs_of_pairs = [], np.zeros(len(self.pairs))
        for flow, (a, b) in enumerate(self.pairs):
            path = [a]
            while path[-1] != b:
                path.append(int(following[path[-1], b]))
            ranks = np.array(path, dtype=np.int64)
            load = self.network.loads(self.network.edge[ranks[:-1], ranks[1:]])
            summed = np.bincount(self.orbit, weights=load, minlength=len(prices))
            column = Column(
                flow=flow, path=ranks, load=summed.astype(np.float64), depth=len(path) - 1
            )
            columns.append(column)
            costs_of_pairs[flow] = column.load @ prices
        # The tie-breaking term must not enter the bound.
        return columns, np.maximum(costs_of_pairs - small * self.network.num_ranks, 0.0)


def _next_hops(cost: Floats) -> Ints:
    """Return the next rank on the cheapest path from i to j (Floyd, Warshall)."""
    count = len(cost)
    best = cost.copy()
    np.fill_diagonal(best, 0.0)
    following = np.broadcast_to(np.arange(count), (count, count)).copy()
    for middle in range(count):
        through = best[:, middle, None] + best[middle]
        shorter = through < best
        best[shorter] = through[shorter]
        following = np.where(shorter, following[:, middle, None], following)
    return following
