"""The behaviour of a parallel module, on gloo processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime import ParallelModule
from tests.support.pool import Pool
from tests.support.tiers import thinned
from tests.support.training import Odd, assert_close, error_of, make, parallel, plan_for, tokens

pytestmark = pytest.mark.distributed


def start(strategy: str, ranks: int, **options: Any) -> tuple[ParallelModule, Any]:
    model, batch = make("odd")
    plan = plan_for(model, batch, strategy, ranks, **options)
    return sw.parallelize(model, batch, plan=plan), batch


def dense_gradients(batch: Any) -> tuple[Any, dict[str, torch.Tensor | None]]:
    model, _ = make("odd")
    output = model(**batch)
    output["loss"].backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


# ------------------------------------------------------------------ steps


def steps(strategy: str) -> None:
    pm, batch = start(strategy, 2)
    output, gradients = dense_gradients(batch)
    loss, out = pm.train_step(batch, outputs=True)
    assert not loss.requires_grad
    assert_close(loss, output["loss"].detach(), "loss")
    assert list(out) == ["loss", "more", "name"]
    assert out["name"] == "odd"
    assert isinstance(out["more"], tuple)
    assert isinstance(out["more"][1], list)
    assert_close(out["more"][0], output["more"][0].detach(), "logits")
    assert torch.equal(out["more"][1][0], batch["labels"])

    pm.train_step(batch)  # without zero_grad: added, as backward() does
    for name, gradient in pm.gather_gradients().items():
        expected = gradients[name]
        assert_close(gradient, None if expected is None else 2 * expected, f"two steps: {name}")

    pm.zero_grad()
    assert set(pm.gather_gradients().values()) == {None}
    small = tokens(3, 4, 13)  # another batch size and length
    output, gradients = dense_gradients(small)
    assert_close(pm.train_step(small), output["loss"].detach(), "loss of a smaller batch")
    for name, gradient in pm.gather_gradients().items():
        assert_close(gradient, gradients[name], f"smaller batch: {name}")

    pm.zero_grad()
    _, gradients = dense_gradients(batch)
    pm.train_step(pm.local_batch(batch), local=True)
    for name, gradient in pm.gather_gradients().items():
        assert_close(gradient, gradients[name], f"local batch: {name}")


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_steps(pool: Callable[[int], Pool], strategy: str) -> None:
    pool(2).run(steps, strategy, timeout=110)


class Mode(nn.Module):
    """Behaves differently in eval mode, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.drop(self.norm(self.line(x)))
        return (y * y).mean(), {"y": y}


