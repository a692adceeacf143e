"""Simulated steps: folding, causes of time, memory, and the effect of the cluster."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.cost.kernels import CallCost
from shardwise.cost.meta_run import cost_of, guess
from shardwise.cost.signature import Signature
from shardwise.errors import PlanError
from shardwise.plans import resolve
from shardwise.sharding.factors import analyze
from shardwise.simulation import (
    Evaluator,
    ExecutionConfig,
    FoldedGraph,
    Group,
    WorkloadModel,
    workload,
)
from tests.support import zoo
from tests.support.clusters import cards
from tests.support.searches import unpolished


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, layers: int, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def deep(layers: int, rows: int = 32) -> sw.Graph:
    with torch.device("meta"):
        model = Deep(layers)
        batch = {"x": torch.zeros(rows, 256), "y": torch.zeros(rows, dtype=torch.long)}
    return sw.capture(model, batch)


def on_one_rank(fold: FoldedGraph, cluster: sw.Cluster) -> sw.types.Estimate:
    """Simulate one rank that runs the full model."""
    plan = sw.strategies.ddp(fold.graph, sw.Cluster.local(1))
    facts = analyze(fold.graph)
    workloads = WorkloadModel(
        fold, facts, resolve(fold.graph, plan, facts).assignments, dict(plan.roles)
    )
    execution = ExecutionConfig(
        groups=(Group(mesh=sw.Mesh(), ranks=(0,)),), cuts=(0,), placement=(0,)
    )
    return Evaluator(fold, cluster).estimate(workloads, execution)


def test_a_few_layers_represent_many() -> None:
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=1)
    full, few = deep(9), deep(2)
    fold = FoldedGraph.of(full)
    assert len(fold.graph.nodes) < len(full.nodes) == fold.size
    assert fold.copies.sum() == fold.size
    a, b = on_one_rank(fold, cluster), on_one_rank(FoldedGraph.repeated(few, 9), cluster)
    assert a.step_time_s == pytest.approx(b.step_time_s, rel=1e-9)
    assert a.peak.peak_bytes == pytest.approx(b.peak.peak_bytes, rel=0.01)
    unfolded = FoldedGraph.of(full, keep=[node.name for node in full.nodes])
    assert len(unfolded.graph.nodes) == len(full.nodes)
    c = on_one_rank(unfolded, cluster)
    assert a.step_time_s == pytest.approx(c.step_time_s, rel=1e-9)
    assert a.peak.peak_bytes == pytest.approx(c.peak.peak_bytes, rel=0.01)


def test_runs_of_blocks_cover_every_range() -> None:
    fold = FoldedGraph.of(deep(5))
    for first in range(0, fold.size, 3):
        for end in range(first + 1, fold.size + 1, 4):
            runs = fold.runs(first, end)
            assert runs[0][1] == first
            assert runs[-1][2] == end
            assert all(a[2] == b[1] for a, b in pairwise(runs))
            assert all(set(fold.blocks[a:b]) == {name} for name, a, b in runs)


def test_half_the_speed_takes_at_least_as_long() -> None:
    graph = deep(4)
    cluster = sw.Cluster.preset("a100", nodes=1, devices_per_node=2)
    plan = sw.strategies.ddp(graph, cluster)
    node = cluster.nodes[0]
    slow = dataclasses.replace(
        cluster,
        nodes=(
            dataclasses.replace(
                node, devices=(node.devices[0], dataclasses.replace(node.devices[1], speed=0.5))
            ),
        ),
    )
    fast_time = sw.simulate(graph, plan, cluster).step_time_s
    slow_time = sw.simulate(graph, plan, slow).step_time_s
    assert fast_time <= slow_time <= 2.5 * fast_time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_causes_add_up_to_the_step(schedule: str) -> None:
    graph = deep(6, rows=64)
    cluster = sw.Cluster.preset("h100", nodes=2, devices_per_node=2)
    plan = sw.strategies.hybrid(
        graph, cluster, dp=2, tp=1, pp=2, num_microbatches=4, schedule=schedule, zero=2
    )
    estimate = sw.simulate(graph, plan, cluster)
    timeline = estimate.timeline
    assert sum(timeline.causes.values()) == pytest.approx(estimate.step_time_s, rel=1e-9)
    assert max(span.end for span in timeline.spans) == pytest.approx(estimate.step_time_s)
    assert 0 < timeline.bubble_fraction < 1
    names = {span.name for span in timeline.spans}
    assert {"0F0", "1F3", "optimizer"} <= names
    events = timeline.trace()["traceEvents"]
    assert isinstance(events, list)
    assert len(events) >= len(timeline.spans)
    sent = [e for e in events if e.get("cat") == "send"]
    assert len(sent) == 2 * 4  # for every micro-batch, in both directions
    inside = sum(e["dur"] for e in events if e.get("tid") == 2 and e["ph"] == "X")
    assert inside * 1e-6 == pytest.approx(float((timeline.waits + timeline.collectives).sum()))
    assert all(use.fits for use in estimate.memory)
    assert sum(estimate.peak.parts.values()) == pytest.approx(estimate.peak.peak_bytes, rel=1e-6)


class Tied(nn.Module):
    def __init__(self, tied: bool, words: int = 50_000, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def tied(ties: bool) -> sw.Graph:
    with torch.device("meta"):
        ids = torch.zeros(32, dtype=torch.long)
        return sw.capture(Tied(ties), {"x": ids, "y": ids})


def test_stages_exchange_tied_parameters() -> None:
    cluster = sw.Cluster.preset("h100", nodes=2, devices_per_node=2, nic_gbit_per_s=10)
    steps = {}
    for ties in (True, False):
        graph = tied(ties)
        plan = sw.strategies.hybrid(graph, cluster, dp=2, pp=2, num_microbatches=4)
        steps[ties] = sw.simulate(graph, plan, cluster)
    transfer_s = 50_000 * 256 * 4 / 1.25e9  # of one rank's copy, on an idle network
    causes, free = steps[True].timeline.causes, steps[False].timeline.causes
    assert causes["gradients"] - free["gradients"] > transfer_s
    assert causes["update"] - free["update"] > transfer_s
    assert sum(causes.values()) == pytest.approx(steps[True].step_time_s)
    names = {span.name for span in steps[True].timeline.spans}
    assert {"gradients of shared parameters", "new values of shared parameters"} <= names


def test_one_group_shares_tied_parameters_without_messages() -> None:
    graph, cluster = tied(True), sw.Cluster.preset("h100", devices_per_node=2)
    plan = sw.strategies.ddp(graph, cluster)
    assert not sw.simulate(graph, plan, cluster).timeline.times.tied


def test_gpipe_needs_more_memory_than_1f1b_and_recomputation_less() -> None:
    graph = deep(8, rows=65536)
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=2)

    def peak(**options: object) -> float:
        plan = sw.strategies.pipeline(graph, cluster, pp=2, num_microbatches=8, **options)
        return sw.simulate(graph, plan, cluster).memory[0].peak_bytes

    assert peak(schedule="gpipe") > peak(schedule="1f1b") > peak(schedule="1f1b", recompute="full")


def test_a_cluster_with_another_number_of_ranks_is_refused() -> None:
    graph = deep(2)
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    with pytest.raises(PlanError, match=r"2 ranks, .* has 4"):
        sw.simulate(graph, plan, sw.Cluster.local(4))


def test_slower_links_take_longer() -> None:
    model, batch = zoo.build("fused_gpt")
    graph = sw.capture(model, batch)
    fast = sw.Cluster.preset("h100", nodes=2, devices_per_node=1)
    slow = sw.Cluster.preset("h100", nodes=2, devices_per_node=1, nic_gbit_per_s=1)
    plan = sw.strategies.ddp(graph, fast)
    assert sw.simulate(graph, plan, slow).step_time_s > sw.simulate(graph, plan, fast).step_time_s


def test_collectives_take_the_time_of_their_implementation() -> None:
    graph, slow = deep(4), cards(800, 800, 800, 200)
    plan = sw.strategies.ddp(graph, slow)
    solved = sw.collectives.choose(plan, slow)
    assert [choice.uses for choice in solved.collectives] == ["solved"]
    assert sw.Plan.from_json(solved.to_json()) == solved
    assert "all_reduce on ranks 0-3: solved" in str(solved)
    before, after = (sw.simulate(graph, p, slow) for p in (plan, solved))
    assert after.step_time_s < 0.75 * before.step_time_s
    with unpolished():
        best = sw.plan(graph, slow, dp=4, zero=0, progress=False)
        even = sw.plan(graph, cards(800, 800, 800, 800), dp=4, zero=0, progress=False)
    assert [choice.uses for choice in best.collectives] == ["solved"]
    assert sw.simulate(graph, best, slow).step_time_s == best.search.best.step_time_s
    assert "collectives" not in even.to_json()
    with pytest.raises(PlanError, match="'fast'"):
        sw.collectives.choose(plan, slow, use="fast")
    with pytest.raises(PlanError, match="4 ranks"):
        sw.collectives.choose(plan, cards(800, 200))
    with pytest.raises(PlanError, match=r"collectives\[0\]"):
        sw.Plan.from_json({**plan.to_json(), "collectives": [{"operation": "all_reduce"}]})
    beyond = {"operation": "all_reduce", "groups": ["0-7"], "uses": "library"}
    with pytest.raises(PlanError, match=r"rank 7 .* 4 ranks"):
        sw.Plan.from_json({**plan.to_json(), "collectives": [beyond]})


def test_generated_code_says_which_collectives_are_solved() -> None:
    graph, slow = deep(2), cards(800, 800, 800, 200)
    plan = sw.strategies.ddp(graph, slow)
    assert "library" not in sw.compile(graph, plan).source(0)
    solved = sw.collectives.choose(plan, slow)
    head = sw.compile(graph, solved).source(0).split('"""')[1]
    assert "- all_reduce on ranks 0-3: solved from" in head
    assert "all_reduce on ranks 0-3: solved" in sw.explain(graph, solved)
    assert sw.compile(graph, solved).fingerprint != sw.compile(graph, plan).fingerprint


def test_guessed_costs_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def guessed(call: Signature) -> CallCost:
        return guess(call, "gelu was not run") if "gelu" in call.op else cost_of(call)

    monkeypatch.setattr(workload, "cost_of", guessed)
    graph, cluster = deep(3), cards(2)
    assert sw.simulate(graph, sw.strategies.ddp(graph, cluster), cluster).notes == (
        "gelu was not run",
    )
