"""Training with collectives solved for unequal links equals training on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from shardwise.runtime import parameters as flat
from shardwise.runtime.collectives.shared_memory import SharedBuckets
from shardwise.runtime.grad_sync import Reducer
from tests.support import training
from tests.support.clusters import measured, uneven
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

HYBRID = {"dp": 2, "tp": 2, "zero": 2}
EVERYDAY = [("odd", "ddp", 3, {"shared": True}), ("odd", "ddp", 3, {}), ("odd", "zero2", 3, {})]
THOROUGH = [
    ("fused_gpt", "zero2", 3, {}),
    ("fused_gpt", "tensor", 3, {}),
    ("odd", "ddp", 2, {}),
    ("fused_gpt", "ddp", 4, {}),
    ("odd", "zero1", 5, {}),
    ("odd", "zero2", 5, {}),
    ("fused_gpt", "fsdp", 4, {}),
    ("fused_gpt", "hybrid", 4, HYBRID),
    ("llama", "hybrid", 4, {"dp": 2, "tp": 2}),
    ("resnet", "ddp", 4, {}),
    ("odd", "zero2", 2, {"shared": True}),
    ("fused_gpt", "fsdp", 4, {"shared": True}),
    ("fused_gpt", "hybrid", 4, {**HYBRID, "shared": True}),
]


def solved(plan: sw.Plan, ranks: int) -> sw.Plan:
    """The plan with every collective solved, from the first byte on, in small chunks."""
    chosen = sw.collectives.choose(plan, uneven(ranks), use="solved")
    assert all(choice.uses == "solved" for choice in chosen.collectives)
    small = [replace(choice, chunk_bytes=256) for choice in chosen.collectives]
    return chosen.with_(collectives=tuple(small))


def shared(plan: sw.Plan, ranks: int) -> sw.Plan:
    """The plan with every collective in the memory that the ranks share."""
    chosen = sw.collectives.choose(plan, measured(ranks), use="shared")
    assert all(choice.uses == "shared" for choice in chosen.collectives)
    return chosen


def train(name: str, strategy: str, ranks: int, options: dict[str, Any]) -> training.Run:
    """Train as `training.parallel` does, with solved collectives or shared memory, and use them."""
    model, inputs = training.make(name)
    choose = shared if (options := dict(options)).pop("shared", False) else solved
    with KeepDouble():
        plan = choose(training.plan_for(model, inputs, strategy, ranks, **options), ranks)
        pm = sw.parallelize(model, inputs, plan=plan)
        run = training.trained(pm, inputs)
    assert pm.mesh.transport.backends.started > 0
    return run


def check(pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: Any) -> None:
    runs = pool(ranks).run(train, model, strategy, ranks, options, timeout=300)
    expected = training.dense(model)
    for run in runs:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        training.assert_equal(run, expected)


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), EVERYDAY)
def test_solved_collectives_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check(pool, model, strategy, ranks, options)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), THOROUGH)
def test_all_solved_collectives_equal_one_device(
    pool: Callable[[int], Pool], model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check(pool, model, strategy, ranks, options)


def accumulate(strategy: str, in_shared_memory: bool) -> list[dict[str, torch.Tensor | None]]:
    """Accumulated gradients of three steps, and gradients of one more."""
    model, inputs = training.make("odd")
    with KeepDouble():
        plan = training.plan_for(model, inputs, strategy, 2)
        pm = sw.parallelize(model, inputs, plan=shared(plan, 2) if in_shared_memory else plan)
        gradients = []
        for steps in (3, 1):
            for _ in range(steps):
                pm.train_step(inputs)
            gradients.append(pm.gather_gradients())
            pm.zero_grad()
    buckets = [r.bucket for p in pm.store.reducer.plans.values() for r in p.reductions]
    assert all((bucket is not None) == in_shared_memory for bucket in buckets)
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_gradients_that_stay_in_shared_buckets_add_up(
    pool: Callable[[int], Pool], strategy: str
) -> None:
    shared_runs, plain_runs = (
        pool(2).run(accumulate, strategy, in_shared_memory, timeout=120)
        for in_shared_memory in (True, False)
    )
    for result, expected in zip(
        shared_runs[0] + shared_runs[1], plain_runs[0] + plain_runs[1], strict=True
    ):
        for name, gradient in expected.items():
            training.assert_close(result[name], gradient, name)


def interrupted() -> list[dict[str, torch.Tensor | None]]:
    """Gradients of a step, and of the same step after one that failed during its sums."""
    model, inputs = training.make("odd")
    at_once, gate = SharedBuckets._run, threading.Event()

    def later(self: SharedBuckets, *call: Any) -> None:
        gate.wait(1.0)
        gate.set()
        at_once(self, *call)

    arrives = Reducer._on_arrival

    def fails(self: Reducer, entry: flat.Entry) -> None:
        if entry.spec.name == "embed.weight":
            raise ValueError("a gradient that does not arrive")
        arrives(self, entry)

    def opens(self: Reducer, entry: flat.Entry) -> None:
        if entry.spec.name == "embed.weight":
            gate.set()
        arrives(self, entry)

    with KeepDouble(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "BUCKET_BYTES", 1)  # a sum for each gradient
        plan = shared(training.plan_for(model, inputs, "ddp", 2), 2)
        gradients = [replace(choice, min_bytes=64) for choice in plan.collectives]  # no loss
        pm = sw.parallelize(model, inputs, plan=plan.with_(collectives=tuple(gradients)))
        pm.train_step(inputs)
        gradients = [pm.gather_gradients()]
        pm.zero_grad()
        patch.setattr(Reducer, "_on_arrival", fails)
        patch.setattr(SharedBuckets, "_run", later)
        with pytest.raises(ValueError, match="does not arrive"):
            pm.train_step(inputs)
        patch.setattr(Reducer, "_on_arrival", opens)
        pm.train_step(inputs)
        gradients.append(pm.gather_gradients())
    return gradients


def test_a_failed_step_leaves_nothing_in_shared_buckets(pool: Callable[[int], Pool]) -> None:
    for before, after in pool(2).run(interrupted, timeout=120):
        for name, gradient in before.items():
            training.assert_close(after[name], gradient, name)


def disagree() -> str:
    """Rank 1 has other trees."""
    model, inputs = training.make("odd")
    plan = solved(training.plan_for(model, inputs, "ddp", 3), 3)
    if dist.get_rank() == 1:
        changed = [replace(choice, chunk_bytes=512) for choice in plan.collectives]
        plan = plan.with_(collectives=tuple(changed))
    return training.error_of(sw.parallelize, model, inputs, plan=plan, timeout_s=20)


def test_ranks_with_different_trees_raise(pool: Callable[[int], Pool]) -> None:
    for message in pool(3).run(disagree, timeout=60):
        assert "different programs" in message


def tuned() -> list[tuple[str, int, bool]]:
    """Return the tuned choices, after training a step with them."""
    model, inputs = training.make("odd")
    plan = solved(training.plan_for(model, inputs, "zero2", 3), 3)
    tuned = sw.collectives.tune(plan, num_bytes=100_000, rounds=1)
    sw.parallelize(model, inputs, plan=tuned).train_step(inputs)
    return [
        (c.uses, c.chunk_bytes, set(c.predicted_s) >= {"library measured", "solved measured"})
        for c in tuned.collectives
    ]


@pytest.mark.slow
def test_chunks_are_tuned_by_measurement(pool: Callable[[int], Pool]) -> None:
    runs = pool(3).run(tuned, timeout=120)
    assert runs[0] == runs[1] == runs[2]
    for uses, chunk_bytes, has_measurements in runs[0]:
        assert (uses, chunk_bytes) == ("library", 0) or (uses == "solved" and chunk_bytes % 64 == 0)
        assert has_measurements