class Dropping(nn.Module):
    """Blocks that are so small without their dropout that emitted code no longer has them."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.Sequential(  # noqa: E731
            nn.LayerNorm(5), nn.Linear(5, 7), nn.Dropout(), nn.ReLU(), nn.Linear(7, 5), nn.Dropout()
        )
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean(), {"y": x}


def evaluate(kind: type[nn.Module], strategy: str) -> None:
    torch.manual_seed(0)
    model, batch = kind().double(), (torch.randn(5, 5, dtype=torch.float64),)
    pm = sw.parallelize(model, batch, plan=plan_for(model, batch, strategy, 2))
    expected = model.eval()(*batch)
    outputs = pm.eval_step(batch)
    assert isinstance(outputs, tuple)
    assert_close(outputs[0], expected[0].detach(), "loss")
    assert_close(outputs[1]["y"], expected[1]["y"].detach(), "y")
    assert not outputs[0].requires_grad
    assert set(pm.gather_gradients().values()) == {None}
    state = pm.gather_state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), f"eval_step changed {name}"
    assert torch.isfinite(pm.train_step(batch))


GRID = [(strategy, kind) for strategy in ("fsdp", "tensor") for kind in (Mode, Dropping)]


@pytest.mark.parametrize(("strategy", "kind"), thinned(GRID, lambda i, _: i in (1, 2)))
def test_eval_step_is_eval_mode_without_gradients(
    pool: Callable[[int], Pool], kind: type[nn.Module], strategy: str
) -> None:
    pool(2).run(evaluate, kind, strategy, timeout=110)


# ------------------------------------------------------------------ names, memory, references


def names_and_memory(strategy: str) -> tuple[int, int]:
    model, batch = make("odd")
    plan = plan_for(model, batch, strategy, 2)
    pm = sw.parallelize(model, batch, plan=plan)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in pm.named_parameters()] == names
    assert list(pm.gather_gradients()) == names
    assert set(pm.gather_state_dict()) == set(model.state_dict())
    pm.train_step(batch)
    gradients = pm.gather_gradients()
    missing = {name for name, grad in gradients.items() if grad is None}
    assert missing == {"scale", "unused.weight", "unused.bias"}
    state = pm.gather_state_dict()
    assert state["head.weight"] is state["embed.weight"], "tied weights stay tied"
    full = sum(p.nbytes for p in model.parameters())
    gone = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone), "a reference to the model is kept"
    return sum(pm.store.stored(e)[0].nbytes for e in pm.store.entries), full


SHARES = [("ddp", 1.0), ("fsdp", 0.55), ("tensor", 0.65)]


@pytest.mark.parametrize(("strategy", "share"), thinned(SHARES, lambda _, case: case[0] == "fsdp"))
def test_names_memory_and_no_reference_to_the_model(
    pool: Callable[[int], Pool], strategy: str, share: float
) -> None:
    for here, full in pool(2).run(names_and_memory, strategy, timeout=110):
        assert here <= share * full + 64


# ------------------------------------------------------------------ optimizers


def groups_and_state(strategy: str) -> None:
    model, batch = make("odd")
    pm = sw.parallelize(deepcopy(model), batch, plan=plan_for(model, batch, strategy, 2))
    groups = [
        {"params": ["*.bias", "norm.*"], "weight_decay": 0.0},
        {"params": "embed.*", "lr": 0.1},
    ]
    opt = sw.optimizer(pm, torch.optim.AdamW, groups, lr=0.02, weight_decay=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    named = dict(model.named_parameters())
    trained = {n: p for n, p in named.items() if p.requires_grad}
    first = [n for n in trained if n.endswith(".bias") or n.startswith("norm.")]
    rest = [n for n in trained if n not in first and n != "embed.weight"]
    plain = torch.optim.AdamW(
        [
            {"params": [trained[n] for n in first], "weight_decay": 0.0},
            {"params": [trained["embed.weight"]], "lr": 0.1},
            {"params": [trained[n] for n in rest]},
        ],
        lr=0.02,
        weight_decay=0.3,
    )
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    for step in range(4):
        if step == 2:  # a round trip through the state dict changes nothing
            saved = opt.state_dict()
            assert set(saved["state"]) <= set(trained)
            assert saved["state"]["embed.weight"]["exp_avg"].shape == named["embed.weight"].shape
            fresh = sw.optimizer(pm, torch.optim.AdamW, groups, lr=9.0, weight_decay=0.3)
            fresh.load_state_dict(saved)
            opt = fresh
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5, last_epoch=1)
            for group, plain_group in zip(opt.param_groups, plain.param_groups, strict=True):
                group["lr"] = plain_group["lr"]
        pm.train_step(batch)
        model(**batch)["loss"].backward()
        for each in (opt, plain, scheduler, plain_scheduler):
            each.step()
        opt.zero_grad()
        plain.zero_grad()
    state = pm.gather_state_dict()
    for name, parameter in named.items():
        assert_close(state[name], parameter.detach(), name, 0.01)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_groups_schedulers_and_state_dicts(pool: Callable[[int], Pool], strategy: str) -> None:
    pool(2).run(groups_and_state, strategy, timeout=110)


def refusals(strategy: str) -> list[str]:
    pm, batch = start(strategy, 2)
    pm.train_step(batch)
    return [
        error_of(torch.nn.utils.clip_grad_norm_, pm.parameters(), 1.0),
        error_of(sw.optimizer, pm, torch.optim.Adafactor, lr=0.1),
        error_of(sw.optimizer, pm, torch.optim.Muon, lr=0.1),
        error_of(sw.optimizer, pm, torch.optim.AdamW, [{"params": "embed.weigth"}], lr=0.1),
    ]


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_operations_that_are_wrong_on_shards_are_refused(
    pool: Callable[[int], Pool], strategy: str
) -> None:
    for clip, adafactor, muon, glob in pool(2).run(refusals, strategy, timeout=110):
        assert clip.startswith("OptimizerError")
        assert "sw.clip_grad_norm_" in clip
        assert adafactor.startswith("OptimizerError: Adafactor is not known to be elementwise")
        assert muon.startswith("OptimizerError: Muon is not known to be elementwise")
        assert "did you mean" in glob


# ------------------------------------------------------------------ batches and ranks that differ


def different_batches() -> str:
    pm, batch = start("ddp", 3)
    if dist.get_rank() == 1:
        batch["labels"][0, 0] = 5
    return error_of(pm.train_step, batch)


@pytest.mark.slow
def test_different_batches_are_an_error(pool: Callable[[int], Pool]) -> None:
    for message in pool(3).run(different_batches, timeout=110):
        assert message.startswith("BatchError: the data of ranks [1] differ from rank 0")
        assert "batch['labels']" in message


def different_plans() -> str:
    model, batch = make("odd")
    plan = plan_for(model, batch, "ddp" if dist.get_rank() else "fsdp", 3)
    return error_of(sw.parallelize, model, batch, plan=plan, timeout_s=20)


def test_ranks_with_different_plans_raise(pool: Callable[[int], Pool]) -> None:
    for message in pool(3).run(different_plans, timeout=110):
        assert message.startswith("RankError")
        assert "ranks [1, 2]" in message


def failing_rank() -> tuple[str, float]:
    model, batch = make("odd")
    plan = plan_for(model, batch, "ddp", 3)
    begin = time.monotonic()
    full = OSError("no space left on device") if dist.get_rank() == 1 else None
    with mock.patch.object(Odd, "forward", side_effect=full) if full else nullcontext():
        message = error_of(sw.parallelize, model, batch, plan=plan)
    seconds = time.monotonic() - begin
    assert torch.isfinite(sw.parallelize(model, batch, plan=plan).train_step(batch))
    return message, seconds


def test_a_rank_that_fails_at_the_start_is_named_and_all_can_start_again(
    pool: Callable[[int], Pool],
) -> None:
    for rank, (message, seconds) in enumerate(pool(3).run(failing_rank, timeout=110)):
        if rank == 1:
            assert "no space left" in message
        else:
            assert message.startswith("RankError: rank 1 of 3 failed"), message
            assert seconds < 30


DYING = """
import os, sys, time, torch.distributed as dist
import shardwise as sw
from tests.support.training import error_of, make, plan_for
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
model, batch = make("odd")
plan = plan_for(model, batch, "ddp", 3)
if rank == 1:
    os._exit(7)
