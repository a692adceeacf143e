"""The models of `benchmarks.reality`, small enough for processes of one thread each.

A GPT with much compute per parameter; a convolutional network whose few dense layers have nearly
all parameters, so that no single strategy suits all of it; and a vision transformer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GPT, Block, tokens

Made = tuple[nn.Module, dict[str, Tensor]]


class Wide(nn.Module):
    """Convolutions on large images, then dense layers: the shape of AlexNet and VGG."""

    def __init__(self, *, channels: int, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)]
        )
        self.up = nn.Linear(channels * 16, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(pixels))
        for block in self.blocks:
            x = F.relu(x + block(x))
        x = F.avg_pool2d(x, x.shape[-1] // 4)
        x = F.relu(self.middle(F.relu(self.up(x.flatten(1)))))
        return F.cross_entropy(self.head(x), labels)


class ViT(nn.Module):
    """A vision transformer that returns its loss."""

    def __init__(self, *, layers: int, width: int, heads: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def gpt() -> Made:
    """Return a GPT of 4 layers of 256, and a batch of 32 sequences of 64."""
    torch.manual_seed(0)
    model = GPT(layers=4, width=256, heads=8, length=64, vocab=2048)
    return model, tokens(32, 64, 2048)


def wide() -> Made:
    """Return 4 convolutions of 32 channels with dense layers of 4096, and a batch of 32 images."""
    torch.manual_seed(0)
    model = Wide(channels=32, layers=4, width=4096, classes=1024)
    return model, _images(32, 64, 1024)


def vit() -> Made:
    """Return a ViT of 4 layers of 192, and a batch of 32 images of 64 patches."""
    torch.manual_seed(0)
    return ViT(layers=4, width=192, heads=6, patch=4, classes=100), _images(32, 32, 100)


def _images(batch: int, size: int, classes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    return {"pixels": pixels, "labels": torch.arange(batch) % classes}


MODELS: dict[str, Callable[[], Made]] = {"gpt": gpt, "wide": wide, "vit": vit}
