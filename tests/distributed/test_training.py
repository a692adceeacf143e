"""Training on gloo processes equals training on one device, for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.training import check_parallel

pytestmark = pytest.mark.distributed

HYBRID = {"dp": 2, "tp": 2, "zero": 3}
EVERYDAY = [("odd", "fsdp", 3, {}), ("fused_gpt", "tensor", 3, {}), ("resnet", "ddp", 2, {})]
THOROUGH = [
    (model, strategy, ranks, options)
    for model in ("odd", "fused_gpt", "llama", "resnet", "t5")
    for strategy, ranks, options in (
        ("ddp", 3, {}),
        ("zero1", 5, {}),
        ("zero2", 3, {}),
        ("fsdp", 3, {}),
        ("fsdp", 5, {}),
        ("tensor", 3, {}),
        ("tensor", 5, {}),
        ("hybrid", 4, HYBRID),
        ("hybrid", 4, {"dp": 2, "tp": 2}),
    )
    if (model, strategy, ranks, options) not in EVERYDAY
]


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), EVERYDAY)
def test_ranks_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check_parallel(pool, model, strategy, ranks, options)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), THOROUGH)
def test_all_strategies_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check_parallel(pool, model, strategy, ranks, options)
