"""Training in 16 bits follows training in float32; overflow skips a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from tests.support import bytes_model
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

PIPELINE = {"pp": 2, "num_microbatches": 2}


def worst(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize(
    ("steps", "falls_to"), [(15, 0.99), pytest.param(200, 0.7, marks=pytest.mark.slow)]
)
def test_bf16_follows_the_float32_curve(
    pool: Callable[[int], Pool], steps: int, falls_to: float
) -> None:
    options = {"steps": steps, "timeout": 300, **PIPELINE}
    wide = pool(2).run(bytes_model.train, None, "pipeline", 2, **options)[0]
    assert wide[-1] < falls_to * wide[0]
    narrow = pool(2).run(bytes_model.train, "bf16", "pipeline", 2, **options)[0]
    assert worst(narrow, wide) < 0.02
    assert narrow != wide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "strategy"),
    [("bf16", "ddp"), ("bf16", "zero1"), ("bf16", "zero2"), ("bf16", "fsdp"), ("bf16", "tensor"),
     ("bf16-autocast", "ddp"), ("bf16-autocast", "fsdp"), ("fp16", "ddp"), ("fp16", "fsdp")],
)  # fmt: skip
def test_every_strategy_follows_the_float32_curve(
    pool: Callable[[int], Pool], precision: str, strategy: str
) -> None:
    wide = pool(2).run(bytes_model.train, None, strategy, 2, timeout=600)[0]
    narrow = pool(2).run(bytes_model.train, precision, strategy, 2, timeout=600)[0]
    assert worst(narrow, wide) < 0.02


def overflow(strategy: str, options: dict[str, object]) -> tuple[list[float], int, bool]:
    """Train with an infinite gradient on one rank in the second step."""
    torch.manual_seed(0)
    model = bytes_model.SmallGPT()
    data = bytes_model.batch(0)
    graph = sw.capture(model, data)
    make = getattr(sw.strategies, strategy)
    plan = make(graph, sw.Cluster.local(2), precision="fp16", **options)
    pm = sw.parallelize(model, data, plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=2e-3)
    scales = []
    unchanged = True
    for step in range(3):
        pm.train_step(data)
        if step == 1:
            entry = pm.store.entries[-1]
            before = pm.gather_state_dict()
            if pm.mesh.ranks[pm.mesh.rank] == 1:
                pm.store.gradient(entry).view(-1)[:1] = torch.inf
        optimizer.step()
        if step == 1:
            after = pm.gather_state_dict()
            unchanged = all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()
        scales.append(pm.store.scaler.scale)
    return scales, optimizer.skipped_steps, unchanged


@pytest.mark.parametrize(
    ("strategy", "options"),
    [pytest.param("pipeline", PIPELINE, marks=pytest.mark.slow), ("fsdp", {})],
)
def test_an_infinite_gradient_skips_the_step(
    pool: Callable[[int], Pool], strategy: str, options: dict[str, object]
) -> None:
    for scales, skipped, unchanged in pool(2).run(overflow, strategy, options, timeout=120):
        assert skipped == 1
        assert unchanged
        assert scales[1] == scales[0] / 2 == scales[2]
