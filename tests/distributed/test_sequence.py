"""Sequence and context parallelism equal one device: losses, gradients, three AdamW steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.pool import Pool
from tests.support.training import check_parallel

pytestmark = pytest.mark.distributed
EVERYDAY = [
    ("tensor", 3, {"sequence_parallel": True}),
    ("context", 4, {"attention": "ring"}),
    ("hybrid", 4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
]
SLOW = [
    ("tensor", 2, {"sequence_parallel": True}),
    ("tensor", 4, {"sequence_parallel": True}),
    ("hybrid", 4, {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3}),
    ("context", 2, {"zero": 3}),
    ("context", 3, {}),
    ("context", 3, {"attention": "ring"}),
    ("context", 4, {"attention": "heads"}),
    ("context", 4, {"attention": "gather"}),
    ("hybrid", 4, {"cp": 2, "tp": 2, "attention": "ring"}),
    ("hybrid", 4, {"cp": 2, "pp": 2, "num_microbatches": 3, "attention": "ring"}),
    ("hybrid", 4, {"dp": 2, "cp": 2, "zero": 2}),
    ("hybrid", 4, {"cp": 2, "pp": 2, "num_microbatches": 3}),
]


@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_gpt_on_shards_of_its_sequence(
    pool: Callable[[int], Pool], strategy: str, ranks: int, options: dict[str, object]
) -> None:
    check_parallel(pool, "fused_gpt", strategy, ranks, options)
