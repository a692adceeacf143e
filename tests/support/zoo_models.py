"""Models of the zoo in plain PyTorch, other than those of transformers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, widths=(20, 64, 64, 7)):
        super().__init__()
        self.layers = nn.Sequential(
            *[m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU())][:-1]
        )

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


class ResNet(nn.Module):
    """Convolutions, batch norm with running statistics, residuals, pooling, in-place ReLU."""

    def __init__(self, width=16, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width, 3, padding=1),
                )
                for _ in range(3)
            ]
        )
        self.head = nn.Linear(width, classes)

    def forward(self, pixel_values, labels):
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = x + block(x)
        x = nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return nn.functional.cross_entropy(self.head(x), labels)


class UNet(nn.Module):
    """Long skip connections: values that outlive many layers."""

    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        )
        self.mid = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.out = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x, target):
        a = nn.functional.silu(self.down1(x))
        b = nn.functional.silu(self.mid(nn.functional.silu(self.down2(a))))
        y = self.out(self.norm(torch.cat([a, self.up(b)], 1)))
        return (y - target).pow(2).mean()


class FusedGPT(nn.Module):
    """Fused QKV by chunk, tied embedding; the loss is a sum over unmasked tokens and a count."""

    def __init__(self, vocab=211, dim=64, heads=4, layers=2, length=32):
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "n1": nn.LayerNorm(dim),
                        "qkv": nn.Linear(dim, 3 * dim),
                        "o": nn.Linear(dim, dim),
                        "n2": nn.LayerNorm(dim),
                        "up": nn.Linear(dim, 4 * dim),
                        "down": nn.Linear(4 * dim, dim),
                    }
                )
                for _ in range(layers)
            ]
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.02)

    def forward(self, input_ids, labels):
        b, t = input_ids.shape
        x = self.tok(input_ids) + self.pos(torch.arange(t, device=input_ids.device))
        for p in self.blocks:
            q, k, v = (
                u.view(b, t, self.heads, -1).transpose(1, 2)
                for u in p["qkv"](p["n1"](x)).chunk(3, dim=-1)
            )
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + p["o"](a.transpose(1, 2).reshape(b, t, -1))
            x = x + p["down"](nn.functional.gelu(p["up"](p["n2"](x))))
        logits = self.head(self.norm(x))
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
        )
        return losses.sum() / (labels != -100).sum()


class DLRM(nn.Module):
    """Recommendation: embedding tables far larger than the rest, pairwise interactions."""

    def __init__(self, rows=(1009, 503, 97), dim=16):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(r, dim) for r in rows])
        self.bottom, self.top = nn.Linear(13, dim), nn.Linear(dim + 6, 1)

    def forward(self, dense, sparse, label):
        x = torch.relu(self.bottom(dense))
        vectors = torch.stack([x] + [t(sparse[:, i]) for i, t in enumerate(self.tables)], 1)
        inter = vectors @ vectors.transpose(1, 2)
        i, j = torch.triu_indices(4, 4, 1)
        return nn.functional.binary_cross_entropy_with_logits(
            self.top(torch.cat([x, inter[:, i, j]], 1)).squeeze(1), label
        )
