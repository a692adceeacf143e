"""Models of `benchmarks.gpu`: a GPT of 1.3 billion parameters, six layers of Llama 3 8B, a ViT.

All are plain modules that return their loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import tokens

Batch = dict[str, Tensor]


class RMSNorm(nn.Module):
    """A norm with its statistics in float32, as Llama writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * values.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features by the angle of their position."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    length: int
    vocab: int


class DecoderBlock(nn.Module):
    """RMSNorm, rotary attention with grouped heads, and SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = size = sizes.width // sizes.heads
        self.norm1, self.norm2 = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.q = nn.Linear(sizes.width, sizes.heads * size, bias=False)
        self.k = nn.Linear(sizes.width, sizes.kv_heads * size, bias=False)
        self.v = nn.Linear(sizes.width, sizes.kv_heads * size, bias=False)
        self.o = nn.Linear(sizes.heads * size, sizes.width, bias=False)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, t, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList([DecoderBlock(sizes) for _ in range(sizes.layers)])
        self.norm = RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        size = sizes.width // sizes.heads
        angles = torch.arange(sizes.length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class VitBlock(nn.Module):
    """A pre-norm encoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Vit(nn.Module):
    """A vision transformer that returns its loss."""

    def __init__(self, *, layers: int, width: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.randn(1, 196, width) * 0.02)
        self.blocks = nn.ModuleList([VitBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def _decoder(sizes: Sizes, batch: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Decoder(sizes)
    return model, tokens(batch, sizes.length, sizes.vocab)


def gpt() -> tuple[nn.Module, Batch]:
    """Return a GPT of 1.3 billion parameters and 8 x 2048 tokens."""
    return _decoder(Sizes(24, 2048, 16, 16, 5504, 2048, 32000), 8)


def llama() -> tuple[nn.Module, Batch]:
    """Return six layers of Llama 3 8B with 128,256 classes and 2 x 8192 tokens."""
    return _decoder(Sizes(6, 4096, 32, 8, 14336, 8192, 128256), 2)


def small() -> tuple[nn.Module, Batch]:
    """Return a model of 8 layers of 512 and a batch of 8 x 256 tokens, limited by launches."""
    return _decoder(Sizes(8, 512, 8, 8, 1408, 256, 8192), 8)


def vit() -> tuple[nn.Module, Batch]:
    """Return a ViT-L/16 and 128 images."""
    torch.manual_seed(0)
    model = Vit(layers=24, width=1024, heads=16)
    return model, {"images": torch.randn(128, 3, 224, 224), "labels": torch.arange(128) % 1000}


def tiny() -> tuple[nn.Module, Batch]:
    """Return a decoder for a trial run on a CPU."""
    return _decoder(Sizes(3, 64, 4, 2, 176, 32, 512), 2)


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt": gpt,
    "llama": llama,
    "vit": vit,
    "small": small,
    "tiny": tiny,
}
