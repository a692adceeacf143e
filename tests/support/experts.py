"""A small mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.routing import collect, dispatch, grouped_linear, route


class Experts(nn.Module):
    """Experts of which each token uses two; `chosen` sends all tokens to one expert."""

    def __init__(self, experts: int, chosen: int | None = None, width: int = 4) -> None:
        super().__init__()
        self.router, self.num_experts, self.chosen = nn.Linear(width, experts), experts, chosen
        self.up = nn.Parameter(torch.randn(experts, width + 2, width))
        self.down = nn.Parameter(torch.randn(experts, width, width + 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        if self.chosen is not None:
            ids = torch.full_like(ids, self.chosen)
        order, counts = route(ids, self.num_experts)
        rows = grouped_linear(dispatch(x, order, 2), self.up, counts).tanh()
        rows = grouped_linear(rows, self.down, counts)
        x = x + (collect(rows, order, ids) * weights.unsqueeze(-1)).sum(1)
        return nn.functional.mse_loss(x, y)


def make(experts: int, rows: int = 7, chosen: int | None = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Experts(experts, chosen), {"x": torch.randn(rows, 4), "y": torch.randn(rows, 4)}
