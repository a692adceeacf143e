"""Programs of ranks with unequal shares: their classes, their text, and invalid shares."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Mesh
from shardwise.errors import ClusterError, InfeasiblePlan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


BATCH = {"x": torch.zeros(8, 6)}


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    return sw.capture(Net(), BATCH)


@pytest.mark.parametrize(
    ("weights", "classes"), [((5, 2, 1), 3), ((1, 2, 1), 2), ((1, 1, 1), 2), ((1, 0, 1), 2)]
)
def test_ranks_with_equal_shares_run_one_program(
    graph: sw.Graph, weights: tuple[int, ...], classes: int
) -> None:
    plan = sw.strategies.ddp(graph, sw.Cluster.local(3), shares={"dp": weights})
    programs = sw.compile(graph, plan).lowered.rank_programs
    assert len(programs) == classes
    rows = {r: p.values[p.inputs[0].value].type.shape[0] for p in programs for r in p.ranks}
    assert sum(rows.values()) == 8
    if weights == (5, 2, 1):
        assert rows == {0: 5, 1: 2, 2: 1}


def test_parameters_are_sharded_by_shares(graph: sw.Graph) -> None:
    plan = sw.strategies.tensor(graph, sw.Cluster.local(2), shares={"tp": (3, 1)})
    programs = sw.compile(graph, plan).lowered.rank_programs
    shapes = {s.name: [s.local_shape] for s in programs[0].parameters}
    for storage in programs[1].parameters:
        shapes[storage.name].append(storage.local_shape)
    assert shapes["up.weight"] == [(12, 6), (4, 6)]
    assert shapes["down.weight"] == [(6, 12), (6, 4)]
    assert sw.verify(Net(), BATCH, plan).ok


def test_generated_files_list_the_shares(graph: sw.Graph) -> None:
    meshes = [Mesh.of(dp=(2, 1)), Mesh()]
    plan = sw.strategies.pipeline(
        graph, sw.Cluster.local(3), stage_meshes=meshes, num_microbatches=2
    )
    files = sw.compile(graph, plan).sources
    assert any('axes={"dp": (2, 1)}' in text for text in files)
    assert any("on Mesh(mb=2, dp=2:1)" in text for text in files)
    assert sw.verify(Net(), BATCH, plan).ok


def test_plans_with_unequal_shares_differ_from_even_ones(graph: sw.Graph) -> None:
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2), shares={"dp": (2, 1)})
    assert plan.to_json()["mesh"] == {"dp": [2, 1]}
    assert "Mesh(dp=2:1)" in str(plan)
    even = sw.strategies.ddp(graph, sw.Cluster.local(2))
    assert sw.strategies.ddp(graph, sw.Cluster.local(2), shares={"dp": (3, 3)}) == even
    assert sw.compile(graph, plan).source() != sw.compile(graph, even).source()


def test_shares_that_do_not_match_the_mesh_are_rejected(graph: sw.Graph) -> None:
    cluster = sw.Cluster.local(2)
    for shares, message in [
        ({"dp": (2, 1, 1)}, "ddp: shares for 3 ranks along dp, Mesh(dp=2) has 2"),
        ({"tp": (2, 1)}, "ddp: shares for 2 ranks along tp, Mesh(dp=2) has 0"),
    ]:
        with pytest.raises(InfeasiblePlan, match=re.escape(message)):
            sw.strategies.ddp(graph, cluster, shares=shares)
    with pytest.raises(ClusterError, match="mesh axis dp has shares"):
        sw.strategies.ddp(graph, cluster, shares={"dp": (0, 0)})
