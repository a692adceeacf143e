"""One rank of a plan runs here, with messages that take the time of the cluster's links."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.runtime.transport import Group
from shardwise.runtime.transport.replay import ReplayTransport
from shardwise.tuning.replay import Replay, link_seconds
from tests.support import training


def graph_of(name: str = "fused_gpt") -> sw.Graph:
    return sw.capture(*training.make(name))


def slow(num_ranks: int, gbit_per_s: float = 0.02) -> sw.Cluster:
    """Return ranks on nodes of their own, with links far slower than this machine computes."""
    return sw.Cluster.preset(
        "cpu",
        nodes=num_ranks,
        devices_per_node=1,
        nic_gbit_per_s=gbit_per_s,
        network_latency_us=200,
    )


def causes(run: Replay) -> dict[str, float]:
    return {cause.name: cause.measured_s for cause in run.causes}


def test_messages_take_their_time_while_the_rank_computes() -> None:
    transport = ReplayTransport(0, 4, lambda op, num_bytes, ranks: 0.05)
    pair, other = Group((0, 1), 0), Group((0, 2), 0)
    begin = time.perf_counter()
    first = transport.all_reduce(torch.ones(4), "sum", pair)
    second = transport.all_gather(torch.ones(2), [2, 2], pair)
    aside = transport.reduce_scatter(torch.ones(4), [2, 2], other)
    assert time.perf_counter() - begin < 0.04  # nothing waits yet
    time.sleep(0.05)
    assert first.wait().tolist() == [1.0] * 4
    assert aside.wait().tolist() == [1.0] * 2  # at the same time, on other links
    assert second.wait().tolist() == [1.0] * 4
    assert time.perf_counter() - begin >= 0.1  # after the first of the same group
    assert transport.sent == [0.05] * 3


def test_tensors_of_other_stages_arrive_when_they_are_expected() -> None:
    transport = ReplayTransport(1, 2, lambda op, num_bytes, ranks: 0.0)
    transport.begin([0.03, 0.06])
    begin = time.perf_counter()
    for expected in (0.03, 0.06):
        _, (arrival,) = transport.exchange([], [(torch.empty(3), 0)])
        arrival.wait()
        assert expected - 1e-3 < time.perf_counter() - begin


@pytest.mark.parametrize(
    ("strategy", "options", "num_ranks"),
    [
        ("ddp", {}, 3),
        ("zero1", {}, 2),
        ("fsdp", {}, 5),
        ("hybrid", {"dp": 2, "tp": 2, "zero": 3}, 4),
        ("pipeline", {"pp": 2, "num_microbatches": 3, "schedule": "zero_bubble"}, 2),
        ("hybrid", {"dp": 2, "tp": 4, "pp": 2, "num_microbatches": 3}, 16),
    ],
)
def test_the_exposed_communication_is_that_of_the_links(
    strategy: str, options: dict[str, Any], num_ranks: int
) -> None:
    graph, cluster = graph_of(), slow(num_ranks)
    plan = getattr(sw.strategies, strategy)(graph, cluster, **options)
    rank = num_ranks - 1
    run = sw.replay(graph, plan, cluster, rank, steps=2)
    measured = causes(run)
    assert run.rank == rank
    assert {"forward", "backward", "optimizer"} <= set(measured)
    for item in run.communication:
        assert item.exposed_s + item.hidden_s >= item.link_s
    # Links are so slow that communication is most of the step, in the measurement as predicted.
    predicted = {cause.name: cause.predicted_s for cause in run.causes}
    waits = ("collectives", "parameters", "gradients", "update", "bubble")
    exposed = sum(measured.get(cause, 0.0) for cause in waits)
    expected = sum(predicted.get(cause, 0.0) for cause in waits)
    assert exposed > 0.8 * expected > 0.4 * run.predicted_step_time_s
    assert run.step_time_s >= 0.9 * exposed
    assert 0.6 < run.peak_bytes / run.predicted_peak_bytes < 1.4
    assert "on links" in str(run) or not run.communication


def test_message_times_are_those_of_all_groups_at_once() -> None:
    """Four groups of a data axis share the card of a node, and are slower than one alone."""
    graph, cluster = graph_of(), sw.Cluster.preset("cpu", nodes=2, devices_per_node=4)
    (node,) = cluster.nodes
    assert node.nic is not None
    cluster = replace(cluster, nodes=(replace(node, nic=replace(node.nic, count=1)),))
    plan = sw.strategies.hybrid(graph, cluster, dp=2, tp=4)
    time_of = link_seconds(plan, cluster, 1)
    together, alone = time_of("all_reduce", 1e8, (1, 5)), time_of("send", 1e8, (1, 5))
    assert together > 3 * alone


def test_a_calibrated_cluster_predicts_the_measured_step(tmp_path: Any) -> None:
    graph, cluster = graph_of(), slow(2, gbit_per_s=1)
    plan = sw.strategies.ddp(graph, cluster)
    run = sw.replay(graph, plan, cluster, 1, steps=3)
    run.calibrated(cluster).save(tmp_path / "cluster.yaml")
    better = sw.Cluster.load(tmp_path / "cluster.yaml")
    assert better.device(0).compute_factor != 1.0 != better.device(0).update_factor
    before, after = (sw.simulate(graph, plan, c).timeline.causes for c in (cluster, better))
    measured = causes(run)
    assert after["optimizer"] == pytest.approx(measured["optimizer"], rel=1e-6)
    computed = measured["forward"] + measured["backward"]
    assert after["compute"] == pytest.approx(computed, rel=1e-6)
    assert before["compute"] != pytest.approx(computed, rel=0.01)


def test_wrong_arguments_are_refused() -> None:
    graph, cluster = graph_of(), sw.Cluster.local(2)
    plan = sw.strategies.ddp(graph, cluster)
    with pytest.raises(PlanError, match="rank=2, steps=5 of a plan for 2 ranks"):
        sw.replay(graph, plan, cluster, 2)
    with pytest.raises(PlanError, match="rank=0, steps=0"):
        sw.replay(graph, plan, cluster, steps=0)
    with pytest.raises(PlanError, match="is for 2 ranks"):
        sw.replay(graph, plan, sw.Cluster.local(3))
    threads = torch.get_num_threads()
    other = sw.replay(
        graph,
        plan.with_(name="renamed"),
        sw.Cluster.preset("h100", nodes=1, devices_per_node=2),
        steps=1,
    )
    assert "computing on a cpu takes another time" in other.notes[0]
    assert torch.get_num_threads() == threads
