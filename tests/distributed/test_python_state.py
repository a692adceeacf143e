"""Attributes, globals, closures and hooks that change between steps reach the next step."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.support.pool import Pool
from tests.support.tiers import thinned
from tests.support.training import assert_close, error_of, plan_for

pytestmark = pytest.mark.distributed

TEMPERATURE = 1.0


class Annealed(nn.Module):
    """Reads an attribute, a list, a config, a plain tensor, a class attribute and a global."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.beta, self.powers = 0.5, [1.0, 2.0]
        self.config = SimpleNamespace(shift=0.0, unread=0)
        self.mask = torch.ones(7, dtype=torch.float64)
        self.activation = torch.tanh
        self.unread = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.up(x)) * self.mask
        y = self.norm(self.down(h)) * self.scale + self.config.shift
        loss = sum((y.abs() ** power).mean() for power in self.powers)
        return self.beta * loss / TEMPERATURE + (h * h).mean()


def set_temperature(value: float) -> None:
    global TEMPERATURE
    TEMPERATURE = value


def masked(model: Any) -> None:
    model.mask[2] = 0.0


CHANGES: list[Callable[[Any], Any]] = [
    lambda model: None,
    lambda model: setattr(model, "beta", 0.25),
    lambda model: model.powers.append(3.0),
    lambda model: setattr(model.config, "shift", 0.5),
    masked,
    lambda model: setattr(Annealed, "scale", 2.0),
    lambda model: set_temperature(3.0),
    lambda model: setattr(model, "activation", torch.sigmoid),
    lambda model: model.norm.eval(),
    lambda model: model.up.register_forward_hook(lambda m, args, output: 2 * output),
    lambda model: model.up.weight.register_hook(lambda grad: grad / grad.norm()),
    lambda model: setattr(model, "beta", 0.5),
]


def make() -> tuple[Annealed, Any]:
    torch.manual_seed(0)
    return Annealed().double(), (torch.randn(7, 5, dtype=torch.float64),)


def reset() -> None:
    set_temperature(1.0)
    Annealed.scale = 1.0


