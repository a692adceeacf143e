"""Right plans are never called wrong: models of the zoo, split over batch and parameters."""

from __future__ import annotations

import pytest

import shardwise as sw
from tests.support import zoo

QUICK = ("mlp", "resnet", "unet", "fused_gpt", "dlrm")
MANY = ("gpt2", "llama", "qwen2", "phi3", "bloom", "opt", "bert", "t5", "vit", "convnext", "gptj")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)]
)
def test_two_ranks_equal_one(name: str, strategy: str) -> None:
    model, batch = zoo.build(name)
    plan = getattr(sw.strategies, strategy)(sw.capture(model, batch), sw.Cluster.local(2))
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)
    assert certificate.first_difference is None
    assert certificate.scaled == ()
