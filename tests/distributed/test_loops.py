"""Custom training loops change parameters and gradients as in plain PyTorch, under every plan."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.api.parallelize import _Factory
from tests.support.pool import Pool
from tests.support.tiers import thinned
from tests.support.training import error_of

pytestmark = pytest.mark.distributed
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 7)) for _ in range(2)
        )
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), y)


def make() -> tuple[Net, Net, dict[str, torch.Tensor]]:
    """Return a model, its copy for plain PyTorch, and a batch."""
    torch.manual_seed(3)
    model = Net().double()
    batch = {"x": torch.randn(6, 5).double(), "y": torch.randint(3, (6,))}
    return model, copy.deepcopy(model), batch


def parallelized(strategy: str, ranks: int) -> tuple[Any, Net, Net, dict[str, torch.Tensor]]:
    model, plain, batch = make()
    return sw.parallelize(model, batch, plan_for(strategy, ranks)), model, plain, batch


def plan_for(strategy: str, ranks: int) -> Callable[[sw.Graph], sw.Plan]:
    """Return a function that makes the plan for a graph."""
    all_options = {"pipeline": {"num_microbatches": 2}, "hybrid": {"dp": 2, "tp": 2, "zero": 3}}
    options = all_options.get(strategy, {})
    make_plan = getattr(sw.strategies, strategy)
    return lambda graph: make_plan(graph, sw.Cluster.local(ranks), **options)  # type: ignore[no-any-return]


def assert_same(actual: Any, expected: Any, what: str) -> None:
    assert set(actual) == set(expected), what
    for name, tensor in expected.items():
        if tensor is None:
            assert actual[name] is None, f"{what}: {name}"
        else:
            torch.testing.assert_close(
                actual[name], tensor, rtol=1e-10, atol=1e-12, msg=what + name
            )


def assert_same_gradients(pm: Any, plain: nn.Module, what: str) -> None:
    assert_same(pm.gather_gradients(), {n: p.grad for n, p in plain.named_parameters()}, what)


def assert_same_values(pm: Any, plain: nn.Module, what: str) -> None:
    assert_same(pm.gather_state_dict(), {n: p.detach() for n, p in plain.named_parameters()}, what)


def local_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a loop changes on this rank."""
    return [(n, p) for n, p in module.named_parameters() if not p.is_meta]


def arithmetic(strategy: str, ranks: int) -> None:
    pm, _, plain, batch = parallelized(strategy, ranks)
    with mock.patch.object(_Factory, "specialize", side_effect=AssertionError("recaptured")):
        for _ in range(2):  # accumulation
            loss = pm.train_step(batch, scale=0.5)
            expected = plain(**batch) * 0.5
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
    for name, parameter in plain.named_parameters():
        shown = dict(pm.named_parameters())[name]
        assert isinstance(shown, nn.Parameter)
        assert (shown.shape, shown.dim(), shown.ndim) == (
            parameter.shape,
            parameter.dim(),
            parameter.ndim,
        )
    assert_same_gradients(pm, plain, "scaled")
    noise = {n: torch.randn(p.shape).double() for n, p in plain.named_parameters()}
    for module in (pm, plain):
        for name, p in local_parameters(module):
            assert p.grad is not None
            p.grad.mul_(3).add_(noise[name], alpha=0.01)
            p.grad = p.grad * 0.7 + noise[name] * p.grad.abs()
            p.grad.clamp_(-0.4, 0.5)
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.3)
        named = dict(local_parameters(module))
        if "first.weight" in named:
            named["first.weight"].grad = None
        if "head.bias" in named:
            named["head.bias"].grad = torch.ones(3).double()
    assert_same_gradients(pm, plain, "arithmetic")
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
    if strategy in ("ddp", "zero1"):
        clipped = torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.2)
    else:
        with pytest.raises(sw.errors.OptimizerError, match=r"sw\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.2)
        clipped = sw.clip_grad_norm_(pm, 0.2)
    torch.testing.assert_close(clipped, norm)
    assert_same_gradients(pm, plain, "clipped")

    averages = [
        {n: p.detach().clone() for n, p in local_parameters(module)} for module in (pm, plain)
    ]
    with torch.no_grad():
        for module in (pm, plain):
            for name, p in local_parameters(module):
                p.mul_(0.9)
                p.data.clamp_(-0.3, 0.3)
                p -= 0.1 * noise[name]
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.1)
        assert_same_values(pm, plain, "values")
        torch.testing.assert_close(pm.eval_loss(batch), plain(**batch))
        for module, average in zip((pm, plain), averages, strict=True):
            for name, p in local_parameters(module):
                average[name].lerp_(p, 0.3)
                p.copy_(average[name])
        assert_same_values(pm, plain, "averages")
    pm.zero_grad()
    plain.zero_grad()
    pm.train_step(batch)
    plain(**batch).backward()
    assert_same_gradients(pm, plain, "afterwards")


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    thinned(
        [*((s, 2) for s in STRATEGIES), ("fsdp", 3), ("hybrid", 4)],
        lambda _, case: case == ("fsdp", 2),
    ),
)
def test_arithmetic_on_gradients_and_parameters(
    pool: Callable[[int], Pool], strategy: str, ranks: int
) -> None:
    pool(ranks).run(arithmetic, strategy, ranks, timeout=110)


