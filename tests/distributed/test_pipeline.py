"""Pipelines on gloo processes equal one device: stages, schedules, micro-batches, ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.training import check_parallel

pytestmark = pytest.mark.distributed

EVERYDAY = [
    ("fused_gpt", "pipeline", 2, {"pp": 2, "num_microbatches": 3}),
    ("odd", "pipeline", 2, {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
    ("unet", "pipeline", 4, {"pp": 2, "num_microbatches": 3}),
    ("fused_gpt", "zero2", 2, {"num_microbatches": 2}),
    pytest.param(
        "llama",
        "hybrid",
        4,
        {"tp": 2, "pp": 2, "num_microbatches": 3, "recompute": "full"},
        marks=pytest.mark.slow,
    ),
]
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
THOROUGH = [
    *(
        (model, "pipeline", ranks, {"pp": ranks, "num_microbatches": 4, "schedule": schedule})
        for model in ("fused_gpt", "t5", "unet", "vit", "llama", "odd")
        for ranks in (2, 3, 4)
        for schedule in SCHEDULES
    ),
    *(
        (model, "pipeline", 2, {"pp": 2, "num_microbatches": 5, "schedule": schedule})
        for model in ("fused_gpt", "llama")
        for schedule in ("interleaved", "zb_v")
    ),
    *(
        (
            model,
            "hybrid",
            8,
            {"dp": 2, "tp": 2, "pp": 2, "zero": zero, "num_microbatches": 3, "recompute": again},
        )
        for model in ("fused_gpt", "llama", "t5", "vit")
        for zero, again in ((0, "none"), (1, "full"), (2, "selective"), (3, "full"))
    ),
    ("resnet", "pipeline", 2, {"pp": 2, "num_microbatches": 1}),
    ("fused_gpt", "pipeline", 4, {"stage_ranks": (1, 2, 1), "num_microbatches": 3}),
]


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), EVERYDAY)
def test_stages_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check_parallel(pool, model, strategy, ranks, options)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), THOROUGH)
def test_every_schedule_equals_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check_parallel(pool, model, strategy, ranks, options)
