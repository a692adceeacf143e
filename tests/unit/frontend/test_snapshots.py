"""Guards hold while Python state is unchanged, and fail on every change."""

from __future__ import annotations

import contextvars
import copy
import gc
import multiprocessing
import os
import weakref
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.frontend.snapshots import item_guards

BATCH = {"x": torch.ones(4, 3)}
RATES = {"first": 1.0, "nested": [1, (2, {"deep": 3.0})]}


class Config:
    factor = 1.0

    def __init__(self) -> None:
        self.scale, self.inner = 2.0, None
        self.unread = [1, 2]


class Reads(nn.Module):
    kind = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.config, self.table = Config(), [1.0, [2.0]]
        self.config.inner = Config()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.config.scale * self.config.inner.scale * self.table[0] * self.table[1][0]
        y = self.line(x).sum() * scale * RATES["nested"][1][1]["deep"]
        return y if self.kind == "sum" else -y


def parallel(model: nn.Module) -> Any:
    plan = sw.strategies.fsdp(sw.capture(model, BATCH), sw.Cluster.local(1))
    pm = sw.parallelize(model, BATCH, plan)
    pm.train_step(BATCH)
    return pm


def changes(model: Reads) -> dict[str, Any]:
    config, inner = model.config, model.config.inner
    deep = RATES["nested"][1][1]  # type: ignore[index]
    return {
        "attribute of an object": lambda: setattr(config, "scale", 3.0),
        "an equal number of another type": lambda: setattr(config, "scale", 3),
        "attribute of an object in an object": lambda: setattr(inner, "scale", 0.5),
        "another object": lambda: setattr(config, "inner", Config()),
        "item of a list": lambda: model.table.__setitem__(0, 5.0),
        "item of an inner list": lambda: model.table[1].__setitem__(0, 6.0),
        "length of a list": lambda: model.table.append(7.0),
        "item deep in a global variable": lambda: deep.update(deep=4.0),
        "attribute in place of a class's": lambda: setattr(model, "kind", "minus"),
        "attribute of a class": lambda: setattr(Reads, "kind", "other"),
        "method of an instance": lambda: setattr(model.line, "forward", lambda x: x * 2),
    }


def test_guards_fail_on_every_change_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reads, "kind", "sum")
    monkeypatch.setitem(RATES, "nested", [1, (2, {"deep": 3.0})])
    model = Reads()
    pm = parallel(model)
    state = pm._world.__self__.state
    for name, change in changes(model).items():
        before = state.number()
        assert state._guards.hold(), name
        model.config.unread.append(3)  # no code names it
        assert state._guards.hold(), name
        change()
        assert not state._guards.hold(), name
        assert not state._guards._snapshots  # identities are enough for all of this state
        if name != "length of a list":
            assert state.number() != before, name


def test_mutable_values_have_no_guards() -> None:
    class Slots:
        __slots__ = ("value",)

    mutable = [
        torch.zeros(1),
        iter([1]),
        Slots(),
        {1},
        nn.ReLU(),
        [Config()],
        partial(print, end=""),
    ]
    assert all(item_guards(value, frozenset()) is None for value in mutable)
    assert item_guards({"a": [1, (2.0, None)]}, frozenset())


