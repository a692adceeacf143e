"""Two plans side by side: what changed and what it costs, also where one has no figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise import cli
from shardwise.cli.report import difference_text
from shardwise.collectives.messages import CollectiveChoice
from shardwise.reports.diff import diff
from tests.support.reported import HOSTILE, LAYERS


def test_equal_plans_differ_in_nothing(staged: sw.Plan) -> None:
    found = diff(staged, staged)
    assert found.changes == ()
    assert all(cost.difference == 0 for cost in found.costs)
    assert "decide the same" in difference_text(found, "a", "b", 80)


def test_costs_are_those_of_the_plans_and_sum_up(flat: sw.Plan, staged: sw.Plan) -> None:
    found = diff(flat, staged)
    kinds = {change.kind for change in found.changes}
    assert {"cluster", "ranks", "stages", "schedule", "micro-batches", "zero", "stage"} <= kinds
    assert any(c.kind == "parameters" and HOSTILE in c.name for c in found.changes)
    assert found.step_time_s is not None
    assert found.memory_bytes is not None
    before, after = found.step_time_s
    assert before == flat.search.best.step_time_s
    assert after == staged.search.best.step_time_s
    for kind, total in (("time", after - before),
                        ("memory", found.memory_bytes[1] - found.memory_bytes[0])):  # fmt: skip
        parts = [c.difference for c in found.costs if c.kind == kind]
        assert sum(parts) == pytest.approx(total, rel=1e-6)
    assert any(c.kind == "traffic" for c in found.costs)


def test_what_is_as_long_or_as_many_still_differs(flat: sw.Plan) -> None:
    (axis, size), *rest = flat.mesh.axes
    uneven = sw.Mesh.of(**{axis: (2, *[1] * (size - 1)), **dict(rest)})
    ranks = (tuple(range(flat.num_ranks)),)
    ways = [
        CollectiveChoice(operation="all_reduce", groups=ranks, uses="shared", min_bytes=size)
        for size in (1 << 10, 1 << 20)
    ]
    for kind, before, after in (
        ("mesh", flat, flat.with_(mesh=uneven)),
        ("units", flat.with_(units=("a",)), flat.with_(units=("b",))),
        ("collectives", *(flat.with_(collectives=(way,)) for way in ways)),
    ):
        assert [change.kind for change in diff(before, after).changes] == [kind]


def test_a_parameter_is_not_absent_where_a_glob_names_it(flat: sw.Plan) -> None:
    whole = {glob: entry for glob, entry in flat.parameters.items() if "up.weight" in glob}
    (entry,) = whole.values()
    parts = {f"blocks.{i}.up.weight": entry for i in range(LAYERS)}
    before, after = (flat.with_(parameters=found) for found in (whole, parts))
    assert diff(before, after).changes == diff(after, before).changes == ()
    other = {**parts, "blocks.1.up.weight": replace(entry, zero=0)}
    changes = diff(before, flat.with_(parameters=other)).changes
    told = {(c.name, c.after) for c in changes if c.kind == "parameters"}
    assert ("blocks.1.up.weight", "replicate, zero 0") in told
    assert {name for name, _ in told} == {"blocks.1.up.weight", *whole}
    assert "absent" not in {after for _, after in told}


@pytest.mark.parametrize("width", [40, 60, 120])
def test_text_fits_the_terminal(flat: sw.Plan, staged: sw.Plan, width: int) -> None:
    text = difference_text(diff(flat, staged), "a", "b" * 200, width)
    assert all(len(line) <= width for line in text.splitlines())


def test_what_cannot_be_compared_is_said(staged: sw.Plan) -> None:
    named = staged.with_(search=None, name="mine", recompute="full")
    other = named.with_(model="Other", fingerprint="0")
    found = diff(staged, other)
    assert found.step_time_s is None
    assert found.costs == ()
    assert any(c.kind == "recompute" for c in found.changes)
    assert any("different models" in note for note in found.notes)
    assert any("'mine' has no figures" in note for note in found.notes)
    edited = diff(staged, staged.with_(num_microbatches=2))
    assert any("was changed" in note for note in edited.notes)


def test_the_verb(
    flat: sw.Plan, staged: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for plan, file in zip((flat, staged), files, strict=True):
        plan.save(file)
    trace = tmp_path / "both.json"
    with pytest.raises(SystemExit) as exit_:
        cli.main(["diff", *map(str, files), "--json", "--perfetto", str(trace)])
    assert exit_.value.code == 0
    data = json.loads(capsys.readouterr().out)
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
    with pytest.raises(SystemExit) as exit_:
        cli.main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert exit_.value.code == 1
    assert "b.json" in capsys.readouterr().err
