"""Models with hooks train on several ranks as they do on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise as sw
from tests.support.pool import Pool
from tests.support.tiers import thinned
from tests.support.training import assert_close, error_of, plan_for

pytestmark = pytest.mark.distributed


class Hooked(nn.Module):
    """Hooks on activations, parametrized weights, prime sizes."""

    def __init__(self, couples_samples: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = parametrizations.weight_norm(nn.Linear(5, 5))
        self.head = nn.Linear(5, 5)
        self.couples_samples = couples_samples

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = torch.tanh(h)
        if self.couples_samples:
            h.register_hook(lambda g: g / (1 + g.norm()))
        else:
            h.register_hook(lambda g: 3 * g.clamp(-0.1, 0.1))
        out = self.head(self.norm(self.down(y + h)))
        return (out * out).mean()


def clip(grad: Tensor) -> Tensor:
    return grad * (0.1 / grad.norm()).clamp(max=1.0)


def shrink(grad: Tensor) -> None:
    grad.clamp_(-0.02, 0.02)


def decay(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5 + 0.1 * parameter.detach()


def make(couples_samples: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Hooked(couples_samples).double()
    mask = (torch.arange(35).view(5, 7) % 3 > 0).double()
    model.up.weight.register_hook(clip)
    model.down.weight.register_hook(lambda grad: grad * mask)
    model.down.bias.register_hook(shrink)
    model.down.bias.register_hook(clip)
    model.head.weight.register_post_accumulate_grad_hook(decay)
    model.down.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    model.up.register_forward_hook(lambda module, args, output: 1.5 * output)
    return model, (torch.randn(7, 5, dtype=torch.float64),)


def train(step: Callable[[Any], Tensor], optimizer: Any, batch: Any) -> list[float]:
    """Make three updates, the second with the gradients of two batches."""
    losses = []
    for number in range(3):
        losses.append(step(batch).item())
        if number == 1:
            losses.append(step((batch[0] + 1,)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(strategy: str, ranks: int, options: dict[str, Any]) -> None:
    couples_samples = strategy != "pipeline"
    reference, batch = make(couples_samples)

    def one_device(batch: Any) -> Tensor:
        loss: Tensor = reference(*batch)
        loss.backward()
        return loss.detach()

    one_device(batch)
    gradients = {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}
    reference.zero_grad()
    model, _ = make(couples_samples)
    pm = sw.parallelize(model, batch, plan_for(model, batch, strategy, ranks, **options))
    del model
    pm.train_step(batch)
    for name, grad in pm.gather_gradients().items():
        assert_close(grad, gradients.get(name), f"gradient of {name}")
    pm.zero_grad()
    expected = train(one_device, torch.optim.AdamW(reference.parameters(), lr=0.01), batch)
    losses = train(pm.train_step, sw.optimizer(pm, torch.optim.AdamW, lr=0.01), batch)
    assert losses == pytest.approx(expected, rel=1e-9)
    state = pm.gather_state_dict()
    for name, tensor in reference.state_dict().items():
        assert_close(state[name], tensor, f"{name} after three updates", 0.01, 1e-7)


CASES = [
    ("fsdp", 2, {}),
    ("tensor", 2, {}),
    ("ddp", 3, {}),
    ("zero1", 2, {}),
    ("zero2", 3, {}),
    ("fsdp", 3, {}),
    ("pipeline", 2, {"num_microbatches": 3}),
    ("hybrid", 4, {"dp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("strategy", "ranks", "options"), thinned(CASES, lambda i, _: i == 0))
def test_models_with_hooks_train_as_on_one_device(
    pool: Callable[[int], Pool], strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    pool(ranks).run(check, strategy, ranks, options, timeout=300)


def refusals() -> list[str]:
    model, batch = make(couples_samples=False)
    pm = sw.parallelize(model, batch, plan_for(model, batch, "fsdp", 2))
    errors = [error_of(pm.register_forward_hook, print)]
    errors.append(error_of(next(iter(pm.parameters())).register_hook, clip))
    errors.append(error_of(pm.train_step, batch))
    del pm
    pm = sw.parallelize(model, batch, plan_for(model, batch, "ddp", 2))
    handle = next(p for p in pm.parameters() if p.requires_grad).register_hook(clip)
    assert error_of(pm.train_step, batch) == errors[1]
    handle.remove()
    assert error_of(pm.train_step, batch) == "no error"
    return errors


def test_hooks_on_the_parallel_module_are_refused(pool: Callable[[int], Pool]) -> None:
    for on_module, on_part, after_removal in pool(2).run(refusals, timeout=110):
        assert "would never run" in on_module
        assert "this rank's part of a parameter" in on_part
        assert after_removal == "no error"
