"""Strategies of parameter servers, and forms of synchronization that `sw.plan` chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.cost.sync import link_rates, link_time, sync_messages
from shardwise.runtime.sync_forms import factors_are_smaller
from tests.support.sync_model import make_batches, make_model


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200_000, 16)
        self.up = nn.Linear(16, 1100)
        self.wide = nn.Linear(1100, 1100)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.wide(torch.relu(self.up(self.table(x).mean(1))))
        return nn.functional.cross_entropy(out, y)


def batch() -> dict[str, Tensor]:
    return {"x": torch.zeros(32, 4, dtype=torch.long), "y": torch.zeros(32, dtype=torch.long)}


def slow_third() -> sw.Cluster:
    """Return three nodes, of which the last has a link of a tenth of the speed."""
    nodes = sw.Cluster.preset("cpu", nodes=3, devices_per_node=1, nic_gbit_per_s=10).machines()
    card = nodes[2].nic
    assert card is not None
    slow = replace(card, bandwidth_bytes_per_s=card.bandwidth_bytes_per_s / 10)
    return sw.Cluster(name="uneven", nodes=(*nodes[:2], replace(nodes[2], nic=slow)))


def test_strategies() -> None:
    graph = sw.capture(make_model(), make_batches()[0])
    cluster = slow_third()
    sync = {
        name: sw.strategies.find_strategy(name)(graph, cluster).entry("words.weight").sync
        for name in ("parameter_server", "partitioned_parameter_server", "partitioned_all_reduce")
    }
    assert sync["parameter_server"] == sw.Sync(kind="owner", owner=0)
    assert sync["partitioned_parameter_server"] == sw.Sync(kind="partitioned", dim=0)
    assert sync["partitioned_all_reduce"] == sw.Sync(kind="partitioned")
    plan = sw.strategies.parallax(graph, cluster)
    assert plan.entry("words.weight").sync == sw.Sync(kind="partitioned", dim=0, sparse="rows")
    assert plan.entry("up.weight").sync is None
    late = sw.strategies.parameter_server(graph, cluster, constraints={"*": sw.Sync(stale=2)})
    assert late.entry("up.weight").sync == sw.Sync(kind="owner", owner=0, stale=2)


def loads(cluster: sw.Cluster) -> list[int]:
    """Return the bytes that each rank owns under the balanced strategy."""
    graph = sw.capture(make_model(), make_batches()[0])
    plan = sw.strategies.balanced_parameter_server(graph, cluster)
    load = [0] * cluster.num_ranks
    for parameter in graph.parameters:
        sync = plan.entry(parameter.name).sync
        assert sync is not None
        assert sync.owner is not None
        load[sync.owner] += graph.values[parameter.value].num_bytes
    return load


def test_balanced_by_bytes_and_links() -> None:
    even, uneven = loads(sw.Cluster.local(3)), loads(slow_third())
    assert max(even) < 1.5 * min(even)
    rates = link_rates(slow_third(), range(3))
    assert link_time(uneven, rates) <= link_time(even, rates)
    assert link_time(uneven, rates) < link_time([sum(uneven) / 2, sum(uneven) / 2, 0], rates)


def test_plan_chooses_rows_and_factors_on_slow_links() -> None:
    graph = sw.capture(Tables(), batch())
    cluster = sw.Cluster.preset("cpu", nodes=4, devices_per_node=1, nic_gbit_per_s=1)
    plan = sw.plan(graph, cluster, progress=False, dp=4, zero=0, num_microbatches=1)
    table, wide = plan.entry("table.weight").sync, plan.entry("wide.weight").sync
    assert table is not None
    assert table.sparse
    assert wide is not None
    assert wide.factors
    assert any("table.weight" in note and "instead of" in note for note in plan.notes)
    plain = sw.simulate(graph, sw.strategies.ddp(graph, cluster), cluster)
    assert plan.figures.best.step_time_s < 0.5 * plain.step_time_s
    simulated = sw.simulate(graph, plan, cluster)
    assert simulated.step_time_s == pytest.approx(plan.figures.best.step_time_s)


def test_plan_keeps_the_users_sync() -> None:
    graph = sw.capture(Tables(), batch())
    owner = sw.Sync(kind="owner", owner=1)
    plan = sw.plan(graph, sw.Cluster.local(2), progress=False, dp=2, constraints={"table.*": owner})
    assert plan.entry("table.weight").sync == owner


def test_inexact_forms_are_chosen_where_they_are_allowed() -> None:
    graph = sw.capture(Tables(), batch())
    cluster = sw.Cluster.preset("cpu", nodes=4, devices_per_node=1, nic_gbit_per_s=1)
    rounds, late = sw.Sync(every=50), sw.Sync(stale=1)
    int8 = sw.Sync(compression=sw.Compression(kind="int8"))

    def planned(allowed: Any, cluster: sw.Cluster = cluster) -> sw.Plan:
        fixed: dict[str, Any] = {"dp": cluster.num_ranks, "zero": 0, "num_microbatches": 1}
        return sw.plan(graph, cluster, progress=False, allowed_syncs=allowed, **fixed)

    exact = planned(None)
    plan = planned({"up.*": late, "wide.*": (int8, rounds)})
    assert plan.entry("up.weight").sync == late
    assert plan.entry("wide.bias").sync == rounds
    assert plan.entry("table.weight").sync == exact.entry("table.weight").sync
    assert "up.*: gradients 1 step late; wide.*: a round every 50 updates" in plan.notes[-1]
    assert plan.figures.best.step_time_s < exact.figures.best.step_time_s
    assert planned({"*": rounds}, sw.Cluster.local(1)).entry("up.weight").sync is None
    for wrong in ({"none.*": rounds}, {"*": "int8"}):
        with pytest.raises(sw.errors.PlanError) as caught:
            planned(wrong)
        assert caught.value.hint


def test_equal_shares_are_the_fastest_on_unequal_links() -> None:
    rates = link_rates(slow_third(), range(3))
    assert rates[0] == pytest.approx(10 * rates[2])

    def busy(**fields: Any) -> float:
        sync = sw.Sync(kind="partitioned", **fields)
        return sum(m.busy_bytes for m in sync_messages(sync, (100, 10), 4, 4, 0, 3, rates))

    assert busy() < busy(owners=(1, 1, 0)) < busy(owners=(0, 0, 1))


def test_factors_need_few_rows() -> None:
    few, many = (sync_messages(sw.Sync(factors=True), (40, 60), 8, 8, n, 2) for n in (4, 400))
    assert [m.op for m in few] == ["all_gather", "all_gather"]
    assert [m.op for m in many] == ["all_gather", "all_reduce"]
    assert factors_are_smaller(4, (40, 60))
    assert not factors_are_smaller(400, (40, 60))


SPEC = """
nodes:
  - address: 10.0.0.2
    gpus: [0, 1, 2, 3]
    ssh_config: conf
    network_bandwidth: 10
  - address: 10.0.0.1
    gpus: [0, 1]
    chief: true
