"""Hooks that compute a gradient are traced; all others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.errors import CaptureError, PlanError
from tests.support.training import plan_for

BATCH = (torch.ones(5, 3),)
average = torch.zeros(4, 3)


class Net(nn.Module):
    def __init__(self, on_activation: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.ones(4, 3))
        self.on_activation = on_activation

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.on_activation is not None:
            self.on_activation(h)
        return self.b(h).square().mean()

    def masked(self, grad: Tensor) -> Tensor:
        return grad * self.mask


def halve(grad: Tensor) -> Tensor:
    return grad / 2


def unit_norm(grad: Tensor) -> Tensor:
    return grad / grad.norm()


def branches(grad: Tensor) -> Tensor:
    return grad if grad.norm() < 1 else grad / 2


def keeps_state(grad: Tensor) -> None:
    average.mul_(0.9).add_(grad)


def draws(grad: Tensor) -> Tensor:
    return grad + torch.randn_like(grad)


def reshapes(grad: Tensor) -> Tensor:
    return grad[0]


def steps(parameter: Tensor) -> None:
    parameter.data.add_(parameter.grad, alpha=-1.0)


def frees(parameter: Tensor) -> None:
    parameter.grad = None


def test_hooks_on_parameters_are_in_the_graph() -> None:
    model = Net()
    plain = sw.capture(model, BATCH)
    model.a.weight.register_hook(halve)
    model.a.weight.register_hook(unit_norm)
    graph = sw.capture(model, BATCH)
    assert [hook.name for hook in graph.hooks] == ["halve", "unit_norm"]
    assert [hook.elementwise for hook in graph.hooks] == [True, False]
    assert "a.weight: unit_norm (test_hooks.py:" in str(graph)
    assert graph.fingerprint != plain.fingerprint
    assert graph.fingerprint == sw.capture(model, BATCH).fingerprint


def test_constants_of_a_hook_decide_the_fingerprint() -> None:
    def fingerprint(mask: Tensor) -> str:
        model = Net()
        model.a.weight.register_hook(lambda grad: grad * mask)
        return sw.capture(model, BATCH).fingerprint

    assert fingerprint(torch.ones(4, 3)) != fingerprint(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (branches, "depends on the gradient's values"),
        (keeps_state, "writes to a tensor besides the gradient"),
        (draws, "draws random numbers"),
        (reshapes, r"returns \(\d,\)"),
    ],
)
def test_hooks_that_do_more_than_compute_are_refused(hook: Any, reason: str) -> None:
    before = average.clone()
    for on_parameter in (True, False):
        model = Net(None if on_parameter else lambda h: h.register_hook(hook))
        if on_parameter:
            model.a.weight.register_hook(hook)
        elif hook is keeps_state:
            continue
        with pytest.raises(CaptureError, match=f"{hook.__name__}.*{reason}") as caught:
            sw.capture(model, BATCH)
        assert caught.value.where == f"test_hooks.py:{hook.__code__.co_firstlineno}"
    assert torch.equal(average, before)


@pytest.mark.parametrize("hook", [steps, frees])
def test_updates_inside_of_backward_are_refused(hook: Any) -> None:
    model = Net()
    model.a.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(CaptureError, match=f"hook {hook.__name__} on parameter a.weight"):
        sw.capture(model, BATCH)


def test_an_optimizer_in_backward_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.a.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(CaptureError, match=r"steps an optimizer \(SGD\)"):
        sw.capture(model, BATCH)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_gradients_are_refused(mode: Any) -> None:
    model = Net()
    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], frees, mode=mode)
    with pytest.raises(CaptureError, match=r"hook frees on .* gradients of several tensors") as e:
        sw.capture(model, BATCH)
    assert e.value.where == f"test_hooks.py:{frees.__code__.co_firstlineno}"


def test_a_hook_that_reads_the_model_is_refused() -> None:
    model = Net()
    model.a.weight.register_hook(model.masked)
    with pytest.raises(CaptureError, match=r"Net.masked.*a tensor of the model"):
        sw.capture(model, BATCH)
    model = Net()
    model.a.weight.register_hook(lambda grad: grad + 0.1 * model.a.weight)
    with pytest.raises(CaptureError, match="a tensor of the model"):
        sw.capture(model, BATCH)


def test_backward_hooks_of_modules_are_refused() -> None:
    model = Net()
    model.a.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match="<lambda> on module a") as caught:
        sw.capture(model, BATCH)
    assert "test_hooks.py" in str(caught.value.where)
    handle = nn.modules.module.register_module_full_backward_hook(lambda *args: None)
    try:
        with pytest.raises(CaptureError, match="a global hook"):
            sw.capture(Net(), BATCH)
    finally:
        handle.remove()


def on_grad_fn(h: Tensor) -> None:
    h.grad_fn.register_hook(lambda *args: None)  # type: ignore[union-attr]


def on_several(h: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook((h,), lambda grads: None)


def on_saved(h: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        h.square()


@pytest.mark.parametrize("register", [on_grad_fn, on_several, on_saved])
def test_forward_may_not_register_other_hooks(register: Any) -> None:
    with pytest.raises(CaptureError):
        sw.capture(Net(register), BATCH)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        torch.ones(2, requires_grad=True).square().sum().backward()  # torch is as before


def test_global_forward_hooks_are_captured() -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output + 1 if isinstance(module, nn.Linear) else None
    )
    try:
        graph = sw.capture(Net(), BATCH)
    finally:
        handle.remove()
    assert [n.op for n in graph.nodes].count("aten.add.Tensor") == 2


@pytest.mark.parametrize(
    "parametrize",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.spectral_norm,
    ],
)
def test_parametrizations_equal_the_model(parametrize: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    parametrize(model.a)
    batch = (torch.randn(5, 3),)
    certificate = sw.verify(model, batch, plan_for(model, batch, "fsdp", 2))
    assert certificate.ok, certificate


def test_verify_compares_with_the_model_and_its_hooks() -> None:
    torch.manual_seed(0)
    model, batch = Net(lambda h: h.register_hook(unit_norm)), (torch.randn(5, 3),)
    plan = plan_for(model, batch, "tensor", 2)
    model.a.weight.register_hook(unit_norm)
    model.b.weight.register_hook(halve)
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, certificate


def test_hooks_with_separate_micro_batches_are_refused() -> None:
    model = Net()
    model.a.weight.register_hook(unit_norm)
    graph = sw.capture(model, (torch.ones(6, 3),))
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1)).with_(
        num_microbatches=2, per_microbatch=True
    )
    with pytest.raises(PlanError, match=r"unit_norm on parameter a\.weight"):
        sw.capture(model, (torch.ones(6, 3),), plan=plan)
