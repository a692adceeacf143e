"""Attributes of the model that was given to parallelize, between steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwise as sw


class Writing(nn.Module):
    """Assigns a tensor, a number and a lazily made table to attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).tanh()
        self.last = hidden.detach().mean()
        self.length = x.shape[0]
        self.mean = hidden.mean()  # a new attribute
        if not hasattr(self, "table"):
            self.table = torch.arange(4.0)
        return (hidden + self.table).square().mean()


def test_attributes_that_steps_do_not_assign_are_refused_when_used() -> None:
    model, batch = Writing(), {"x": torch.randn(3, 4)}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(1))
    pm = sw.parallelize(model, batch, plan)
    pm.train_step(batch)
    uses = [
        lambda: model.last + 1,
        lambda: torch.norm(model.last),
        lambda: model.last.item(),
        lambda: model.last == 0.5,
        lambda: float(model.last),
        lambda: f"{model.last:.3f}",
    ]
    for use in uses:
        with pytest.raises(sw.errors.ProgramError, match="the attribute last") as raised:
            use()
        assert "self.last = hidden.detach().mean()" in str(raised.value)
    assert "not computed" in repr(model.last)
    copy.deepcopy(model)

    assert model.length == 3  # a plain value that all programs assign
    pm.train_step({"x": torch.randn(5, 4)})
    with pytest.raises(sw.errors.ProgramError, match="the attribute length"):
        print(model.length + 1)

    with pytest.raises(sw.errors.ProgramError, match="the attribute mean"):
        print(model.mean + 1)
    assert not hasattr(model, "table")
    with pytest.warns(UserWarning, match="trains a copy of it"):
        model(**batch)
    assert model.last.shape == ()  # the model's own forward assigns them as before
