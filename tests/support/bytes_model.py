"""A small language model that learns in 200 steps, for comparisons of dtypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwise as sw

VOCAB, LENGTH, ROWS = 32, 8, 16


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, 2, width // 2).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class SmallGPT(nn.Module):
    """Two blocks between an embedding and an untied head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(LENGTH, device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch(step: int) -> dict[str, Tensor]:
    """Return tokens, and labels that are a function of them except for 30 % noise."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    other = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    noise = torch.rand(ROWS, LENGTH, generator=generator) < 0.3
    return {"ids": ids, "labels": torch.where(noise, other, (3 * ids + 1) % VOCAB)}


def train(
    precision: str | None, strategy: str, ranks: int, steps: int = 200, **options: object
) -> list[float]:
    """Return the losses of training under a plan."""
    torch.manual_seed(0)
    model = SmallGPT()
    graph = sw.capture(model, batch(0))
    make = getattr(sw.strategies, strategy)
    plan = make(graph, sw.Cluster.local(ranks), precision=precision, **options)
    pm = sw.parallelize(model, batch(0), plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=2e-3)
    losses = []
    for step in range(steps):
        losses.append(pm.train_step(batch(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
