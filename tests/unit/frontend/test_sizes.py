"""One trace for batches of many sizes gives the same graphs as separate captures."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.frontend import capture
from shardwise.frontend.sizes import GraphsBySize
from tests.support.tiers import thinned

SIZES = (4, 5, 6, 7, 9, 12, 1)


class Model(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"loss": self.function(self, self.linear(x)), "length": 3}


def overwritten(model: nn.Module, y: Tensor) -> Tensor:
    y = y * 1
    y[:, : y.shape[1] // 2] = 0.5
    return y.sum()


def without_gradients(model: nn.Module, y: Tensor) -> Tensor:
    with torch.no_grad():
        mean = y.mean(1, keepdim=True).expand(-1, y.shape[1], -1)
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(y - mean, model.linear.weight)
    return z.float().sum()


def cached(model: Any, y: Tensor) -> Tensor:
    length = y.shape[1]
    if length not in model.cache:
        model.cache[length] = torch.arange(length).float()
    return (y.sum(-1) * model.cache[length]).sum()


def by_type(model: nn.Module, y: Tensor) -> Tensor:
    match y.shape[1]:
        case int(length) if length > 8:
            return (2 * y).sum()
        case int():
            return y.sum()
    raise AssertionError("a size is an int")


# name -> (a function of the model, how often Python runs for `SIZES` at most)
PROGRAMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "attention": (lambda m, y: F.scaled_dot_product_attention(y, y, y, is_causal=True).sum(), 4),
    "mask": (lambda m, y: (torch.tril(torch.ones(y.shape[1], y.shape[1])) @ y).sum(), 4),
    "flatten": (lambda m, y: y.flatten(0, 1).softmax(0).pow(2).sum(), 4),
    "divided": (lambda m, y: y.sum() / y.shape[1] if y.shape[1] else y.sum(), 4),
    "scaled": (lambda m, y: (y * (y.shape[1] + 1) ** -0.5).sum(), 4),
    "half": (lambda m, y: y[:, : y.shape[1] // 2].sum(), 4),
    "padded": (lambda m, y: F.pad(y, (0, 0, 0, -y.shape[1] % 8)).sum(), 5),
    "dropout": (lambda m, y: F.dropout(y, 0.5, True).sum(), 4),
    "overwritten": (overwritten, 5),
    "without gradients": (without_gradients, 4),
    # Python takes another path, or reads the size itself.
    "branch": (lambda m, y: y.sum() if y.shape[1] > 8 else (2 * y).sum(), 5),
    "odd and even": (lambda m, y: y.sum() if y.shape[1] % 2 else (2 * y).sum(), 7),
    "asks for the type": (
        lambda m, y: (y * (2 if isinstance(y.shape[1], int) and y.shape[1] > 8 else 5)).sum(),
        5,
    ),
    "asks for an abstract type": (
        lambda m, y: (y * (2 if isinstance(y.shape[1], Integral) and y.shape[1] > 8 else 5)).sum(),
        5,
    ),
    "matches a type": (by_type, 5),
    "as text": (lambda m, y: (y * len(f"{y.shape[1]}")).sum(), 7),
    "root": (lambda m, y: (y * math.sqrt(y.shape[1])).sum(), 7),
    "loop": (lambda m, y: sum((y[:, i].sum() for i in range(y.shape[1])), y.sum()), 7),
    "a key": (lambda m, y: (y * {4: 1.5, 5: 2.5}.get(y.shape[1], 3.5)).sum(), 7),
    "cached": (cached, 7),
}


@pytest.mark.parametrize("name", thinned(PROGRAMS, lambda i, _: i % 3 == 0))
def test_graphs_equal_those_of_single_captures(name: str) -> None:
    function, max_traces = PROGRAMS[name]
    model, graphs = Model(function), GraphsBySize()
    for size in SIZES:
        batch = {"x": torch.randn(3, size, 6)}
        expected = capture(Model(function), batch, training=True)
        graph = graphs(model, batch, training=True)
        assert graph.fingerprint == expected.fingerprint, size
    assert graphs.num_traces <= max_traces


def test_rows_and_columns_vary_together() -> None:
    model, graphs = Model(PROGRAMS["attention"][0]), GraphsBySize()
    for rows, columns in ((3, 4), (3, 5), (4, 6), (2, 2), (8, 8), (5, 9)):
        batch = {"x": torch.randn(rows, columns, 6)}
        expected = capture(model, batch, training=True)
        assert graphs(model, batch, training=True).fingerprint == expected.fingerprint
    assert graphs.num_traces == 3


def test_a_number_among_the_outputs_is_captured_for_every_size() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"loss": x.sum(), "length": x.shape[0]}

    graphs = GraphsBySize()
    for size in (3, 4, 5, 6):
        graph = graphs(Counting(), {"x": torch.randn(size)})
        assert size in graph.outputs


def test_symbols_look_like_numbers_only_while_tracing() -> None:
    graphs, model = GraphsBySize(), Model(PROGRAMS["as text"][0])
    before = [dict(vars(cls)) for cls in (torch.SymInt, torch.SymFloat, torch.SymBool)]
    for size in (3, 4, 5):
        graphs(model, {"x": torch.randn(2, size, 6)}, training=True)
    assert [dict(vars(cls)) for cls in (torch.SymInt, torch.SymFloat, torch.SymBool)] == before
