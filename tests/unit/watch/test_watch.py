"""A run is followed while its files grow or are replaced; names are shown as plain text."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.errors import WatchError
from shardwise.watch.run import History, Run, Tail, find_run
from shardwise.watch.terminal import line, panel, sparkline, summary
from tests.support.runs import add_rows, make_run, ranks_line, row
from tests.support.work import calls


def poll_run(folder: Path) -> Run:
    run = Run(folder)
    run.poll()
    return run


def test_each_line_is_read_once_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    tail = Tail(path)
    assert [r["step"] for r in tail.rows()] == [1, 2]
    assert list(tail.rows()) == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert not tail.restarted()
    assert [r["step"] for r in tail.rows()] == [3]


def test_a_replaced_or_truncated_file_is_read_again(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path, 30))
    run.poll()
    assert (run.step, run.history.rows, run.generation) == (30, 30, 0)
    fresh = tmp_path / "metrics.tmp"
    fresh.write_text("".join(json.dumps(row(s)) + "\n" for s in range(1, 21)))
    os.replace(fresh, tmp_path / "metrics.jsonl")
    add_rows(tmp_path, range(21, 41))
    run.poll()
    assert (run.step, run.history.rows, run.generation) == (40, 40, 1)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")  # truncated in place
    run.poll()
    assert (run.step, run.history.rows, run.generation) == (1, 1, 2)


def test_truncated_lines_and_losses_that_are_not_finite_are_tolerated(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss"\n{"step": 4, "loss": null, "skipped": 1.0}\n')
        file.write('{"step": 5, "loss": NaN}\n{"step": 5, "evaluation_loss": 2.5}\n')
    run = poll_run(tmp_path)
    assert run.step == 5
    assert run.latest["loss"] is None
    assert run.latest["evaluation_loss"] == 2.5
    assert run.skipped == 1
    json.dumps(run.to_json(), allow_nan=False)
    assert "not a number" in summary(run, 80)


@pytest.mark.parametrize(
    "text", ["hello\n", "[1, 2]\n", '{"loss": 1}\n', "\x00\x01\n", '{"step": "a"}\n']
)
def test_files_of_other_programs_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(WatchError, match="line 1"):
        poll_run(tmp_path)


def test_a_corrupt_run_file_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path, 1)
    for text in ('{"format": "other"}', "{", "[]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(WatchError, match=r"run.json"):
            poll_run(tmp_path)


def test_folders_of_runs_are_distinguished_from_runs(tmp_path: Path) -> None:
    assert find_run(tmp_path / "later") is None
    assert find_run(tmp_path) is None
    assert find_run(make_run(tmp_path / "run", 1) / "plan.json") is None
    (tmp_path / "run" / "plan.json").touch()
    assert find_run(tmp_path / "run" / "plan.json") == tmp_path / "run"
    make_run(tmp_path / "runs" / "a", 1)
    make_run(tmp_path / "runs" / "b", 1)
    with pytest.raises(WatchError, match=r"2: a, b"):
        find_run(tmp_path / "runs")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(WatchError, match="at: "):
        find_run(file)


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(2, 9))
def test_history_has_means_and_extremes_in_few_buckets(
    values: list[float | None], max_buckets: int
) -> None:
    history = History(("x",), max_buckets=max_buckets)
    for step, value in enumerate(values):
        history.add(step, {"x": value})
    data = history.to_json()
    assert len(history) <= max_buckets
    assert data["step"][-1] == len(values) - 1
    finite = [v for v in values if v is not None]
    if finite:
        low = min(v for v in data["x"]["min"] if v is not None)
        high = max(v for v in data["x"]["max"] if v is not None)
        assert math.isclose(low, min(finite), rel_tol=1e-5, abs_tol=1e-300)
        assert math.isclose(high, max(finite), rel_tol=1e-5, abs_tol=1e-300)
    else:
        assert "x" not in data


def test_only_new_history_is_sent(tmp_path: Path) -> None:
    run = poll_run(make_run(tmp_path, 5))
    history = run.to_json()["history"]
    assert history["from"] == 0
    add_rows(tmp_path, range(6, 8))
    run.poll()
    update = run.to_json(run.generation, history["width"], 4)["history"]
    assert (update["from"], update["step"]) == (4, [5, 6, 7])
    assert run.to_json(run.generation + 1, history["width"], 4)["history"]["from"] == 0
    assert run.to_json(run.generation, 64, 4)["history"]["from"] == 0


@pytest.mark.parametrize(
    "thousands",
    [10, pytest.param(100, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.slow)],
)
def test_long_runs_need_little_work_and_memory(tmp_path: Path, thousands: int) -> None:
    make_run(tmp_path, 0)
    lines = [json.dumps(row(step)) + "\n" for step in range(1, 1001)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for turn in range(thousands):
            file.writelines(line.replace('"step": ', f'"step": {turn + 1}') for line in lines)
    run = Run(tmp_path)
    num_calls = calls(run.poll)
    assert run.history.rows == thousands * 1000
    assert len(run.history) <= 240
    assert num_calls < thousands * 100_000  # 69 calls per row
    assert len(json.dumps(run.to_json())) < 500_000


def test_the_status_describes_the_state(tmp_path: Path) -> None:
    assert poll_run(make_run(tmp_path, 3)).status == "running"
    assert poll_run(make_run(tmp_path, 0, state="finished")).status == "finished"
    failed = poll_run(make_run(tmp_path, 0, state="failed", error="TrainingError: loss is nan"))
    assert failed.ended
    assert "loss is nan" in failed.status
    gone = poll_run(make_run(tmp_path, 0, pid=2**22 + 1))
    assert gone.state == "gone"
    assert not poll_run(make_run(tmp_path, 0, pid=2**22 + 1, host="another")).ended


def test_slow_ranks_and_the_prediction_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path, 20)
    own = [0.05] * 8
    own[3] = 0.08
    (tmp_path / "ranks.jsonl").write_text(json.dumps(ranks_line(20, own)) + "\n")
    run = poll_run(tmp_path)
    assert [slow["rank"] for slow in run.slow_ranks] == [3]
    text = summary(run, 100)
    assert "rank 3 1.60x" in text
    assert "times the predicted 80 ms" in text
    assert "left" in text
    assert "slow: rank 3" in line(run)


def test_the_load_of_experts_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path, 20)
    (tmp_path / "ranks.jsonl").write_text(json.dumps(ranks_line(20, [0.05] * 4)) + "\n")
    assert "experts" not in summary(poll_run(tmp_path), 100)
    (tmp_path / "ranks.jsonl").write_text(json.dumps(ranks_line(20, [0.05] * 4, 1.37)) + "\n")
    run = poll_run(tmp_path)
    assert "experts        1.37 times the mean on the most loaded rank" in summary(run, 100)
    assert run.to_json()["ranks"]["expert_load"]["max"] == 1.37


def test_staleness_and_compression_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path, steps=3)
    add_rows(tmp_path, range(4, 6), staleness=2.0, compression_error=0.125)
    run = poll_run(tmp_path)
    text = summary(run, 100)
    assert "staleness      2 steps" in text
    assert "omitted        12.50% of messages" in text
    assert run.to_json()["history"]["compression_error"]["mean"][-1] == 0.125


def test_many_ranks_are_aggregated() -> None:
    own = [0.05 + rank / 1e6 for rank in range(1024)]
    own[700] = 0.09
    line = ranks_line(5, own)
    assert line["slowest"][0]["rank"] == 700
    assert len(line["slowest"]) == 8
    assert "each" not in line
    assert len(json.dumps(line)) < 2000


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_and_names_are_plain_text(tmp_path: Path, width: int) -> None:
    hostile = "[red]boo[/red]\x1b[2J\u202e" + "x" * 10_000
    run = poll_run(make_run(tmp_path, 50, model=hostile, plan="[bold]"))
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console.print(panel(run, width))
    text = console.export_text()
    assert "[red]boo" in text
    assert "\x1b[2J" not in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_summary_fits_its_width(tmp_path: Path, width: int) -> None:
    make_run(tmp_path, 30, model="Model" * 40, state="failed", error="no such file, " * 20)
    text = summary(poll_run(tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).count("no such file") == 20


@given(st.lists(st.floats(), min_size=1, max_size=40))
def test_any_loss_can_be_shown(losses: list[float]) -> None:
    history = History(("loss",), max_buckets=4)
    for step, loss in enumerate(losses):
        history.add(step, {"loss": loss})
    json.dumps(history.to_json(), allow_nan=False)
    assert len(sparkline(history.means("loss"), 20)) <= 20


def test_sparklines_fit_their_width() -> None:
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([None, None], 5) == ""
    assert len(sparkline([float(i) for i in range(1000)], 30)) == 30


def test_the_command_prints_once_or_as_json_or_reports_a_missing_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 5)
    runner = CliRunner()
    once = runner.invoke(app, ["watch", str(tmp_path / "run"), "--once"])
    assert once.exit_code == 0
    assert "step 5 of 1,000" in once.stdout
    data = json.loads(runner.invoke(app, ["watch", str(tmp_path / "run"), "--json"]).stdout)
    assert data["step"] == 5
    missing = runner.invoke(app, ["watch", str(tmp_path / "none"), "--wait-s", "0.2"])
    assert isinstance(missing.exception, WatchError)
    assert "after 0.2 s" in str(missing.exception)


def test_lines_are_printed_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [(4, "running"), (0, "finished")]

    def write_next(seconds: float) -> None:
        """Continue the run whenever the command waits."""
        num_rows, state = states.pop(0)
        make_run(tmp_path / "run", num_rows, state=state)

    monkeypatch.setattr("shardwise.cli.train.time.sleep", write_next)
    result = CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--wait-s", "60"])
    assert result.exit_code == 0
    assert "waiting up to 60 s" in result.stderr
    assert "step 4" in result.stdout
    assert "finished" in result.stdout.splitlines()[-1]
