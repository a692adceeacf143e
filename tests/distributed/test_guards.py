"""Steps in which Python looks at values of the batch, on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.support.guarded import BREAKING, KINDS, Looking, batch, drawn_model
from tests.support.pool import Pool
from tests.support.tiers import thinned
from tests.support.trainer import fields
from tests.support.training import assert_close, error_of, plan_for

pytestmark = pytest.mark.distributed


def compare(model: nn.Module, batches: list[Any], strategy: str, ranks: int, **options: Any) -> int:
    """Train beside the model on one device; return the number of programs."""
    reference = copy.deepcopy(model)
    plan = plan_for(model, batches[0], strategy, ranks, **options)
    pm = sw.parallelize(model, batches[0], plan)
    optimizers = (
        sw.optimizer(pm, torch.optim.SGD, lr=0.1),
        torch.optim.SGD(reference.parameters(), lr=0.1),
    )
    for number, inputs in enumerate(batches):
        loss = reference(**inputs)
        loss.backward()
        assert_close(pm.train_step(inputs), loss.detach(), f"loss {number}")
        for name, gradient in pm.gather_gradients().items():
            expected = dict(reference.named_parameters())[name].grad
            if expected is None and gradient is not None:
                expected = torch.zeros_like(gradient)
            assert_close(gradient, expected, f"{name} in step {number}", 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(pm.eval_loss(inputs), reference(**inputs).detach(), f"eval {number}")
    for name, tensor in reference.state_dict().items():
        assert_close(pm.gather_state_dict()[name].double(), tensor.double(), name, 0.1, 1e-7)
    return len(list(pm._programs.items()))


def train(kind: str, strategy: str, ranks: int, options: dict[str, Any]) -> int:
    batches = [batch(0), batch(0, **BREAKING.get(kind, {})), batch(2), batch(1), batch(0)]
    return compare(Looking(KINDS[kind]), batches, strategy, ranks, **options)


CASES = [
    ("if", "ddp", 2, {}),
    ("nested", "tensor", 3, {}),
    ("if", "ddp", 2, {"num_microbatches": 2}),
    ("item", "pipeline", 2, {"num_microbatches": 2}),
    ("buffer", "hybrid", 4, {"dp": 2, "tp": 2}),
    *((kind, "fsdp", 3, {}) for kind in KINDS),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "ranks", "options"), thinned(CASES, lambda i, _: i == 0)
)
def test_other_values_are_captured_again(
    pool: Callable[[int], Pool], kind: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    counts = pool(ranks).run(train, kind, strategy, ranks, options, timeout=300)
    assert len(set(counts)) == 1
    assert counts[0] > 2 or kind in ("assert", "allclose", "overwritten")


def one_rank_differs(ranks: int) -> list[str]:
    errors = []
    rank = torch.distributed.get_rank()
    for kind in ("if", "item", "tolist", "numpy"):
        model, first = Looking(KINDS[kind]), batch(0)
        pm = sw.parallelize(model, first, plan_for(model, first, "ddp", ranks), check_batches=False)
        pm.train_step(first)
        other = batch(0, **BREAKING[kind]) if rank == ranks - 1 else first
        errors.append(error_of(pm.train_step, other))
        pm.train_step(first)  # nothing is broken
    model, first = Looking(KINDS["assert"]), batch(0)
    pm = sw.parallelize(model, first, plan_for(model, first, "ddp", ranks))
    errors.append(error_of(pm.train_step, batch(0, lengths=torch.zeros(6, dtype=torch.int64))))
    errors.append(error_of(pm.train_step, pm.program(first).local_batch(first), local=True))
    pm.train_step(first)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_refuse_together(pool: Callable[[int], Pool], ranks: int) -> None:
    for *differing, assertion, local in pool(ranks).run(one_rank_differs, ranks, timeout=120):
        for error in differing:
            assert f"BatchError: the batches of ranks [{ranks - 1}] differ from rank 0" in error
            assert "guarded.py:" in error
        assert "CaptureError" in assertion
        assert "lengths must be positive" in assertion
        assert "BatchError" in local


def many_values() -> str:
    model = Looking(lambda m, h, b: h * b["x"].max().item())
    pm = sw.parallelize(model, batch(0), plan_for(model, batch(0), "ddp", 2))
    return error_of(lambda: [pm.train_step(batch(seed)) for seed in range(20)])


@pytest.mark.slow
def test_a_value_that_changes_in_every_batch_is_refused(pool: Callable[[int], Pool]) -> None:
    for error in pool(2).run(many_values, timeout=120):
        assert "BatchError: Python looks at a value of the batch that has had 16" in error
        assert "x.max() > 3" in error
        assert "test_guards.py:" in error


def train_by_config(steps: int) -> tuple[dict[str, Any], bool]:
    model = {"name": "tests.support.guarded:Looked"}
    with sw.Trainer(**fields(model=model, steps=steps, evaluation={"every_steps": 4})) as trainer:
        trainer.fit()
        return {**trainer.state_dict(), **trainer.evaluate()}, trainer._session.module.is_guarded


@pytest.mark.slow
def test_the_trainer_reads_full_batches(pool: Callable[[int], Pool]) -> None:
    [(single, _)] = pool(1).run(train_by_config, 8, timeout=120)
    for together, is_guarded in pool(2).run(train_by_config, 8, timeout=120):
        assert is_guarded
        for name, value in single.items():
            assert_close(torch.as_tensor(together[name]), torch.as_tensor(value), name)


STRATEGIES = ("ddp", "fsdp", "tensor", "zero1")


def fuzz(seeds: range) -> list[tuple[int, str]]:
    """Return for every model whether it is right or refused; a wrong one fails."""
    outcomes = []
    for seed in seeds:
        batches = [batch(seed + step) for step in (0, 1, 2, 3, 0)]
        try:
            compare(drawn_model(seed), batches, STRATEGIES[seed % len(STRATEGIES)], 2)
            outcomes.append((seed, "right"))
        except ShardwiseError as error:
            outcomes.append((seed, f"{type(error).__name__}: {error}"))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_drawn_models_are_right_or_refused(pool: Callable[[int], Pool], start: int) -> None:
    outcomes = pool(2).run(fuzz, range(start, start + 20), timeout=600)
    assert outcomes[0] == outcomes[1]
    refused = [(seed, text) for seed, text in outcomes[0] if text != "right"]
    assert all("depends on a tensor's value" in text for _, text in refused), refused
    assert len(refused) <= 6
