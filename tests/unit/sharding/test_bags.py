"""Bags of embeddings are sharded over the batch, over features, and over rows of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.plans import ParameterEntry

Plan = Callable[[sw.Graph], sw.Plan]


class Bags(nn.Module):
    def __init__(self, mode: str = "sum", padding: int | None = None, last: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(
            50, 6, mode=mode, sparse=mode != "max", padding_idx=padding, include_last_offset=last
        )
        self.out = nn.Linear(6, 4)

    def forward(
        self, x: Tensor, y: Tensor, offsets: Tensor | None = None, scales: Tensor | None = None
    ) -> Tensor:
        rows = self.bag(x, offsets, per_sample_weights=scales)
        return nn.functional.cross_entropy(self.out(rows), y)


def case(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    mode, padding = {"mean": "mean", "max": "max"}.get(name.split()[0], "sum"), None
    if "padding" in name:
        padding = 3
    matrix = "matrix" in name
    x = torch.randint(0, 7 if padding else 50, (8, 5) if matrix else (31,))
    batch = {"x": x, "y": torch.randint(0, 4, (8 if matrix else 6,))}
    if not matrix:
        batch["offsets"] = torch.tensor([0, 3, 9, 9, 20, 25, *([31] if "last" in name else [])])
    if "scales" in name:
        batch["scales"] = torch.randn(x.shape)
    return Bags(mode, padding, "last" in name), batch


CASES = ["sum matrix", "mean matrix padding", "max matrix", "sum matrix scales", "mean ranges"]
CASES += ["sum ranges last padding", "sum ranges scales", "mean ranges padding", "max ranges"]


def rows(sync: sw.Sync | None = None) -> ParameterEntry:
    return ParameterEntry(layout={"tp": "0"}, sync=sync)


def ddp(**fields: Any) -> Plan:
    sync = sw.Sync(**fields)
    return lambda g: sw.strategies.ddp(g, sw.Cluster.local(3), constraints={"bag.*": sync})


PLANS: dict[str, Plan] = {
    "ddp": ddp(),
    "micro-batches": lambda g: sw.strategies.ddp(g, sw.Cluster.local(2), num_microbatches=2),
    "features": lambda g: sw.strategies.tensor(g, sw.Cluster.local(3)),
    "rows": lambda g: sw.strategies.tensor(
        g, sw.Cluster.local(3), constraints={"bag.weight": rows()}
    ),
    "batch and rows": lambda g: sw.strategies.hybrid(
        g,
        sw.Cluster.local(4),
        dp=2,
        tp=2,
        constraints={"bag.weight": rows(sw.Sync(sparse="gather"))},
    ),
    "gathered": ddp(sparse="gather"),
    "owner": ddp(kind="owner", owner=1, sparse="rows"),
    "partitioned": ddp(kind="partitioned", dim=0, sparse="rows"),
}
EVERYDAY = {("sum matrix", "ddp"), ("mean ranges padding", "batch and rows")}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) in EVERYDAY else pytest.mark.slow)
        for name in CASES
        for plan in PLANS
    ],
)
def test_equals_the_model(name: str, plan: str) -> None:
    model, batch = case(name)
    certificate = sw.verify(model, batch, PLANS[plan](sw.capture(model, batch)))
    assert certificate.ok, certificate


def test_each_rank_looks_up_its_own_bags() -> None:
    for name, text in (("sum matrix", "input x: dp:S(0)"), ("mean ranges", "bag_axis=dp")):
        model, batch = case(name)
        graph = sw.capture(model, batch)
        program = str(sw.compile(graph, PLANS["ddp"](graph)))
        assert text in program
        assert "rt.take" not in program
