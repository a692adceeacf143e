"""All ranks start with the same weights, however they built the model, and keep them equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.api import weights
from shardwise.equivalence.reference import KeepDouble
from tests.support.pool import Pool
from tests.support.training import Odd, assert_close, error_of, plan_for, tokens

pytestmark = pytest.mark.distributed

PIPELINE = {"pp": 2, "num_microbatches": 2}
EVERYDAY = [("pipeline", PIPELINE)]
THOROUGH = [
    (2, "ddp", {}),
    (3, "zero1", {}),
    (3, "zero2", {}),
    (3, "fsdp", {"offload": ("optimizer",)}),
    (3, "tensor", {}),
    (4, "hybrid", {"dp": 2, "tp": 2, "zero": 3}),
    (4, "hybrid", {"dp": 2, "pp": 2, "zero": 1, "num_microbatches": 2}),
]


class Model(Odd):
    """A model with random buffers, one of them not persistent, and parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.rand(6), persistent=False)
        self.register_buffer("flags", torch.rand(6) > 0.5)
        self.turn = nn.Parameter(torch.randn(5, 2, dtype=torch.complex128), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        output = super().forward(input_ids, labels)
        weight = self.noise * self.flags * torch.view_as_real(self.turn).mean()
        output["loss"] = output["loss"] + (self.norm.weight * weight).sum()
        return output


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model().double()


def unseeded(strategy: str, options: dict[str, Any], *, on_meta: bool = False) -> None:
    """Build other weights on every rank, or weights on rank 0 only; train as rank 0 alone would."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta" if on_meta and rank != 0 else "cpu"):
        model = built(seed=rank)
    batch = tokens(7, 5, 13)
    with KeepDouble():
        plan = plan_for(model, batch, strategy, ranks, **options)
        pm = sw.parallelize(model, batch, plan=plan)
        reference = built(seed=0)
        for name, buffer in pm.named_buffers():
            assert torch.equal(buffer, reference.get_buffer(name)), name
        for name, value in pm.gather_state_dict().items():
            assert torch.equal(value, reference.state_dict()[name]), name
        optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=0.01)
        reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
        for step in range(3):
            loss, expected = pm.train_step(batch), reference(**batch)["loss"]
            expected.backward()
            assert_close(loss, expected.detach(), f"loss of step {step}")
            for each in (optimizer, reference_optimizer):
                each.step()
                each.zero_grad()
        for name, value in pm.gather_state_dict().items():
            if value.is_floating_point():
                assert_close(value, reference.state_dict()[name], name)


def several(cases: list[tuple[str, dict[str, Any]]]) -> None:
    for strategy, options in cases:
        unseeded(strategy, options)
    weights.BLOCK_BYTES, before = 50, weights.BLOCK_BYTES  # every tensor in many blocks
    try:
        unseeded("fsdp", {})
    finally:
        weights.BLOCK_BYTES = before


def test_ranks_without_a_seed_train_the_model_of_rank_0(pool: Callable[[int], Pool]) -> None:
    pool(2).run(several, EVERYDAY, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy", "options"), THOROUGH)
def test_every_strategy_starts_with_the_weights_of_rank_0(
    pool: Callable[[int], Pool], ranks: int, strategy: str, options: dict[str, Any]
) -> None:
    pool(ranks).run(unseeded, strategy, options, timeout=300)


def from_one_rank(cases: list[tuple[str, dict[str, Any]]]) -> None:
    for strategy, options in cases:
        unseeded(strategy, options, on_meta=True)


def test_weights_of_one_rank_reach_ranks_on_meta(pool: Callable[[int], Pool]) -> None:
    pool(2).run(from_one_rank, [("tensor", {})], timeout=120)


@pytest.mark.slow
def test_weights_of_one_rank_reach_all_stages_and_shards(pool: Callable[[int], Pool]) -> None:
    pool(2).run(from_one_rank, [("pipeline", PIPELINE), ("fsdp", {}), ("ddp", {})], timeout=120)


# ------------------------------------------------------------------ models on meta


class Scaled(Odd):
    """A model with values that only `__init__` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(small)
        nn.init.normal_(self.down.weight, std=1e-3)


def small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def on_meta(strategy: str, options: dict[str, Any]) -> str:
    """Train with `init` and with a state dict; return the error of a model without values."""
    batch = tokens(7, 5, 13)
    with torch.device("meta"):
        model = Scaled().double()
    with KeepDouble():
        plan = plan_for(model, batch, strategy, dist.get_world_size(), **options)
        torch.manual_seed(5)
        reference = Scaled().double()
        expected = reference(**batch)["loss"].detach()
        pm = sw.parallelize(model, batch, plan=plan, seed=5, init=lambda: Scaled().double())
        assert_close(pm.train_step(batch), expected, "loss from init")
        del pm
        pm = sw.parallelize(model, batch, plan=plan, seed=5)
        error = error_of(pm.train_step, batch)
        assert error == error_of(pm.eval_step, batch)
        pm.load_state_dict(reference.state_dict())
        if pm.store.holds("hidden"):
            pm.store.load_full("hidden", reference.hidden)
        pm.store.uninitialized.clear()
        assert_close(pm.train_step(batch), expected, "loss from a state")
    return error


def test_a_model_on_meta_takes_weights_from_init_or_refuses_to_train(
    pool: Callable[[int], Pool],
) -> None:
    for error in pool(2).run(on_meta, "zero1", {}, timeout=120):
        assert "scale was on meta and has no value: nothing is known to set it" in error
        assert "init=lambda: Model(config)" in error


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy", "options"), THOROUGH)
def test_every_strategy_starts_with_the_weights_of_init(
    pool: Callable[[int], Pool], ranks: int, strategy: str, options: dict[str, Any]
) -> None:
    pool(ranks).run(on_meta, strategy, options, timeout=300)


# ------------------------------------------------------------------ ranks that diverge later


def start(strategy: str, options: dict[str, Any]) -> tuple[Any, Any]:
    model, batch = built(seed=0), tokens(7, 5, 13)
    return sw.parallelize(
        model, batch, plan=plan_for(model, batch, strategy, dist.get_world_size(), **options)
    ), batch


def diverging() -> dict[str, str]:
    """Return the errors for a rank with another weight, buffer or learning rate."""
    errors = {}
    for strategy in ("ddp", "zero2"):
        pm, batch = start(strategy, {})
        optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.01)
        if dist.get_rank() == 1:
            with torch.no_grad():
                dict(pm.named_parameters())["norm.bias"].add_(0.25)
        pm.train_step(batch)
        errors[strategy] = error_of(optimizer.step)
    pm, batch = start("ddp", {})
    optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.01)
    pm.store.buffers["noise"].add_(float(dist.get_rank()))
    pm.train_step(batch)
    errors["buffer"] = error_of(optimizer.step)
    pm, batch = start("pipeline", PIPELINE)
    optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.01 * (1 + dist.get_rank()))
    pm.train_step(batch)
    errors["rate"] = error_of(optimizer.step)
    return errors


