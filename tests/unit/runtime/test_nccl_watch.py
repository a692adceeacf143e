"""Steps over NCCL that never end: the cause is recorded, communicators are aborted."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwise.errors import RankError
from shardwise.runtime import nccl_watch
from shardwise.runtime.failures import Cause
from shardwise.runtime.nccl_watch import NcclWatch


@dataclass
class Reports:
    """Rank 0 of 3, with the store as a dictionary; `beating` ranks have heartbeats."""

    beating: set[int] = field(default_factory=lambda: {1, 2})
    runs: dict[int, int] = field(default_factory=lambda: {0: 4, 1: 4, 2: 4})
    recorded: Cause | None = None
    rank: int = 0
    body: tuple[int, str] = (9, "")

    def __post_init__(self) -> None:
        self.connection = self.heartbeat = self

    @property
    def num_runs(self) -> int:
        return self.runs[0]

    @property
    def last_cause(self) -> Cause | None:
        return self.recorded

    def others(self) -> list[int]:
        return [1, 2]

    def record(self, cause: Cause) -> Cause:
        self.recorded = cause
        return cause

    def read(self, key: str) -> str:
        rank = int(key.rpartition("/")[2])
        beats = time.monotonic_ns() if rank in self.beating else 7
        return json.dumps([beats, False, self.runs[rank]])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Reports, NcclWatch, list[str]]:
    monkeypatch.setattr(nccl_watch, "POLL_S", 0.01)
    monkeypatch.setattr(nccl_watch, "DEAD_AFTER_S", 0.2)
    monkeypatch.setattr(nccl_watch, "CLOSE_S", 0.2)
    monkeypatch.setattr(nccl_watch, "GRACE_S", 30.0)
    monkeypatch.setattr(nccl_watch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(nccl_watch, "_write_flight_recorder", lambda rank: None)
    reports, called = Reports(), []
    watch = NcclWatch(reports, lambda: called.append("abort"), called.append)  # type: ignore[arg-type]
    return reports, watch, called


def never_ends() -> Any:
    return lambda: False


def run_until_aborted(watch: NcclWatch, called: list[str], timeout_s: float = 60.0) -> RankError:
    """Run a step whose kernels never end, and the next one, which raises the cause."""
    with watch.step(timeout_s, never_ends):
        pass
    deadline = time.monotonic() + 60
    while not called:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(RankError) as caught, watch.step(timeout_s, never_ends):
        pytest.fail("the step began")
    return caught.value


def test_a_dead_rank_is_named(watched: Any) -> None:
    reports, watch, called = watched
    reports.beating.discard(2)
    error = run_until_aborted(watch, called)
    assert error.message == "rank 2 died: no heartbeat for 0.2 s"
    assert reports.recorded.ranks == [2]
    watch._thread.join(20)
    assert called == ["abort"]  # the process goes on, since the cause was raised


def test_the_cause_of_another_rank_is_raised(watched: Any) -> None:
    reports, watch, called = watched
    reports.recorded = Cause("rank 1 failed: ValueError: seven apples", [1])
    assert run_until_aborted(watch, called).message == reports.recorded.text


def test_no_group_waits_for_the_abort_of_another() -> None:
    both, aborted = threading.Barrier(2), []

    class Group:
        def abort(self) -> None:
            both.wait(20)
            aborted.append(self)

    nccl_watch.abort_groups([Group(), Group()])  # type: ignore[list-item]
    assert len(aborted) == 2


def test_an_error_that_all_ranks_raise_aborts_nothing(watched: Any) -> None:
    reports, watch, called = watched
    reports.recorded = Cause("rank 1 failed: BatchError: the data differ", [1])
    with contextlib.suppress(ValueError), watch.step(60.0, never_ends):
        time.sleep(0.1)
        raise ValueError("seven apples")
    reports.recorded, reports.body = None, (10, "")
    with watch.step(60.0, lambda: lambda: True):
        time.sleep(0.3)
    assert watch.cause is None
    assert not called


def test_a_rank_that_does_not_begin_a_step_is_named(watched: Any) -> None:
    reports, watch, called = watched
    reports.runs[1] = 3
    start = time.monotonic()
    error = run_until_aborted(watch, called, timeout_s=0.5)
    assert 0.4 <= time.monotonic() - start < 60
    assert error.message.startswith("rank 1 did not begin step 4: the kernels of rank 0")


@pytest.mark.slow
def test_a_rank_that_waits_elsewhere_is_ended(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, watch, called = watched
    monkeypatch.setattr(nccl_watch, "GRACE_S", 0.3)
    reports.beating.discard(1)
    with watch.step(60.0, never_ends):
        pass
    watch._thread.join(60)
    assert called[0] == "abort"
    assert called[1].startswith("RankError: rank 1 died")


def test_a_rank_that_depends_on_no_other_continues(watched: Any) -> None:
    """An error that all ranks raise and handle, or a rank that is gone after the last step."""
    reports, watch, called = watched
    with watch.step(60.0, lambda: lambda: True):
        pass
    reports.recorded = Cause("rank 1 failed: ValueError: a bad batch", [1])
    reports.beating.discard(2)
    time.sleep(0.4)
    assert not called
    reports.recorded = None
    reports.beating.add(2)
    with watch.step(60.0, lambda: lambda: True):
        pass
    assert watch.cause is None
