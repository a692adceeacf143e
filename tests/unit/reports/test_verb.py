"""`shardwise report` on the command line; files are written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.files import write_text
from tests.support import command_line
from tests.support.command_line import unwrapped

SOURCE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def build():
    return Net(), {"x": torch.randn(8, 16)}
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return command_line.run(capsys, *map(str, arguments))


def test_reports_of_searched_and_named_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    target, plan, page = f"{tmp_path / 'net.py'}:build", tmp_path / "p.json", tmp_path / "r.html"
    code, _, err = run(capsys, "plan", target, "-c", "h100:1x2", "--no-progress", "-o", plan)
    assert code == 0, err
    code, out, err = run(capsys, "report", plan, "-o", page)
    assert code == 0, err
    assert str(page) in out
    assert "without" not in err  # the plan file has the code
    assert 'id="report-data"' in page.read_text()
    code, out, _ = run(capsys, "report", plan, "--json")
    data = json.loads(out)
    assert data["code"]["files"]

    code, _, _ = run(capsys, "plan", target, "-s", "ddp", "-n", "2", "-o", plan)
    assert code == 0
    code, _, err = run(capsys, "report", plan, "-o", tmp_path / "no.html")
    assert code == 1
    assert "no figures" in err
    assert not (tmp_path / "no.html").exists()
    again = tmp_path / "again.json"
    options = ("-c", "h100:1x2", "-o", page, "--plan-out", again, "--perfetto", tmp_path / "t.json")
    code, _, err = run(capsys, "report", plan, target, *options)
    assert code == 0, err
    assert sw.Plan.load(again).search.details.code
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    code, out, _ = run(capsys, "simulate", again, "--json")
    step = json.loads(out)["step_time_s"]
    assert step == sw.report(sw.Plan.load(again)).verdict.step_time_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not JSON"),
        ('{"traceEvents": []}', "unknown field"),
        ("[1, 2]", "mapping"),
        ('{"version": 1', "not JSON"),
        ("[" * 100_000, "unsupported JSON"),
        ('{"version": ' + "9" * 5000 + "}", "unsupported JSON"),
    ],
    ids=["not JSON", "a trace", "a list", "truncated", "deeply nested", "a huge number"],
)
def test_a_foreign_plan_leaves_no_page(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(text)
    page = tmp_path / "r.html"
    code, _, err = run(capsys, "report", tmp_path / "p.json", "-o", page)
    assert code == 1
    assert message in err
    assert "p.json" in err
    assert "try: " in err
    assert not page.exists()


@pytest.mark.parametrize("verb", ["report", "explain", "simulate"])
def test_hints_name_the_given_file(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, verb, "runs/plan.json")
    assert code == 1
    assert "-o runs/plan.json writes a plan" in unwrapped(err)


def test_an_error_about_corrupt_figures_names_the_file(
    staged: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    staged.save(path)
    data = json.loads(path.read_text())
    del data["search"]["details"]["modules"]["rows"]["count"]
    path.write_text(json.dumps(data))
    code, _, err = run(capsys, "report", path, "-o", tmp_path / "r.html")
    assert code == 1
    assert f"{path}: search" in unwrapped(err)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("verb", ["report", "explain"])
@pytest.mark.parametrize("change", ["cause", "layout", "source", "long key"])
def test_corrupt_figures_are_refused_by_every_verb(
    verb: str, change: str, staged: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    staged.save(path)
    data = json.loads(path.read_text())
    search = data["search"]
    modules = search["details"]["modules"]
    if change == "cause":
        search["best"]["causes"]["other"] = search["best"]["causes"].pop("bubble")
    elif change == "layout":
        modules["parameters"][0][4] = "dp:0"
    elif change == "source":
        modules["sources"][0] = modules["sources"][0][:1]
    else:
        data["parameters"]["[" * 50_000] = data["parameters"].popitem()[1]
    path.write_text(json.dumps(data))
    words = ("-o", tmp_path / "r.html") if verb == "report" else ()
    code, _, err = run(capsys, verb, path, *words)
    assert code == 1
    assert "PlanError" in err
    assert str(path) in unwrapped(err).replace(" ", "")


def test_a_foreign_trace_leaves_no_page(
    staged: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staged.save(tmp_path / "p.json")
    (tmp_path / "run.json").write_text('{"hello": 1}')
    page = tmp_path / "r.html"
    code, _, err = run(
        capsys, "report", tmp_path / "p.json", "--trace", tmp_path / "run.json", "-o", page
    )
    assert code == 1
    assert "run.json" in err
    assert list(tmp_path.glob("*.html")) == []


def test_paths_that_cannot_be_written_are_reported(
    flat: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "new" / "p.json"
    flat.save(plan)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "out.json"):
        for verb, option in (("simulate", "--perfetto"), ("report", "--perfetto"),
                             ("report", "--plan-out"), ("report", "-o")):  # fmt: skip
            code, _, err = run(capsys, verb, plan, option, place)
            assert code == 1, (verb, option, place)
            assert "cannot write" in unwrapped(err)
            assert option == "--plan-out" or f"try: {option} " in unwrapped(err)
            assert "Traceback" not in err


def test_links_are_followed_and_devices_stay(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "one"
    write_text("/dev/null", "two")
    assert Path("/dev/null").is_char_device()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "page.html"
    write_text(path, "one \ud800")
    assert path.read_text() == "one \\ud800"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(sw.errors.ShardwiseError, match="No space left"):
        write_text(path, "two")
    assert path.read_text() == "one \\ud800"
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
