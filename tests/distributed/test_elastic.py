"""Ranks are killed, stopped, added and removed; the result is that of an undisturbed training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plan", ["zero1", "3d"])
def test_disturbed_trainings_equal_an_undisturbed_one(plan: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.elastic", "--plans", plan, "--events", "5"]
    command += ["--steps", "120", "--keep", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
