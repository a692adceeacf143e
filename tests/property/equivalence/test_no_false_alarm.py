"""Correct plans of zoo models pass verification."""

from __future__ import annotations

import pytest

import shardwise as sw
from tests.support import zoo
from tests.support.tiers import thinned

QUICK = ("mlp", "resnet", "unet", "fused_gpt", "dlrm")
MANY = ("gpt2", "llama", "qwen2", "phi3", "bloom", "opt", "bert", "t5", "vit", "convnext", "gptj")


GRID = [(name, strategy) for name in (*QUICK, *MANY) for strategy in ("ddp", "tensor")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "strategy"), thinned(GRID, lambda i, case: case[0] in QUICK and i % 2 == i // 2 % 2)
)
def test_two_ranks_equal_one(name: str, strategy: str) -> None:
    model, batch = zoo.build(name)
    plan = getattr(sw.strategies, strategy)(sw.capture(model, batch), sw.Cluster.local(2))
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)
    assert certificate.first_difference is None
    assert certificate.scaled == ()
