"""The planner's result is as fast as that of a brute force, for typical operators of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.ir import Graph
from tests.unit.planner.search.test_quality import ROWS, check


class Model(nn.Module):
    """Named layers, and a function of them."""

    def __init__(
        self, body: Callable[[Model, Tensor], Tensor], scale: int = 0, **layers: nn.Module
    ) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            setattr(self, name, layer)
        if scale:
            self.scale = nn.Parameter(torch.ones(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the shape of its input, and a cluster."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch row
    cluster: Cluster
    dtype: torch.dtype = torch.float32
    memory: float = 1.0  # fraction of the memory that an unrestricted plan uses

    def graph(self) -> Graph:
        with torch.device("meta"):
            model = self.model()
            return sw.capture(model, {"x": torch.zeros(ROWS, *self.shape, dtype=self.dtype)})


def convolved(net: Model, x: Tensor) -> Tensor:
    return net.b(F.relu(net.a(x))).mean()


def pooled(net: Model, x: Tensor) -> Tensor:
    return net.c(F.relu(net.a(x)).amax((2, 3))).logsumexp(-1).sum()


def attended(net: Model, x: Tensor) -> Tensor:
    attention = F.scaled_dot_product_attention(net.q(x), net.k(x), net.v(x), is_causal=True)
    return net.o(attention).sum()


def scored(net: Model, x: Tensor) -> Tensor:
    return net.head(net.norm(net.table(x))).logsumexp(-1).mean()


def tied(net: Model, x: Tensor) -> Tensor:
    return F.linear(net.a(net.table(x)), net.table.weight).logsumexp(-1).sum()


def scaled(net: Model, x: Tensor) -> Tensor:
    return net.a(x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * net.scale).sum()


def gated(net: Model, x: Tensor) -> Tensor:
    return (x + net.down(F.silu(net.gate(x)) * net.up(x))).sum()


def narrowing(net: Model, x: Tensor) -> Tensor:
    return net.d(F.gelu(net.c(F.gelu(net.b(net.a(x)))))).sum()


def stacked(net: Model, x: Tensor) -> Tensor:
    for layer in (net.a, net.b, net.c):
        x = F.gelu(layer(x))
    return x.sum()


def linear(wide: int, out: int) -> nn.Linear:
    return nn.Linear(wide, out, bias=False)


def _attention(width: int) -> Model:
    return Model(attended, **{name: linear(width, width) for name in "qkvo"})


def _stack(width: int) -> Model:
    return Model(stacked, **{name: linear(width, width) for name in "abc"})


SLOW = Cluster.preset("a100", nodes=4, devices_per_node=1, nic_gbit_per_s=10)
CASES = {
    "convolutions": Case(
        model=lambda: Model(convolved, a=nn.Conv2d(3, 256, 3), b=nn.Conv2d(256, 256, 3)),
        shape=(3, 64, 64),
        cluster=Cluster.preset("v100", nodes=1, devices_per_node=4),
    ),
    "pooling": Case(
        model=lambda: Model(pooled, a=nn.Conv2d(64, 512, 3), c=nn.Linear(512, 32768)),
        shape=(64, 16, 16),
        cluster=Cluster.preset("h100", nodes=2, devices_per_node=2),
    ),
    "attention": Case(
        model=lambda: _attention(1024),
        shape=(512, 1024),
        cluster=Cluster.preset("h100", nodes=1, devices_per_node=4),
    ),
    "attention on slow links": Case(model=lambda: _attention(2048), shape=(32, 2048), cluster=SLOW),
    "scores": Case(
        model=lambda: Model(
            scored, table=nn.Embedding(32768, 512), norm=nn.LayerNorm(512), head=linear(512, 32768)
        ),
        shape=(64,),
        dtype=torch.long,
        cluster=Cluster.preset("a100", nodes=1, devices_per_node=4),
    ),
    "tied embedding": Case(
        model=lambda: Model(tied, table=nn.Embedding(65536, 256), a=nn.Linear(256, 256)),
        shape=(16,),
        dtype=torch.long,
        cluster=Cluster.preset("a100", nodes=2, devices_per_node=2),
    ),
    "root mean square": Case(
        model=lambda: Model(scaled, scale=2048, a=linear(2048, 8192)),
        shape=(128, 2048),
        cluster=Cluster.preset("b200", nodes=1, devices_per_node=4),
    ),
    "gated": Case(
        model=lambda: Model(
            gated, gate=linear(1024, 4096), up=linear(1024, 4096), down=linear(4096, 1024)
        ),
        shape=(128, 1024),
        cluster=Cluster.preset("cpu", nodes=1, devices_per_node=4),
    ),
    "stages of unequal work": Case(
        model=lambda: Model(
            narrowing,
            a=linear(8192, 4096),
            b=linear(4096, 4096),
            c=linear(4096, 1024),
            d=linear(1024, 512),
        ),
        shape=(1, 8192),
        cluster=SLOW,
    ),
    "stages on two nodes": Case(
        model=lambda: _stack(4096),
        shape=(2, 4096),
        cluster=Cluster.preset("v100", nodes=2, devices_per_node=1, nic_gbit_per_s=10),
    ),
    "little memory for activations": Case(
        model=lambda: _stack(256),
        shape=(2048, 256),
        cluster=Cluster.preset("a100", nodes=1, devices_per_node=2),
        memory=0.6,
    ),
    "little memory for states": Case(
        model=lambda: _stack(4096),
        shape=(16, 4096),
        cluster=Cluster.preset("h100", nodes=2, devices_per_node=2),
        memory=0.5,
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_matches_brute_force(name: str) -> None:
    case = CASES[name]
    graph, memory_gib = case.graph(), None
    if case.memory < 1:
        free = sw.plan(graph, case.cluster, progress=False, all_devices=True)
        memory_gib = free.search.best.memory.peak_bytes / 2**30 * case.memory
    check(graph, case.cluster, memory_gib)
