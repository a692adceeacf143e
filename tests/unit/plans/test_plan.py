"""Plan files: reading back what was written, and errors in edited files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.cluster import Mesh
from shardwise.errors import PlanError, PlanMismatch
from shardwise.plans import ParameterEntry, Plan, resolve
from shardwise.sharding.placements import Shard

words = st.text("abcz.*_0", min_size=1, max_size=6)


class Net(nn.Module):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, hidden), nn.Linear(hidden, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(6, 4)}


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    return sw.capture(Net(), batch())


@pytest.fixture
def plan(graph: sw.Graph) -> Plan:
    return sw.strategies.tensor(graph, sw.Cluster.local(2))


@st.composite
def plans(draw: Any) -> Plan:
    names = draw(st.lists(st.sampled_from(["dp", "tp", "cp"]), min_size=1, unique=True))
    weights = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)
    size = st.one_of(st.integers(1, 7), weights)
    mesh = Mesh.of(**{name: draw(size) for name in names})
    entry = st.builds(
        ParameterEntry,
        layout=st.dictionaries(
            st.sampled_from(names), st.sampled_from(["0", "replicate", "1:2x[3]"])
        ),
        zero=st.sampled_from([None, 0, 1, 2, 3]),
    )
    return Plan(
        name=draw(words),
        model=draw(words),
        fingerprint=draw(words),
        mesh=mesh,
        roles={name: draw(st.sampled_from(["batch", "parameters"])) for name in names},
        inputs=draw(st.dictionaries(words, st.one_of(st.none(), st.integers(0, 3)))),
        parameters=draw(st.dictionaries(words, entry)),
        nodes=draw(
            st.dictionaries(words, st.dictionaries(st.sampled_from(names), words, min_size=1))
        ),
        units=tuple(draw(st.lists(words))),
        rng=draw(st.sampled_from(["exact", "fast"])),
        seed=draw(st.integers(0, 2**40)),
        notes=tuple(draw(st.lists(words))),
    )


@given(plans())
def test_plans_survive_a_json_round_trip(plan: Plan) -> None:
    text = json.dumps(plan.to_json())
    again = Plan.from_json(json.loads(text))
    assert again == plan
    assert json.dumps(again.to_json()) == text
    assert list(again.parameters) == list(plan.parameters), "later entries win: order matters"


def test_plan_files_are_saved_and_loaded(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(PlanError, match="there is no plan file"):
        Plan.load(tmp_path / "plam.json")
    (tmp_path / "bad.json").write_text('{\n"version": 1,,\n}')
    with pytest.raises(PlanError, match="not JSON") as caught:
        Plan.load(tmp_path / "bad.json")
    assert "bad.json:2" in str(caught.value)


def edited(plan: Plan, *path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(plan.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("paramters",), {}, "unknown field 'paramters'; did you mean 'parameters'"),
        (("seed",), "3", "seed is '3'"),
        (("seed",), True, "seed is True"),
        (("mesh",), [2], "mesh is a list"),
        (("version",), 9, "plan version 9"),
        (("rng",), "exakt", "did you mean 'exact'"),
        (("roles", "tp"), "parameter", "did you mean 'parameters'"),
        (("roles", "dp"), "batch", "roles name axis 'dp'"),
        (("mesh", "tp"), 0, "0"),
        (("mesh", "tp"), "2", "2"),
        (("parameters", "layers.0.weight", "layuot"), {}, "did you mean 'layout'"),
        (("parameters", "layers.0.weight", "zero"), 4, "zero=4"),
        (("parameters", "layers.0.weight", "layout"), {"tp": 0}, "tp is 0, must be text"),
        (("parameters", "layers.0.weight", "layout"), {"tpp": "0"}, "did you mean 'tp'"),
        (("parameters", "layers.0.weight"), "0", "'0', must be a mapping"),
        (("nodes", "linear"), {"pt": "same"}, "unknown mesh axis 'pt'"),
        (("nodes", "linear"), "same", "nodes"),
        (("nodes", "linear"), {"tp": 3}, "3"),
        (("inputs", "x"), "0", "inputs"),
        (("units",), [3], "units"),
        (("notes",), [3], "notes"),
    ],
)
def test_an_error_names_the_invalid_field(
    plan: Plan, path: tuple[str, ...], value: Any, message: str
) -> None:
    data = edited(plan, *path, value=value)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data, where="my.json")
    assert message in str(caught.value)
    assert "my.json" in str(caught.value)


@pytest.mark.parametrize("field", ["version", "name", "model", "fingerprint", "mesh", "roles"])
def test_a_missing_field_is_named(plan: Plan, field: str) -> None:
    data = plan.to_json()
    del data[field]
    with pytest.raises(PlanError, match=f"field '{field}' is missing"):
        Plan.from_json(data)


def test_a_plan_for_another_model_is_refused(plan: Plan) -> None:
    other = sw.capture(Net(hidden=8), batch())
    with pytest.raises(PlanMismatch, match="was made for Net"):
        sw.compile(other, plan)
    with pytest.raises(PlanMismatch):
        sw.verify(Net(hidden=8), batch(), plan)


def test_a_plan_is_valid_for_another_batch_size(plan: Plan) -> None:
    other = sw.capture(Net(), {"x": torch.ones(3, 4)})
    sw.compile(other, plan)


def test_names_without_a_match_are_refused(graph: sw.Graph, plan: Plan) -> None:
    for changes, message in (
        ({"parameters": {"layer.0.weight": ParameterEntry()}}, "did you mean 'layers.0.weight'"),
        ({"inputs": {"y": 0}}, "input 'y'"),
        ({"nodes": {"liner": {"tp": "same"}}}, "did you mean 'linear'"),
    ):
        with pytest.raises(PlanError) as caught:
            resolve(graph, plan.with_(**changes))
        assert message in str(caught.value)


def test_a_choice_that_the_rule_forbids_is_refused(graph: sw.Graph, plan: Plan) -> None:
    (first, *_) = [n for n in graph.nodes if n.op.startswith("aten.linear")]
    with pytest.raises(PlanError) as caught:
        resolve(graph, plan.with_(nodes={first.name: {"tp": "shard q"}}))
    text = str(caught.value)
    assert f"node {first.name} (aten.linear.default) cannot 'shard q'" in text
    assert "test_plan.py:" in text
    assert "'same', 'shard " in text


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("2", "names dim 2 of a tensor of shape (6, 4)"),
        ("x", "is not understood"),
        ("0:2x[4]", "describes 8 elements, dim 0 of shape (6, 4) has 6"),
        ("0:2x[3", "is not understood"),
    ],
)
def test_an_invalid_placement_names_the_parameter(
    graph: sw.Graph, plan: Plan, placement: str, message: str
) -> None:
    entry = {"layers.0.weight": ParameterEntry(layout={"tp": placement})}
    with pytest.raises(PlanError) as caught:
        resolve(graph, plan.with_(parameters=entry))
    assert "layers.0.weight" in str(caught.value)
    assert message in str(caught.value)


def test_later_globs_win_field_by_field(graph: sw.Graph, plan: Plan) -> None:
    entries = {
        "*": ParameterEntry(layout={"tp": "replicate"}, zero=1),
        "layers.0.*": ParameterEntry(layout={"tp": "0"}),
        "*.bias": ParameterEntry(zero=2),
    }
    plan = plan.with_(parameters=entries)
    assert plan.entry("layers.0.bias") == ParameterEntry(layout={"tp": "0"}, zero=2)
    assert plan.entry("layers.1.weight") == ParameterEntry(layout={"tp": "replicate"}, zero=1)
    swapped = dict(reversed(entries.items()))
    assert plan.with_(parameters=swapped).entry("layers.0.bias").layout == {"tp": "replicate"}
    resolved = resolve(graph, plan)
    values = {p.name: p.value for p in graph.parameters}
    is_sharded = {
        n: isinstance(resolved.parameter_layout(v)["tp"], Shard) for n, v in values.items()
    }
    assert is_sharded == {
        "layers.0.weight": True,
        "layers.0.bias": True,
        "layers.1.weight": False,
        "layers.1.bias": False,
    }
    assert sw.verify(Net(), batch(), plan).ok


def test_a_node_can_be_overridden(graph: sw.Graph, plan: Plan) -> None:
    relu = next(n for n in graph.nodes if n.op.startswith("aten.relu"))
    assert str(resolve(graph, plan).assignments[0].nodes[relu.name].choice).startswith("shard")
    forced = plan.with_(nodes={relu.name: {"tp": "same"}})
    assert str(resolve(graph, forced).assignments[0].nodes[relu.name].choice) == "same"
    assert sw.verify(Net(), batch(), forced).ok
