"""Every rank computes values of parameters alone in full, and their gradients are partial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.ir import Graph
from tests.support.tiers import thinned


class Net(nn.Module):
    """A function of an input, a table, matrices and a scale."""

    def __init__(self, body: Callable[..., Tensor], width: int = 8) -> None:
        super().__init__()
        self.body = body
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / width**0.5)

        self.table, self.w = parameter(6, width), parameter(width, width)
        self.up, self.down, self.scale = parameter(width, 2), parameter(2, width), parameter(width)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        return self.body(self, x, places)


def positions(net: Net, x: Tensor, _: Any) -> Tensor:
    return F.linear(x + F.embedding(torch.arange(6), net.table), net.w).square().mean()


def given_positions(net: Net, x: Tensor, places: Tensor) -> Tensor:
    return F.linear(x + F.embedding(places, net.table).tanh(), net.w).square().mean()


def rotary(net: Net, x: Tensor, _: Any) -> Tensor:
    angles = torch.outer(torch.arange(6, dtype=x.dtype), net.scale)
    return F.linear(x * angles.cos() + x.flip(-1) * angles.sin(), net.w).square().mean()


def weight_norm(net: Net, x: Tensor, _: Any) -> Tensor:
    return F.linear(x, net.w / net.w.norm(dim=1, keepdim=True) * net.scale[:, None]).square().mean()


def low_rank(net: Net, x: Tensor, _: Any) -> Tensor:
    return F.linear(x, net.w + 0.5 * net.up @ net.down).square().mean()


def tied(net: Net, x: Tensor, _: Any) -> Tensor:
    w = net.w * net.scale
    return F.linear(F.linear(x, w).relu(), w.t()).square().mean()


def bias_mlp(net: Net, x: Tensor, _: Any) -> Tensor:
    bias = F.linear(F.linear(net.table, net.w).relu(), net.w).sigmoid()
    return (F.linear(x, net.w).softmax(-1) * bias).square().mean()


def queries(net: Net, x: Tensor, _: Any) -> Tensor:
    start = net.table.unsqueeze(0).repeat(x.shape[0], 1, 1)
    mixed = F.linear(start, net.w).relu()
    return F.scaled_dot_product_attention(mixed, x, x).square().mean()


CHAINS = [
    positions, given_positions, rotary, weight_norm, low_rank, tied, bias_mlp, queries,
]  # fmt: skip


def batch(body: Callable[..., Tensor], width: int = 8) -> tuple[Tensor, ...]:
    x = torch.randn(6, 6, width, generator=torch.Generator().manual_seed(1))
    return (x, torch.arange(6).flip(0)[None]) if body is given_positions else (x,)


def communicated(graph: Graph, plan: sw.Plan) -> list[str]:
    """Return the values that a step communicates over `dp`, except the loss."""
    program = sw.compile(graph, plan).lowered.of_rank(0)
    return [
        f"{step.fn} {program.values[step.inputs[0]].value}"
        for step in program.steps
        if step.is_move
        and "dp" in step.axes
        and step.fn != "rt.take"
        and program.values[step.inputs[0]].value != graph.loss
    ]


@pytest.mark.parametrize("body", thinned(CHAINS, lambda i, _: i % 2 == 0))
def test_only_gradients_and_the_loss_are_communicated(body: Callable[..., Tensor]) -> None:
    net, data = Net(body), batch(body)
    graph = sw.capture(net, data)
    plans = [sw.strategies.zero2(graph, sw.Cluster.local(3))]
    plans.append(sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2))
    for plan in plans:
        assert communicated(graph, plan) == []
        certificate = sw.verify(net, data, plan)
        assert certificate.ok, str(certificate)


def large(net: Net, x: Tensor, _: Any) -> Tensor:
    """Many multiply-adds for each byte of the result."""
    weight = (net.table @ net.w).relu() @ net.up
    return F.linear(x[..., :2], weight).square().mean()


@pytest.mark.parametrize("width", [8, 8192])
def test_a_large_computation_is_sharded(width: int) -> None:
    with torch.device("meta"):
        graph = sw.capture(Net(large, width), (torch.empty(4096, 6, width),))
    moves = communicated(graph, sw.strategies.ddp(graph, sw.Cluster.local(2)))
    assert [move.split()[0] for move in moves] == ["rt.gather_fanout"] * (width > 8)


def halves(net: Net, x: Tensor, _: Any) -> Tensor:
    """Use one half of a parameter with the batch, and the other equally on every rank."""
    one, other = net.w.chunk(2)
    return F.linear(x, one).square().mean() + other.square().mean()


def test_halves_of_a_parameter_may_have_different_uses() -> None:
    net, data = Net(halves), batch(halves)
    plan = sw.strategies.ddp(sw.capture(net, data), sw.Cluster.local(2))
    certificate = sw.verify(net, data, plan)
    assert certificate.ok, str(certificate)
