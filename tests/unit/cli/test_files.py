"""Modules that verbs import, and files that they write or refuse to overwrite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import __version__
from tests.support.command_line import run, unwrapped

MODEL = """
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def make():
    return Tiny(), {"x": torch.ones(4, 4)}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a package and work in it."""
    (tmp_path / "tinypack").mkdir()
    (tmp_path / "tinypack" / "__init__.py").touch()
    (tmp_path / "tinypack" / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tinypack"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_a_target_may_be_a_module_or_a_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("tinypack.model:make", "tinypack/model.py:make"):
        code, out, err = run(capsys, "plan", target, "-s", "ddp", "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["model"] == "Tiny"
    for target, message in (
        ("tinypack.modle:make", "module 'tinypack.modle' is neither here nor installed"),
        ("tinypack/model:make", "is not of the form"),
        ("tinypack.model:mkae", "did you mean 'make'?"),
    ):
        code, _, err = run(capsys, "plan", target)
        assert code == 2
        assert message in unwrapped(err)


def test_a_config_may_name_modules_next_to_it(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "config.yaml").write_text(
        "model: tinypack.model:Tiny\ndata: {train: tinypack.data:samples}\nsteps: 1\n"
        "plan: ddp\nlogs: {console: off}\n"
    )
    (project / "tinypack" / "data.py").write_text(
        "import torch\ndef samples():\n    return [{'x': torch.ones(4)}] * 9\n"
    )
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    code, out, err = run(capsys, "train", "../config.yaml")
    assert (code, err) == (0, "")
    assert out.startswith("done at step 1")


def test_other_files_are_never_overwritten(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "tinypack.model:make"
    assert run(capsys, "plan", target, "--cluster", "cpu:2", "-o", "plan.json")[0] == 0
    assert run(capsys, "report", "plan.json", "-o", "page.html")[0] == 0
    assert run(capsys, "simulate", "plan.json", "--perfetto", "trace.json")[0] == 0
    assert run(capsys, "compile", target, "-n", "2", "-o", "code")[0] == 0
    (project / "notes.json").write_text('{"notes": 1}')
    (project / "notes.pt2").write_text("notes")
    before = {p: p.read_bytes() for p in project.rglob("*") if p.is_file()}
    for words, kind in (
        (("plan", target, "-o", "tinypack/model.py"), "a Python file"),
        (("plan", target, "-o", "trace.json"), "a trace"),
        (("plan", target, "-o", "page.html"), "a report"),
        (("report", "plan.json", "-o", "plan.json"), "a plan"),
        (("report", "plan.json", "-o", "notes.json"), "a JSON file"),
        (("report", "plan.json", "--plan-out", "page.html"), "a report"),
        (("simulate", "plan.json", "--perfetto", "plan.json"), "a plan"),
        (("diff", "plan.json", "plan.json", "--perfetto", "page.html"), "a report"),
        (("compile", target, "-o", "tinypack"), "a folder with"),
        (("collective", "solve", "cpu:2", "-o", "plan.json"), "a plan"),
        (("launch", "-c", "cpu:2", "--to", "slurm", "-o", "plan.json", "--", "a.py"), "a plan"),
        (("profile", "-o", "plan.json"), "a plan"),
        (("export", ".", "-o", "notes.pt2"), "a file that Shardwise did not write"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 1, words
        assert kind in unwrapped(err), words
        assert "refusing to overwrite" in unwrapped(err), words
    assert {p: p.read_bytes() for p in project.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_files_of_the_same_kind_are_replaced(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "tinypack.model:make"
    for _ in range(2):
        assert run(capsys, "plan", target, "--cluster", "cpu:2", "-o", "plan.json")[0] == 0
        assert run(capsys, "report", "plan.json", "-o", "page.html")[0] == 0
        assert run(capsys, "simulate", "plan.json", "--perfetto", "trace.json")[0] == 0
        assert run(capsys, "collective", "solve", "cpu:2", "-o", "program.json")[0] == 0
        for to, file in (("slurm", "job.sh"), ("kubernetes", "job.yaml"), ("ray", "job.py")):
            options = ("--option", "image=a") if to == "kubernetes" else ()
            words = ("launch", "-c", "cpu:2", "--to", to, "-o", file, *options, "--", "a.py")
            assert run(capsys, *words)[0] == 0, to
    assert run(capsys, "compile", target, "-s", "pipeline", "-m", "2", "-o", "code")[0] == 0
    assert (project / "code" / "pipeline.py").exists()
    assert run(capsys, "compile", target, "-n", "2", "-o", "code")[0] == 0
    assert sorted(path.name for path in (project / "code").glob("*.py")) == ["rank_0.py"]


def test_the_version_is_printed_without_torch() -> None:
    program = (
        "import sys; from shardwise.cli import main\n"
        "try: main(['--version'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["shardwise", __version__, "False"]


def test_a_shell_completes_verbs_and_options() -> None:
    program = "from shardwise.cli import main; main([])"
    for words, completion in (
        ("shardwise ver", "verify"),
        ("shardwise plan --strat", "--strategy"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "_SHARDWISE_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            },
            capture_output=True,
            text=True,
        )
        assert completion in done.stdout.split()
