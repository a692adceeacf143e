"""The two-level algorithm: inside each node, between nodes, and inside again.

Enters: a `Network` whose `groups` are nodes, and a `Demand`. Leaves: parts: each rank is the root
of its share; inside a node everyone gives that share to one rank of it, these form a ring over the
nodes, and results go back the same way.
"""

from __future__ import annotations

import numpy as np

from shardwise.arrays import Ints
from shardwise.collectives.demand import Demand
from shardwise.collectives.network import Network
from shardwise.collectives.trees import Part


def hierarchical(network: Network, demand: Demand) -> tuple[Part, ...] | None:
    """Return the parts of all roots; None where there are no levels, or a send is not possible."""
    nodes = [group for group in network.groups if group]
    if len(nodes) < 2 or max(map(len, nodes)) < 2 or demand.root is not None:
        return None
    count = network.num_ranks
    shares = demand.shares or (1 / count,) * count
    parts = []
    for home, node in enumerate(nodes):
        for place, root in enumerate(node):
            if shares[root] <= 0:
                continue
            inward = _towards(nodes, home, place, count, 1) if demand.inward else None
            outward = _towards(nodes, home, place, count, -1) if demand.outward else None
            if not _possible(network, inward, outward):
                return None
            parts.append(Part(weight=shares[root], root=root, inward=inward, outward=outward))
    return tuple(parts)


def _towards(nodes: list[tuple[int, ...]], home: int, place: int, count: int, step: int) -> Ints:
    """Parents: everyone's is their node's rank of this place, whose is that of the next node."""
    heads = [node[place % len(node)] for node in nodes]
    parent = np.full(count, -1, dtype=np.int64)
    for number, node in enumerate(nodes):
        for rank in node:
            parent[rank] = heads[number]
        parent[heads[number]] = -1 if number == home else heads[(number + step) % len(nodes)]
    return parent


def _possible(network: Network, inward: Ints | None, outward: Ints | None) -> bool:
    for half, up in ((inward, True), (outward, False)):
        if half is not None:
            rank = np.flatnonzero(half >= 0)
            ends = (rank, half[rank]) if up else (half[rank], rank)
            if (network.edge[ends] < 0).any():
                return False
    return True
