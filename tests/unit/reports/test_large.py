"""Reports of many ranks, stages and actions: classes, folded timelines and small files."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.planner.module_tree import FIGURES, Folder, Module
from shardwise.plans.search_result import GroupTimes, PassTimes, PlanDetails, StageTimes, StepTimes
from shardwise.reports import timeline
from shardwise.reports.timeline import MAX_CLASSES, Step, classes_of
from shardwise.simulation import stored_estimate


def test_a_long_step_shows_its_beginning_and_end(
    staged: sw.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = stored_estimate(staged)
    monkeypatch.setattr(timeline, "MAX_SPANS", 8)
    classes = classes_of(staged, estimate)
    chart = Step(staged, estimate, classes).chart()
    assert chart.folded is not None
    more = chart.kinds.index("more")
    for row in chart.rows:
        kinds = row.lanes["compute"]["kind"]
        assert kinds.count(more) == 1
        assert max(row.lanes["compute"]["end"]) <= estimate.step_time_s * (1 + 1e-9)
        assert len(kinds) < len(estimate.timeline.schedule.actions[row.group])


def test_the_number_of_classes_is_limited_and_includes_the_slowest(staged: sw.Plan) -> None:
    stages = 40
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
    passes = tuple(
        PassTimes(kind=kind, stage=i, last=last, seconds=5e-3 if (i, kind) == (slow, "F") else 1e-3)
        for i in range(stages)
        for kind, last in (("F", False), ("B", False), ("B", True))
    )
    search = replace(
        staged.search,
        step=StepTimes(
            passes=passes,
            stages=tuple(
                StageTimes(group=i, forward_s=1e-3, backward_s=1e-3) for i in range(stages)
            ),
            groups=(GroupTimes(),) * stages,
        ),
        memory=tuple(replace(staged.search.memory[0], group=i) for i in range(stages)),
        digest="",
        details=PlanDetails(),
    )
    estimate = stored_estimate(plan.with_(search=search))
    best = replace(
        search.best,
        step_time_s=estimate.step_time_s,
        causes=estimate.timeline.causes,
        bubble_fraction=estimate.timeline.bubble_fraction,
    )
    report = sw.report(plan.with_(search=replace(search, best=best)))
    assert len(report.classes) == MAX_CLASSES
    assert sum(c.num_ranks for c in report.classes) == stages
    assert sum(c.more for c in report.classes) == stages - MAX_CLASSES
    assert slow in {c.shown for c in report.classes if not c.more}
    assert {group.class_ for group in report.groups} == set(range(MAX_CLASSES))


def test_only_modules_with_equal_children_are_folded() -> None:
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
