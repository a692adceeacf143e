"""Ways of collectives are measured by all ranks together, those without a group among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.profiling.links import other_ways
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def measured() -> dict[tuple[str, int], bool]:
    """Which rows have a time; in pairs, the third rank has nobody to talk to."""
    rows = other_ways([[[0, 1, 2]], [[0, 1]]], [1024], lambda _: None, 0.001)
    return {(row["operation"], len(row["groups"][0])): row["seconds"] > 0 for row in rows}


def test_ranks_that_remain_wait_for_the_others(pool: Callable[[int], Pool]) -> None:
    *others, alone = pool(3).run(measured, timeout=60)
    shared = {key: has for key, has in alone.items() if key[0].startswith("shared")}
    assert {size for _, size in shared} == {2, 3}
    assert all(has == (size == 3) for (_, size), has in shared.items())
    assert all(all(found.values()) for found in others)
