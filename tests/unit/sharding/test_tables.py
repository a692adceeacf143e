"""Tables that depend on no input are computed only in the shards that are used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.plans import resolve
from shardwise.program.lower import lower_place
from shardwise.program.pipeline import build_pipeline

ROWS, LENGTH, WIDTH = 6, 8, 16


class Masked(nn.Module):
    """Attention under a mask of `rows x length x length`, as some libraries write it."""

    def __init__(self, full_use: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.full_use = full_use

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        at = torch.arange(length).unsqueeze(0).expand(rows, -1)
        kind = at.cumsum(1) % 2
        row = torch.arange(rows)[:, None, None]
        equal = kind[row, at[0][:, None]] == kind[row, at[0][None, :]]
        mask = equal & (at[:, None, :] <= at[:, :, None])
        q, k, v = self.inner(x).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.full_use:
            y = y * mask.sum()
        return self.outer(y).square().mean()


def largest_table(plan: sw.Plan, model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Return the number of elements of the largest mask in a rank's program."""
    program = lower_place(resolve(sw.capture(model, batch), plan), 0)
    return max(v.type.numel for v in program.values.values() if v.type.dtype == torch.bool)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mask_is_computed_for_the_rows_of_a_rank(ranks: int) -> None:
    model, batch = Masked(), {"x": torch.randn(ROWS, LENGTH, WIDTH)}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(ranks))
    assert largest_table(plan, model, batch) == -(-ROWS // ranks) * LENGTH * LENGTH
    assert sw.verify(model, batch, plan).ok


def test_a_mask_with_other_uses_is_computed_in_full() -> None:
    model, batch = Masked(full_use=True), {"x": torch.randn(ROWS, LENGTH, WIDTH)}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    assert largest_table(plan, model, batch) == ROWS * LENGTH * LENGTH
    assert sw.verify(model, batch, plan).ok


def test_micro_batches_of_a_mask() -> None:
    model, batch = Masked(), {"x": torch.randn(ROWS, LENGTH, WIDTH)}
    graph = sw.capture(model, batch)
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2), num_microbatches=3)
    (stage,) = build_pipeline(graph, plan).stages
    values = stage.program.rank_programs[0].values.values()
    assert max(v.type.numel for v in values if v.type.dtype == torch.bool) == LENGTH * LENGTH
    assert sw.verify(model, batch, plan).ok
