"""Two linear layers, and a batch of 7 rows that ranks cannot split evenly."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Two layers that return the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - y).pow(2).mean()


def make() -> tuple[MLP, dict[str, Tensor]]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return MLP(), {"x": torch.randn(7, 6), "y": torch.randn(7, 3)}
