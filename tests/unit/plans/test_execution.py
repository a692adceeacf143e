"""Stages, schedules and dtypes in plan files: round trips, and errors in edited files."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Mesh
from shardwise.collectives.messages import CollectiveChoice
from shardwise.collectives.messages.program import format_ranks, format_steps, parse_ranks
from shardwise.errors import PlanError
from shardwise.plans import TIME, ParameterEntry, Plan, Precision, Stage


def plan(**changes: Any) -> Plan:
    """Return a plan of four ranks in two stages, with all options of execution."""
    mesh = Mesh.of(dp=2)
    fields: dict[str, Any] = {
        "name": "pipeline",
        "model": "Net",
        "fingerprint": "abc",
        "mesh": mesh,
        "roles": {"dp": "batch"},
        "inputs": {"x": 0},
        "parameters": {"*": ParameterEntry(zero=1)},
        "stages": (
            Stage(first="", ranks=(0, 1), mesh=mesh),
            Stage(first="b.add_0", ranks=(2, 3), mesh=mesh),
        ),
        "schedule": "1f1b",
        "num_microbatches": 4,
        "recompute": ("blocks.*",),
        "precision": Precision.of("bf16"),
        "offload": ("optimizer",),
    }
    return Plan(**{**fields, **changes})


def read_back(original: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(original.to_json())))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": (("0F0", "0B0"), ("1F0", "1B0")), "num_microbatches": 1},
        {"per_microbatch": True, "recompute": "full", "offload": ()},
        {"precision": Precision.of("fp16-autocast")},
        {"precision": Precision(loss_scale="1024")},
    ],
)
def test_every_field_survives_a_json_round_trip(changes: dict[str, Any]) -> None:
    assert read_back(plan(**changes)) == plan(**changes)


@st.composite
def staged(draw: Any) -> Plan:
    """Draw groups of different meshes, on ranks in any order, some with several stages."""
    axes = {"dp": "batch", "tp": "parameters"}
    sizes = st.dictionaries(st.sampled_from(list(axes)), st.integers(2, 3))
    meshes = [Mesh(axes=tuple(draw(sizes).items())) for _ in range(draw(st.integers(1, 4)))]
    ranks = draw(st.permutations(range(sum(m.size for m in meshes))))
    groups = []
    for mesh in meshes:
        groups.append((tuple(ranks[: mesh.size]), mesh))
        ranks = ranks[mesh.size :]
    more = draw(st.lists(st.sampled_from(groups), max_size=4))
    stages = tuple(
        Stage(first=f"n_{i}" if i else "", ranks=r, mesh=m)
        for i, (r, m) in enumerate(groups + more)
    )
    used = dict.fromkeys(axis for mesh in meshes for axis in mesh.names)
    return plan(
        mesh=meshes[0],
        roles={axis: axes[axis] for axis in used},
        stages=stages,
        num_microbatches=draw(st.integers(1, 9)),
        per_microbatch=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full", "selective", ("a.*", "b")])),
    )


@given(staged())
def test_stages_survive_a_json_round_trip(original: Plan) -> None:
    again = read_back(original)
    assert again == original
    assert again.num_ranks == sum(
        mesh.size for _, mesh in {(s.ranks, s.mesh) for s in again.stages}
    )
    assert len(again.groups) == len({s.ranks for s in again.stages})


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_ranks_are_read_back(ranks: list[int]) -> None:
    for written in (format_ranks(tuple(ranks)), format_steps(tuple(ranks))):
        assert parse_ranks(written, "here") == tuple(ranks)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("stages", 0, "frist"), "", "unknown field 'frist'; did you mean 'first'"),
        (("stages", 1, "ranks"), [2, 3], "ranks is a list, must be text"),
        (("stages", 1, "ranks"), "2..3", "ranks '2..3' are not ranges"),
        (("stages", 1, "ranks"), "2-4", "Mesh(dp=2) has 2 ranks, but the stage has 3"),
        (("stages", 1, "ranks"), "3-4", "ranks [2] have no stage"),
        (("stages", 1, "ranks"), "1-2", "ranks [1] are in two different groups"),
        (("stages", 1, "mesh"), {"dp": 0}, "mesh axis dp has size 0"),
        (("stages", 1, "mesh"), {"mb": 2}, "'mb' is the axis of micro-batches"),
        (("stages", 1, "mesh"), {"tp": 2}, "axis 'tp' has no role"),
        (("stages", 1, "first"), "", 'the first stage, and only it, begins at ""'),
        (("stages", 0, "first"), "a", 'the first stage, and only it, begins at ""'),
        (("stages", 0), "0-1", "'0-1', must be a mapping"),
        (("mesh",), {"dp": 4}, "mesh is Mesh(dp=4), but the first stage has Mesh(dp=2)"),
        (("schedule",), 3, "schedule is 3"),
        (("schedule",), [["0F0", 1]], "schedule[0][1] is 1"),
        (("num_microbatches",), 0, "num_microbatches=0"),
        (("num_microbatches",), 2.0, "num_microbatches is 2.0"),
        (("per_microbatch",), 1, "per_microbatch is 1"),
        (("recompute",), "fulll", "did you mean 'full'"),
        (("recompute",), [3], "recompute[0] is 3"),
        (("precision", "compute"), "bfloat", "did you mean 'bfloat16'"),
        (("precision", "compte"), "bfloat16", "did you mean 'compute'"),
        (("precision", "loss_scale"), "-1", "loss_scale='-1'"),
        (("precision", "autocast"), "yes", "autocast is 'yes'"),
        (("offload",), ["optimiser"], "did you mean 'optimizer'"),
        (("roles", "dp"), "time", "the axis of micro-batches is 'mb'"),
    ],
)
def test_an_error_names_the_invalid_field(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(plan().to_json())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data, where="my.json")
    assert message in str(caught.value)
    assert "my.json" in str(caught.value)


def test_the_plan_of_a_single_stage() -> None:
    full = plan(stages=(*plan().stages[:1], Stage(first="b.add_0", ranks=(2,), mesh=Mesh())))
    second = full.for_stage(1)
    assert second.mesh == Mesh(axes=((TIME, 4),))
    assert second.roles == {TIME: "time"}
    assert not second.is_scheduled
    assert full.for_stage(0).mesh == Mesh(axes=((TIME, 4), ("dp", 2)))
    separate = full.with_(per_microbatch=True)
    assert not separate.splits_time
    assert separate.for_stage(1).mesh == Mesh()


def test_precisions_have_names() -> None:
    assert Precision.of(None) == Precision.of("") == Precision()
    assert Precision.of("fp16").loss_scale == "dynamic"
    assert Precision.of(Precision.of("bf16")) == Precision.of("bf16")
    with pytest.raises(PlanError, match="precision 'bf61'; did you mean 'bf16'"):
        Precision.of("bf61")


def test_text_lists_stages_and_execution_options() -> None:
    lines = str(plan()).splitlines()
    assert lines == [
        "Plan pipeline for Net on 2 stages of 4 ranks",
        "  dp   shards the batch (input dim 0)",
        "  stage  ranks  mesh        begins at",
        "  0      0-1    Mesh(dp=2)  the first node",
        "  1      2-3    Mesh(dp=2)  b.add_0",
        "  schedule 1f1b, 4 micro-batches, parts of one batch",
        "  recompute blocks.*",
        "  precision compute bfloat16, master float32, gradients float32, reduce float32",
        "  offload optimizer",
        "  parameter  sharding   gradients and state",
        "  *          replicate  zero 1: optimizer state sharded",
    ]
    long = plan(recompute=tuple(f"encoder.layers.{i}.attention" for i in range(40)))
    assert all(len(line) <= 100 for line in str(long).splitlines())


@pytest.mark.parametrize("text", ["", "a", "-1", "3-0", "0-4/0", "²", "0-99999999999", "0-2000000"])
def test_invalid_ranges_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="are not ranges"):
        parse_ranks(text, "here")
    row = {"operation": "all_reduce", "groups": [text], "uses": "library"}
    with pytest.raises(PlanError, match="are not ranges"):
        CollectiveChoice.from_json(row, "here")
