"""All ranks measure shared memory together, including ranks outside every group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.profiling.links import measure_shared_memory
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def measured() -> dict[tuple[str, int], bool]:
    """Return whether each row has a time; the third rank is in no pair."""
    rows = measure_shared_memory([[[0, 1, 2]], [[0, 1]]], [1024], lambda _: None, 0.001)
    return {(row["operation"], len(row["groups"][0])): row["seconds"] > 0 for row in rows}


def test_ranks_outside_a_group_take_part_in_barriers(pool: Callable[[int], Pool]) -> None:
    *paired, unpaired = pool(3).run(measured, timeout=60)
    shared = {key: has for key, has in unpaired.items() if key[0].startswith("shared")}
    assert {size for _, size in shared} == {2, 3}
    assert all(has == (size == 3) for (_, size), has in shared.items())
    assert all(all(rows.values()) for rows in paired)
