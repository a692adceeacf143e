"""Models whose files, functions, inputs and modules have names that emitted code uses itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

SOURCE = """
import torch
from torch import nn

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return FACTOR * x

    @staticmethod
    def backward(ctx, grad):
        return FACTOR * grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4).double()

    def forward(self, x):
        return Double.apply(self.up(x)).square().mean()
"""


def module_of(path: Path, name: str, factor: float) -> ModuleType:
    path.write_text(f"FACTOR = {factor}\n{SOURCE}")
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["my-model", "class", "2nd", "a b", "x; raise SystemExit", "plain"]
)
def test_functions_of_files_with_any_name(tmp_path: Path, name: str) -> None:
    module = module_of(tmp_path / f"{name}.py", name, 3.0)
    batch = {"x": torch.randn(4, 4, dtype=torch.float64)}
    model = module.Net()
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    assert sw.verify(model, batch, plan)
    source = sw.compile(sw.capture(model, batch), plan).source(0)
    assert ("from plain import Double" in source) == (name == "plain")
    del sys.modules[name]


def test_functions_of_one_name_from_two_files(tmp_path: Path) -> None:
    first, second = (
        module_of(tmp_path / f"{name}.py", name, factor)
        for name, factor in (("first_file", 2.0), ("second_file", 5.0))
    )

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            return (first.Double.apply(x) + second.Double.apply(x).tanh()).square().mean()

    model, batch = Both(), {"x": torch.randn(4, 4, dtype=torch.float64)}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    assert sw.verify(model, batch, plan)
    source = sw.compile(sw.capture(model, batch), plan).source(0)
    assert "import Double as Double2" in source


class Named(nn.Module):
    """Modules and inputs with names that the emitted file uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4), nn.Tanh(),
                          nn.Linear(4, 4))
            for _ in range(2)
        )  # fmt: skip
        self.outputs, self.checkpoint, self.rng = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.others = nn.ModuleDict({"a-b": nn.Linear(4, 4), "007": nn.Linear(4, 4)})
        self.double()

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        x = sum(inputs.values())
        for part in self.blocks:
            x = part(x)
        x = self.rng(self.checkpoint(self.outputs(x)).tanh()).tanh()
        x = self.others["007"](self.others["a-b"](x))
        for value in inputs.values():
            x = x * value
        return {"loss": x.square().mean(), "outputs": x}


@pytest.mark.parametrize(
    "names",
    [("outputs", "block"), ("self_", "torch"), ("checkpoint", "recomputed_1"), ("rt", "x2")],
)
def test_inputs_and_modules_with_reserved_names(names: tuple[str, str]) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randn(4, 4, dtype=torch.float64) for name in names}
    model = Named()
    graph = sw.capture(model, batch)
    plans = [
        sw.strategies.ddp(graph, sw.Cluster.local(2)),
        sw.strategies.tensor(graph, sw.Cluster.local(2), recompute="full"),
    ]
    for plan in plans:
        certificate = sw.verify(model, batch, plan)
        assert certificate, str(certificate)
