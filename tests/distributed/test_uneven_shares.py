"""Ranks that take unequal shares equal one device: batches, parameters, stages, ZeRO."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Mesh
from tests.support import training
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

EVERYDAY = [
    ("odd", "ddp", 2, {"shares": {"dp": (2, 1)}}, 7),
    ("odd", "fsdp", 3, {"shares": {"dp": (5, 2, 1)}}, 8),
    ("fused_gpt", "tensor", 2, {"shares": {"tp": (3, 1)}}, 7),
    (
        "fused_gpt",
        "pipeline",
        3,
        {"stage_meshes": [Mesh.of(dp=(3, 1)), Mesh()], "num_microbatches": 2},
        7,
    ),
]
THOROUGH = [
    ("fused_gpt", "fsdp", 3, {"shares": {"dp": (5, 2, 1)}}, 8),
    *(
        (model, "hybrid", len(weights), {"dp": len(weights), "zero": zero, "shares": shares}, batch)
        for model in ("odd", "fused_gpt")
        for weights, batch in (((2, 1), 9), ((3, 1), 5), ((5, 2, 1), 7), ((1, 0, 2), 2))
        for zero in (0, 1, 2, 3)
        for shares in ({"dp": weights},)
    ),
    *(
        (model, "tensor", 3, {"shares": {"tp": (5, 2, 1)}}, 7)
        for model in ("odd", "fused_gpt", "llama", "t5", "vit", "unet")
    ),
    *(
        (
            model,
            "hybrid",
            4,
            {"dp": 2, "tp": 2, "zero": zero, "shares": {"dp": (2, 1), "tp": (1, 3)}},
            7,
        )
        for model in ("fused_gpt", "llama", "vit")
        for zero in (0, 3)
    ),
    *(
        (
            "fused_gpt",
            "pipeline",
            4,
            {"stage_meshes": meshes, "num_microbatches": 3, "schedule": schedule},
            11,
        )
        for meshes in (
            [Mesh.of(dp=(2, 1)), Mesh.of(dp=(1, 2))],
            [Mesh.of(tp=(3, 1)), Mesh.of(dp=(1, 3))],
            [Mesh(), Mesh.of(dp=(5, 2, 1))],
        )
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    ),
]


@functools.cache
def dense(model: str, batch: int) -> training.Run:
    return training.dense(model, batch)


def check(
    pool: Callable[[int], Pool],
    model: str,
    strategy: str,
    ranks: int,
    options: dict[str, Any],
    batch: int,
) -> None:
    runs = pool(ranks).run(training.parallel, model, strategy, ranks, options, batch, timeout=300)
    for run in runs:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        training.assert_equal(run, dense(model, batch))


@pytest.mark.parametrize(("model", "strategy", "ranks", "options", "batch"), EVERYDAY)
def test_unequal_shares_equal_one_device(
    pool: Callable[[int], Pool],
    model: str,
    strategy: str,
    ranks: int,
    options: dict[str, Any],
    batch: int,
) -> None:
    check(pool, model, strategy, ranks, options, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "ranks", "options", "batch"), THOROUGH)
def test_all_unequal_shares_equal_one_device(
    pool: Callable[[int], Pool],
    model: str,
    strategy: str,
    ranks: int,
    options: dict[str, Any],
    batch: int,
) -> None:
    check(pool, model, strategy, ranks, options, batch)


class Dropping(nn.Module):
    """A model with random numbers, and a loss that ignores some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x).relu(), 0.4)
        return nn.functional.cross_entropy(self.down(hidden), labels, ignore_index=-100)


def dropping() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.arange(7) % 5
    labels[:2] = -100
    return Dropping().double(), {"x": torch.randn(7, 6, dtype=torch.float64), "labels": labels}


def losses(axis: str, weights: tuple[int, ...] | None, ranks: int) -> tuple[list[float], list[int]]:
    """Losses of three steps, and the numbers of rows that this rank reads."""
    model, batch = dropping()
    graph = sw.capture(model, batch)
    strategy = sw.strategies.ddp if axis == "dp" else sw.strategies.tensor
    options = {"shares": {axis: weights}} if weights else {}
    plan = strategy(graph, sw.Cluster.local(ranks), **options)
    pm = sw.parallelize(model, batch, plan=plan)
    opt = sw.optimizer(pm, torch.optim.AdamW, lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(pm.train_step(batch).item())
        opt.step()
        opt.zero_grad()
    return losses, [t.shape[0] for t in pm.local_batch(batch).values()]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_random_numbers_are_those_of_one_device(pool: Callable[[int], Pool], axis: str) -> None:
    expected, _ = losses(axis, None, 1)
    runs = pool(2).run(losses, axis, (3, 1), 2)
    for result, _ in runs:
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    rows = [rows for _, rows in runs]
    assert rows == ([[5, 5], [2, 2]] if axis == "dp" else [[7, 7], [7, 7]])
