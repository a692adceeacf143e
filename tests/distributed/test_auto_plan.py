"""Automatic plans train as one device does: on unequal ranks, and with cuts that differ by node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.equivalence.reference import KeepDouble
from tests.support import training
from tests.support.pool import Pool
from tests.support.searches import unpolished

pytestmark = pytest.mark.distributed


def cluster(speeds: tuple[float, ...]) -> Cluster:
    """Ranks of a local cluster with speeds of their own, quick enough that compute decides."""
    local = Cluster.local(len(speeds))
    (node,) = local.nodes
    slow = tuple(replace(d, speed=s * 1e-3) for d, s in zip(node.devices, speeds, strict=True))
    return replace(local, nodes=(replace(node, devices=slow),))


def auto(model: nn.Module, inputs: Any, speeds: tuple[float, ...], options: dict[str, Any]) -> Any:
    with KeepDouble(), unpolished():
        graph = sw.capture(model, inputs)
        return sw.plan(graph, cluster(speeds), progress=False, **options)


def train(name: str, speeds: tuple[float, ...], options: dict[str, Any]) -> tuple[Any, str, int]:
    """This rank's part of training, the plan's mesh, and the rows that it reads."""
    model, inputs = training.make(name)
    plan = auto(model, inputs, speeds, options)
    with KeepDouble():
        pm = sw.parallelize(model, inputs, plan=plan)
        run = training.trained(pm, inputs)
    return run, str(plan.mesh), next(iter(pm.local_batch(inputs).values())).shape[0]


@functools.cache
def dense(name: str) -> training.Run:
    return training.dense(name)


@pytest.mark.parametrize(
    ("name", "speeds", "options"),
    [
        ("odd", (1.0, 0.5), {"pp": 1, "tp": 1}),
        pytest.param("fused_gpt", (1.0, 0.5), {"pp": 1, "tp": 1}, marks=pytest.mark.slow),
        pytest.param("odd", (1.0, 0.5), {}, marks=pytest.mark.slow),
    ],
)
def test_unequal_ranks(
    pool: Callable[[int], Pool], name: str, speeds: tuple[float, ...], options: dict[str, Any]
) -> None:
    runs = pool(2).run(train, name, speeds, options, timeout=300)
    for run, mesh, _ in runs:
        assert mesh == runs[0][1]
        assert run.losses == runs[0][0].losses
        training.assert_equal(run, dense(name))
    if options:
        assert [rows for _, _, rows in runs] == [5, 2]  # of 7, by speed


class Wide(nn.Module):
    """Rows are many and small in front, parameters are many behind."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.head = nn.Linear(4 * 16, 512), nn.Linear(512, 6)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.far(F.relu(self.near(pixels)))), 8)
        return F.cross_entropy(self.head(F.relu(self.up(x.flatten(1)))), labels)


def wide() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(8, 2, 32, 32, dtype=torch.float64)
    return Wide().double(), {"pixels": images, "labels": torch.arange(8) % 6}


def mixed() -> tuple[list[float], dict[str, Any], dict[str, dict[str, str]]]:
    """Losses of three steps, and how the plan cuts parameters and nodes."""
    model, batch = wide()
    fixed = {"near.*": "replicate", "far.*": "replicate", "up.weight": "0"}
    with mock.patch("shardwise.planner.search.SIMPLER_SLACK", 0.0):
        plan = auto(
            model, batch, (1.0, 1.0), {"tp": 2, "num_microbatches": 1, "constraints": fixed}
        )
    pm = sw.parallelize(model, batch, plan=plan)
    opt = sw.optimizer(pm, torch.optim.AdamW, lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(pm.train_step(batch).item())
        opt.step()
        opt.zero_grad()
    cuts = {name: dict(entry.layout) for name, entry in plan.parameters.items()}
    return losses, cuts, {name: dict(choice) for name, choice in plan.nodes.items()}


def test_nodes_may_cut_rows_or_parameters(pool: Callable[[int], Pool]) -> None:
    """Convolutions cut the batch and the large product its weight, on the same two ranks."""
    model, batch = wide()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    for losses, cuts, nodes in pool(2).run(mixed, timeout=300):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
        assert cuts["up.weight"] == {"tp": "0"}
        assert nodes["far.conv2d_0"] == {"tp": "shard n"}
