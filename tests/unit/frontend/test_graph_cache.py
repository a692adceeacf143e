"""Captured graphs are loaded from disk if nothing changed, and only then."""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.batch import read_batch
from shardwise.frontend import capture, graph_cache
from shardwise.frontend.python_state import Reads
from shardwise.frontend.sizes import GraphsBySize
from shardwise.ir.stored import NotStorable, graph_from_json, graph_to_json

BATCH = {"x": torch.ones(4, 3)}
RATE, TABLE = 1.0, {"a": [1, 2]}


def helper(y: Tensor, factor: float = 1.0) -> Tensor:
    return y * factor


class Settings:
    def __init__(self) -> None:
        self.beta = 1.0


class Model(nn.Module):
    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.drop = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.1)
        self.scale, self.settings = 2.0, Settings()
        self.table = torch.tensor([1.0, 2.0])
        self.mode = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "environment":
            x = x * float(os.environ["A_RATE"])
        y = self.drop(self.norm(self.line(x))) * self.scale * self.settings.beta
        return helper(y * self.table, RATE).sum() * TABLE["a"][0]


class Weight:
    """Arithmetic that reads a global variable."""

    def __mul__(self, y: Tensor) -> Tensor:
        return y * RATE


class Registry(type):
    rate = 1.0


class Registered(metaclass=Registry):
    pass


WEIGHT = Weight()


class Outside(nn.Module):
    """A step that computes with a number from `read`."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read, self.line = read, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.line(x) * self.read(x)).sum()


@pytest.fixture
def folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    # Modules that earlier tests wrote into temporary folders are newer than this process: nothing
    # would be stored.
    temporary = str(tmp_path_factory.getbasetemp().parent)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(temporary):
            monkeypatch.delitem(sys.modules, name)
    return tmp_path / "graphs"


def was_stored(model: nn.Module, batch: Any = BATCH, **options: Any) -> bool:
    """Capture with nothing but the cache remembered; return whether Python did not have to run."""
    graphs = GraphsBySize()
    made = graphs(model, batch, **options)
    if graphs.num_traces == 0:
        assert made == capture(model, batch, **options)
    return graphs.num_traces == 0


def place(model: Model) -> graph_cache.CachedCapture | None:
    """Where the model's graph is stored."""
    options = {"training": None, "device": None}
    return graph_cache.cached_capture(model, read_batch(BATCH), None, options)


def test_a_stored_graph_is_loaded_with_what_it_read(folder: Path) -> None:
    first, second = Reads(), Reads()
    graph = GraphsBySize()(Model(), BATCH, reads=first)
    graphs = GraphsBySize()
    again = graphs(Model(), BATCH, reads=second)
    assert graphs.num_traces == 0
    assert again == graph
    assert str(again) == str(graph)
    assert again.constants[0].data.equal(graph.constants[0].data)
    assert (first.attributes, first.methods) == (second.attributes, second.methods)
    assert first.reach.names == second.reach.names
    assert {v.name for v in first.reach.variables.values()} == {
        v.name for v in second.reach.variables.values()
    }


