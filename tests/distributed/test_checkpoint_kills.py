"""Ranks are killed at random moments, also while saving; training always resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROUNDS = 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_complete_checkpoints_survive_kills(tmp_path: Path) -> None:
    kill(tmp_path, ROUNDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["overlap", "stale_owner", "stale_int8"])
def test_nothing_is_lost_in_rounds_or_of_late_gradients(tmp_path: Path, form: str) -> None:
    kill(tmp_path, 4, "0", form)


def kill(folder: Path, rounds: int, *options: str) -> None:
    command = [sys.executable, "-m", "tests.support.kill_ranks", str(folder), str(rounds), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    assert len(ended.stdout.splitlines()) == rounds
