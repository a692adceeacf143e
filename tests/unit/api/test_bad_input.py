"""Wrong input leads to a clear error before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import (
    ClusterError,
    InfeasiblePlan,
    PlanMismatch,
    RankError,
    ShardwiseError,
    VerifyError,
)
from tests.support.training import make, plan_for


def one_rank(strategy: str = "ddp") -> tuple[nn.Module, Any, sw.Plan]:
    model, batch = make("odd")
    return model, batch, plan_for(model, batch, strategy, 1)


class Scalar(nn.Module):
    """Nothing in it has a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight - 1.0).pow(2)


def test_one_rank_needs_no_process_group() -> None:
    model, batch, plan = one_rank()
    loss = sw.parallelize(model, batch, plan=plan).train_step(batch)
    assert loss == pytest.approx(model(**batch)["loss"].item(), rel=1e-12)


def test_a_plan_for_more_ranks_than_the_group_is_refused() -> None:
    model, batch = make("odd")
    plan = plan_for(model, batch, "ddp", 3)
    with pytest.raises(RankError, match="the plan is for 3 ranks") as caught:
        sw.parallelize(model, batch, plan=plan)
    assert "torchrun --nproc-per-node 3" in str(caught.value)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_cluster_needs_at_least_one_rank(ranks: int) -> None:
    with pytest.raises(ClusterError):
        sw.Cluster.local(ranks)


def test_mesh_sizes_must_multiply_to_the_number_of_ranks() -> None:
    graph = sw.capture(*make("odd"))
    with pytest.raises(InfeasiblePlan, match="dp=2 x tp=2 = 4 ranks, the cluster has 6"):
        sw.strategies.hybrid(graph, sw.Cluster.local(6), dp=2, tp=2)
    with pytest.raises(InfeasiblePlan, match="at least one rank"):
        sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=-2, tp=-2)
    with pytest.raises(InfeasiblePlan, match="zero=4"):
        sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2, zero=4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_a_batch_without_a_dim_to_shard_is_refused(strategy: str) -> None:
    graph = sw.capture(Scalar(), (torch.tensor(3.0),))
    with pytest.raises(InfeasiblePlan, match=r"(tp|dp)=2") as caught:
        getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2))
    assert "Scalar" in str(caught.value)


@pytest.mark.slow
def test_a_batch_of_one_row_gives_a_plan_for_larger_ones() -> None:
    graph = sw.capture(*make("odd", batch=1))
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    assert plan.inputs == sw.strategies.ddp(sw.capture(*make("odd")), sw.Cluster.local(2)).inputs


@pytest.mark.parametrize("name", ["up.weight", "norm.bias", "hidden"])
def test_nan_weights_are_refused(name: str) -> None:
    model, batch, plan = one_rank()
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    with torch.no_grad():
        tensor.view(-1)[1] = float("nan")
    with pytest.raises(ShardwiseError) as caught:
        sw.parallelize(model, batch, plan=plan)
    assert f"{name} has 1 NaNs among its {tensor.numel()} values" in str(caught.value)


def test_a_plan_for_another_model_is_refused() -> None:
    _, _, plan = one_rank()
    other, inputs = make("fused_gpt")
    with pytest.raises(PlanMismatch, match="was made for Odd"):
        sw.parallelize(other, inputs, plan=plan)


def test_a_model_without_trained_parameters_is_not_verified() -> None:
    model, batch = make("odd")
    model.requires_grad_(False)
    with pytest.raises(VerifyError, match="trainable parameter"):
        sw.verify(model, batch, plan_for(model, batch, "ddp", 2))


class Inverse(nn.Module):
    """Inverts a weight matrix, which cannot be done in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64) * 3 + 0.1)
        self.line = nn.Linear(4, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x @ torch.linalg.inv(self.weight)).pow(2).sum()


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_an_operator_that_cannot_be_sharded_is_replicated_and_noted(strategy: str) -> None:
    model, batch = Inverse(), (torch.randn(4, 4, dtype=torch.float64),)
    plan = plan_for(model, batch, strategy, 2)
    assert any("linalg_inv" in note for note in plan.notes), plan.notes
    assert sw.verify(model, batch, plan).ok
