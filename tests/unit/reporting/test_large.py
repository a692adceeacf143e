"""Many ranks, stages and actions: classes, folded timelines, files that stay small."""

from __future__ import annotations

import json

import pytest

import shardwise as sw
from shardwise.planner.search.details.tree import FIGURES, Folder, Module
from shardwise.planner.search.replay import replay
from shardwise.reporting import timeline
from shardwise.reporting.classes import MOST_CLASSES, classes_of
from shardwise.reporting.timeline import Step


def test_a_long_step_keeps_its_ends(staged: sw.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = replay(staged)
    monkeypatch.setattr(timeline, "MOST_SPANS", 8)
    classes = classes_of(staged, estimate)
    chart = Step(staged, estimate, classes, [0.0] * 2).chart()
    assert chart.folded is not None
    more = chart.kinds.index("more")
    for row in chart.rows:
        kinds = row.lanes["compute"]["kind"]
        assert kinds.count(more) == 1
        assert max(row.lanes["compute"]["end"]) <= estimate.step_time_s * (1 + 1e-9)
        assert len(kinds) < len(estimate.timeline.schedule.actions[row.group])


def test_at_most_so_many_classes_with_the_slowest(staged: sw.Plan) -> None:
    stages = 40
    search = json.loads(json.dumps(dict(staged.search)))
    unit = {"forward_s": 1e-3, "backward_s": 2e-3}
    group = search["groups"][0]
    slow = 21
    plan = sw.Plan(
        name="many",
        model="m",
        fingerprint="f",
        mesh=sw.Mesh(),
        roles={},
        stages=tuple(
            sw.Stage(first=f"b.{i}" if i else "", ranks=(i,), mesh=sw.Mesh()) for i in range(stages)
        ),
        schedule="1f1b",
        num_microbatches=2,
    )
    stage = {k: search["stages"][0][k] for k in search["stages"][0]}
    search |= {
        "units": [unit, {"forward_s": 5e-3, "backward_s": 2e-3}],
        "stages": [{**stage, "group": i, "units": str(int(i == slow))} for i in range(stages)],
        "groups": [
            {**group, "ranks": str(i), "memory": {**group["memory"], "group": i}}
            for i in range(stages)
        ],
    }
    del search["decisions"], search["details"]
    made = sw.report(plan.with_(search=_consistent(plan, search)))
    assert len(made.classes) == MOST_CLASSES
    assert sum(found.num_ranks for found in made.classes) == stages
    assert sum(found.more for found in made.classes) == stages - MOST_CLASSES
    assert slow in {found.shown for found in made.classes if not found.more}
    assert {group.class_ for group in made.groups} == set(range(MOST_CLASSES))


def _consistent(plan: sw.Plan, search: dict[str, object]) -> dict[str, object]:
    """The figures with the step that they give."""
    best = dict(search["best"])  # type: ignore[call-overload]
    found = replay(plan.with_(search={**search, "best": {**best, "step_time_s": 1e9}}))
    best |= {
        "step_time_s": found.step_time_s,
        "causes": dict(found.timeline.causes),
        "bubble_fraction": found.timeline.bubble_fraction,
    }
    return {**search, "best": best}


def test_modules_fold_only_where_all_below_is_equal() -> None:
    root = Module("m", "")
    for layer in range(6):
        for name in ("a", "b"):
            leaf = root.at(f"layers.{layer}.{name}")
            leaf.own[FIGURES.index("forward_s")] = 1.0 if layer != 3 or name == "a" else 2.0
            leaf.stages.add(layer // 2)
    root.at("layers.٣").kind = "not a number"
    rows = Folder({}, {}).rows(root)
    layers = {row.name: row.count for row in rows if row.module.path.count(".") == 1}
    assert layers == {"0-2,4-5": 5, "3": 1, "٣": 1}
    assert rows[0].figures[0] == pytest.approx(13.0)
    first = next(row for row in rows if row.name == "0-2,4-5")
    assert first.stages == {0, 1, 2}
