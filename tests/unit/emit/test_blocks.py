"""Repeated layers are written once, and called in a loop if each uses the previous result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.support.tiers import thinned


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.relu(self.up(self.norm(x)) * 2.0)))


class Stack(nn.Module):
    """Layers that the function `order` calls."""

    def __init__(self, hidden: tuple[int, ...], order: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6, h) for h in hidden)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.order(x, self.layers).pow(2).mean()


def in_turn(x: Tensor, layers: nn.ModuleList) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def backwards(x: Tensor, layers: nn.ModuleList) -> Tensor:
    for layer in reversed(layers):
        x = layer(x)
    return x


def twice(x: Tensor, layers: nn.ModuleList) -> Tensor:
    return in_turn(in_turn(x, layers), layers)


def side_by_side(x: Tensor, layers: nn.ModuleList) -> Tensor:
    return torch.stack([layer(x) for layer in layers]).sum(0)


def collected(x: Tensor, layers: nn.ModuleList) -> Tensor:
    """Use every layer's result at the end as well."""
    states = [x]
    for layer in layers:
        states.append(layer(states[-1]))
    return torch.cat(states, -1)


def skipped(x: Tensor, layers: nn.ModuleList) -> Tensor:
    """Use the first input in every layer."""
    y = x
    for layer in layers:
        y = layer(y + x)
    return y


def source(model: nn.Module, strategy: str) -> tuple[str, sw.Plan]:
    graph = sw.capture(model, (torch.ones(6, 6),))
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2))
    return sw.compile(graph, plan).source(0), plan


def test_equal_layers_in_turn_are_one_class_and_a_loop() -> None:
    text, _ = source(Stack((8, 8, 8), in_turn), "fsdp")
    assert text.count("class ") == 2
    assert "class Layer(nn.Module):" in text
    assert "for i in range(3):" in text
    assert text.count("F.layer_norm(") == 1


def test_a_first_layer_whose_input_has_no_gradient_may_differ() -> None:
    """The gradient of its norm reaches only parameters, and is reduced with their gradients."""
    text, _ = source(Stack((8, 8, 8), in_turn), "tensor")
    assert text.count("(nn.Module):") == 3
    assert "for i in range(1, 3):" in text


def test_layers_of_different_sizes_are_different_classes() -> None:
    text, _ = source(Stack((8, 8, 10), in_turn), "tensor")
    assert "class Layer(nn.Module):" in text
    assert "class Layer2(nn.Module):" in text


ORDERS = [in_turn, backwards, twice, side_by_side, collected, skipped]
GRID = [(order, strategy) for order in ORDERS for strategy in ("fsdp", "tensor")]


@pytest.mark.parametrize(
    ("order", "strategy"),
    thinned(GRID, lambda i, _: i % 2 == i // 2 % 2),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_any_order_of_layers_is_correct(order: Callable[..., Tensor], strategy: str) -> None:
    torch.manual_seed(0)
    model = Stack((8, 8, 8), order)
    _, plan = source(model, strategy)
    certificate = sw.verify(model, (torch.randn(5, 6),), plan)
    assert certificate.ok, str(certificate)


class Oddly(nn.Module):
    """Parameters in lists and dicts, with names that are not valid attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(6, 6) for _ in range(2)])
        self.vectors = nn.ParameterDict({"a-b": torch.randn(6), "class": torch.randn(6)})
        self.lines = nn.ModuleDict({"x-y": nn.Linear(6, 6), "for": nn.Linear(6, 6)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        x = self.lines["for"](self.lines["x-y"](x * self.vectors["a-b"]))
        return (x + self.vectors["class"]).pow(2).mean()


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


def sequential() -> nn.Module:
    """Return a sequential model of sequential blocks."""
    layers = [
        nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
        for _ in range(3)
    ]
    return nn.Sequential(*[nn.Sequential(layer, nn.GELU(), nn.Tanh()) for layer in layers], Last())


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.parametrize("make", [Oddly, sequential])
def test_members_without_a_valid_name(make: Callable[[], nn.Module], strategy: str) -> None:
    torch.manual_seed(0)
    model = make()
    _, plan = source(model, strategy)
    certificate = sw.verify(model, (torch.randn(5, 6),), plan)
    assert certificate.ok, str(certificate)
