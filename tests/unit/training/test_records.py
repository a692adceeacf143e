"""Recorded steps, and the figures of all ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.runtime import ShardedOptimizer
from shardwise.training.run_files import ranks_row
from tests.support import trainer


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"trace": 3}, "needs a folder"),
        ({"trace": {"steps": [5, 3]}, "folder": "x"}, r"\[5, 3\] is not the first and last"),
        ({"trace": {"steps": [1, 500]}, "folder": "x"}, "at most 100 steps"),
        ({"trace": {"steps": []}, "folder": "x"}, "not the first and last"),
        ({"trace": {"steps": [1, 2, 3]}, "folder": "x"}, "not the first and last"),
        ({"trace": {"steps": 0}, "folder": "x"}, "at least 1"),
        ({"trace": {"steps": [9, 12]}, "folder": "x"}, "ends at step 8, before step 9"),
        ({"trace": {"steps": 1, "file": "../x.json"}, "folder": "x"}, "plain file name"),
        ({"trace": {"steps": 1, "file": "run.json"}, "folder": "x"}, "the run does not use"),
    ],
)
def test_invalid_traces_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=match):
        sw.Trainer(**trainer.fields(**changes)).check()


def test_one_process_writes_trace_ranks_and_run_files(tmp_path: Path) -> None:
    changes = {"logs": {"console": "off", "ranks_every_s": 0.0}, "trace": 2, "steps": 5}
    result = trainer.fit(folder=str(tmp_path), **changes)
    assert result.trace == tmp_path / "trace.json"
    steps = [
        e["args"]["step"]
        for e in json.loads(result.trace.read_text())["traceEvents"]
        if e.get("cat") == "step"
    ]
    assert steps == [2]
    rows = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "finished"


def test_missed_steps_of_a_trace_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace after the last step is refused at the start; an early end is reported at the end."""
    with pytest.raises(ConfigError, match="ends at step 5, before step 7"):
        trainer.fit(folder=str(tmp_path), trace=7, steps=None, epochs=1)
    changes = {"logs": {"console": "lines"}, "trace": {"steps": [2, 5]}, "folder": str(tmp_path)}
    assert trainer.fit(callbacks=[trainer.StopAt(3)], **changes).trace is not None
    assert "trace: steps 4 to 5 were not recorded: this run had steps 1 to 3" in _printed(capsys)
    assert trainer.fit(**changes).trace is not None
    assert "trace: steps 2 to 3 were not recorded: this run had steps 4 to 8" in _printed(capsys)


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


class Fails(sw.Callback):
    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        raise ValueError("boom")


def test_a_failed_run_records_its_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(folder=str(tmp_path), callbacks=[Fails()])
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["state"], run["error"]) == ("failed", "ValueError: boom")


def test_a_step_that_failed_is_not_part_of_the_next_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"logs": {"console": "off"}, "trace": 2, "steps": 3}
    run = sw.Trainer(**trainer.fields(folder=str(tmp_path), **changes))
    step, calls = ShardedOptimizer.step, itertools.count(1)

    def fails_once(optimizer: ShardedOptimizer) -> Any:
        if next(calls) == 2:
            raise ValueError("boom")
        return step(optimizer)

    monkeypatch.setattr(ShardedOptimizer, "step", fails_once)
    with pytest.raises(ValueError, match="boom"):
        run.fit()
    result = run.fit()
    assert result.trace is not None
    events = json.loads(result.trace.read_text())["traceEvents"]
    assert len([e for e in events if e.get("cat") == "step"]) == 1


def test_a_rank_is_compared_with_its_group() -> None:
    rows = [[1.0, 0, 2, 5, 0], [1.0, 0, 2, 5, 0], [3.0, 0, 2, 5, 0], [6.0, 0, 2, 7, 0]]
    row = ranks_row(9, rows, [(0, 1), (2, 3)])
    slowest = {rank["rank"]: rank["ratio"] for rank in row["slowest"]}
    assert slowest == {3: pytest.approx(2.0), 0: 1.0, 1: 1.0, 2: pytest.approx(0.5)}
    assert row["own_s"] == {"min": 1.0, "median": 2.0, "max": 6.0}
    single = ranks_row(9, rows[1:], [(0,), (1,), (2,)])
    assert single["slowest"][0]["ratio"] == pytest.approx(2.0)
