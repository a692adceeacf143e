"""Over NCCL, ranks end with an error that names a rank that died, failed or is stuck."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.runtime.failures import naming_failures
from tests.support.faults import survivors
from tests.support.training import device_of_rank, make, to_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
TIMEOUT_S = 15.0
PLANS = {
    "fsdp": ("fsdp", {}),
    "pipeline": ("pipeline", {"pp": 4, "num_microbatches": 6}),
    "3d": ("hybrid", {"tp": 2, "pp": 2, "num_microbatches": 4}),
}


def train(
    ready: Callable[[], None], plan: str, stuck: int | None = None, how_stuck: str = ""
) -> None:
    """Train forever; rank `stuck` sleeps or raises before its tenth step."""
    strategy, options = PLANS[plan]
    model, batch = to_device(*make("unet", 8), device_of_rank())
    graph = sw.capture(model, batch)
    made = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(4), **options)
    pm = sw.parallelize(model, batch, plan=made, timeout_s=TIMEOUT_S)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    step = 0
    while True:
        if dist.get_rank() == stuck and step == 10:
            if how_stuck == "raise":
                with naming_failures(TIMEOUT_S):
                    raise ValueError("seven apples")
            time.sleep(600)
        pm.train_step(batch).item()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 2:
            ready()


@pytest.mark.parametrize("number", range(30))
def test_a_killed_rank_is_named(backend: str, number: int) -> None:
    chance = random.Random(number)
    plan, victim = chance.choice(list(PLANS)), chance.randrange(4)
    reports = survivors(
        f"{__name__}:train", 4, victim=victim, how=signal.SIGKILL, limit_s=60, backend=backend,
        plan=plan,
    )  # fmt: skip
    assert len(reports) == 3, reports
    for text, seconds in reports.values():
        assert text.startswith(f"RankError: rank {victim} died"), text
        assert seconds < TIMEOUT_S + 5


@pytest.mark.parametrize("number", range(10))
def test_a_stuck_rank_is_named(backend: str, number: int) -> None:
    """A rank whose process is stopped has no heartbeat, one that sleeps does not begin the step."""
    chance = random.Random(number)
    plan, victim = chance.choice(list(PLANS)), chance.randrange(4)
    stops = number % 2 == 0
    reports = survivors(
        f"{__name__}:train", 4, victim=victim, how=signal.SIGSTOP if stops else signal.SIGCONT,
        limit_s=90, backend=backend, plan=plan, stuck=None if stops else victim,
    )  # fmt: skip
    assert len(reports) == 3, reports
    for text, seconds in reports.values():
        assert text.startswith("RankError: "), text
        assert f"rank {victim}" in text or f"[{victim}]" in text, text
        assert seconds < 2 * TIMEOUT_S + 10


def test_a_rank_that_raises_is_named(backend: str) -> None:
    reports = survivors(
        f"{__name__}:train", 4, victim=2, how=signal.SIGCONT, limit_s=60, backend=backend,
        plan="3d", stuck=2, how_stuck="raise",
    )  # fmt: skip
    for text, _ in reports.values():
        assert text.startswith("RankError: rank 2 failed: ValueError: seven apples"), text
