"""Micro-batches equal the full batch for any loss; models that couple samples are rejected."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import InfeasiblePlan
from tests.support.tiers import thinned

WORDS = 20


class Words(nn.Module):
    """A small model with a choice of losses."""

    def __init__(self, kind: str, norm: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8) if norm else None
        self.register_buffer("weights", torch.linspace(0.5, 1.5, WORDS))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(x)))
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        scores, flat = self.head(x), labels.flatten()
        counted = flat != -100
        known = labels.clamp(min=0)
        hot = F.one_hot(known, WORDS).to(scores.dtype)
        rows = scores.flatten(0, 1)
        if self.kind == "mean":
            return {"loss": F.cross_entropy(rows, flat), "scores": scores}
        if self.kind == "sum":
            return {"loss": F.cross_entropy(rows, flat, reduction="sum")}
        if self.kind == "weighted":
            return {"loss": F.cross_entropy(rows, flat, self.weights, label_smoothing=0.1)}
        if self.kind == "log":
            return {"loss": F.nll_loss(F.log_softmax(scores, -1).transpose(1, 2), labels)}
        if self.kind == "masked":
            terms = F.cross_entropy(rows, flat, reduction="none")
            return {
                "loss": (terms * counted).sum() / counted.sum().clamp(min=1),
                "right": (scores.argmax(-1) == labels).sum(),
            }
        if self.kind == "square":
            return {"loss": F.mse_loss(scores, hot)}
        if self.kind == "soft":
            return {"loss": F.cross_entropy(rows, F.softmax(hot, -1).flatten(0, 1))}
        if self.kind == "decay":
            return {"loss": F.cross_entropy(rows, flat) + 0.01 * (self.up.weight**2).sum()}
        if self.kind == "longest":
            longest = (labels != -100).sum(1).max()
            return {"loss": F.cross_entropy(rows, flat) * (1 + longest / 10)}
        if self.kind == "contrast":
            z = F.normalize(x.mean(1), dim=-1)
            return {"loss": F.cross_entropy(z @ z.t(), torch.arange(len(z)))}
        if self.kind == "product":
            return {"loss": scores.mean() * x.mean()}
        assert self.kind == "root"
        return {"loss": F.mse_loss(scores, hot).sqrt()}


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (rows, 6), generator=generator)
    labels = torch.randint(0, WORDS, (rows, 6), generator=generator)
    for row in range(rows):
        labels[row, : (2 * row) % 6] = -100
    return {"ids": ids, "labels": labels}


def make_model(kind: str, norm: bool) -> nn.Module:
    torch.manual_seed(0)
    return Words(kind, norm).double()


@functools.cache
def captured(kind: str, norm: bool, rows: int) -> sw.Graph:
    return sw.capture(make_model(kind, norm), batch(rows))


def verify(
    kind: str, rows: int, strategy: str, ranks: int, norm: bool = False, **options: Any
) -> sw.types.Certificate:
    model, data = make_model(kind, norm), batch(rows)
    make = getattr(sw.strategies, strategy)
    plan = make(captured(kind, norm, rows), sw.Cluster.local(ranks), **options)
    return sw.verify(model, data, plan)


EXACT = ("mean", "sum", "weighted", "log", "masked", "square", "soft", "decay", "longest")


@pytest.mark.parametrize("kind", thinned(EXACT, lambda i, _: i % 2 == 0))
def test_the_loss_equals_that_of_the_full_batch(kind: str) -> None:
    certificate = verify(kind, 7, "hybrid", 4, dp=2, pp=2, num_microbatches=3)
    assert certificate.ok, certificate
    certificate = verify(kind, 7, "ddp", 1, num_microbatches=4)
    assert certificate.ok, certificate


@pytest.mark.parametrize(
    ("kind", "node"), [("contrast", "matmul"), ("product", "mul"), ("root", "sqrt")]
)
def test_nodes_that_couple_samples_are_reported(kind: str, node: str) -> None:
    with pytest.raises(InfeasiblePlan, match="couples the samples") as caught:
        verify(kind, 8, "pipeline", 2, pp=2, num_microbatches=2)
    assert node in str(caught.value)
    assert "test_micro_batches.py" in str(caught.value)
    assert "per_microbatch=True" in str(caught.value)
    single = verify(kind, 8, "pipeline", 2, pp=2, num_microbatches=1)
    assert single.ok, single
    separate = verify(kind, 8, "pipeline", 2, pp=2, num_microbatches=2, per_microbatch=True)
    assert separate.ok, separate


@pytest.mark.parametrize("kind", ["mean", "masked"])
def test_batch_norm_requires_separate_micro_batches(kind: str) -> None:
    options = {"pp": 2, "num_microbatches": 4}
    with pytest.raises(InfeasiblePlan, match="batch_norm"):
        verify(kind, 8, "pipeline", 2, norm=True, **options)
    certificate = verify(kind, 8, "pipeline", 4, norm=True, per_microbatch=True, **options)
    assert certificate.ok, certificate


def test_separate_micro_batches_must_have_equal_sizes() -> None:
    with pytest.raises(sw.errors.BatchError, match="7 samples"):
        verify("contrast", 7, "pipeline", 2, pp=2, num_microbatches=2, per_microbatch=True)


def test_random_numbers_equal_those_of_the_full_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3))
    data = (torch.randn(7, 4, dtype=torch.float64),)

    def loss(out: Tensor, _: Any) -> Tensor:
        return out.square().mean()

    graph = sw.capture(model.double(), data, loss)
    for options in ({}, {"per_microbatch": True, "num_microbatches": 7}):
        arguments = {"pp": 2, "num_microbatches": 3, "schedule": "zero_bubble", **options}
        plan = sw.strategies.pipeline(graph, sw.Cluster.local(2), **arguments)
        certificate = sw.verify(model, data, plan, loss)
        assert certificate.ok, certificate


def test_a_listed_schedule_may_split_only_some_backwards() -> None:
    """Gradients are synchronized after the last one, be it a B or a W."""
    model, data = Words("mean").double(), batch(6)
    graph = sw.capture(model, data)
    plan = sw.strategies.pipeline(graph, sw.Cluster.local(4), pp=2, num_microbatches=3)
    rows = (
        ("0F0", "0F1", "0F2", "0I0", "0W0", "0B1", "0B2"),
        ("1F0", "1I0", "1F1", "1B1", "1W0", "1F2", "1B2"),
    )
    certificate = sw.verify(model, data, plan.with_(schedule=rows))
    assert certificate.ok, certificate


def test_an_invalid_listed_schedule_is_rejected_by_compile() -> None:
    model, data = Words("mean").double(), batch(4)
    graph = sw.capture(model, data)
    plan = sw.strategies.pipeline(graph, sw.Cluster.local(2), pp=2, num_microbatches=2)
    rows = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    assert sw.compile(graph, plan.with_(schedule=rows)).lowered.schedule.actions
    blocked = (rows[0], ("1B0", "1F0", "1F1", "1B1"))
    with pytest.raises(sw.errors.PlanError, match="1B0"):
        sw.compile(graph, plan.with_(schedule=blocked))
    with pytest.raises(sw.errors.PlanError, match="1B1"):
        sw.compile(graph, plan.with_(schedule=(rows[0], rows[1][:3])))
    with pytest.raises(sw.errors.PlanError, match="0F7"):
        sw.compile(graph, plan.with_(schedule=((*rows[0], "0F7"), rows[1])))
