"""Synchronization per parameter: files, merged globs, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.errors import ClusterError, PlanError
from shardwise.plans import ParameterEntry, Plan
from shardwise.schema import Reader, Writer


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(self.embed(x))) * self.frozen).pow(2).sum()


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    return sw.capture(Words(), {"x": torch.ones(6, 3, dtype=torch.long)})


def plan(graph: sw.Graph, entries: dict[str, Any], ranks: int = 2) -> Plan:
    return sw.strategies.ddp(graph, sw.Cluster.local(ranks), constraints=entries)


syncs = st.one_of(
    st.builds(sw.Sync, kind=st.just("owner"), owner=st.integers(0, 3), host=st.booleans()),
    st.builds(
        sw.Sync,
        kind=st.just("partitioned"),
        owners=st.lists(st.integers(0, 5), max_size=3).filter(lambda w: not w or any(w)).map(tuple),
        dim=st.none() | st.integers(0, 2),
        chunk=st.integers(0, 3),
    ),
    st.builds(
        sw.Sync,
        kind=st.sampled_from(["", "all_reduce"]),
        bucket_mib=st.sampled_from([0.0, 0.5, 25.0]),
        dtype=st.sampled_from(["", "bfloat16"]),
        hierarchical=st.integers(0, 4),
        factors=st.booleans(),
    ),
)


@given(sync=syncs)
def test_reads_what_was_written(sync: sw.Sync) -> None:
    data = Writer().write(sync)
    assert Reader(PlanError, "x").read(sw.Sync, data) == sync
    assert str(sync)


def test_files_and_text(graph: sw.Graph) -> None:
    made = plan(graph, {"embed.*": sw.Sync(kind="partitioned", dim=0, owners=(2, 1))})
    again = Plan.from_json(made.to_json())
    assert again == made
    assert "partitioned 2:1 along dim 0" in str(made)
    assert plan(graph, {"embed.*": {"sync": {"kind": "owner", "owner": 1}}}).entry(
        "embed.weight"
    ).sync == sw.Sync(kind="owner", owner=1)


def test_later_globs_win_by_field(graph: sw.Graph) -> None:
    made = plan(
        graph,
        {
            "*": sw.Sync(bucket_mib=1.0, dtype="bfloat16"),
            "linear.*": sw.Sync(dtype="float16"),
            "linear.bias": sw.Sync(kind="owner", owner=1),
        },
    )
    assert made.entry("linear.weight").sync == sw.Sync(bucket_mib=1.0, dtype="float16")
    assert made.entry("linear.bias").sync == sw.Sync(kind="owner", owner=1)


def test_a_later_glob_may_not_contradict_an_earlier_one(graph: sw.Graph) -> None:
    with pytest.raises(PlanError, match="gradients 2 steps late") as caught:
        plan(graph, {"*": sw.Sync(stale=2), "linear.*": sw.Sync(every=5)})
    assert 'kind="all_reduce"' in str(caught.value.hint)
    replaced = sw.Sync(kind="all_reduce", every=5)
    made = plan(graph, {"*": sw.Sync(stale=2), "linear.*": replaced})
    assert made.entry("linear.weight").sync == replaced


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"kind": "owners"}, "owners"),
        ({"kind": "owner"}, "owner=None"),
        ({"owner": 1}, "owner=1"),
        ({"owners": (1, 1)}, "owners=(1, 1)"),
        ({"kind": "all_reduce", "host": True}, "host memory"),
        ({"sparse": "rows"}, "rows"),
        ({"kind": "owner", "owner": 0, "factors": True}, "factors"),
        ({"dtype": "int64"}, "int64"),
        ({"bucket_mib": -1.0}, "-1.0"),
        ({"chunk": -2}, "-2"),
    ],
)
def test_inconsistent_fields(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(PlanError) as caught:
        sw.Sync(**fields)
    assert part in str(caught.value)


def test_weights_of_owners() -> None:
    with pytest.raises(ClusterError):
        sw.Sync(kind="partitioned", owners=(0, 0))


@pytest.mark.parametrize(
    ("name", "entry", "parts"),
    [
        ("linear.weight", sw.Sync(kind="owner", owner=2), ("owner=2", "0 to 1")),
        (
            "linear.weight",
            sw.Sync(kind="partitioned", owners=(1, 1, 1)),
            ("1:1:1", "owners=(1, 1)"),
        ),
        ("linear.bias", sw.Sync(kind="partitioned", dim=1), ("dim=1", "linear.bias")),
        ("frozen", sw.Sync(kind="owner", owner=0), ("frozen",)),
        ("linear.weight", sw.Sync(sparse="gather"), ("sparse", "aten.linear.default")),
        ("embed.weight", sw.Sync(factors=True), ("factors", "aten.embedding.default")),
        ("linear.bias", sw.Sync(factors=True), ("factors", "linear.bias")),
        ("linear.weight", sw.Sync(kind="sharded"), ("zero=1",)),
        (
            "linear.weight",
            ParameterEntry(zero=3, sync=sw.Sync(kind="owner", owner=0)),
            ("zero=3", "owner 0"),
        ),
    ],
)
def test_refused_for_a_parameter(
    graph: sw.Graph, name: str, entry: Any, parts: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(graph, {name: entry}).check(graph)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients_are_computed_as_rows(ranks: int, sparse: bool) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 4, sparse=sparse, padding_idx=2)
            self.bag = nn.EmbeddingBag(11, 4, sparse=sparse)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.table(x).sum(1) * self.bag(x)).square().sum()

    graph = sw.capture(Tables(), {"x": torch.ones(6, 3, dtype=torch.long)})
    program = sw.compile(graph, sw.strategies.parallax(graph, sw.Cluster.local(ranks)))
    calls = [line for line in program.source(0).splitlines() if "F.embedding(" in line]
    assert len(calls) == 2
    assert all("sparse=True)" in call for call in calls)


def test_a_glob_needs_one_suitable_parameter(graph: sw.Graph) -> None:
    plan(graph, {"*": sw.Sync(factors=True)}).check(graph)
