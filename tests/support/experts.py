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


class Block(nn.Module):
    """Causal attention with 6 heads and 3 key heads, and 5 experts."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value, self.router = nn.Linear(width, width), nn.Linear(width, 5)
        self.up = nn.Parameter(torch.randn(5, 14, width) / 4)
        self.down = nn.Parameter(torch.randn(5, width, 14) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query = self.query(y).unflatten(-1, (6, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (3, -1)).transpose(1, 2) for part in self.key_value(y).chunk(2, -1)
        )
        y = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        order, counts = route(ids, 5)
        rows = nn.functional.silu(grouped_linear(dispatch(tokens, order, 2), self.up, counts))
        rows = grouped_linear(rows, self.down, counts)
        return x + (collect(rows, order, ids) * weights.unsqueeze(-1)).sum(1).view_as(x)


class Language(nn.Module):
    """Blocks with experts between an embedding and a head, of sizes that do not divide."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(31, 12), nn.Embedding(16, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(12, 31)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)


def make_language(rows: int = 7) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a language model with experts, and sequences of 11 tokens."""
    torch.manual_seed(0)
    ids = torch.randint(31, (rows, 11))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return Language(), {"ids": ids, "labels": labels}