def optimizers(strategy: str) -> None:
    pm, model, plain, batch = parallelized(strategy, 2)
    big = [p for p in plain.parameters() if p.dim() >= 2]
    small = [p for p in plain.parameters() if p.dim() < 2]
    reference = torch.optim.AdamW(
        [{"params": big}, {"params": small, "weight_decay": 0.0, "lr": 0.05}], lr=0.02
    )
    groups = [
        {"params": [p for p in pm.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
    ]
    opt = sw.optimizer(pm, torch.optim.AdamW, groups, lr=0.02)
    assert [len(g["params"]) for g in opt.param_groups] == [
        len([p for _, p in local_parameters(pm) if (p.dim() >= 2) == large])
        for large in (True, False)
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (opt, reference)]
    for _ in range(3):
        pm.train_step(batch)
        plain(**batch).backward()
        for each in (opt, reference, *schedulers):
            each.step()
        opt.zero_grad()
        reference.zero_grad()
    assert_same_values(pm, plain, "groups of tensors")

    heads = sw.optimizer(pm, torch.optim.SGD, params="head.*", lr=0.1)
    others = sw.optimizer(pm, torch.optim.SGD, params=["first.*", "blocks.*"], lr=0.1)
    pm.train_step(batch)
    plain(**batch).backward()
    norm = sw.clip_grad_norm_(pm, 0.01, params="head.*")
    expected = torch.nn.utils.clip_grad_norm_(plain.head.parameters(), 0.01)
    torch.testing.assert_close(norm, expected)
    heads.step()
    heads.zero_grad()
    torch.optim.SGD(plain.head.parameters(), lr=0.1).step()
    plain.head.zero_grad()
    assert_same_values(pm, plain, "one of two optimizers")
    assert_same_gradients(pm, plain, "one optimizer clears only its own gradients")
    assert "blocks.0.0.bias" in error_of(opt.step)  # another optimizer now updates it
    others.step()
    torch.optim.SGD([p for p in plain.parameters() if p.grad is not None], lr=0.1).step()
    assert_same_values(pm, plain, "the other optimizer")
    pm.copy_to(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-10, atol=1e-12)
    if strategy in ("fsdp", "zero2", "tensor"):
        foreign = torch.optim.SGD(pm.parameters(), lr=0.1)
        assert "sw.optimizer(pm, torch.optim.SGD" in error_of(foreign.step)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, lambda _, name: name == "zero2"))
def test_groups_schedulers_and_several_optimizers(
    pool: Callable[[int], Pool], strategy: str
) -> None:
    pool(2).run(optimizers, strategy, timeout=110)


