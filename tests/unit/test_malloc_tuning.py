"""Memory that a process frees stays with it, unless the user has said otherwise."""

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

print(faults(), keep_heap(), min(faults() for _ in range(8)))  # the first ones find their places
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_steps_find_the_memory_that_those_before_them_freed() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=env, capture_output=True, text=True, timeout=120
    )
    usual, keeps, faults = done.stdout.split()
    assert keeps == "True"
    assert int(faults) < 100 < 10_000 < int(usual)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")],
)
def test_what_the_user_set_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_heap.__wrapped__()
