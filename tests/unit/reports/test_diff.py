"""Differences of two plans and their costs, also if one has no figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli.report import difference_text
from shardwise.collectives.messages import CollectiveChoice
from shardwise.reports.diff import diff
from tests.support.command_line import run
from tests.support.reported import HOSTILE, LAYERS


def test_equal_plans_have_no_differences(staged: sw.Plan) -> None:
    difference = diff(staged, staged)
    assert difference.changes == ()
    assert all(cost.difference == 0 for cost in difference.costs)
    assert "the same decisions" in difference_text(difference, "a", "b", 80)


def test_costs_are_consistent_with_the_totals(flat: sw.Plan, staged: sw.Plan) -> None:
    difference = diff(flat, staged)
    kinds = {change.kind for change in difference.changes}
    assert {"cluster", "ranks", "stages", "schedule", "micro-batches", "zero", "stage"} <= kinds
    assert any(c.kind == "parameters" and HOSTILE in c.name for c in difference.changes)
    assert difference.step_time_s is not None
    assert difference.memory_bytes is not None
    before, after = difference.step_time_s
    assert before == flat.search.best.step_time_s
    assert after == staged.search.best.step_time_s
    memory = difference.memory_bytes[1] - difference.memory_bytes[0]
    for kind, total in (("time", after - before), ("memory", memory)):
        parts = [c.difference for c in difference.costs if c.kind == kind]
        assert sum(parts) == pytest.approx(total, rel=1e-6)
    assert any(c.kind == "traffic" for c in difference.costs)


def test_changes_of_equal_size_are_detected(flat: sw.Plan) -> None:
    (axis, size), *others = flat.mesh.axes
    uneven = sw.Mesh.of(**{axis: (2, *[1] * (size - 1)), **dict(others)})
    ranks = (tuple(range(flat.num_ranks)),)
    choices = [
        CollectiveChoice(operation="all_reduce", groups=ranks, uses="shared", min_bytes=size)
        for size in (1 << 10, 1 << 20)
    ]
    for kind, before, after in (
        ("mesh", flat, flat.with_(mesh=uneven)),
        ("units", flat.with_(units=("a",)), flat.with_(units=("b",))),
        ("collectives", *(flat.with_(collectives=(choice,)) for choice in choices)),
    ):
        assert [change.kind for change in diff(before, after).changes] == [kind]


def test_a_parameter_matched_by_a_glob_is_not_absent(flat: sw.Plan) -> None:
    globs = {glob: entry for glob, entry in flat.parameters.items() if "up.weight" in glob}
    (entry,) = globs.values()
    parts = {f"blocks.{i}.up.weight": entry for i in range(LAYERS)}
    before, after = (flat.with_(parameters=entries) for entries in (globs, parts))
    assert diff(before, after).changes == diff(after, before).changes == ()
    other = {**parts, "blocks.1.up.weight": replace(entry, zero=0)}
    changes = diff(before, flat.with_(parameters=other)).changes
    changed = {(c.name, c.after) for c in changes if c.kind == "parameters"}
    assert ("blocks.1.up.weight", "replicate, zero 0") in changed
    assert {name for name, _ in changed} == {"blocks.1.up.weight", *globs}
    assert "absent" not in {after for _, after in changed}


@pytest.mark.parametrize("width", [40, 60, 120])
def test_text_fits_the_terminal(flat: sw.Plan, staged: sw.Plan, width: int) -> None:
    text = difference_text(diff(flat, staged), "a", "b" * 200, width)
    assert all(len(line) <= width for line in text.splitlines())


def test_notes_name_what_cannot_be_compared(staged: sw.Plan) -> None:
    named = staged.with_(search=None, name="custom", recompute="full")
    other = named.with_(model="Other", fingerprint="0")
    difference = diff(staged, other)
    assert difference.step_time_s is None
    assert difference.costs == ()
    assert any(c.kind == "recompute" for c in difference.changes)
    assert any("different models" in note for note in difference.notes)
    assert any("'custom' has no figures" in note for note in difference.notes)
    edited = diff(staged, staged.with_(num_microbatches=2))
    assert any("was changed" in note for note in edited.notes)


def test_the_verb_prints_json_and_writes_timelines(
    flat: sw.Plan, staged: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for plan, file in zip((flat, staged), files, strict=True):
        plan.save(file)
    trace = tmp_path / "both.json"
    code, out, _ = run(capsys, "diff", *map(str, files), "--json", "--perfetto", str(trace))
    assert code == 0
    data = json.loads(out)
    assert data["step_time_s"]["before"] == flat.search.best.step_time_s
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"a: ranks 0-3", "b: ranks 0-3", "b: ranks 4-7"}
    assert len({e["pid"] for e in events}) == 3


def test_a_foreign_file_is_an_error(
    staged: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staged.save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"hello": 1}')
    code, _, err = run(capsys, "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert code == 1
    assert "b.json" in err
