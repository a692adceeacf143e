"""The end of a run: retained checkpoints, unchanged files, and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.training.processes import Stop, StopRequests
from tests.support import trainer as support

ROOT = Path(__file__).parents[3]
SCRIPT = """
import shardwise as sw
from tests.support.trainer import fields

sw.Trainer(**fields(optimizer={"name": "SGD", "args": {"lr": 1e300}}, lr_schedule=())).fit()
"""


@pytest.mark.parametrize(("every", "steps"), [(1, [6, 7]), (3, [6, 7]), (5, [5, 7])])
def test_keep_last_limits_the_number_of_checkpoints(
    tmp_path: Path, every: int, steps: list[int]
) -> None:
    checkpoints = {"every_steps": every, "keep_last": 2}
    support.fit(folder=str(tmp_path), checkpoints=checkpoints, steps=7, data={"evaluation": None})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in steps]


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    checkpoints = {"every_steps": 1, "keep_last": 1, "keep_best": 1, "metric": "learning_rate"}
    support.fit(folder=str(tmp_path), checkpoints=checkpoints, steps=5, data={"evaluation": None})
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_completed_run_changes_no_file(tmp_path: Path) -> None:
    support.fit(folder=str(tmp_path), steps=3)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    again = support.fit(folder=str(tmp_path), steps=3, plan="fsdp", seed=0)
    assert (again.steps, again.losses) == (3, ())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before


class Interrupt(sw.Callback):
    """Send a signal, and store what stderr has right afterwards."""

    def __init__(self, capfd: pytest.CaptureFixture[str], number: int) -> None:
        self.capfd, self.number, self.stderr = capfd, number, ""

    def on_step(self, trainer: sw.Trainer, metrics: object) -> None:
        os.kill(os.getpid(), self.number)
        self.stderr += self.capfd.readouterr().err


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (15, "SIGTERM")])
def test_a_signal_is_answered_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int, name: str
) -> None:
    interrupt = Interrupt(capfd, number)
    result = support.fit(folder=str(tmp_path), callbacks=[interrupt])
    assert (result.steps, result.stopped) == (1, "signal")
    assert interrupt.stderr.startswith(f"{name}: stopping after this step and saving.")
    assert interrupt.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_error_under_torchrun_is_printed_once_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 1
    printed, _, report = ended.stderr.partition("torch/distributed/elastic")
    assert printed.count("TrainingError: ") == 1
    assert "Traceback" not in printed
    assert "TrainingError: " in report  # torchrun's own report, with frames of torchrun only
    assert "shardwise/training" not in report


def test_a_signal_that_interrupts_its_own_handler_is_answered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = StopRequests()
    replies = []

    def write(_: int, text: bytes) -> None:
        replies.append(text)
        stops._on_signal(signal.SIGINT, None)  # the terminal and the launcher both send it

    with stops.listening("stopping"), monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        stops._on_signal(signal.SIGINT, None)
    assert replies == [b"Ctrl-C: stopping\n"] or replies == [b"\nCtrl-C: stopping\n"]
    assert stops.request is Stop.SIGNAL
