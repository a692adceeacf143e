"""Sequence dims of inputs, and the choices of context and sequence parallelism."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import InfeasiblePlan, PlanError
from tests.support import zoo
from tests.unit.equivalence import mutations as m
from tests.unit.equivalence.cases import case


def gpt(length: int = 12, heads: int = 4) -> sw.Graph:
    model = zoo.FusedGPT(vocab=37, dim=24, heads=heads, layers=2, length=length)
    ids = torch.zeros((2, length), dtype=torch.int64)
    return sw.capture(model, {"input_ids": ids, "labels": ids})


def moves(graph: sw.Graph, plan: sw.Plan) -> Counter[str]:
    steps = sw.compile(graph, plan).lowered.rank_programs[0].steps
    return Counter(step.fn.removeprefix("rt.") for step in steps if step.fn.startswith("rt."))


def test_sequence_parallelism_scatters_and_gathers_instead_of_reducing() -> None:
    graph = gpt()
    plan = sw.strategies.tensor(graph, sw.Cluster.local(2), sequence_parallel=True)
    used = moves(graph, plan)
    assert used["reduce_scatter"] >= 4
    assert used["gather_fanout"] >= 5
    assert used["fanout"] == 0
    assert used["reduce"] <= 1  # the loss
    program = sw.compile(graph, plan).lowered.rank_programs[0]
    norms = [p for p in program.parameters if "norm" in p.name]
    assert norms
    assert all(p.sync == ("tp",) for p in norms)


@pytest.mark.parametrize(
    ("attention", "ranks", "used"),
    [("gather", 2, "gather_fanout"), ("ring", 2, "ring_attention"), ("heads", 2, "all_to_all")],
)
def test_attention_over_a_sharded_sequence(attention: str, ranks: int, used: str) -> None:
    graph = gpt()
    plan = sw.strategies.context(graph, sw.Cluster.local(ranks), attention=attention)
    assert plan.roles == {"cp": "sequence"}
    assert plan.sequence == {"input_ids": 1, "labels": 1}
    assert moves(graph, plan)[used] >= 2
    assert sw.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "heads"])
def test_activations_are_divided_with_the_sequence(attention: str) -> None:
    graph = gpt(length=4096)
    one = sw.strategies.ddp(graph, sw.Cluster.local(1))
    plan = sw.strategies.context(graph, sw.Cluster.local(4), attention=attention)
    full, part = (sw.compile(graph, p).memory(rank=0).parts["activations"] for p in (one, plan))
    assert part <= 1.1 / 4 * full


def test_too_few_heads_are_exchanged_within_groups_of_ranks() -> None:
    graph = gpt(heads=2)
    plan = sw.strategies.context(graph, sw.Cluster.local(4), attention="heads")
    assert plan.mesh == sw.Mesh.of(cp=2, cp1=2)
    used = moves(graph, plan)
    assert used["ring_attention"] == 2
    assert used["all_to_all"] >= 4


class Pooled(nn.Module):
    """A model without a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


@pytest.mark.parametrize("options", [{"tp": 2, "sequence_parallel": True}, {"dp": 1, "cp": 2}])
def test_a_model_without_a_sequence_is_refused(options: dict[str, Any]) -> None:
    graph = sw.capture(Pooled(), {"x": torch.zeros(4, 6)})
    with pytest.raises(InfeasiblePlan, match="sequence"):
        sw.strategies.hybrid(graph, sw.Cluster.local(2), **options)


def test_a_wrong_option_names_the_right_ones() -> None:
    graph = gpt()
    with pytest.raises(InfeasiblePlan) as error:
        sw.strategies.context(graph, sw.Cluster.local(2), attention="rings")
    assert "ring" in str(error.value.hint)
    with pytest.raises(PlanError, match="input_id"):
        sw.strategies.context(graph, sw.Cluster.local(2), sequence_dim={"input_id": 1})


def test_verification_catches_a_ring_with_another_mask_or_another_length() -> None:
    subject = case("fused_gpt", "context", attention="ring")
    assert subject.check().ok
    for change in (
        m.change_keyword(subject.program, "rt.ring_attention", "is_causal", lambda _: False),
        m.drop_step(subject.program, m.find_step(subject.program, "rt.reduce")),
        m.unsynced(subject.program, subject.program.graph.parameters[0].name),
    ):
        assert not subject.check(change).ok


@pytest.mark.parametrize(
    ("ranks", "cp", "mesh"),
    [(3, 3, {"cp": 3}), (4, 2, {"dp": 2, "cp": 2}), (6, 3, {"dp": 2, "cp": 3})],
)
def test_the_planner_divides_the_sequence_as_asked(
    ranks: int, cp: int, mesh: dict[str, int]
) -> None:
    graph, cluster = gpt(), sw.Cluster.local(ranks)
    plan = sw.plan(graph, cluster, cp=cp, tp=1, progress=False)
    assert dict(plan.mesh.axes) == mesh
    assert plan.sequence == {"input_ids": 1, "labels": 1}


def test_a_plan_with_a_divided_sequence_is_explained() -> None:
    plan = sw.plan(gpt(), sw.Cluster.local(4), cp=2, tp=1, memory_gib=2, progress=False)
    assert not plan.is_edited
    assert plan.figures.fixed == {"cp": 2, "tp": 1, "memory_gib": 2}
    assert [other.what for other in plan.figures.runners_up]
    assert plan.figures.details is not None
    text = sw.explain(plan)
    assert "dp=2, cp=2" in str(text)
    assert "why not dp=2, cp=2" in str(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 4, "cp": 2}, r"dp=4 x cp=2 = 8 ranks.*has 4"),
        ({"dp": 4, "cp": 1}, "dp=4, the batch has 2 rows"),
        ({"cp": 3}, "cp=3 does not divide the 4 ranks"),
    ],
)
def test_the_planner_refuses_sizes_that_do_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(InfeasiblePlan, match=message):
        sw.plan(gpt(), sw.Cluster.local(4), progress=False, **options)


def test_the_planner_refuses_more_ranks_than_positions() -> None:
    with pytest.raises(InfeasiblePlan, match=r"cp=4.*3 positions"):
        sw.plan(gpt(length=3), sw.Cluster.local(4), cp=4, progress=False)


@pytest.mark.slow
def test_the_planner_divides_the_sequence_where_rows_are_too_few() -> None:
    with torch.device("meta"):
        model = zoo.FusedGPT(vocab=32000, dim=4096, heads=32, layers=2, length=131072)
        ids = torch.zeros((2, 131072), dtype=torch.int64)
    graph = sw.capture(model, {"input_ids": ids, "labels": ids})
    cluster = sw.Cluster.preset("h100", nodes=4, devices_per_node=8)
    plans = [sw.plan(graph, cluster, cp=cp, progress=False) for cp in (None, 1)]
    assert plans[0].sequence
    assert not plans[1].sequence
    times = [sw.simulate(graph, plan, cluster).step_time_s for plan in plans]
    assert times[0] < times[1]
