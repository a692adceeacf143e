"""With a loss function, a batch may contain targets that the model does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale


X, Y = torch.randn(8, 6), torch.arange(8) % 3


@pytest.mark.parametrize(
    ("batch", "target"),
    [((X, 0.5, Y), 2), ({"x": X, "y": Y}, "y"), ({"y": Y, "x": X, "weights": X}, "y")],
)
def test_the_model_gets_only_the_arguments_of_its_forward(batch: Any, target: Any) -> None:
    def loss(out: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(out, batch[target])

    graph = sw.capture(Net(), batch, loss)
    for strategy in (sw.strategies.ddp, sw.strategies.tensor):
        plan = strategy(graph, sw.Cluster.local(2))
        assert sw.verify(Net(), batch, plan, loss).ok


def test_without_a_loss_function_the_model_gets_the_full_batch() -> None:
    with pytest.raises(sw.errors.CaptureError, match="unexpected keyword argument 'y'"):
        sw.capture(Net(), {"x": X, "y": Y})