def test_different_values_and_learning_rates_are_detected(pool: Callable[[int], Pool]) -> None:
    for errors in pool(2).run(diverging, timeout=120):
        assert "norm.bias on ranks [1] differs from rank 0" in errors["ddp"]
        assert "by up to 0.25" in errors["ddp"]
        assert "noise" in errors["buffer"]
        assert "'lr' on ranks [1] differs from rank 0" in errors["rate"]


def diverging_pieces() -> tuple[str, str]:
    """Return the errors before and after ranks that replicate a shard diverge."""
    pm, batch = start("hybrid", {"dp": 2, "tp": 2, "zero": 3})
    optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.01)
    pm.train_step(batch)
    before = error_of(optimizer.step)
    entry = pm.store.entry("norm.bias")
    if pm.mesh.coordinates["tp"] == 1:
        with torch.no_grad():
            entry.piece.add_(0.25)
    return before, error_of(pm.store.replicas.compare)


@pytest.mark.slow
def test_different_replicas_of_a_shard_are_detected(pool: Callable[[int], Pool]) -> None:
    for before, after in pool(4).run(diverging_pieces, timeout=200):
        assert before == "no error"
        assert "norm.bias on ranks" in after
        assert "by up to 0.25" in after


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.table = nn.Linear(5, 3), torch.rand(40, 3)  # not a buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.line(x) @ self.table.T).square().mean()


def constants() -> str:
    torch.manual_seed(dist.get_rank())
    model, batch = Constant(), (torch.ones(4, 5),)
    return error_of(sw.parallelize, model, batch, plan_for(model, batch, "ddp", 2))


def test_different_constants_are_an_error(pool: Callable[[int], Pool]) -> None:
    for error in pool(2).run(constants, timeout=60):
        assert "rank 1" in error
        assert "(40, 3)" in error
        assert "test_initial_weights.py:" in error


def lengths() -> str:
    data = [{"x": torch.ones(5)} for _ in range(20 + dist.get_rank())]
    model = Constant()
    model.table = torch.ones(40, 3)
    trainer = sw.Trainer(
        model=model, data={"train": data, "batch_size": 4}, steps=1, plan="ddp", folder=None
    )
    return error_of(trainer.fit)


def test_datasets_of_different_lengths_are_an_error(pool: Callable[[int], Pool]) -> None:
    for error in pool(2).run(lengths, timeout=60):
        assert "data.train on ranks [1] differs in length" in error
        assert "20 on rank 0, 21 on rank 1" in error


def within_rounding() -> None:
    """Devices that round differently are not an error."""
    pm, batch = start("ddp", {})
    optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.01)
    with torch.no_grad():
        for _, parameter in pm.named_parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + dist.get_rank() * 4 * torch.finfo(parameter.dtype).eps)
    pm.train_step(batch)
    optimizer.step()


def test_ranks_may_differ_by_rounding(pool: Callable[[int], Pool]) -> None:
    pool(2).run(within_rounding, timeout=60)
