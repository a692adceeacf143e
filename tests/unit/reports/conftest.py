"""Searched plans of a small model, with one group of ranks and with stages."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from tests.support.reported import ROWS, Net
from tests.support.searches import unpolished


@pytest.fixture(scope="session")
def graph() -> sw.Graph:
    ids = torch.zeros((ROWS, 16), dtype=torch.long)
    with torch.device("meta"):
        model = Net()
    return sw.capture(model, {"ids": ids, "labels": ids})


@pytest.fixture(scope="session")
def cluster() -> sw.Cluster:
    return sw.Cluster.preset("h100", nodes=2, devices_per_node=4)


@pytest.fixture(scope="session")
def staged(graph: sw.Graph, cluster: sw.Cluster) -> sw.Plan:
    """Return a plan with dp=2, tp=2, pp=2 and four micro-batches."""
    with unpolished():
        return sw.plan(graph, cluster, progress=False, dp=2, tp=2, pp=2, num_microbatches=4)


@pytest.fixture(scope="session")
def flat(graph: sw.Graph) -> sw.Plan:
    """Return a plan with only data parallelism and sharded parameters."""
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=4)
    with unpolished():
        return sw.plan(graph, cluster, progress=False, dp=4, zero=3, num_microbatches=1)
