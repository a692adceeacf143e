"""A report contains all figures of the plan file and agrees with the other verbs."""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.planner.figures import with_figures
from shardwise.plans.text import explain_json, explain_plan
from shardwise.reports.render import with_code
from shardwise.reports.timeline import CriticalPath
from shardwise.simulation import stored_estimate
from tests.support.reported import HOSTILE, LAYERS

PLANS = ("staged", "flat")


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> sw.Plan:
    plan: sw.Plan = request.getfixturevalue(request.param)
    return plan


def saved(plan: sw.Plan, tmp_path: Path) -> sw.Plan:
    plan.save(tmp_path / "plan.json")
    return sw.Plan.load(tmp_path / "plan.json")


def test_a_report_needs_only_the_plan_file(plan: sw.Plan, tmp_path: Path) -> None:
    report = sw.report(saved(plan, tmp_path))
    assert set(report.missing) == {"code", "measured"}
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["format"] == "shardwise-report"
    for name in ("modules", "cluster", "what_if", "plans", "memory", "timeline"):
        assert data[name], name
    assert (data["schedule"] is not None) == plan.is_scheduled


def test_figures_equal_explain_and_simulate(plan: sw.Plan, tmp_path: Path) -> None:
    plan = saved(plan, tmp_path)
    data, explained = sw.report(plan).to_json(), explain_json(plan)
    estimate = json.loads(json.dumps(stored_estimate(plan).to_json()))
    verdict, best = data["verdict"], explained["best"]
    assert verdict["step_time_s"] == best["step_time_s"] == estimate["step_time_s"]
    assert verdict["rows_per_s"] == estimate["rows_per_s"]
    causes = {row["name"]: row["seconds"] for row in data["causes"]}
    assert causes == best["causes"] == estimate["timeline"]["causes"]
    for name in ("peak_bytes", "limit_bytes"):
        assert verdict["memory"][name] == best["memory"][name]
        assert [bar[name] for bar in data["memory"]] == [use[name] for use in explained["memory"]]
        assert [bar[name] for bar in data["memory"]] == [use[name] for use in estimate["memory"]]
    assert [bar["parts"] for bar in data["memory"]] == [use["parts"] for use in estimate["memory"]]
    assert [row["busy_s"] for row in data["timeline"]["rows"]] == estimate["timeline"]["busy_s"]
    shown = [row["step_time_s"] for row in data["plans"]]
    runners_up = [row["step_time_s"] for row in explained["runners_up"]]
    assert shown == [best["step_time_s"], *runners_up]
    assert [row["differences_s"] for row in data["plans"][1:]] == [
        row["differences"]["causes_s"] for row in explained["runners_up"]
    ]
    assert data["gap"] == explained["gap"]


def test_modules_sum_to_the_layers_of_explain(plan: sw.Plan) -> None:
    layers = plan.search.layers
    root = sw.report(plan).to_json()["modules"]["rows"][0]
    for name in ("forward_s", "backward_s", "communication_s", "parameters", "activation_bytes"):
        total = sum(getattr(row, name) * row.count for row in layers)
        assert root[name] == pytest.approx(total, rel=1e-9), name


def test_parents_are_the_sum_of_their_children_and_nodes(plan: sw.Plan) -> None:
    modules = sw.report(plan).to_json()["modules"]
    rows, nodes = modules["rows"], modules["nodes"]
    own = np.zeros(len(rows))
    np.add.at(own, nodes["module"], nodes["forward_s"])
    for row in rows:
        below = [r for r in rows if r["parent"] == row["id"]]
        total = own[row["id"]] + sum(r["forward_s"] * r["count"] for r in below)
        assert row["forward_s"] == pytest.approx(total, rel=1e-5, abs=1e-12)


def test_equal_layers_share_a_row(plan: sw.Plan) -> None:
    modules = sw.report(plan).to_json()["modules"]
    blocks = [row for row in modules["rows"] if row["kind"] == "Block"]
    assert sum(row["count"] for row in blocks) == LAYERS
    assert len(blocks) < LAYERS or plan.is_scheduled
    elements = 64 * 32 * 2 + 64 + LAYERS * (2 * 32 * 64 + 64 + 32)
    assert modules["rows"][0]["model_parameters"] == elements
    assert any(source["text"].startswith("x = self.words") for source in modules["sources"])


