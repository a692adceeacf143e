"""Devices of a node that wires connect pair by pair, without a switch.

Enters: the size of a node and the groups of ranks that talk. Leaves: how many wires carry what a
group's rings send out of each device; few devices of a cube mesh share few wires.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise, permutations

# NVLinks between V100s of a DGX-1, p3.16xlarge or p3dn.24xlarge, a hybrid cube mesh: `nvidia-smi
# topo -m` there. NVIDIA DGX-1 System Architecture (2017) draws it.
CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
WIRES = 6  # of each device
WIRE_BYTES_PER_S = 25e9  # NVLink 2, one way
# PCIe 3.0 x16 carries 12 GB/s (the preset's host_bytes_per_s): where no wire leads.
_HOST_WIRES = 12 / 25


def slowest(groups: Iterable[tuple[int, ...]]) -> float:
    """Return the fewest wires that any of the groups has; devices are counted from 0 in
    their node.
    """
    return min((ring_wires(tuple(sorted(group))) for group in groups), default=float(WIRES))


@lru_cache(maxsize=512)
def ring_wires(devices: tuple[int, ...]) -> float:
    """Wires out of each device that rings through all `devices` use at once.

    A ring runs both ways; between two devices, every wire is one.

    >>> [ring_wires(tuple(range(n))) for n in (2, 4, 8)], ring_wires((0, 2, 4, 6))
    ([1, 4, 6], 2)
    """
    first, *rest = devices
    if len(devices) == 2:
        return CUBE_MESH[first][rest[0]] or _HOST_WIRES
    found = (
        (first, *order, first)
        for order in permutations(rest)
        if order[0] < order[-1]  # each ring once, not its reverse too
    )
    rings = [ring for ring in found if all(CUBE_MESH[a][b] for a, b in pairwise(ring))]
    return 2 * _most(rings, {}) or _HOST_WIRES


def _most(rings: list[tuple[int, ...]], used: dict[frozenset[int], int]) -> int:
    """How many of the rings run at once, each on wires of its own."""
    best = 0
    for at, ring in enumerate(rings):
        edges = [frozenset(pair) for pair in pairwise(ring)]
        taken = used | {edge: used.get(edge, 0) + 1 for edge in edges}
        if all(count <= CUBE_MESH[min(edge)][max(edge)] for edge, count in taken.items()):
            best = max(best, 1 + _most(rings[at:], taken))
        if best == WIRES // 2:
            break
    return best
