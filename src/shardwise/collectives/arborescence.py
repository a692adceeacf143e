"""Spanning trees under prices: the cheapest, and cheap ones of little depth.

Enters: a matrix of costs, infinite where there is no edge, and a root that reaches every rank.
Leaves: the parent of every rank, -1 at the root. For trees that lead into the root, give the
transposed matrix.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def cheapest(cost: Floats, root: int) -> Ints:
    """The spanning tree of the least total cost (Chu-Liu, Edmonds): `cost[u, v]` of u -> v.

    Every rank takes its cheapest parent; each cycle that this makes becomes one rank, whose ways
    in cost what they add to the cycle; and again, until there is no cycle.
    """
    cost = cost.copy()
    np.fill_diagonal(cost, math.inf)
    parent: Ints = _contract(cost, root)
    parent[root] = -1
    return parent


def _contract(cost: Floats, root: int) -> Ints:
    size = len(cost)
    everyone = np.arange(size)
    parent: Ints = cost.argmin(axis=0)
    parent[root] = root
    cycles = _cycles(parent.tolist(), root)
    if not cycles:
        return parent
    best = cost[parent, everyone]
    label = np.full(size, -1, dtype=np.int64)
    for i, cycle in enumerate(cycles):
        label[cycle] = i
    singles = np.flatnonzero(label < 0)
    label[singles] = len(cycles) + np.arange(len(singles))
    within = label < len(cycles)
    reduced = cost - np.where(within, best, 0.0)

    count = len(cycles) + len(singles)
    entry = np.empty((size, count), dtype=np.int64)  # where an edge from u into a part arrives
    entry[:, len(cycles) :] = singles
    for i, cycle in enumerate(cycles):
        entry[:, i] = cycle[reduced[:, cycle].argmin(axis=1)]
    arriving = reduced[everyone[:, None], entry]
    leaving = np.empty((count, count), dtype=np.int64)  # from which rank of a part it leaves
    leaving[len(cycles) :] = singles[:, None]
    for i, cycle in enumerate(cycles):
        leaving[i] = cycle[arriving[cycle].argmin(axis=0)]
    smaller = arriving[leaving, np.arange(count)]
    np.fill_diagonal(smaller, math.inf)
    inner = int(label[root])
    outer = _contract(smaller, inner)
    parts = np.delete(np.arange(count), inner)
    first = leaving[outer[parts], parts]
    parent[entry[first, parts]] = first
    return parent


def _cycles(parent: list[int], root: int) -> list[Ints]:
    seen = [-1] * len(parent)
    seen[root] = root
    found = []
    for start in range(len(parent)):
        at = start
        while seen[at] < 0:
            seen[at] = start
            at = parent[at]
        if seen[at] == start and at != root:
            cycle = [at]
            while parent[cycle[-1]] != at:
                cycle.append(parent[cycle[-1]])
            found.append(np.array(cycle, dtype=np.int64))
    return found


def shallow(cost: Floats, delay: Floats, root: int, weight: float, max_depth: int) -> Ints | None:
    """A tree of at most `max_depth` hops: grown rank by rank, each by the least of its price and
    `weight` times how late its bytes come. None where such a tree was not found.

    With weight 0 this is Prim's way, with a large one Dijkstra's.
    """
    size = len(cost)
    parent = np.full(size, -1, dtype=np.int64)
    depth = np.zeros(size, dtype=np.int64)
    late = np.zeros(size)
    outside = np.ones(size, dtype=bool)
    best = np.full(size, math.inf)
    joined = root
    for _ in range(size - 1):
        outside[joined] = False
        best[joined] = math.inf
        if depth[joined] < max_depth:
            offer = cost[joined] + weight * (late[joined] + delay[joined])
            better = outside & (offer < best)
            best[better] = offer[better]
            parent[better] = joined
        joined = int(best.argmin())
        if best[joined] == math.inf:
            return None
        depth[joined] = depth[parent[joined]] + 1
        late[joined] = late[parent[joined]] + delay[parent[joined], joined]
    return parent


def depths(parent: Ints) -> Ints:
    """The hops from the root to every rank."""
    found = (parent >= 0).astype(np.int64)
    above = np.where(parent >= 0, parent, np.arange(len(parent)))
    for _ in range(len(parent).bit_length()):  # twice as far each time; the root adds nothing
        found, above = found + found[above], above[above]
    return found
