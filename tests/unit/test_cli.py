from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from shardwise import cli, errors

CLI = [sys.executable, "-m", "shardwise.cli"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    code = exit_.value.code
    assert isinstance(code, int)
    return code, out, err


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
        "    return 3\n"
    )
    return f"{tmp_path / 'tiny.py'}:make"


def test_help_lists_the_verbs_quickly() -> None:
    start = time.monotonic()
    text = subprocess.run([*CLI, "--help"], capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - start < 5  # a loaded machine; torch alone takes longer than typer
    for verb in ("verify", "compile", "plan", "explain", "doctor"):
        assert verb in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "tiny.py"], "not of the form"),
        (["plan", "missing.py:make"], "no file missing.py"),
        (["plan", "x.py:make", "--strategy", "dpp"], "ddp"),
        (["plna"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert out == ""


def test_a_target_must_return_model_and_batch(target: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"returned int, not \(model, batch\)"):
        cli.load_target(target.replace(":make", ":wrong"))
    with pytest.raises(typer.BadParameter, match="has no function 'nothing'"):
        cli.load_target(target.replace(":make", ":nothing"))
    model, batch = cli.load_target(target)
    assert model(**batch).shape == ()


@pytest.mark.parametrize(
    ("dp", "tp", "sizes"), [(2, None, (2, 3)), (None, 2, (3, 2)), (4, 2, (4, 2))]
)
def test_hybrid_takes_what_remains(dp: int | None, tp: int | None, sizes: tuple[int, int]) -> None:
    assert cli.hybrid_sizes(6, dp, tp) == sizes


@pytest.mark.parametrize(("dp", "tp"), [(None, None), (4, None), (0, None)])
def test_hybrid_sizes_must_divide(dp: int | None, tp: int | None) -> None:
    with pytest.raises(typer.BadParameter):
        cli.hybrid_sizes(6, dp, tp)


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
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(cli, "_capture", fail)
    assert run(capsys, "plan", target) == (code, "", f"{type(error).__name__}: {error}\n")
    with pytest.raises(type(error)):
        cli.main(["--debug", "plan", target])


def test_plan_prints_and_saves(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    code, out, _ = run(capsys, "plan", target, "--strategy", "tensor", "--out", str(path))
    assert code == 0
    assert "up.weight" in out
    code, out, _ = run(capsys, "plan", target, "--plan", str(path), "--json")
    assert json.loads(out) == json.loads(path.read_text())


def test_verify_gives_a_certificate(capsys: pytest.CaptureFixture[str], target: str) -> None:
    code, out, _ = run(capsys, "verify", target, "--strategy", "hybrid", "--dp", "2", "--json")
    certificate = json.loads(out)
    assert code == 0
    assert certificate["ok"] is True
    assert certificate["max_relative_error"] < 1e-9


def test_compile_writes_python(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "compile", target, "--out", str(tmp_path / "out"))
    assert code == 0
    assert all(Path(line).suffix == ".py" for line in out.split())


def test_explain_names_the_parameters(capsys: pytest.CaptureFixture[str], target: str) -> None:
    code, out, _ = run(capsys, "explain", target, "--strategy", "tensor")
    assert code == 0
    assert "up" in out
