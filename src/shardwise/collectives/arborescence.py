"""Spanning trees under prices: the cheapest, and cheap ones of little depth.

Enters: a matrix of costs, infinite where there is no edge, and a root that reaches every rank.
Leaves: the parent of every rank, -1 at the root. For trees that lead into the root, give the
transposed matrix.
"""

from __future__ import annotations

import math

import numpy as np

from shardwise.arrays import Bools, Floats, Ints


def cheapest(cost: Floats, root: int) -> Ints:
    """Return the spanning tree of the least total cost (Chu-Liu, Edmonds): `cost[u, v]` of u -> v.

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


def shallow(
    cost: Floats, delay: Floats, roots: Ints, weights: Floats, max_depth: int
) -> tuple[Ints, Bools]:
    """Trees of at most `max_depth` hops, one for each root and weight, and which were found: grown
    rank by rank, each by the least of its price and `weight` times how late its bytes come.

    With weight 0 this is Prim's way, with a large one Dijkstra's. All are grown at once.
    """
    size, row = len(cost), np.arange(len(roots))
    parent = np.full((len(roots), size), -1, dtype=np.int64)
    depth = np.zeros((len(roots), size), dtype=np.int64)
    late = np.zeros((len(roots), size))
    best = np.full((len(roots), size), math.inf)
    outside = np.ones((len(roots), size), dtype=bool)
    found = np.ones(len(roots), dtype=bool)
    joined = np.asarray(roots)
    for _ in range(size - 1):
        outside[row, joined] = False
        best[row, joined] = math.inf
        since = late[row, joined]
        offer = cost[joined] + weights[:, None] * (since[:, None] + delay[joined])
        offer[depth[row, joined] >= max_depth] = math.inf
        better = outside & (offer < best)
        best = np.where(better, offer, best)
        parent = np.where(better, joined[:, None], parent)
        joined = best.argmin(axis=1)
        found &= best[row, joined] < math.inf
        above = parent[row, joined]
        depth[row, joined] = depth[row, above] + 1
        late[row, joined] = late[row, above] + np.where(found, delay[above, joined], 0.0)
    return parent, found


def depths(parent: Ints) -> Ints:
    """Return the hops from the root to every rank, of one tree or of several."""
    found = (parent >= 0).astype(np.int64)
    above = np.where(parent >= 0, parent, np.arange(parent.shape[-1]))
    for _ in range(parent.shape[-1].bit_length()):  # twice as far each time; the root adds nothing
        found = found + np.take_along_axis(found, above, -1)
        above = np.take_along_axis(above, above, -1)
    return found