def test_a_hostile_name_is_not_markup(staged: sw.Plan) -> None:
    report = sw.report(staged)
    assert any(row["name"] == HOSTILE for row in report.to_json()["modules"]["rows"])
    assert HOSTILE not in report.html
    assert "<script>&quot;" not in report.html


def test_a_very_long_name_is_not_shortened(cluster: sw.Cluster) -> None:
    long = "n" * 10_000
    model = torch.nn.Sequential()
    model.add_module(long, torch.nn.Linear(4, 4))
    graph = sw.capture(model, (torch.zeros(8, 4),), lambda out, batch: out.sum())
    report = sw.report(sw.strategies.ddp(graph, cluster), graph, cluster)
    assert long in [row["name"] for row in report.to_json()["modules"]["rows"]]
    assert long in report.html


def test_the_critical_path_covers_the_step_without_gaps(plan: sw.Plan) -> None:
    estimate = stored_estimate(plan)
    chain = CriticalPath(estimate)
    seconds = chain.seconds
    assert sum(seconds.values()) == pytest.approx(estimate.step_time_s, rel=1e-6)
    assert seconds["waiting"] == 0
    data = sw.report(plan).to_json()["timeline"]
    spans = []
    for row in data["rows"]:
        for lane in row["lanes"].values():
            columns = zip(lane["start"], lane["end"], lane["critical"], strict=True)
            spans += [(start, end) for start, end, critical in columns if critical]
    spans.sort()
    assert spans[-1][1] == pytest.approx(estimate.step_time_s)
    for (_, end), (start, _) in pairwise(spans):
        assert start == pytest.approx(end, rel=1e-6, abs=1e-9)


def test_memory_over_time_is_sorted_and_reaches_the_peak(plan: sw.Plan) -> None:
    report = sw.report(plan)
    for bar in report.memory:
        assert list(bar.times) == sorted(bar.times)
        assert bar.times[-1] <= report.verdict.step_time_s
        assert max(bar.over_time) == pytest.approx(bar.peak_bytes, rel=1e-3)
        assert len(bar.over_time) >= 8


def test_every_rank_has_a_device(staged: sw.Plan) -> None:
    data = sw.report(staged).to_json()
    (node,) = data["cluster"]["nodes"]
    ranks = {int(r) for device in node["devices"] for r in device["ranks"].split(", ")}
    assert ranks == set(range(8))
    purposes = {what for link in data["cluster"]["links"] for what in link["what"]}
    assert {"gradients", "between stages"} <= purposes
    for link in data["cluster"]["links"]:
        assert sum(link["what"].values()) == pytest.approx(link["traffic_bytes"])


def test_memory_over_time_starts_with_the_step(plan: sw.Plan) -> None:
    report = sw.report(plan)
    for bar in report.memory:
        assert bar.times[0] == 0  # a waiting stage stores its parameters, too
        state = bar.parts["parameters"] + bar.parts["optimizer"]
        assert bar.over_time[0] == pytest.approx(state) or bar.group == 0
        # A file has four digits of every moment.
        assert max(bar.over_time) == pytest.approx(bar.peak_bytes, rel=1e-3)


def test_sizes_of_what_ifs_are_not_rounded_to_zero(plan: sw.Plan) -> None:
    notes = [row.note for row in sw.report(plan).what_if or ()]
    assert any("GiB" in note for note in notes)
    assert not any(re.search(r"\b0\.0 (of|GiB)", note) for note in notes)


def test_implementations_of_collectives_are_those_of_the_plan(graph: sw.Graph) -> None:
    cluster = sw.Cluster.from_yaml("""
version: 2
name: two
devices: {a: {preset: a100-80}}
nodes:
  - {name: n0, devices: {a: 2}, link: {bandwidth_gb_per_s: 300, latency_us: 2},
     nic: {count: 2, bandwidth_gbit_per_s: 200, latency_us: 1}}
  - {name: n1, devices: {a: 2}, link: {bandwidth_gb_per_s: 100, latency_us: 2},
     nic: {count: 1, bandwidth_gbit_per_s: 100, latency_us: 1}}
network: {latency_us: 5}
""")
    plan = sw.collectives.choose(sw.strategies.zero2(graph, cluster), cluster, use="hierarchical")
    report = sw.report(plan, graph, cluster)
    assert report.collectives
    for row, choice in zip(report.collectives, plan.collectives, strict=True):
        assert (row.operation, row.uses) == (choice.operation, choice.uses)
        assert row.implementation == choice.summary
        assert row.predicted_s == choice.predicted_s
        assert row.saved_share == choice.gain
    assert sw.report(plan.with_(collectives=()), graph, cluster).collectives is None


