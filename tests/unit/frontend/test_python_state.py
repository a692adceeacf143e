"""Python state that forward reads is recorded; changes that steps would lose are refused."""

from __future__ import annotations

import functools
import itertools
import random
import time
import warnings
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError, ProgramError
from shardwise.frontend import capture
from shardwise.frontend.python_state import Reads, reachable

BATCH = (torch.ones(5, 3),)
CALLS = 0
HISTORY: list[Tensor] = []
BETA = 0.5
generator = np.random.default_rng(0)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 4)
        self.calls, self.length, self.started = 0, 0, False
        self.history: list[Any] = []
        self.masks: dict[int, Tensor] = {}
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self.rng = random.Random(0)


class Counter(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.line(x).sum()


class Starts(Base):
    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.started else 0.0
        self.started = True
        return self.line(x).sum() * scale


class AppendsTensors(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        self.history.append(y.detach())
        return y.sum()


class AppendsNumbers(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.shape[0])
        return self.line(x).sum()


class KeepsFirst(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        if self.first is None:
            self.first = y.detach()
        return (y - self.first).sum()


class Draws(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).sum() * self.rng.random()


ATTRIBUTES = [
    (Counter, "calls"),
    (Starts, "started"),
    (AppendsTensors, "history"),
    (AppendsNumbers, "history"),
    (KeepsFirst, "first"),
    (Draws, "rng"),
]


@pytest.mark.parametrize(("model", "name"), ATTRIBUTES)
def test_forward_may_not_change_an_attribute_that_it_reads(model: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=f"changes the attribute {name}") as caught:
        sw.capture(model(), BATCH)
    assert str(caught.value.where).startswith("test_python_state.py:")
    assert "self." in str(caught.value.where)


class WritesGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return self.line(x).sum()


class AppendsToGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        HISTORY.append(y)
        return y.sum()


def writes_closure() -> type[Base]:
    count = 0

    class WritesClosure(Base):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return self.line(x).sum()

    return WritesClosure


def test_changes_of_variables_are_undone_and_refused() -> None:
    for model, name in ((WritesGlobal, "CALLS"), (AppendsToGlobal, "HISTORY")):
        with pytest.raises(CaptureError, match=f"global variable {name}") as caught:
            sw.capture(model(), BATCH)
        assert str(caught.value.where).startswith("test_python_state.py:")
    assert CALLS == 0
    assert HISTORY == []
    with pytest.raises(CaptureError, match="enclosing variable count"):
        sw.capture(writes_closure()(), BATCH)


def test_a_recording_hook_is_refused_and_its_changes_undone() -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(3, 1))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    with pytest.raises(CaptureError, match="enclosing variable seen"):
        sw.capture(model, BATCH, lambda y, batch: y.mean())
    assert seen == []


class Harmless(Base):
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        if size not in self.masks:
            self.masks[size] = torch.arange(size)[:, None] > 1
        self.length = max(size, self.length)
        y = self.line(x) * self.masks[size]
        self.last = y
        return y.sum() * self.length


def test_forward_may_write_caches_and_results_that_it_does_not_read() -> None:
    graph = sw.capture(Harmless(), BATCH)
    assert len(graph.warnings) == 1
    assert "attribute last (test_python_state.py:" in graph.warnings[0]


class Reader(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = [1.0, 2.0]
        self.unread = 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x) * self.scale[0] * getattr(self, "len" + "gth")
        return helper(y).sum() * self.calls


def helper(y: Tensor) -> Tensor:
    return y * BETA


def test_reads_are_recorded() -> None:
    reads = Reads()
    capture(Reader(), BATCH, reads=reads)
    assert {("", "scale"), ("", "length"), ("", "calls")} <= set(reads.attributes)
    assert ("", "unread") not in reads.attributes
    assert {("", "forward"), ("line", "forward")} <= set(reads.methods)
    assert "BETA" in {variable.name for variable in reads.reach.variables.values()}


def test_variables_are_reached_through_containers_methods_and_closures() -> None:
    power = 2.0

    class Schedule:
        def value(self) -> float:
            return BETA * power

    class Model(Base):
        functions: ClassVar[Any] = {"one": [helper]}

        def __init__(self) -> None:
            super().__init__()
            self.schedule = Schedule()

        def forward(self, x: Tensor) -> Tensor:
            return self.functions["one"][0](x) * self.schedule.value()

    names = {variable.name for variable in reachable(Model(), []).variables.values()}
    assert {"BETA", "power"} <= names


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.choice([1.0, 2.0]),
        lambda: float(np.random.randn()),
        lambda: time.time() % 2,
        lambda: generator.random(),
    ],
)
def test_random_numbers_and_clocks_are_refused_at_the_line(draw: Any) -> None:
    class Moment(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.line(x).sum() * draw()

    with pytest.raises(CaptureError) as caught:
        sw.capture(Moment(), BATCH)
    assert str(caught.value.where).startswith("test_python_state.py:")


# --- state that programs depend on, changed from outside ----------------------------------


class Settings:
    beta = 1.0


def scaled(value: float, settings: dict[str, float] = {"beta": 1.0}) -> float:  # noqa: B006
    return value * settings["beta"] * scaled.beta  # type: ignore[attr-defined]


scaled.beta = 1.0  # type: ignore[attr-defined]
TABLE = [1.0] * 1000
ARRAY = np.ones(1000)
QUEUE = deque([1.0, 2.0])


class Scaler:
    def __init__(self) -> None:
        self.beta = 1.0

    def scale(self) -> float:
        return self.beta


class ReadsAll(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 4).double()
        self.scaler = Scaler()
        self.method = self.scaler.scale
        self.partial = functools.partial(float.__mul__, 1.0)
        self.options = UserDict(beta=1.0)
        self.hidden = 1.0

    def forward(self, x: Tensor) -> Tensor:
        numbers = [Settings.beta, scaled(1.0), TABLE[7], float(ARRAY[7]), QUEUE[0], self.method()]
        numbers += [type(self).factor, self.options["beta"], self.__dict__["hidden"]]
        numbers += [getattr(self.scaler, "be" + "ta"), *self.partial.keywords.values()]
        loss = self.line(x.to(torch.get_default_dtype())).mean()
        for number in numbers:
            loss = loss * number
        return torch.tanh(loss)


CHANGES: dict[str, Callable[[Any], object]] = {
    "class": lambda m: setattr(Settings, "beta", 2.0),
    "own class": lambda m: setattr(type(m), "factor", 3.0),
    "default": lambda m: scaled.__defaults__[0].update(beta=2.0),  # type: ignore[index]
    "function": lambda m: setattr(scaled, "beta", 2.0),
    "long list": lambda m: TABLE.__setitem__(7, 2.0),
    "array": lambda m: ARRAY.__setitem__(7, 2.0),
    "deque": lambda m: QUEUE.appendleft(3.0),
    "bound method": lambda m: setattr(m.scaler, "beta", 2.0),
    "keywords of partial": lambda m: m.partial.keywords.update(a=2.0),
    "user dict": lambda m: m.options.update(beta=2.0),
    "__dict__": lambda m: setattr(m, "hidden", 2.0),
}


def test_every_change_from_outside_is_detected() -> None:
    torch.manual_seed(0)
    model, batch = ReadsAll(), {"x": torch.randn(5, 3, dtype=torch.float64)}
    torch.set_default_dtype(torch.float64)
    try:
        plan = sw.strategies.fsdp(capture(model, batch), sw.Cluster.local(1))
        pm = sw.parallelize(model, batch, plan)
        with pytest.warns(UserWarning, match="9th time because") as caught:  # noqa: PT031
            for name, change in CHANGES.items():
                change(model)
                with torch.no_grad():
                    want = model(**batch)
                assert torch.allclose(pm.train_step(batch), want, rtol=1e-12), name
        assert caught[0].filename == __file__
        before = torch.tanh
        torch.tanh = torch.sin
        try:
            with torch.no_grad():
                want = model(**batch)
            assert torch.allclose(pm.train_step(batch), want, rtol=1e-12)
        finally:
            torch.tanh = before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "make", [itertools.count, lambda: itertools.cycle([1, 2]), lambda: (i for i in range(99))]
)
def test_forward_may_not_advance_an_iterator(make: Callable[[], Any]) -> None:
    class Advances(Base):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = make()

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x).sum() * next(self.numbers)

    with pytest.raises(CaptureError, match="numbers") as error:
        capture(Advances(), BATCH)
    assert "next(self.numbers)" in str(error.value)


