"""Operators that depend on memory: those that return their operand, and views by strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.support import zoo


class Biased(nn.Module):
    """Use a bias of all heads in two layers; `contiguous` copies it unless there is one head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3)[:, None, None])

    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        bias = self.table(places).permute(2, 0, 1)
        first = (x * self.scale + bias.contiguous()).softmax(-1)
        return ((first + 2 * bias.contiguous()) * self.scale).square().mean()


def test_an_operator_may_copy_on_some_ranks_and_return_its_operand_on_others() -> None:
    places = torch.arange(16).remainder(5).view(4, 4)
    model, batch = Biased(), {"places": places, "x": torch.linspace(-1, 1, 48).view(3, 4, 4)}
    graph = sw.capture(model, batch)
    heads = {"table.weight": {"tp": "1"}, "scale": {"tp": "0"}}
    plan = sw.strategies.tensor(graph, sw.Cluster.local(2), constraints=heads)
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, certificate


class Views(nn.Module):
    """View the heads of fused attention as one dim, which its strides allow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).view(x.shape).square().mean()


def test_views_may_rely_on_the_strides_of_fused_attention() -> None:
    model, batch = Views(), {"x": torch.linspace(-1, 1, 96).view(4, 3, 8)}
    plan = sw.strategies.tensor(sw.capture(model, batch), sw.Cluster.local(2))
    assert sw.verify(model, batch, plan).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [("cohere2", "tensor", {}), ("helium", "pipeline", {"pp": 2, "num_microbatches": 2})],
)
def test_the_gradient_of_an_operator_without_effect_is_not_compared(
    name: str, strategy: str, options: dict[str, int]
) -> None:
    model, batch = zoo.build(name)
    graph = sw.capture(model, batch)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2), **options)
    assert sw.verify(model, batch, plan).ok