def test_what_ifs_vary_memory_links_compute_and_devices(plan: sw.Plan) -> None:
    rows = sw.report(plan).what_if or ()
    assert {row.kind for row in rows} == {"memory", "bandwidth", "compute", "devices"}
    slower = next(row for row in rows if row.change == "links half as fast")
    faster = next(row for row in rows if row.change == "links twice as fast")
    assert slower.step_time_s is not None
    assert faster.step_time_s is not None
    assert faster.step_time_s <= sw.report(plan).verdict.step_time_s <= slower.step_time_s
    assert all(row.feasible == (row.step_time_s is not None) for row in rows)


def test_code_refers_to_the_users_lines(staged: sw.Plan, graph: sw.Graph, tmp_path: Path) -> None:
    plan = saved(with_code(staged, graph), tmp_path)
    code = sw.report(plan).code
    assert code is not None
    assert "pipeline.py" in [file.name for file in code.files]
    texts = {
        code.sources[number]["text"]
        for file in code.files
        for number in file.sources
        if number >= 0
    }
    assert "x = self.words(ids)" in texts
    assert sw.report(staged, graph).code == code


def test_a_hostile_plan_name_is_not_code(flat: sw.Plan, graph: sw.Graph) -> None:
    hostile = flat.with_(name='"""\nraise SystemExit\n"""\\', search=None)
    for source in sw.compile(graph, hostile).sources:
        body = ast.parse(source).body
        assert not any(isinstance(statement, ast.Raise) for statement in body)
        assert "\u202e" not in source


def test_a_named_plan_is_simulated_with_model_and_cluster(
    graph: sw.Graph, cluster: sw.Cluster
) -> None:
    plan = sw.strategies.hybrid(graph, cluster, dp=2, tp=2, pp=2, num_microbatches=4)
    with pytest.raises(PlanError, match=r"no figures(.|\n)*--cluster"):
        sw.report(plan)
    report = sw.report(plan, graph, cluster)
    estimate = sw.simulate(graph, plan, cluster)
    assert report.verdict.step_time_s == estimate.step_time_s
    assert [bar.peak_bytes for bar in report.memory] == [u.peak_bytes for u in estimate.memory]
    assert report.modules is not None
    assert report.plans is None
    assert "plans" in report.missing
    text = explain_plan(with_figures(graph, plan, cluster), 80)
    assert "time by cause" in text
    assert "what would change" not in text


def test_an_edited_plan_is_simulated_again(
    staged: sw.Plan, graph: sw.Graph, cluster: sw.Cluster
) -> None:
    edited = staged.with_(recompute="full")
    with pytest.raises(PlanError, match="was changed"):
        sw.report(edited)
    report = sw.report(edited, graph, cluster)
    assert report.verdict.step_time_s > staged.search.best.step_time_s


def test_notebooks_show_a_frame_or_text(flat: sw.Plan) -> None:
    assert "<iframe" in flat._repr_html_()
    assert "srcdoc" in sw.report(flat)._repr_html_()
    assert flat.with_(search=None)._repr_html_().startswith("<pre>")


CORRUPTION: dict[str, Any] = {
    "no memory": lambda search: search.pop("memory"),
    "text for a number": lambda s: s["details"]["links"][0].update(busy_s="soon"),
    "not finite": lambda s: s["details"]["links"][0].update(share=float("nan")),
    "a node of no module": lambda s: s["details"]["modules"]["nodes"]["module"].__setitem__(0, 999),
    "columns of different lengths": lambda s: s["details"]["modules"]["rows"]["name"].pop(),
    "no cluster": lambda s: s["details"].update(cluster={"version": 1, "name": "x"}),
    "parts that do not sum to the peak": lambda s: s["memory"][0]["parts"].update(other=1e12),
}


@pytest.mark.parametrize("corrupt", CORRUPTION.values(), ids=CORRUPTION.keys())
def test_corrupt_figures_are_reported(staged: sw.Plan, corrupt: Any) -> None:
    data = json.loads(json.dumps(staged.to_json()))
    corrupt(data["search"])
    with pytest.raises(sw.errors.ShardwiseError, match=r"search"):
        sw.report(sw.Plan.from_json(data))