def check(strategy: str, ranks: int, options: dict[str, Any]) -> None:
    reset()
    model, batch = make()
    reference, _ = make()
    pm = sw.parallelize(model, batch, plan_for(model, batch, strategy, ranks, **options))
    optimizers = (
        sw.optimizer(pm, torch.optim.SGD, lr=0.1),
        torch.optim.SGD(reference.parameters(), lr=0.1),
    )
    for number, change in enumerate(CHANGES):
        change(reference)
        loss = reference(*batch)
        loss.backward()
        if change not in (CHANGES[5], CHANGES[6]):  # they apply to both models
            change(model)
        assert_close(pm.train_step(batch), loss.detach(), f"loss after change {number}")
        for name, grad in pm.gather_gradients().items():
            expected = dict(reference.named_parameters())[name].grad
            assert_close(grad, expected, f"{name} after change {number}", 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    num_programs = len(list(pm._programs.items()))
    model.unread = model.config.unread = 1
    pm.train_step(batch)
    assert len(list(pm._programs.items())) == num_programs
    for name, tensor in reference.state_dict().items():
        assert_close(pm.gather_state_dict()[name], tensor, name, 0.1, 1e-7)
    reset()


CASES = [
    ("fsdp", 2, {}),
    ("ddp", 3, {}),
    ("zero2", 2, {}),
    ("tensor", 2, {}),
    ("pipeline", 2, {"num_microbatches": 1}),
    ("hybrid", 4, {"dp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("strategy", "ranks", "options"), thinned(CASES, lambda i, _: i == 0))
def test_changes_between_steps_reach_the_next_step(
    pool: Callable[[int], Pool], strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    pool(ranks).run(check, strategy, ranks, options, timeout=300)


def anneal(model: Annealed, pm: Any, batch: Any) -> None:
    for step in range(10):
        model.beta = 1.0 / (step + 1)
        pm.train_step(batch)


def refusals() -> list[str]:
    reset()
    model, batch = make()
    pm = sw.parallelize(model, batch, plan_for(model, batch, "ddp", 2))
    errors = [error_of(setattr, pm, "beta", 0.25)]
    head, model.down = model.down, nn.Linear(7, 5).double()
    errors.append(error_of(pm.train_step, batch))
    model.down = head
    pm.train_step(batch)
    with pytest.warns(UserWarning, match="because the attribute beta changed"):
        anneal(model, pm, batch)
    programs = len(list(pm._programs.items()))
    model.beta = 1.0
    pm.train_step(batch)  # a state that already has a program
    assert len(list(pm._programs.items())) == programs
    del model, head
    errors.append(error_of(pm.train_step, batch))
    return errors


def test_setting_attributes_of_pm_and_replacing_modules_are_refused(
    pool: Callable[[int], Pool],
) -> None:
    for on_pm, replaced, gone in pool(2).run(refusals, timeout=110):
        assert "beta is an attribute of the model" in on_pm
        assert "replaced after parallelize" in replaced
        assert "at: down" in replaced
        assert gone == "no error"


RATE = 2.0
BYTES = bytearray([2])


class Weight:
    """An object whose special methods read a global variable."""

    def __mul__(self, y: Tensor) -> Tensor:
        return y * RATE

    def __enter__(self) -> float:
        return RATE

    def __exit__(self, *args: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return RATE == 2.0

    def __get__(self, instance: Any, owner: Any) -> float:
        return RATE


class Table(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return RATE


class Registry(type):
    rate = 2.0


class Registered(metaclass=Registry):
    rated = Weight()

    def __init__(self) -> None:
        self.made = RATE


WEIGHT, TABLE = Weight(), Table()


def entered(y: Tensor) -> Tensor:
    with WEIGHT as rate:
        return y * rate


def _set_rate() -> None:
    global RATE
    RATE = 3.0


HIDDEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "arithmetic": (lambda y: WEIGHT * y, _set_rate),  # type: ignore[return-value]
    "with": (entered, _set_rate),
    "truth": (lambda y: y * 2 if WEIGHT else y, _set_rate),
    "descriptor": (lambda y: y * Registered.rated, _set_rate),
    "constructor": (lambda y: y * Registered().made, _set_rate),
    "missing key": (lambda y: y * TABLE["a"], _set_rate),
    "globals": (lambda y: y * globals()["RATE"], _set_rate),
    "eval": (lambda y: y * eval("RATE"), _set_rate),
    "modules": (lambda y: y * sys.modules[__name__].RATE, _set_rate),  # type: ignore[attr-defined]
    "metaclass": (lambda y: y * Registered.rate, lambda: setattr(Registry, "rate", 3.0)),
    "bytes": (lambda y: y * BYTES[0], lambda: BYTES.__setitem__(0, 3)),
    "argument": (lambda y: y * len(sys.argv[0]), lambda: sys.argv.__setitem__(0, "changed")),
    "builtin": (
        lambda y: y * _A_RATE,  # type: ignore[name-defined]  # noqa: F821
        lambda: setattr(builtins, "_A_RATE", 3.0),
    ),
}


class Hidden(nn.Module):
    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.scale = nn.Linear(3, 2), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.line(x)).square().mean()


def hidden() -> list[str]:
    """Change what a step reads in indirect ways; return the names of changes that it misses."""
    global RATE
    missed, argv = [], sys.argv[:]
    torch.manual_seed(0)
    batch = (torch.randn(4, 3),)
    for name, (scale, change) in HIDDEN.items():
        RATE, builtins._A_RATE = 2.0, 2.0  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = Hidden(scale)
        pm = sw.parallelize(model, batch, lambda g: sw.strategies.ddp(g, sw.Cluster.local(2)))
        before = pm.train_step(batch)
        change()
        loss, expected = pm.train_step(batch), model(*batch).detach()
        if loss == before or not torch.allclose(loss, expected):
            missed.append(name)
    sys.argv[:] = argv
    return missed


def test_state_that_special_methods_and_names_reach(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(hidden) == [[], []]
