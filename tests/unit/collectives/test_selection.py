"""Select the implementation of a collective by predicted time, and store it in a plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shardwise.cluster import Cluster
from shardwise.collectives import solve
from shardwise.collectives.messages import CollectiveChoice
from shardwise.collectives.messages.check import check, interpret
from shardwise.collectives.messages.choice import OPERATIONS, REFERENCE_BYTES
from shardwise.collectives.solver.derive import chunk_of, derive, verify
from shardwise.cost import selection
from shardwise.cost.collectives import collective_model
from shardwise.cost.selection import may_gain, saves_enough, select
from shardwise.errors import PlanError
from tests.support.clusters import cards, uneven

EVEN = [
    Cluster.local(4),
    cards(800, 800, 800),
    Cluster.preset("h100", nodes=8),
    Cluster.preset("gb200", nodes=36),
]


@pytest.mark.parametrize("cluster", EVEN, ids=str)
def test_uniform_clusters_use_the_library(cluster: Cluster) -> None:
    assert not may_gain(cluster)
    choice = select(cluster, "all_reduce", [range(cluster.num_ranks)])
    assert choice is not None
    assert choice.is_library


@pytest.mark.parametrize(
    ("cluster", "gain"),
    [(cards(800, 800, 800, 200), 0.32), (uneven(4), 0.65), (uneven(5), 0.65)],
    ids=["slow host", "trunk", "both"],
)
def test_unequal_links_are_solved(cluster: Cluster, gain: float) -> None:
    choice = select(cluster, "all_reduce", [range(cluster.num_ranks)])
    assert choice is not None
    assert choice.uses == "solved"
    assert choice.gain > gain


def test_solving_for_a_choice_has_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def recording_solve(*args: Any, limit_s: float = 0.0, **more: Any) -> Any:
        limits.append(limit_s)
        return solve(*args, limit_s=limit_s, **more)

    monkeypatch.setattr(selection, "solve", recording_solve)
    assert select(cards(110, 310, 470, 730), "all_reduce", [range(4)]) is not None
    assert limits == [math.inf]  # ranks that plan independently must agree, whatever their speed


def test_nodes_of_several_ranks_use_the_hierarchical_algorithm() -> None:
    choice = select(cards(800, 800, devices=4), "all_gather", [range(8)])
    assert choice is not None
    assert choice.uses == "hierarchical"
    assert choice.predicted_s["hierarchical"] < 1.02 * choice.predicted_s["solved"]


RATES = st.lists(st.sampled_from([100, 200, 400, 800]), min_size=2, max_size=5)


@settings(max_examples=25, deadline=None)
@given(RATES, st.sampled_from(OPERATIONS), st.integers(1, 2))
def test_another_implementation_must_save_a_tenth(
    rates: list[int], operation: str, devices: int
) -> None:
    cluster = cards(*rates, devices=devices)
    groups = np.arange(cluster.num_ranks)[None]
    choice = select(cluster, operation, groups)
    assert choice is not None
    library = collective_model(cluster, operation, groups)
    model = library.with_choice(choice)
    assert choice.predicted_s["library"] == library.seconds(REFERENCE_BYTES)
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
        if choice.is_library or size < choice.min_bytes:
            assert model.seconds(size) == library.seconds(size)
        else:
            assert saves_enough(library.seconds(size), model.seconds(size))
    verify(choice)
    restored = CollectiveChoice.from_json(json.loads(json.dumps(choice.to_json())), "plan")
    assert restored == choice


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 5), st.sampled_from(OPERATIONS), st.integers(1, 400), st.integers(1, 600))
def test_trees_give_programs_of_any_size(
    ranks: int, operation: str, numel: int, chunk_bytes: int
) -> None:
    choice = select(uneven(ranks), operation, [range(ranks)], use="solved")
    assert choice is not None
    bounds = np.sort(np.arange(ranks - 1) * 7919 % (numel + 1))
    counts = np.diff(np.concatenate([[0], bounds, [numel]])).tolist()
    program = derive(
        replace(choice, chunk_bytes=chunk_bytes),
        tuple(range(ranks)),
        numel,
        8,
        () if operation == "all_reduce" else counts,
    )
    assert program is not None
    check(program)
    full = [np.arange(numel, dtype=np.float64) + 100 * rank for rank in range(ranks)]
    if operation == "all_gather":
        offsets = np.concatenate([[0], np.cumsum(counts)])
        shards = [x[a:b] for x, a, b in zip(full, offsets, offsets[1:], strict=False)]
        for result in interpret(program, shards):
            assert result is not None
            assert (result == np.concatenate(shards)).all()
    elif operation == "all_reduce":
        for result in interpret(program, full):
            assert result is not None
            assert (result == sum(full)).all()


def test_groups_share_the_resources_they_cross() -> None:
    cluster = cards(800, 200, devices=2)
    single = select(cluster, "all_reduce", [[0, 2]], use="solved")
    both = select(cluster, "all_reduce", [[0, 2], [1, 3]], use="solved")
    assert single is not None
    assert both is not None
    assert both.s_per_byte == pytest.approx(2 * single.s_per_byte, rel=0.02)


def test_chunks_shrink_with_the_data_and_are_not_too_many() -> None:
    sizes = [chunk_of(1 << n, 100_000) for n in range(10, 31)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 32 * 1024
    assert chunk_of(1 << 24, 100_000) == 100_000
    assert (1 << 30) / sizes[-1] <= 4000


def test_errors_name_the_mistake() -> None:
    choice = select(uneven(3), "all_reduce", [range(3)], use="solved")
    assert choice is not None
    data = choice.to_json()
    for change, words in (
        ({"uses": "magic"}, "uses 'magic'"),
        ({"color": 1}, "unknown field 'color'"),
        ({"groups": ["0-2", "3"]}, "equally many different ranks"),
        ({"groups": ["0"], "uses": "shared", "forests": []}, "at least two"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"forests": []}, "0 forests"),
    ):
        with pytest.raises(PlanError, match=words):
            CollectiveChoice.from_json({**data, **change}, "collectives[0]")
    looped = json.loads(json.dumps(data))
    looped["forests"][0]["trees"][0]["in"] = "1 0 -"
    with pytest.raises(PlanError, match=r"lead to the root|among the sends|does not span"):
        CollectiveChoice.from_json(looped, "collectives[0]")
    without_sends = json.loads(json.dumps(data))
    without_sends["forests"][0]["sends"] = {}
    with pytest.raises(PlanError, match="not among the sends"):
        CollectiveChoice.from_json(without_sends, "collectives[0]")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["min_bytes"], math.inf, "min_bytes is inf"),
        (["chunk_bytes"], 2.5, "chunk_bytes is 2.5"),
        (["predicted_s", "library"], -1, "predicted_s"),
        (["latency_s"], True, "latency_s is True"),
        (["forests", 0, "ranks"], math.inf, "ranks is inf"),
        (["forests", 0, "message_s"], -1, "message_s is -1"),
        (["forests", 0, "trees"], [], "without trees"),
        (["forests", 0, "trees", 0, "root"], math.inf, "root is inf"),
    ],
)
def test_edited_choices_are_read_strictly(path, value, message):
    choice = select(uneven(3), "all_reduce", [range(3)], use="solved")
    assert choice is not None
    data = json.loads(json.dumps(choice.to_json()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(PlanError, match=message) as error:
        CollectiveChoice.from_json(data, "collectives[0]")
    assert "collectives[0]" in str(error.value)
