"""Nodes are assigned to recomputation groups as the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.ir import Graph
from shardwise.program.recompute import PRODUCTS_KEPT, keeps_products, mark_recompute
from tests.support import zoo


def marked(model: nn.Module, batch: Any, recompute: Any) -> Graph:
    graph = sw.capture(model, batch)
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2)).with_(recompute=recompute)
    result = mark_recompute(graph, plan)
    assert mark_recompute(result, plan) == result
    return result


def groups(graph: Graph) -> dict[str, list[str]]:
    """Map each group to the operators of its nodes."""
    result: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.recompute:
            result.setdefault(node.recompute, []).append(node.op.split(".")[1])
    return result


class Layer(nn.Module):
    """A layer with an optional checkpoint around its inner half."""

    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.own = own

    def half(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x)) * 2.0

    def full(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        inner = checkpoint(self.half, x, use_reentrant=False) if self.own else self.half(x)
        return torch.tanh(self.down(inner))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.full(x)


class Stack(nn.Module):
    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(own) for _ in range(2))
        self.own = own

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.run, x, use_reentrant=False) if self.own == "all" else self.run(x)
        return x.pow(2).mean()


BATCH = (torch.ones(6, 6),)


def test_full_recomputes_every_node_of_a_block() -> None:
    graph = marked(Stack(), BATCH, "full")
    block = ["layer_norm", "linear", "relu", "mul", "linear", "tanh", "add"]
    assert groups(graph) == {"layers.0": block, "layers.1": block}


def test_code_of_a_block_in_its_parent_belongs_to_it() -> None:
    result = groups(marked(*zoo.build("fused_gpt"), "full"))
    assert list(result) == ["blocks.0", "blocks.1"]
    assert result["blocks.0"] == result["blocks.1"]
    assert (result["blocks.0"][0], result["blocks.0"][-1]) == ("layer_norm", "add")
    assert "scaled_dot_product_attention" in result["blocks.0"]


def test_selective_has_the_same_groups_as_full() -> None:
    full, selective = (groups(marked(Stack(), BATCH, mode)) for mode in ("full", "selective"))
    assert selective == {name + PRODUCTS_KEPT: ops for name, ops in full.items()}
    assert all(map(keeps_products, selective))
    assert not any(map(keeps_products, full))


def test_globs_select_the_outermost_module() -> None:
    graph = marked(Stack(), BATCH, ("layers.1*", "layers.0.[ud]*"))
    expected = {"layers.0.up": 1, "layers.0.down": 1, "layers.1": 7}
    assert {name: len(ops) for name, ops in groups(graph).items()} == expected


def test_a_glob_that_matches_no_module_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"did you mean 'layers\.0\.up'"):
        marked(Stack(), BATCH, ("layer.0.up",))


def test_checkpoints_of_the_model_are_preserved() -> None:
    inner = ["linear", "relu", "mul"]
    result = groups(marked(Stack("half"), BATCH, "none"))
    assert list(result.values()) == [inner, inner]
    assert groups(marked(Stack("half"), BATCH, ("layers.0",))) == {
        "layers.0": ["layer_norm", *inner, "linear", "tanh", "add"],
        "checkpoint_1": inner,
    }
    (full,) = groups(marked(Stack("all"), BATCH, "full")).values()
    assert len(full) == 14


class Counting(nn.Module):
    """A layer that divides by a buffer and then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.line(x)) / (self.scale + 1.0))
        with torch.no_grad():
            self.scale.mul_(0.5).add_(y.abs().mean(0))
        return x + y


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_nodes_that_read_a_changed_buffer_are_not_recomputed() -> None:
    graph = marked(Buffers(), (torch.randn(6, 6),), "full")
    scales = {b.value for b in graph.buffers if b.name.endswith("scale")}
    outside = [n for n in graph.nodes if n.module.startswith("layers") and not n.recompute]
    assert [n.op for n in outside] == ["aten.add.Tensor"] * 2
    assert all(scales.intersection(n.inputs) for n in outside)
    assert any("batch_norm" in n.op for n in graph.nodes if n.recompute)


@pytest.mark.parametrize("recompute", ["full", "selective", ("layers.*",)])
def test_buffers_change_once(recompute: Any) -> None:
    torch.manual_seed(0)
    model, batch = Buffers(), (torch.randn(6, 6),)
    graph = sw.capture(model, batch)
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2)).with_(recompute=recompute)
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.table(x).tanh()
        return self.line(x).pow(2).mean()


def test_nodes_without_gradients_are_not_recomputed() -> None:
    assert groups(marked(Frozen(), BATCH, ("table", "line"))) == {"line": ["linear"]}


def test_a_plan_without_units_notes_that_nothing_is_recomputed() -> None:
    model, batch = zoo.build("mlp")
    graph = sw.capture(model, batch)
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2)).with_(recompute="full")
    notes = sw.compile(graph, plan).lowered.notes
    assert "recompute 'full': the plan has no units, nothing is recomputed" in notes
