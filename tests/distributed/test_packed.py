"""Recurrent layers over packed sequences on gloo processes equal those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.training import check_parallel

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("model", "strategy", "ranks", "options"),
    [
        ("rnn_lstm", "fsdp", 3, {}),
        *(
            pytest.param(model, strategy, ranks, options, marks=pytest.mark.slow)
            for model in ("rnn_lstm", "rnn_gru", "rnn_labels")
            for strategy, ranks, options in (
                ("ddp", 5, {}),
                ("zero1", 3, {}),
                ("tensor", 3, {}),
                ("hybrid", 4, {"dp": 2, "tp": 2, "zero": 3}),
                ("hybrid", 4, {"dp": 2, "pp": 2, "num_microbatches": 2}),
            )
        ),
    ],
)
def test_packed_sequences_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check_parallel(pool, model, strategy, ranks, options)
