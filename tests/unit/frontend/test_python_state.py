"""Python state in captured graphs: what is read, what may be written, what is refused."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.frontend import capture
from shardwise.frontend.reach import reachable
from shardwise.frontend.watch import Reads

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
def test_attributes_that_the_next_step_would_see_changed_are_refused(model: Any, name: str) -> None:
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


def test_a_hook_that_records_is_refused_and_leaves_nothing_behind() -> None:
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


def test_caches_and_results_that_are_only_kept_are_allowed() -> None:
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


def test_reads_are_noted() -> None:
    reads = Reads()
    capture(Reader(), BATCH, reads=reads)
    assert {("", "scale"), ("", "length"), ("", "calls")} <= set(reads.attributes)
    assert ("", "unread") not in reads.attributes
    assert {("", "forward"), ("line", "forward")} <= set(reads.methods)
    assert "BETA" in {variable.name for variable in reads.reach.variables.values()}


def test_variables_are_found_through_containers_methods_and_closures() -> None:
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

    found = {variable.name for variable in reachable(Model(), []).variables.values()}
    assert {"BETA", "power"} <= found


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.choice([1.0, 2.0]),
        lambda: float(np.random.randn()),
        lambda: time.time() % 2,
        lambda: generator.random(),
    ],
)
def test_numbers_of_the_moment_are_refused_with_the_line(draw: Any) -> None:
    class Moment(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.line(x).sum() * draw()

    with pytest.raises(CaptureError) as caught:
        sw.capture(Moment(), BATCH)
    assert str(caught.value.where).startswith("test_python_state.py:")
