"""Parameters that several stages use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.plans import ParameterEntry
from shardwise.program import build_pipeline


class Tied(nn.Module):
    """A model whose embedding table is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x @ self.table.weight.T).logsumexp(-1).mean()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_stages_of_the_same_ranks_store_a_parameter_in_one_layout(zero: int) -> None:
    graph = sw.capture(Tied(), {"tokens": torch.zeros(8, 3, dtype=torch.int64)})
    plan = sw.strategies.hybrid(
        graph, Cluster.local(4), dp=2, pp=2, schedule="zb_v", num_microbatches=4
    )
    names = [p.name for p in graph.parameters]
    plan = plan.with_(parameters={name: ParameterEntry(zero=zero) for name in names})
    pipeline = build_pipeline(graph, plan)
    stored = [
        storage
        for stage in pipeline.stages
        for storage in stage.program.rank_programs[0].parameters
        if storage.name == "table.weight"
    ]
    assert len(stored) == 2
    assert stored[0] == stored[1]
    assert stored[0].zero == zero