def lbfgs(strategy: str) -> str | None:
    pm, _, plain, batch = parallelized(strategy, 2)
    try:
        opt = sw.optimizer(pm, torch.optim.LBFGS, lr=0.5, line_search_fn="strong_wolfe")
    except sw.errors.OptimizerError as error:
        return str(error)
    reference = torch.optim.LBFGS(plain.parameters(), lr=0.5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        reference.zero_grad()
        loss = plain(**batch)
        loss.backward()
        return loss

    def step() -> torch.Tensor:
        opt.zero_grad()
        return pm.train_step(batch)  # type: ignore[no-any-return]

    for _ in range(2):
        torch.testing.assert_close(opt.step(step), reference.step(closure))
    assert "closure" in error_of(opt.step)
    state = pm.gather_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-6, atol=1e-8)
    return None


@pytest.mark.slow
def test_lbfgs_with_a_closure(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(lbfgs, "ddp", timeout=110) == [None, None]
    for strategy in ("fsdp", "pipeline"):
        for error in pool(2).run(lbfgs, strategy, timeout=110):
            assert "LBFGS" in str(error)


def refusals(strategy: str) -> list[str]:
    pm, model, _, batch = parallelized(strategy, 2)
    assert "plan " + strategy in repr(pm)
    assert "rank " in repr(pm)
    loss = pm.train_step(batch)
    pm.double().to("cpu").cpu()
    parameter = local_parameters(pm)[0][1]
    errors = [
        error_of(copy.deepcopy, pm),
        error_of(torch.optim.swa_utils.AveragedModel, pm),
        error_of(pm.bfloat16),
        error_of(pm.apply, print),
        error_of(loss.backward),
        error_of(pm.eval().train_step, batch),
    ]
    pm.train()
    if strategy != "ddp":
        errors += [
            error_of((parameter**2).sum),
            error_of(torch.randn_like, parameter),
            error_of(parameter.norm),
            error_of(parameter.__getitem__, 0),
            error_of(torch.nn.init.normal_, parameter),
            error_of(parameter.register_hook, print),
        ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch).backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        copy.deepcopy(model)(**batch)
    assert [(str(w.message)[:8], w.filename) for w in caught] == [("this Net", __file__)]
    errors.append(error_of(pm.train_step, batch))  # the original's weights were written
    model.zero_grad()
    errors.append(error_of(torch.optim.SGD(model.parameters(), lr=0.1).step))
    errors.append(error_of(sw.parallelize, model, batch, None))
    assert "first.weight" in errors[-1]
    del pm, parameter
    gc.collect()
    sw.parallelize(model, batch, plan_for(strategy, 2))
    gc.collect()  # without a parallel module, the model is an ordinary one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch).backward()
    return errors


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_operations_that_would_be_wrong_are_refused(
    pool: Callable[[int], Pool], strategy: str
) -> None:
    for errors in pool(2).run(refusals, strategy, timeout=110):
        for error in errors:
            assert error.startswith(("ProgramError", "OptimizerError", "ShardwiseError")), error
            assert "try: " in error, error


def precise(strategy: str) -> torch.dtype:
    model, _, batch = make()
    model, batch = model.float(), {"x": batch["x"].float(), "y": batch["y"]}
    graph = sw.capture(model, batch)
    precision = sw.Precision(compute="bfloat16", master="float32")
    options = {"num_microbatches": 2} if strategy == "pipeline" else {}
    make_plan = getattr(sw.strategies, strategy)
    plan = make_plan(graph, sw.Cluster.local(2), precision=precision, **options)
    pm = sw.parallelize(model, batch, plan)
    loss = pm.train_step(batch)
    before = pm.gather_state_dict()["head.weight"].clone()
    with torch.no_grad():
        for _, p in local_parameters(pm):
            assert p.dtype is torch.float32
            assert p.grad is not None
            assert p.grad.dtype is torch.float32
            p.mul_(8.0)  # changes the master values and those used in compute
    after = pm.gather_state_dict()["head.weight"]
    torch.testing.assert_close(after, before * 8.0)
    assert abs(pm.eval_loss(batch) - loss) > 0.1
    return loss.dtype  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_and_parameters_in_float32_under_bfloat16(
    pool: Callable[[int], Pool], strategy: str
) -> None:
    assert pool(2).run(precise, strategy, timeout=110) == [torch.float32] * 2
