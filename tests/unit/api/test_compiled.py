"""A compiled program depends only on its graph and plan, not on earlier compilations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


def function(factor: float) -> Any:
    """An autograd function; all have the same name."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * factor

    return Scaled


class Model(nn.Module):
    def __init__(self, scaled: Any) -> None:
        super().__init__()
        parts = lambda: (nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))  # noqa: E731
        self.layers = nn.ModuleList([nn.Sequential(*parts(), *parts()) for _ in range(2)])
        self.register_buffer("offset", torch.ones(6))
        self.scaled = scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + self.offset
        return self.scaled.apply(x).pow(2).mean()


def captured(factor: float = 2.0) -> sw.Graph:
    return sw.capture(Model(function(factor)), (torch.ones(4, 6),))


def changed(what: str, graph: sw.Graph) -> sw.Graph:
    """The same computation, told in another way."""
    if what == "place":
        return replace(graph, nodes=tuple(replace(n, source="other.py:7") for n in graph.nodes))
    if what == "class":
        return replace(graph, nodes=tuple(replace(n, module_class="Other") for n in graph.nodes))
    if what == "block":
        return replace(graph, module_classes=dict.fromkeys(graph.module_classes, "Other"))
    assert what == "persistence"
    return replace(graph, buffers=tuple(replace(b, persistent=False) for b in graph.buffers))


@pytest.mark.parametrize("what", ["place", "class", "block", "persistence"])
def test_graphs_with_equal_fingerprints_may_have_different_code(what: str) -> None:
    graph = captured()
    other = changed(what, graph)
    assert graph.fingerprint == other.fingerprint
    plan = sw.strategies.fsdp(graph, sw.Cluster.local(2))
    assert sw.compile(graph, plan).source() != sw.compile(other, plan).source()


def test_functions_with_equal_names_are_distinguished() -> None:
    graph, other = captured(2.0), captured(3.0)
    plan = sw.strategies.fsdp(graph, sw.Cluster.local(2))
    for each in (graph, other):
        assert sw.compile(each, plan).graph.functions == each.functions


def test_the_same_graph_is_compiled_once() -> None:
    graph = captured()
    plan = sw.strategies.fsdp(graph, sw.Cluster.local(2))
    assert sw.compile(graph, plan) is sw.compile(replace(graph), plan)


def test_a_rule_registered_later_recompiles() -> None:
    @torch.library.custom_op("test_compiled::center", mutates_args=())
    def center(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True)

    center.register_fake(torch.empty_like)
    center.register_autograd(lambda ctx, grad: grad - grad.mean(dim=1, keepdim=True))

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return center(self.linear(x)).pow(3).mean()

    def source(rule: str) -> str:
        sw.register_rule("test_compiled::center", rule)
        graph = sw.capture(Centered(), (torch.ones(5, 4),))
        plan = sw.strategies.tensor(graph, sw.Cluster.local(2))
        return sw.compile(graph, plan).source(0)

    assert "rt.gather" not in source("b n -> b n")
    assert "rt.gather" in source("b n^ -> b n^")
