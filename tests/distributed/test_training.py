"""Training on gloo processes equals training on one device, for every strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import training
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

HYBRID = {"dp": 2, "tp": 2, "zero": 3}
EVERYDAY = [
    ("fused_gpt", "fsdp", 3, {}),
    ("fused_gpt", "tensor", 3, {}),
    ("odd", "zero2", 3, {}),
    ("resnet", "ddp", 3, {}),
]
THOROUGH = [
    (model, strategy, ranks, options)
    for model in ("odd", "fused_gpt", "llama", "resnet", "t5")
    for strategy, ranks, options in (
        ("ddp", 3, {}),
        ("zero1", 5, {}),
        ("zero2", 3, {}),
        ("fsdp", 5, {}),
        ("tensor", 3, {}),
        ("tensor", 5, {}),
        ("hybrid", 4, HYBRID),
        ("hybrid", 4, {"dp": 2, "tp": 2}),
    )
    if (model, strategy, ranks, options) not in EVERYDAY
]


@functools.cache
def dense(model: str) -> training.Run:
    return training.dense(model)


def check(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    runs = pool(ranks).run(training.parallel, model, strategy, ranks, options, timeout=300)
    for found in runs:
        assert found.losses == runs[0].losses
        assert found.norms == runs[0].norms
        training.assert_equal(found, dense(model))


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), EVERYDAY)
def test_ranks_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check(pool, model, strategy, ranks, options)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), THOROUGH)
def test_all_strategies_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check(pool, model, strategy, ranks, options)
