"""`shardwise train`: its output, exit codes and signals."""

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

from tests.support import command_line

ROOT = Path(__file__).parents[3]
CONFIG = """\
model: tests.support.trainer:Net
data: {train: tests.support.trainer:Samples, batch_size: 4}
steps: 6
plan: ddp
logs: {console: off}
folder: run
"""
TIMEOUT_S = 100


def start_command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
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


def run_here(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *arguments: str,
) -> tuple[int, str, str]:
    """Run the command in this process, for tests without signals and ranks."""
    (folder / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    return command_line.run(capfd, "train", "config.yaml", *arguments)


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def test_a_wrong_config_is_reported_once_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_here(
        tmp_path, monkeypatch, capfd, "--ranks", "2", "--set", "optimiser=SGD"
    )
    assert (code, out) == (1, "")
    assert err.count("did you mean 'optimizer'?") == 1


def test_the_printed_report_command_is_quoted_for_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = "my runs; echo $HOME"
    code, out, _ = run_here(tmp_path, monkeypatch, capfd, "--folder", folder, "--set", "trace=2")
    assert code == 0
    (command,) = (line for line in out.splitlines() if line.startswith("  shardwise report"))
    files = [f"{folder}/plan.json", "--trace", f"{folder}/trace.json"]
    assert shlex.split(command) == ["shardwise", "report", *files]


@pytest.mark.slow
def test_a_dry_run_prints_and_stops(tmp_path: Path) -> None:
    code, out, err = wait_for_end(start_command(tmp_path, "--dry-run", "--set", "cluster=h100:2"))
    assert (code, err) == (0, "")
    assert "Plan ddp for Net on Mesh(dp=2)" in out
    assert "memory" in out
    assert "step " in out


@pytest.mark.slow
def test_only_rank_0_prints_the_result(tmp_path: Path) -> None:
    code, out, err = wait_for_end(start_command(tmp_path, "--ranks", "2", "--json"))
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 6


@pytest.mark.slow
def test_a_signal_to_the_command_saves_on_all_ranks(tmp_path: Path) -> None:
    process = start_command(tmp_path, "--ranks", "2", "--set", "steps=100000")
    figures, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and not (figures.exists() and figures.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, err = wait_for_end(process)
    assert code == 75
    assert err.count("\n") == 1
    assert err.startswith("SIGTERM: stopping after this step and saving")
    assert "stopped by a signal at step" in out
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json"))


@pytest.mark.slow
def test_a_dead_rank_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    process = start_command(
        tmp_path, "--ranks", "2", "--set", "steps=100000", "--set", "checkpoints.every_steps=5"
    )
    saved, deadline = tmp_path / "run" / "checkpoints", time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and not list(saved.glob("step-*/checkpoint.json")):
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, _, err = wait_for_end(process)
    assert code not in (0, 75)
    assert "RankError" in err
    newest = max(saved.glob("step-*/checkpoint.json")).parent.name
    steps = int(newest.removeprefix("step-")) + 2
    code, out, err = wait_for_end(start_command(tmp_path, "--set", f"steps={steps}", "--json"))
    assert (code, err) == (0, "")
    assert len(json.loads(out)["losses"]) == 2
