"""Rings on the links of a cube mesh."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from shardwise.published.machines import CUBE_MESH, NUM_LINKS, ring_links

DEVICES = range(len(CUBE_MESH))


def test_every_device_has_six_links() -> None:
    assert all(sum(row) == NUM_LINKS for row in CUBE_MESH)
    assert all(CUBE_MESH[a][b] == CUBE_MESH[b][a] for a in DEVICES for b in DEVICES)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_rings_fit_the_links(size: int) -> None:
    for devices in combinations(DEVICES, size):
        inside = min(sum(CUBE_MESH[a][b] for b in devices) for a in devices)
        links = ring_links(devices)
        closed = any(
            all(CUBE_MESH[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True))
            for order in permutations(devices)
            if order[0] == devices[0]
        )
        assert (links >= 1) == closed
        assert links <= max(inside, 1)


def test_known_groups() -> None:
    """NCCL uses 6 rings for 8 devices and 4 for each half; pairs have one or two links."""
    assert [ring_links(tuple(range(n))) for n in (2, 4, 8)] == [1, 4, 6]
    assert ring_links((4, 5, 6, 7)) == 4
    assert ring_links((0, 2, 4, 6)) == 2
    assert (ring_links((0, 3)), ring_links((0, 5))) == (2, 0.48)
