"""Parameters that are frozen and unfrozen between steps, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from tests.support.pool import Pool
from tests.support.training import Odd, assert_close, error_of, plan_for, tokens

pytestmark = pytest.mark.distributed

PIPELINE = {"pp": 2, "num_microbatches": 2}
EVERYDAY = [("zero2", {}), ("pipeline", PIPELINE)]
THOROUGH = [
    (2, "ddp", {}),
    (3, "zero1", {}),
    (3, "zero2", {}),
    (3, "fsdp", {}),
    (2, "fsdp", {"offload": ("optimizer",)}),
    (3, "tensor", {}),
    (3, "pipeline", {"pp": 3, "num_microbatches": 3, "schedule": "zero_bubble"}),
    (4, "hybrid", {"dp": 2, "tp": 2, "zero": 3}),
    (4, "hybrid", {"dp": 2, "pp": 2, "zero": 1, "num_microbatches": 2}),
]


def built() -> nn.Module:
    torch.manual_seed(0)
    model = Odd().double()
    model.up.requires_grad_(False)
    return model


def phases(parameters: dict[str, Any], other: dict[str, Any]) -> Iterator[bool]:
    """Change `requires_grad` between steps; yield whether to clear gradients after the step."""
    yield True
    parameters["norm.weight"].requires_grad_(False)
    parameters["down.bias"].requires_grad_(False)
    yield True
    for name in ("up.weight", "up.bias"):  # frozen since before parallelize
        other[name].requires_grad_(True)
    yield False  # the next gradients are added to these
    parameters["down.weight"].requires_grad_(False)  # it has a gradient of the last step
    other["norm.weight"].requires_grad_(True)
    yield True
    parameters["embed.weight"].requires_grad_(False)  # tied: the first stage and the last
    yield True
    for parameter in parameters.values():
        parameter.requires_grad_(parameter.is_floating_point())
    yield True
    other["up.weight"].requires_grad_(False)
    yield True


def train_with_frozen(strategy: str, options: dict[str, Any], kind: str = "AdamW") -> None:
    ranks = dist.get_world_size()
    model, plain, batch = built(), built(), tokens(7, 5, 13)
    cls: Any = getattr(torch.optim, kind)
    settings = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "SGD" else {})
    with KeepDouble():
        plan = plan_for(model, batch, strategy, ranks, **options)
        pm = sw.parallelize(model, batch, plan=plan)
        if strategy in ("zero1", "zero2", "fsdp"):  # also the parameters that are frozen now
            level = plan.entry("up.weight").zero
            assert {entry.zero for entry in pm.store.entries} == {level}
        optimizer = sw.optimizer(pm, cls, **settings)
        reference = cls(plain.parameters(), **settings)
        named, expected = dict(pm.named_parameters()), dict(plain.named_parameters())
        parallel = phases(named, dict(model.named_parameters()))
        for step, (clears, _) in enumerate(zip(parallel, phases(expected, expected), strict=True)):
            loss, plain_loss = pm.train_step(batch), plain(**batch)["loss"]
            plain_loss.backward()
            assert_close(loss, plain_loss.detach(), f"loss of step {step}")
            for name, gradient in pm.gather_gradients().items():
                assert_close(gradient, expected[name].grad, f"gradient of {name}, step {step}")
            flags = {n: p.requires_grad for n, p in pm.named_parameters()}
            assert flags == {n: p.requires_grad for n, p in plain.named_parameters()}, step
            assert flags == {n: p.requires_grad for n, p in model.named_parameters()}, step
            for each in (optimizer, reference):
                each.step()
                if clears:
                    each.zero_grad()
            for name, value in pm.gather_state_dict().items():
                assert_close(value, plain.state_dict()[name], f"{name} after step {step}")
        pm.requires_grad_(False)
        assert "not depend on any trained parameter" in error_of(pm.train_step, batch)


def several(cases: list[tuple[str, dict[str, Any]]]) -> None:
    for strategy, options in cases:
        train_with_frozen(strategy, options)


def test_freezing_and_unfreezing_matches_plain_pytorch(pool: Callable[[int], Pool]) -> None:
    pool(2).run(several, EVERYDAY, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(("ranks", "strategy", "options"), THOROUGH)
def test_freezing_and_unfreezing_matches_under_every_strategy(
    pool: Callable[[int], Pool], ranks: int, strategy: str, options: dict[str, Any], kind: str
) -> None:
    pool(ranks).run(train_with_frozen, strategy, options, kind, timeout=400)
