"""A plan made for one batch is used with others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import shardwise as sw
from tests.support.pool import Pool
from tests.support.training import assert_close, make, plan_for, tokens

pytestmark = pytest.mark.distributed

CUTS = {  # of a batch of 7 rows and 5 columns
    "rows": ("shard b2", "shard g0_0", "shard n0:[7]x5"),
    "columns": ("shard b1", "shard g0_1", "shard n0:7x[5]"),
}


def other_batches(cut: str) -> None:
    model, batch = make("odd")
    plan = plan_for(model, batch, "tensor", 2)
    keys = ("head.linear_0", "flatten", "cross_entropy_loss")
    forced = {key: {"tp": choice} for key, choice in zip(keys, CUTS[cut], strict=True)}
    pm = sw.parallelize(model, batch, plan=plan.with_(nodes={**plan.nodes, **forced}))
    for rows, columns in ((7, 5), (4, 5), (3, 6), (1, 5), (1, 3)):
        batch = tokens(rows, columns, 13)
        reference, _ = make("odd")
        loss = reference(**batch)["loss"]
        loss.backward()
        assert_close(pm.train_step(batch), loss.detach(), f"loss of {rows} x {columns}")
        expected = {name: p.grad for name, p in reference.named_parameters()}
        for name, gradient in pm.gather_gradients().items():
            assert_close(gradient, expected[name], f"{rows} x {columns}: {name}")
        pm.zero_grad()


@pytest.mark.parametrize("cut", CUTS)
def test_a_plan_that_shards_activations_accepts_other_batches(
    pool: Callable[[int], Pool], cut: str
) -> None:
    pool(2).run(other_batches, cut, timeout=110)
