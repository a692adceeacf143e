"""Mixtures of experts that are divided over ranks equal one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from tests.support import training, zoo
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

MESHES = [
    (2, {"ep": 2}),
    (3, {"ep": 3}),
    (4, {"ep": 4}),
    (4, {"ep": 2, "tp": 2}),
    (4, {"ep": 2, "dp": 2, "zero": 3}),
    (4, {"ep": 2, "pp": 2, "num_microbatches": 2}),
]
THOROUGH = [
    (model, *mesh)
    for model in ("experts", *zoo.EXPERTS)
    for mesh in MESHES
    # A balancing loss is a product of means over the batch, which micro-batches cannot compute; the
    # smallest model has a single layer.
    if not (model in ("experts", "mixtral_losses") and "pp" in mesh[1])
] + [
    ("mixtral", 2, {"ep": 2, "num_microbatches": 2, "recompute": "full"}),
    ("mixtral", 4, {"dp": 2, "ep": 2, "zero": 1}),
    ("mixtral", 4, {"dp": 2, "ep": 2, "zero": 2}),
    ("mixtral", 5, {"ep": 5}),
    ("olmoe", 6, {"ep": 6}),
    ("qwen3_moe", 8, {"dp": 2, "ep": 2, "tp": 2}),
    ("qwen3_moe", 4, {"dp": 2, "tp": 2, "sequence_parallel": True}),
    ("gpt_oss", 4, {"ep": 2, "cp": 2}),
]
# Sizes that no number of ranks divides: 7 rows of 11 tokens, 5 experts, 6 heads and 3 key heads.
SPLIT = {"num_microbatches": 2}
PRODUCTS = [
    (4, {"ep": 2, "cp": 2, "attention": "ring"}),
    (4, {"cp": 2, "tp": 2, "sequence_parallel": True, "attention": "ring"}),
    (4, {"cp": 2, "pp": 2, "attention": "heads"} | SPLIT),
    (6, {"ep": 3, "cp": 2, "attention": "ring", "zero": 3}),
    (6, {"dp": 2, "cp": 3, "attention": "gather", "zero": 2}),
    (6, {"ep": 3, "pp": 2} | SPLIT),
    (6, {"ep": 2, "tp": 3, "sequence_parallel": True}),
    (8, {"dp": 2, "ep": 2, "cp": 2, "attention": "ring", "zero": 1}),
    (8, {"ep": 2, "cp": 2, "tp": 2, "sequence_parallel": True}),
    (8, {"ep": 2, "cp": 2, "pp": 2, "attention": "ring"} | SPLIT),
    (8, {"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": True} | SPLIT),
    (8, {"cp": 8, "attention": "ring"}),
    (8, {"dp": 2, "ep": 4, "zero": 3}),
]


@functools.cache
def dense(model: str) -> training.Run:
    return training.dense(model)


def check(pool: Callable[[int], Pool], model: str, ranks: int, options: dict[str, Any]) -> None:
    runs = pool(ranks).run(training.parallel, model, "hybrid", ranks, options, timeout=300)
    for run in runs:
        assert run.losses == runs[0].losses
        training.assert_equal(run, dense(model))


def test_experts_on_two_ranks_equal_one_device(pool: Callable[[int], Pool]) -> None:
    check(pool, "experts", 2, {"ep": 2})


def recorded_loads() -> list[float]:
    """Return the loads of experts that a step records."""
    model, batch = training.make("experts")
    plan = training.plan_for(model, batch, "expert", 2)
    pm = sw.parallelize(model, batch, plan=plan, record=True)
    pm.train_step(batch)
    events = pm.recorder.take() if pm.recorder is not None else []
    return [e.details["expert_load"] for e in events if "expert_load" in e.details]


def test_the_load_of_the_busiest_rank_is_recorded(pool: Callable[[int], Pool]) -> None:
    model, batch = training.make("experts")
    ids = model.get_submodule("router")(batch["x"]).topk(2).indices
    counts = torch.bincount(ids.flatten(), minlength=5)
    rows = [int(counts[:3].sum()), int(counts[3:].sum())]  # 3 experts on rank 0, 2 on rank 1
    for loads in pool(2).run(recorded_loads):
        assert loads
        assert loads == pytest.approx([max(rows) * 5 / (sum(rows) * 3)] * len(loads))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks", "options"), THOROUGH)
def test_all_experts_equal_one_device(
    pool: Callable[[int], Pool], model: str, ranks: int, options: dict[str, Any]
) -> None:
    check(pool, model, ranks, options)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), PRODUCTS)
def test_all_axes_together_equal_one_device(
    pool: Callable[[int], Pool], ranks: int, options: dict[str, Any]
) -> None:
    check(pool, "language_of_experts", ranks, options)


def saved(path: str) -> dict[str, Tensor]:
    """Train one step with divided experts, and save."""
    model, batch = training.make("experts")
    plan = training.plan_for(model, batch, "expert", 2)
    pm = sw.parallelize(model, batch, plan=plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=0.01)
    pm.train_step(batch)
    optimizer.step()
    sw.save_checkpoint(path, pm, optimizer)
    return pm.gather_state_dict()


def loaded(path: str, strategy: str) -> dict[str, Tensor]:
    """Load the checkpoint under another plan, on three ranks."""
    model, batch = training.make("experts")
    pm = sw.parallelize(model, batch, plan=training.plan_for(model, batch, strategy, 3))
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=0.01)
    sw.load_checkpoint(path, pm, optimizer)
    return pm.gather_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["expert", "fsdp"])
def test_checkpoints_hold_all_experts(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: str
) -> None:
    before = pool(2).run(saved, str(tmp_path / "checkpoint"))[0]
    after = pool(3).run(loaded, str(tmp_path / "checkpoint"), strategy)[0]
    assert before["up"].shape == (5, 6, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