def test_guards_keep_no_object_alive() -> None:
    model = Reads()
    model.config.owner = model  # type: ignore[attr-defined]
    pm = parallel(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    pm.train_step(BATCH)


def test_guards_fail_once_the_object_is_gone() -> None:
    config = Config()
    guards = item_guards(config, frozenset({"scale"}))
    assert guards is not None
    assert all(guard.holds() for guard in guards)
    del config
    assert not all(guard.holds() for guard in guards)
    empty = type("Empty", (), {})()
    (attributes_guard, *_) = item_guards(empty, frozenset()) or ()
    del empty
    assert not attributes_guard.holds()


@pytest.mark.parametrize("place", ["model", "parallel module"])
def test_user_hooks_are_detected_although_steps_register_their_own(place: str) -> None:
    model = Reads()
    pm = parallel(model)
    pm.train_step(BATCH)
    weight = model.line.weight
    if place == "model":
        before = pm.world()
        assert pm.world() == before
        handle = weight.register_hook(lambda grad: grad * 2)
        hooked = pm.world()
        assert hooked != before
        pm.train_step(BATCH)
        assert pm.world() == hooked
        handle.remove()
        assert pm.world() == before
    else:
        shown = dict(pm.named_parameters())["line.weight"]
        shown.register_post_accumulate_grad_hook(print)
        with pytest.raises(ShardwiseError, match="hook"):
            pm.train_step(BATCH)


@lru_cache
def table(size: int) -> Tensor:
    return torch.ones(size)


class ReadsOutside(nn.Module):
    """Reads files, settings of torch, and a cached function."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.line, self.flag, self.rate = nn.Linear(3, 2), folder / "flag", folder / "rate"

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if self.flag.exists() else 1.0
        scale *= 3.0 if os.path.isdir(self.flag) else 1.0
        scale *= float(self.rate.read_text())
        scale *= 5.0 if torch.are_deterministic_algorithms_enabled() else 1.0
        scale *= 7.0 if torch.backends.cudnn.benchmark else 1.0
        return (self.line(x) * table(2)).sum() * scale


def test_files_and_settings_that_forward_reads_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ReadsOutside(tmp_path)
    model.rate.write_text("1.5")
    pm = parallel(model)
    assert table(2).tolist() == [1.0, 1.0]  # no tensor of the capture stays in the cache

    def compare() -> None:
        expected = copy.deepcopy(model)(**BATCH)
        assert pm.train_step(BATCH).item() == pytest.approx(expected.item(), rel=1e-6)

    compare()
    model.flag.touch()
    compare()
    model.flag.unlink()
    model.flag.mkdir()
    compare()
    model.rate.write_text("-0.25")
    compare()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    compare()
    torch.use_deterministic_algorithms(True)
    try:
        compare()
    finally:
        torch.use_deterministic_algorithms(False)
    compare()


class ReadsForLongBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.beta = nn.Linear(3, 2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x).sum()
        return y * self.beta if len(x) > 4 else y


def test_state_read_only_for_another_batch_is_captured_as_it_is_then() -> None:
    model = ReadsForLongBatches()
    pm = parallel(model)
    longer = {"x": torch.ones(8, 3)}
    for beta in (5.0, 7.0):
        model.beta = beta
        assert torch.allclose(pm.train_step(longer), model(**longer)), beta


LEVEL = contextvars.ContextVar("LEVEL", default=1.0)
SHARED = multiprocessing.Value("d", 1.0)


def scaled(x: Tensor, *, factor: float = 1.0) -> Tensor:
    return x * factor


class Absent(nn.Module):
    """Reads what does not exist yet, and state behind a reference."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.line, self.folder, self.config = nn.Linear(3, 2), folder, Config()
        self.reference = weakref.ref(self.config)

    def forward(self, x: Tensor) -> Tensor:
        y = scaled(self.line(x).sum()) * LEVEL.get() * SHARED.value
        y = y * getattr(self.line, "gain", 1.0) * self.__dict__.get("bonus", 1.0)
        if hasattr(self, "shift"):
            y = y + self.shift
        y = y * len(os.listdir(self.folder)) * self.reference().scale
        try:
            return y * SOMETHING  # type: ignore[name-defined]
        except NameError:
            return y * globals().get("OTHER", 1.0)


def test_state_that_appears_later_and_state_behind_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").touch()
    model = Absent(tmp_path)
    pm = parallel(model)
    changes = (
        lambda: scaled.__kwdefaults__.update(factor=2.0),
        lambda: LEVEL.set(3.0),
        lambda: setattr(SHARED, "value", 0.5),
        lambda: setattr(model.line, "gain", 2.0),
        lambda: setattr(model, "bonus", 0.7),
        lambda: setattr(model, "shift", 4.0),
        lambda: (tmp_path / "two").touch(),
        lambda: setattr(model.config, "scale", 9.0),
        lambda: monkeypatch.setitem(globals(), "OTHER", 1.5),
        lambda: monkeypatch.setitem(globals(), "SOMETHING", 2.5),
    )
    for number, change in enumerate(changes):
        before = pm.train_step(BATCH)
        change()
        after = pm.train_step(BATCH)
        assert not torch.equal(before, after), number
        assert torch.allclose(after, model(**BATCH)), number