def test_objects_with_getattr_are_captured() -> None:
    class Answers:
        def __init__(self) -> None:
            self.values = {"beta": 1.0}

        def __getattr__(self, name: str) -> Any:
            return self.__dict__["values"][name]

    class Reads(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.log = Answers(), mock.MagicMock()

        def forward(self, x: Tensor) -> Tensor:
            self.log("called")
            return self.line(x).sum() * self.config.beta

    assert capture(Reads(), BATCH).nodes


def test_trainable_parameters_outside_the_model_are_refused() -> None:
    head, line = nn.Linear(4, 2), nn.Linear(3, 4)
    with pytest.raises(CaptureError, match=r"head\.weight requires a gradient") as error:
        capture(line, BATCH, lambda y, batch: head(y).sum())
    assert "test_python_state.py" in str(error.value.where)
    with pytest.raises(CaptureError, match="steps="):
        capture(line, BATCH, lambda y, batch: y.sum() + line.weight.square().sum())
    head.requires_grad_(False)
    assert capture(line, BATCH, lambda y, batch: head(y).sum()).nodes


def test_deeply_nested_modules_are_captured() -> None:
    class Wraps(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Wraps(depth - 1) if depth else nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    assert capture(Wraps(100), BATCH, lambda y, batch: y.sum()).nodes


def parallel_sequential() -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(nn.Linear(3, 4))

    def loss(y: Tensor, batch: Any) -> Tensor:
        return y.sum()

    plan = sw.strategies.ddp(capture(model, BATCH, loss), sw.Cluster.local(1))
    pm = sw.parallelize(model, BATCH, plan, loss)
    pm.train_step(BATCH)
    return model, pm


def test_invalid_scales_and_disabled_gradients_are_refused() -> None:
    _, pm = parallel_sequential()
    for scale in ("x", float("nan")):
        with pytest.raises(ProgramError):
            pm.train_step(BATCH, scale=scale)
    with torch.no_grad(), pytest.raises(ProgramError, match="gradients"):
        pm.train_step(BATCH)


def test_a_module_added_after_parallelize_is_refused() -> None:
    model, pm = parallel_sequential()
    model.append(nn.ReLU())
    with pytest.raises(ProgramError) as error:
        pm.train_step(BATCH)
    assert error.value.where == "1"


def test_an_optimizer_of_the_original_is_refused() -> None:
    model, pm = parallel_sequential()
    optimizer = torch.optim.AdamW(model.parameters())
    pm.train_step(BATCH)
    with pytest.raises(ProgramError) as error:
        optimizer.step()
    assert error.value.where == "0.weight"


@pytest.mark.parametrize("how", ["data", "in place", "buffer"])
def test_changed_weights_of_the_original_are_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight  # tied

    def loss(y: Tensor, batch: Any) -> Tensor:
        return y.square().sum()

    plan = sw.strategies.ddp(capture(model, BATCH, loss), sw.Cluster.local(1))
    pm = sw.parallelize(model, BATCH, plan, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.train_step(BATCH)
        pm.copy_to(model)
        pm.train_step(BATCH)
        pm.train_step(BATCH)
    with torch.no_grad():
        if how == "data":
            model[0].weight.data.clamp_(-0.01, 0.01)
        elif how == "in place":
            model[0].weight.mul_(2.0)
        else:
            model[1].running_mean = torch.ones(4)
    for _ in range(2):
        with pytest.raises(ProgramError, match=r"of the Sequential that was given") as error:
            pm.train_step(BATCH)
        assert error.value.where == ("1.running_mean" if how == "buffer" else "0.weight")
    pm.load_state_dict(model.state_dict())
    pm.train_step(BATCH)
    model.load_state_dict(pm.gather_state_dict())  # to evaluate it
    pm.train_step(BATCH)


class CountsInClass(Base):
    calls_of_all: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls_of_all += 1
        return self.line(x).sum() * self.calls_of_all


def test_forward_may_not_change_a_class_attribute() -> None:
    with pytest.raises(CaptureError, match="class attribute calls_of_all") as error:
        capture(CountsInClass(), BATCH)
    line = CountsInClass.forward.__code__.co_firstlineno + 1
    assert error.value.where == f"test_python_state.py:{line}"
    assert CountsInClass.calls_of_all == 0