CHANGES: dict[str, Callable[[Model, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda m, _: setattr(m, "scale", 3.0),
    "equal number": lambda m, _: setattr(m, "scale", 2),
    "attribute of an object": lambda m, _: setattr(m.settings, "beta", 2.0),
    "tensor": lambda m, _: m.table.mul_(2),
    "rate of dropout": lambda m, _: setattr(m.drop, "p", 0.2),
    "mode of one module": lambda m, _: m.norm.eval(),
    "frozen": lambda m, _: m.line.weight.requires_grad_(False),
    "tied": lambda m, _: setattr(m.norm, "bias", m.norm.weight),
    "forward hook": lambda m, _: m.line.register_forward_hook(lambda m, x, y: y * 2),
    "method of an instance": lambda m, _: setattr(m.line, "forward", lambda x: x[:, :2]),
    "global variable": lambda _, p: p.setitem(globals(), "RATE", 2.0),
    "global container": lambda _, p: p.setitem(TABLE, "a", [3]),
    "class attribute": lambda _, p: p.setattr(Model, "kind", "other"),
    "default": lambda _, p: p.setattr(helper, "__defaults__", (5.0,)),
    "function": lambda _, p: p.setitem(globals(), "helper", lambda y, factor: y + factor),
    "method of a class": lambda _, p: p.setattr(nn.Linear, "forward", lambda s, x: x @ s.weight.T),
    "function of torch": lambda _, p: p.setattr(F, "dropout", lambda x, p, training, inplace: x),
    "default dtype": lambda _, p: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_leads_to_another_entry(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place(Model())
    assert before is not None
    same = place(Model())
    assert same is not None
    assert before.file == same.file
    model = Model()
    try:
        CHANGES[name](model, monkeypatch)
        after = place(model)
        assert after is None or after.file != before.file
    finally:
        torch.set_default_dtype(torch.float32)


def test_batches_and_options_are_part_of_an_entry(folder: Path) -> None:
    model = Model()
    assert not was_stored(model)
    assert was_stored(model)
    assert not was_stored(model, {"x": torch.ones(5, 3)})
    assert not was_stored(model, {"x": torch.ones(4, 3).requires_grad_()})
    assert not was_stored(model, training=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert not was_stored(model)


def test_what_a_capture_reads_from_outside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.mode = "environment"
    monkeypatch.setenv("A_RATE", "2.0")
    assert not was_stored(model)
    assert was_stored(model)
    monkeypatch.setenv("A_RATE", "3.0")
    assert not was_stored(model)


def _from_posix(_: Tensor) -> int:
    import posix

    return int(posix.environ.get(b"A_RATE", b"1"))


OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "a file": lambda _: len(Path(os.devnull).read_text()) + 1,
    "an opened file": lambda _: len(open(os.devnull).read()) + 1,  # noqa: SIM115
    "whether a file exists": lambda _: 1 + os.path.exists("/missing"),
    "the contents of a folder": lambda _: len(os.listdir("/")),
    "the process": lambda _: os.getpid() % 7 + 1,
    "arguments of the command line": lambda _: len(sys.argv) + 1,
    "the environment by bytes": lambda _: len(os.environb),
    "the environment of another module": _from_posix,
    "modules by name": lambda _: sys.modules[__name__].RATE,  # type: ignore[attr-defined]
    "variables by name": lambda _: globals()["RATE"],
    "evaluated text": lambda _: eval("RATE"),
    "a frame": lambda _: sys._getframe().f_globals["RATE"],
    "an attribute of a metaclass": lambda _: Registered.rate,
    "hashes, which differ between processes": lambda _: hash("rate") % 7 + 1,
    "threads": lambda _: torch.get_num_threads(),
    "settings of backends": lambda _: 1 + torch.backends.cudnn.benchmark,
    "the process group": lambda _: 1 + torch.distributed.is_initialized(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_code_that_uses_state_outside_of_it_is_not_stored(folder: Path, name: str) -> None:
    model = Outside(OUTSIDE[name])
    assert place(model) is None  # type: ignore[arg-type]


class Level(Enum):
    LOW = 1.0


class Number(float):
    unit = 1.0


UNIT, PART = Number(1.0), Fraction(1, 3)
INSIDE: dict[str, tuple[Callable[[Tensor], Any], Callable[[pytest.MonkeyPatch], Any]]] = {
    "special method": (lambda x: (WEIGHT * x).sum(), lambda p: p.setitem(globals(), "RATE", 2.0)),
    "enumeration": (lambda _: Level.LOW.value, lambda p: p.setattr(Level.LOW, "_value_", 2.0)),
    "subclass of float": (lambda _: UNIT.unit, lambda p: p.setattr(UNIT, "unit", 2.0)),
    "fraction": (lambda _: float(PART), lambda p: p.setattr(PART, "_numerator", 2)),
    "builtin": (lambda _: _A_RATE, lambda p: p.setattr(builtins, "_A_RATE", 2.0)),  # type: ignore[name-defined]  # noqa: F821
    "linear algebra": (
        torch.linalg.vector_norm,
        lambda p: p.setattr(torch.linalg, "vector_norm", lambda x: x.sum()),
    ),
    "einsum": (
        lambda x: torch.einsum("ab,cb,cd->ad", x, x, x).sum(),
        lambda p: p.setattr(torch.backends.opt_einsum, "enabled", False),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_values_behind_other_names_are_part_of_an_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(builtins, "_A_RATE", 1.0, raising=False)
    read, change = INSIDE[name]
    model = Outside(read)
    assert not was_stored(model)
    assert was_stored(model)
    change(monkeypatch)
    assert not was_stored(model)


def test_own_files_that_changed_after_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings_of_mine.py").write_text("RATE = 1.0\n")
    os.utime(tmp_path / "settings_of_mine.py", (1, 1))
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("settings_of_mine")
    try:
        assert not was_stored(Model())
        assert was_stored(Model())
        (tmp_path / "settings_of_mine.py").write_text("RATE = 2.0\n")
        assert not was_stored(Model())
        assert not was_stored(Model())
    finally:
        del sys.modules["settings_of_mine"]


def test_models_that_are_not_stored(folder: Path) -> None:
    model = Model()
    model.line.weight.register_hook(lambda grad: grad * 2)
    assert not was_stored(model)
    model = Model()
    model.settings.beta = iter([1.0])  # type: ignore[assignment]
    assert place(model) is None
    assert not folder.exists()


SPOILERS: list[Callable[[Any], Any]] = [
    lambda e: e["graph"]["nodes"][0].update(op="aten.linear.default\nimport os"),
    lambda e: e["graph"]["nodes"][0].update(op="os.system"),
    lambda e: e["graph"]["nodes"][0].update(outputs={"tuple": ["a b"]}),
    lambda e: e["graph"]["values"].append(["x;import os", {"type": [[1], "float32"]}]),
    lambda e: e["graph"]["values"][0][1]["type"].__setitem__(1, "load"),
    lambda e: e["graph"]["values"][0][1]["type"].__setitem__(0, [7, 7]),
    lambda e: e["graph"]["constants"][0].__setitem__(2, "AAAA"),
    lambda e: e["graph"].update(output_spec=["os.PathLike", None, []]),
    lambda e: e["graph"].update(fingerprint="0"),
    lambda e: e.update(attributes=[["nowhere", "x"]]),
    lambda e: e.update(environment=[]),
    lambda e: e.update(format=0),
    lambda e: e.clear(),
]


def test_damaged_and_hostile_entries_are_not_used(folder: Path) -> None:
    model = Model()
    assert not was_stored(model)
    entry_of_model = place(model)
    assert entry_of_model is not None
    text = entry_of_model.file.read_text()
    assert entry_of_model.load(model, None) is not None
    for spoil in SPOILERS:
        entry = json.loads(text)
        spoil(entry)
        entry_of_model.file.write_text(json.dumps(entry))
        assert entry_of_model.load(model, None) is None, entry
    entry_of_model.file.write_text(text[:100])
    assert not was_stored(model)
    assert was_stored(model)  # written anew


def test_the_oldest_entries_are_removed_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    for age in range(4):
        (folder / f"{age}.json").write_bytes(b"x" * 100)
        os.utime(folder / f"{age}.json", (1000 - age, 1000 - age))
    monkeypatch.setattr(graph_cache, "MAX_BYTES", 250)
    graph_cache._drop_oldest(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["0.json", "1.json"]


def test_the_cache_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "off")
    assert graph_cache.cache_folder() is None
    monkeypatch.delenv("SHARDWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert graph_cache.cache_folder() == tmp_path / "shardwise/graphs"


def test_graphs_without_a_stored_form() -> None:
    graph = capture(Model(), BATCH)
    assert graph_from_json(graph_to_json(graph)) == graph
    for lost in ({"functions": {"f": print}}, {"input_constants": (("x", object()),)}):
        with pytest.raises(NotStorable):
            graph_to_json(type(graph)(**{**_fields(graph), **lost}))


def _fields(graph: Any) -> dict[str, Any]:
    return {name: getattr(graph, name) for name in graph.__dataclass_fields__}
