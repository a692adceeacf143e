"""Plans that divide experts equal one device, for every routing and number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import InfeasiblePlan, PlanError
from tests.support.experts import Experts, make, make_language

CASES = {
    "all tokens to the last expert": ((5, 7, 4), 3, {"ep": 3}),
    "more experts than tokens": ((11, 3), 3, {"ep": 3}),
    "fewer experts than ranks": ((2,), 3, {"ep": 3}),
    "micro-batches, recomputed": (
        (5, 9),
        4,
        {"dp": 2, "ep": 2, "num_microbatches": 2, "recompute": "full"},
    ),
    "unequal shares": ((5,), 2, {"ep": 2, "shares": {"ep": (2, 1)}}),
    "all axes": ((5,), 8, {"dp": 2, "ep": 2, "tp": 2, "zero": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_divided_experts_equal_one_device(name: str) -> None:
    arguments, ranks, options = CASES[name]
    model, batch = make(*arguments)
    plan = sw.strategies.hybrid(sw.capture(model, batch), sw.Cluster.local(ranks), **options)
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)


@pytest.mark.parametrize("options", [{"tp": 2}, {"cp": 2, "tp": 2, "attention": "ring"}])
def test_experts_between_shards_of_the_sequence(options: dict[str, Any]) -> None:
    graph = sw.capture(*make_language())
    cluster = sw.Cluster.local(2 * options.get("cp", 1))
    plan = sw.strategies.hybrid(graph, cluster, sequence_parallel=True, **options)
    steps = sw.compile(graph, plan).lowered.rank_programs[0].steps
    assert sum(step.fn == "rt.reduce_scatter" for step in steps) >= 4


def test_a_rank_holds_its_experts_and_no_others() -> None:
    model, batch = make(8)
    plan = sw.strategies.expert(sw.capture(model, batch), sw.Cluster.local(4))
    program = sw.compile(sw.capture(model, batch), plan).lowered
    shapes = {s.name: (s.local_shape, s.sync) for s in program.rank_programs[0].parameters}
    assert shapes["up"] == ((2, 6, 4), ())
    assert shapes["router.weight"] == ((8, 4), ("ep",))


def test_a_model_without_experts_is_refused() -> None:
    graph = sw.capture(nn.Linear(4, 4), (torch.randn(4, 4),), lambda out, batch: out.sum())
    with pytest.raises(InfeasiblePlan, match="ep=2"):
        sw.strategies.expert(graph, sw.Cluster.local(2))


def test_an_uneven_load_of_experts_takes_longer_where_they_are_divided() -> None:
    model, batch = make(8, 1 << 16)
    graph, cluster = sw.capture(model, batch), sw.Cluster.local(4)
    for strategy, longer in ((sw.strategies.expert, True), (sw.strategies.ddp, False)):
        plan = strategy(graph, cluster)
        even, uneven = (
            sw.simulate(graph, plan, cluster, expert_load=load).step_time_s for load in (1.0, 3.0)
        )
        assert (uneven > even) == longer
    with pytest.raises(PlanError, match="expert_load"):
        sw.simulate(graph, plan, cluster, expert_load=0.5)


@pytest.mark.slow
def test_the_planner_divides_experts_where_that_is_faster() -> None:
    torch.manual_seed(0)
    model = Experts(16, width=512)
    batch = {"x": torch.randn(256, 512), "y": torch.randn(256, 512)}
    graph, cluster = sw.capture(model, batch), sw.Cluster.local(4)
    plans = [sw.plan(graph, cluster, ep=ep, progress=False) for ep in (None, 1, 2)]
    sizes = [dict(plan.mesh.axes).get("ep", 1) for plan in plans]
    assert sizes[0] > 1
    assert sizes[1:] == [1, 2]
    times = [sw.simulate(graph, plan, cluster).step_time_s for plan in plans]
    assert times[0] < times[1]
