"""`shardwise train`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import main

ROOT = Path(__file__).parents[3]
CONFIG = """\
model: tests.support.trainer:Net
data: {train: tests.support.trainer:Samples, batch_size: 4}
steps: 6
plan: ddp
logs: {console: off}
folder: run
"""
PATIENCE_S = 100


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "config.yaml").write_text(CONFIG)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "train", "config.yaml", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def here(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *arguments: str,
) -> tuple[int, str, str]:
    """The same command in this process, for what needs no signals and no ranks."""
    (folder / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(["train", "config.yaml", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code, *capfd.readouterr()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def test_a_wrong_config_is_told_once_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = here(tmp_path, monkeypatch, capfd, "--ranks", "2", "--set", "optimiser=SGD")
    assert (code, out) == (1, "")
    assert err.count("did you mean 'optimizer'?") == 1


def test_the_command_for_a_report_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = "my runs; echo $HOME"
    code, out, _ = here(tmp_path, monkeypatch, capfd, "--folder", folder, "--set", "trace=2")
    assert code == 0
    (pasted,) = (line.partition(": ")[2] for line in out.splitlines() if line.startswith("trace"))
    files = [f"{folder}/plan.json", "--trace", f"{folder}/trace.json"]
    assert shlex.split(pasted) == ["shardwise", "report", *files]


@pytest.mark.slow
def test_a_dry_run_prints_and_stops(tmp_path: Path) -> None:
    code, out, err = ended(command(tmp_path, "--dry-run", "--set", "cluster=h100:2"))
    assert (code, err) == (0, "")
    assert "Plan ddp for Net on Mesh(dp=2)" in out
    assert "memory" in out
    assert "step " in out


@pytest.mark.slow
def test_ranks_train_quietly_and_rank_0_tells_the_end(tmp_path: Path) -> None:
    code, out, err = ended(command(tmp_path, "--ranks", "2", "--json"))
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 6


@pytest.mark.slow
def test_a_signal_to_the_command_saves_on_all_ranks(tmp_path: Path) -> None:
    process = command(tmp_path, "--ranks", "2", "--set", "steps=100000")
    figures, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (figures.exists() and figures.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 75
    assert err.count("\n") == 1
    assert err.startswith("SIGTERM: stopping after this step and saving")
    assert "stopped by a signal at step" in out
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json"))


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_and_the_run_goes_on(tmp_path: Path) -> None:
    process = command(
        tmp_path, "--ranks", "2", "--set", "steps=100000", "--set", "checkpoints.every_steps=5"
    )
    saved, deadline = tmp_path / "run" / "checkpoints", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not list(saved.glob("step-*/checkpoint.json")):
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, _, err = ended(process)
    assert code not in (0, 75)
    assert "RankError" in err
    newest = max(saved.glob("step-*/checkpoint.json")).parent.name
    steps = int(newest.removeprefix("step-")) + 2
    code, out, err = ended(command(tmp_path, "--set", f"steps={steps}", "--json"))
    assert (code, err) == (0, "")
    assert len(json.loads(out)["losses"]) == 2
