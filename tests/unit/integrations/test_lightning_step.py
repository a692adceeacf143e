"""Steps of LightningModules that change Python state are refused with the user's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CaptureError

lightning = pytest.importorskip("lightning")
step = pytest.importorskip("shardwise.integrations.lightning.step")


class Counting(lightning.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 1), kind
        self.counter, self.stats, self.recent = 0, {"steps": 0}, [1, 2]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.print_state()
        if self.kind == "counter":
            self.counter += 1
        elif self.kind == "stats":
            self.stats["steps"] = self.stats["steps"] + 1
        elif self.kind == "recent":
            self.recent.pop()
        else:
            self.created = 1
        return self.layer(batch).square().mean()

    def print_state(self) -> None:
        assert self.counter >= 0 <= self.stats["steps"] <= len(self.recent)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("counter", "self.counter += 1"),
        ("stats", 'self.stats["steps"] = self.stats["steps"] + 1'),
        ("recent", "self.recent.pop()"),
        ("created", "self.created = 1"),
    ],
)
def test_a_change_of_python_state_is_refused_with_its_line(kind: str, line: str) -> None:
    model = step.step_model(Counting(kind))
    batch = step.step_batch("training", torch.randn(4, 4))
    with pytest.raises(CaptureError, match=rf"the step changes self\.{kind}") as raised:
        sw.capture(model, batch)
    assert str(raised.value.where).endswith(f": {line}")
