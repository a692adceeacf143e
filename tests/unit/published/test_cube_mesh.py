"""Rings on the wires of a cube mesh."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from shardwise.published.machines import CUBE_MESH, WIRES, ring_wires, slowest

DEVICES = range(len(CUBE_MESH))


def test_wires_are_counted_once() -> None:
    assert all(sum(row) == WIRES for row in CUBE_MESH)
    assert all(CUBE_MESH[a][b] == CUBE_MESH[b][a] for a in DEVICES for b in DEVICES)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_rings_fit_the_wires(size: int) -> None:
    for devices in combinations(DEVICES, size):
        inside = min(sum(CUBE_MESH[a][b] for b in devices) for a in devices)
        found = ring_wires(devices)
        closed = any(
            all(CUBE_MESH[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True))
            for order in permutations(devices)
            if order[0] == devices[0]
        )
        assert (found >= 1) == closed
        assert found <= max(inside, 1)


def test_known_groups() -> None:
    """What NCCL finds: 6 rings of 8 devices, 4 of each half; pairs have one or two wires."""
    assert [ring_wires(tuple(range(n))) for n in (2, 4, 8)] == [1, 4, 6]
    assert ring_wires((4, 5, 6, 7)) == 4
    assert ring_wires((0, 2, 4, 6)) == 2
    assert (ring_wires((0, 3)), ring_wires((0, 5))) == (2, 0.48)


def test_all_groups_wait_for_the_slowest() -> None:
    assert slowest([(0, 3), (1, 0)]) == 1
    assert slowest([]) == WIRES
