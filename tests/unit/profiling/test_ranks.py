"""Ranks of a measurement: their results, and errors that name the rank."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from shardwise.errors import ClusterError, RankError
from shardwise.processes import run_workers
from shardwise.profiling import profile

WORKER = "shardwise.profiling.worker"
JOB: dict[str, Any] = {"rank": 0, "ranks": 1, "device": "cpu", "threads": 1}


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 ended with code 1") as caught:
        run_workers(WORKER, [JOB], 60)
    assert "KeyError" in str(caught.value)


def test_ranks_that_take_too_long_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real = subprocess.Popen

    def remember(*args: Any, **kwargs: Any) -> Any:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 returned no result within 0.01 s"):
        run_workers(WORKER, [JOB, JOB | {"rank": 1}], 0.01)
    assert [process.poll() is not None for process in started] == [True, True]


@pytest.mark.parametrize("slow", [{2: 0.5}, {0: 0.0}, {0: 2.0}])
def test_invalid_slow_ranks_raise(slow: dict[int, float]) -> None:
    with pytest.raises(ClusterError, match="cannot slow rank"):
        profile(2, device="cpu", slow=slow)


def test_an_unknown_device_raises() -> None:
    with pytest.raises(ClusterError, match="no device 'tpu'"):
        profile(2, device="tpu")


@pytest.mark.slow
def test_this_machine_with_one_slow_rank() -> None:
    steps: list[str] = []
    cluster = profile(2, device="cpu", quick=True, slow={1: 0.5}, progress=steps.append)
    assert cluster.num_ranks == 2
    assert cluster.device(0).speed == 1.0
    assert cluster.device(1).speed == pytest.approx(0.5, abs=0.15)
    assert any("all_reduce" in step for step in steps)
    assert {"float32", "bfloat16", "float64"} <= set(cluster.device(0).dtypes)
    assert cluster.path(0, 1).latency_s > 0
