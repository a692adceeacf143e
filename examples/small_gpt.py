"""A small GPT with a fused QKV projection and tied embeddings, written for one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A GPT that returns the mean loss over labelled tokens."""

    def __init__(self, vocab: int = 211, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make(seed: int = 0) -> tuple[SmallGPT, dict[str, Tensor]]:
    """Return the model, and a batch whose rows ignore different numbers of labels."""
    torch.manual_seed(seed)
    return SmallGPT(), batch(seed)


def batch(seed: int, rows: int = 8, length: int = 32) -> dict[str, Tensor]:
    """Return rows of consecutive numbers, which can be learned in a few steps."""
    start = torch.randint(0, 100, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = start + torch.arange(length + 1)
    labels = ids[:, 1:].clone()
    for row in range(rows):
        labels[row, :row] = -100
    return {"ids": ids[:, :-1].contiguous(), "labels": labels}
