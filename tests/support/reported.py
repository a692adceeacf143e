"""A small model for reports, with equal blocks and a module whose name is markup."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, ROWS = 32, 4, 8
HOSTILE = '<script>"\u202e'


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """A language model; the name of its last module is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.add_module(HOSTILE, nn.Linear(WIDTH, 64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(getattr(self, HOSTILE)(x).flatten(0, 1), labels.flatten())
