"""Run a small part of `python -m benchmarks.hostile` in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hostile import mutate
from benchmarks.hostile.__main__ import FAULTS, damaged, hostile, read_once
from benchmarks.hostile.formats import plain_formats

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")
def test_corrupt_and_hostile_files_are_read_or_refused(tmp_path: Path) -> None:
    formats = plain_formats(tmp_path)
    sentinel = tmp_path / "ran"
    strings = mutate.hostile_strings(100, str(sentinel))
    for number in range(6 * len(formats)):
        form = formats[number % len(formats)]
        begin = time.process_time()
        result, detail = read_once(form, damaged(form, number)[1], tmp_path / "work")
        assert result not in FAULTS, (form.name, number, detail)
        data = hostile(form, number, strings[number % len(strings)])
        result, detail = read_once(form, data, tmp_path / "work")
        assert result not in FAULTS, (form.name, number, detail)
        assert not sentinel.exists(), (form.name, strings[number % len(strings)])
        assert time.process_time() - begin < 10


@pytest.mark.slow
def test_a_sweep_of_every_format() -> None:
    command = [sys.executable, "-m", "benchmarks.hostile", "--files", "200", "--strings", "40"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