begin = time.monotonic()
print(error_of(sw.parallelize, model, batch, plan=plan, timeout_s=5))
print(time.monotonic() - begin)
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_dies_at_the_start_is_named_by_the_others(tmp_path: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": "src:.", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for rank, process in enumerate(ranks):
        out, _ = process.communicate(timeout=110)
        if rank != 1:
            assert out.startswith("RankError")
            assert "ranks [1] of 3" in out
            assert float(out.splitlines()[-1]) < 60


# ------------------------------------------------------------------ models without weights


def from_meta(strategy: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Deep().double()
    batch = (torch.ones(5, 6, dtype=torch.float64),)
    pm = sw.parallelize(model, batch, plan=plan_for(model, batch, strategy, 2), seed=3)
    assert torch.isfinite(pm.train_step(batch))
    return pm.gather_state_dict()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x)).pow(2).mean()


def test_a_model_on_meta_has_equal_weights_on_every_rank_and_plan(
    pool: Callable[[int], Pool],
) -> None:
    states = [s for strategy in ("fsdp", "tensor") for s in pool(2).run(from_meta, strategy)]
    for state in states:
        for name, tensor in states[0].items():
            assert torch.equal(state[name], tensor), name
    assert states[0]["layers.0.weight"].std() > 0.1
    assert torch.equal(states[0]["norm.weight"], torch.ones(6, dtype=torch.float64))


def test_training_reports_are_equal_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(parallel, "odd", "zero1", 2, {}, timeout=110)
    assert (first.losses, first.norms) == (second.losses, second.norms)
