"""Predicted memory is that of single ranks of large plans on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from benchmarks.memory import LLAMA_8B, SingleRank, make_batch, make_model, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SMALL = {
    **LLAMA_8B, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 8, "num_attention_heads": 16,
}  # fmt: skip
PLANS: list[tuple[str, int, dict[str, Any]]] = [
    ("fsdp", 8, {}),
    ("fsdp", 8, {"recompute": "full"}),
    ("hybrid", 64, {"dp": 8, "tp": 8, "zero": 1, "num_microbatches": 2}),
    ("hybrid", 64, {"dp": 4, "tp": 4, "pp": 4, "num_microbatches": 8}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "ranks", "options"), PLANS)
def test_the_peak_of_a_rank(strategy: str, ranks: int, options: dict[str, Any]) -> None:
    model, batch = make_model(SMALL), make_batch(32, 2048, 32000)
    cluster = sw.Cluster.preset("h200", nodes=ranks // 8)
    plan = getattr(sw.strategies, strategy)(
        sw.capture(model, batch), cluster, precision="bf16", **options
    )
    graph = sw.capture(model, batch, plan=plan)
    use = sw.simulate(graph, plan, cluster).memory[0]
    torch.cuda.empty_cache()
    one = SingleRank(graph, plan, 0, "cuda")
    try:
        measurement = measure(one, batch)
    finally:
        one.close()
    workspace = 100 << 20  # of cuBLAS
    assert (
        abs(use.peak_bytes - measurement["measured"]) <= 0.05 * measurement["measured"] + workspace
    )
    assert measurement["context"] <= cluster.device(0).reserved_bytes