ssh:
  conf: {username: root, port: 12345, key_file: /root/.ssh/id, python_venv: /opt/venv}
"""


def test_autodist_resource_spec() -> None:
    cluster = sw.Cluster.from_yaml(SPEC)
    chief, other = cluster.nodes
    assert (chief.address, other.address, cluster.num_ranks) == ("10.0.0.1", "10.0.0.2", 6)
    assert other.nic is not None
    assert other.nic.count * other.nic.bandwidth_bytes_per_s == 1.25e9
    assert other.ssh is not None
    assert (other.ssh.user, other.ssh.port) == ("root", 12345)
    assert other.start.python == "/opt/venv/bin/python"
    assert sw.Cluster.from_yaml(cluster.to_yaml()) == cluster
    with pytest.raises(sw.errors.ClusterError) as caught:
        sw.Cluster.from_yaml(SPEC.replace("ssh_config: conf", "ssh_config: other"))
    assert "nodes[0].ssh_config" in str(caught.value)
    assert "conf" in str(caught.value.hint)


def test_inexact_forms_are_priced_as_they_run() -> None:
    graph = sw.capture(Tables(), batch())
    cluster = sw.Cluster.preset("cpu", nodes=4, devices_per_node=1, nic_gbit_per_s=1)

    def simulated(**fields: Any) -> sw.Estimate:
        plan = sw.strategies.ddp(graph, cluster, constraints={"*": sw.Sync(**fields)})
        return sw.simulate(graph, plan, cluster)

    plain, often, rare = simulated(), simulated(every=2), simulated(every=50)
    late = simulated(every=50, overlap=2)
    summed = 1.5 * sum(p.numel() * 4 for p in Tables().parameters()) / 125e6
    assert plain.timeline.causes["gradients"] == pytest.approx(summed, rel=0.1)
    for rounds, every in ((often, 2), (rare, 50)):
        assert rounds.timeline.causes["gradients"] == 0
        assert rounds.timeline.causes["update"] == pytest.approx(summed / every, rel=0.1)
    computing = rare.timeline.causes["compute"] + rare.timeline.causes["collectives"]
    hidden = rare.timeline.causes["update"] - late.timeline.causes["update"]
    assert hidden == pytest.approx(2 / 50 * computing, rel=0.1)
    assert simulated(stale=1).step_time_s < plain.step_time_s
    compressed = simulated(compression=sw.Compression(kind="onebit"))
    (sent,) = compressed.timeline.times.syncs
    assert sent.num_bytes == pytest.approx(2 * summed / 3 * 125e6 * 0.75 * 2 / 32, rel=0.01)
    assert "onebit: each rank sends" in str(compressed)
    for estimate, tensors in ((often, 1), (late, 3), (compressed, 1)):
        state = estimate.peak.parts["optimizer"] - plain.peak.parts["optimizer"]
        assert state == pytest.approx(tensors * summed / 1.5 * 125e6)


def test_reports_name_the_bytes_of_inexact_forms() -> None:
    graph, cluster = sw.capture(Tables(), batch()), sw.Cluster.local(2)
    plan = sw.strategies.local_sgd(graph, cluster, every=10)
    assert "a round every 10 updates: each rank sends" in sw.report(plan, graph, cluster).html
