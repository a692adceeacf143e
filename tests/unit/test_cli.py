"""The command line: verbs, exit codes and error messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from shardwise import cli, errors
from shardwise.cli import planning
from tests.support.command_line import run, unwrapped

CLI = [sys.executable, "-m", "shardwise.cli"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "tiny.py").write_text(
        "import torch\n\n\n"
        "class Tiny(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up = torch.nn.Linear(8, 16)\n"
        "        self.down = torch.nn.Linear(16, 8)\n\n"
        "    def forward(self, x):\n"
        "        return self.down(self.up(x).relu()).pow(2).mean()\n\n\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return Tiny(), {'x': torch.randn(4, 8)}\n\n\n"
        "def wrong():\n"
        "    return 3\n\n\n"
        "def breaks():\n"
        "    raise KeyError('weights')\n\n\n"
        "def scalar():\n"
        "    return torch.nn.Linear(8, 3), (torch.randn(4, 8),), lambda out, batch: out.sum()\n\n\n"
        "class Branch(Tiny):\n"
        "    def forward(self, x):\n"
        "        y = self.up(x)\n"
        "        return y.sum() if y.sum() > 0 else y.mean()\n\n\n"
        "def branch():\n"
        "    return Branch(), {'x': torch.randn(4, 8)}\n"
    )
    return f"{tmp_path / 'tiny.py'}:make"


def test_help_lists_the_verbs_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", *CLI[1:], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, imported = done.stdout, {line.split()[-1] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "scipy"}  # each takes longer than typer
    for verb in ("verify", "compile", "plan", "explain", "doctor"):
        assert verb in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "tiny.py"], "not of the form"),
        (["plan", "missing.py:make"], "file missing.py does not exist"),
        (["plan", "x.py:make", "--strategy", "dpp"], "ddp"),
        (["plna"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in unwrapped(err)
    assert out == ""


def test_a_target_must_return_model_and_batch(target: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"returned int, not \(model, batch\)"):
        cli.load_target(target.replace(":make", ":wrong"))
    with pytest.raises(typer.BadParameter, match="has no 'nothing'"):
        cli.load_target(target.replace(":make", ":nothing"))
    loaded = cli.load_target(target)
    assert loaded.model(**loaded.batch).shape == ()
    assert loaded.loss_fn is None


@pytest.mark.parametrize(
    ("sizes", "mesh"), [(["--dp", "2"], "dp=2, tp=3"), (["--tp", "2"], "dp=3, tp=2")]
)
def test_hybrid_derives_the_missing_size(
    capsys: pytest.CaptureFixture[str], target: str, sizes: list[str], mesh: str
) -> None:
    code, out, _ = run(capsys, "plan", target, "-s", "hybrid", "--ranks", "6", *sizes)
    assert code == 0
    assert mesh in out


@pytest.mark.parametrize("sizes", [["--dp", "4"], ["--tp", "4"]])
def test_hybrid_sizes_must_divide(
    capsys: pytest.CaptureFixture[str], target: str, sizes: list[str]
) -> None:
    assert run(capsys, "plan", target, "-s", "hybrid", "--ranks", "6", *sizes)[0] == 3


def test_a_misspelt_strategy_suggests_the_closest_name(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, _, err = run(capsys, "plan", target, "-s", "fspd")
    assert code == 2
    assert "fsdp" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CaptureError("no graph", where="m.py:3", hint="x"), 1),
        (errors.InfeasiblePlan("does not fit"), 3),
    ],
)
def test_errors_go_to_stderr_without_traceback(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    error: errors.ShardwiseError,
    code: int,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(planning, "_capture", fail)
    assert run(capsys, "plan", target) == (code, "", f"{type(error).__name__}: {error}\n")
    with pytest.raises(type(error)):
        cli.main(["--debug", "plan", target])


def test_plan_prints_and_saves_the_plan(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    code, out, _ = run(capsys, "plan", target, "--strategy", "tensor", "--out", str(path))
    assert code == 0
    assert "up.weight" in out
    code, out, _ = run(capsys, "plan", target, "--plan", str(path), "--json")
    assert json.loads(out) == json.loads(path.read_text())


def test_verify_prints_a_certificate(capsys: pytest.CaptureFixture[str], target: str) -> None:
    code, out, _ = run(capsys, "verify", target, "--strategy", "hybrid", "--dp", "2", "--json")
    certificate = json.loads(out)
    assert code == 0
    assert certificate["ok"] is True
    assert certificate["max_relative_error"] < 1e-9
    assert certificate["failures"] == []


def test_verify_checks_edited_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "out"
    assert run(capsys, "compile", target, "--strategy", "ddp", "--out", str(folder))[0] == 0
    (file,) = folder.glob("rank_*.py")
    assert "shardwise verify MODEL.py:FUNCTION --program FOLDER" in file.read_text()
    assert run(capsys, "verify", target, "--program", str(folder))[0] == 0
    lines = file.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if " = F.linear(" in line)
    lines.insert(place + 1, re.sub(r"(\s*)(\w+) = .*", r"\1\2 = \2 * 1.5", lines[place]))
    file.write_text("\n".join(lines))
    code, out, _ = run(capsys, "verify", target, "--program", str(folder), "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_a_difference_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    from shardwise.equivalence import Certificate
    from shardwise.equivalence.certificate import Comparison

    bad = (Comparison("loss", float("inf"), "is missing"),)
    certificate = Certificate(plan="ddp", model="Tiny", mesh="dp=2", comparisons=bad)
    monkeypatch.setattr("shardwise.verify", lambda *_, **__: certificate)
    code, out, _ = run(capsys, "verify", target, "--json")
    assert code == 1
    assert json.loads(out)["max_relative_error"] is None
    code, out, _ = run(capsys, "verify", target)
    assert code == 1
    assert "DIFFERS FROM" in out


def test_a_target_may_return_a_loss_function(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, out, err = run(capsys, "verify", target.replace(":make", ":scalar"))
    assert (code, err) == (0, "")
    assert "equals Linear" in out


def test_compile_writes_python_files(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    code, out, _ = run(capsys, "compile", target, "--out", str(folder))
    assert code == 0
    assert out.split() == [f"{folder}/rank_0.py", "ranks", "0,", "1", f"{folder}/plan.json"]
    assert "class Model" in (folder / "rank_0.py").read_text()
    _, out, _ = run(capsys, "compile", target, "-o", str(folder), "--json")
    assert json.loads(out)["files"] == {f"{folder}/rank_0.py": [0, 1]}


@pytest.mark.parametrize("place", ["", "file/out"])
def test_a_path_that_cannot_be_written_is_reported(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "c.csv").write_text("row_id,layers,hidden\nx,2,8\n")
    folder, out = str(tmp_path / "file"), str(tmp_path / place)
    commands = [
        ("predict", "--csv", str(tmp_path / "c.csv"), "-o", out),
        ("launch", "--cluster", "cpu:2", "--to", "slurm", "-o", out, "--", "train.py"),
        ("profile", "-o", out),
        ("collective", "solve", "cpu:2", "-o", out),
        ("collective", "show", "cpu:2", "--svg", out),
        ("export", str(tmp_path), "-o", str(tmp_path / "file" / "model.pt2")),
        ("compile", target, "-o", folder),
        ("tune", target, "--cluster", "cpu:2", "--table-out", out),
    ]
    for words in commands:
        code, _, err = run(capsys, *words)
        assert code == 1, words
        assert "cannot write" in unwrapped(err), words
        assert "try: -" in unwrapped(err), words


def test_explain_names_nodes_and_redistributions(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, out, _ = run(capsys, "explain", target, "--strategy", "tensor")
    assert code == 0
    assert "linear_1" in out
    assert "over tp" in out
    code, out, _ = run(capsys, "explain", target, "-s", "tensor", "--node", "linear", "--json")
    assert code == 0
    assert "shard n" in json.loads(out)["explanation"]
    code, _, err = run(capsys, "explain", target, "-s", "tensor", "--node", "linaer")
    assert code == 1
    assert "did you mean 'linear'?" in err


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [(":breaks", 1, "failed with KeyError: 'weights'"), (":branch", 1, "CaptureError")],
)
def test_errors_in_the_target_are_reported_without_traceback(
    capsys: pytest.CaptureFixture[str], target: str, function: str, code: int, message: str
) -> None:
    actual_code, out, err = run(capsys, "plan", target.replace(":make", function))
    assert (actual_code, out) == (code, "")
    assert message in err
    assert "tiny.py:" in err
    assert "Traceback" not in err


def test_sizes_that_do_not_match_the_cluster_are_infeasible(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, _, err = run(capsys, "plan", target, "-s", "hybrid", "-n", "4", "--dp", "3", "--tp", "2")
    assert code == 3
    assert "InfeasiblePlan: hybrid: dp=3 x tp=2 = 6 ranks, the cluster has 4" in err
    code, out, _ = run(capsys, "plan", target, "-s", "hybrid", "--dp", "2", "--tp", "2", "--json")
    assert code == 0
    assert json.loads(out)["mesh"] == {"dp": 2, "tp": 2}
    code, _, _ = run(capsys, "plan", target, "--ranks", "0")
    assert code == 2


def test_a_plan_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    run(capsys, "plan", target, "--out", str(path))
    code, _, err = run(capsys, "verify", target.replace(":make", ":scalar"), "--plan", str(path))
    assert code == 1
    assert "PlanMismatch" in err
    path.write_text(path.read_text().replace('"roles"', '"rols"'))
    code, _, err = run(capsys, "plan", target, "--plan", str(path))
    assert code == 1
    assert "did you mean 'roles'?" in err


def test_text_wraps_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run(capsys, "explain", target, "-s", "hybrid", "--dp", "2", "--zero", "1")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 60


def test_the_command_runs_as_a_process(target: str) -> None:
    command = [*CLI, "plan", target, "--strategy", "tensor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["mesh"] == {"tp": 2}
    assert done.stderr == ""
