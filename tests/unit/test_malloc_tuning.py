"""A process keeps the memory that it frees, unless the user configured malloc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.malloc_tuning import keep_heap

STEPS = """
import resource, torch
from shardwise.malloc_tuning import keep_heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(12 << 20).add(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), keep_heap(), min(faults() for _ in range(8)))  # early steps still grow the heap
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_steps_reuse_the_memory_of_earlier_steps() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=env, capture_output=True, text=True, timeout=120
    )
    faults_before, keeps, faults = done.stdout.split()
    assert keeps == "True"
    assert int(faults) < 100 < 10_000 < int(faults_before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")],
)
def test_settings_of_the_user_take_precedence(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_heap.__wrapped__()
