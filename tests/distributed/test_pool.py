from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support import pool as pools
from tests.support.pool import Pool, RankDied, RankTimeout, RemoteError

pytestmark = pytest.mark.distributed

PoolOf = Callable[[int], Pool]


def rank_and_sum(value: torch.Tensor, *, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    total = value * (dist.get_rank() + 1) * scale
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("asked for")
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def fail_unpicklably() -> None:
    class Local(Exception):
        pass

    raise Local("kept as text")


def unpicklable_result() -> Callable[[], None]:
    return lambda: None


def state() -> tuple[int, torch.dtype, float]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    return threads, dtype, torch.rand(()).item()


def pid() -> int:
    return os.getpid()


def test_results_are_ordered_by_rank(pool: PoolOf) -> None:
    results = pool(2).run(f"{__name__}:rank_and_sum", torch.ones(3), scale=2.0)
    assert [rank for rank, _ in results] == [0, 1]
    for _, total in results:
        torch.testing.assert_close(total, torch.full((3,), 6.0))


def test_processes_persist_between_calls(pool: PoolOf) -> None:
    first = pool(2).run(pid)
    assert pool(2).run(pid) == first == pool(2).pids


def test_every_call_starts_from_the_same_state(pool: PoolOf) -> None:
    results = [*pool(2).run(state), *pool(2).run(state)]
    assert len(set(results)) == 1
    assert results[0][:2] == (1, torch.float32)


@pytest.mark.slow
def test_an_exception_is_raised_and_no_rank_keeps_waiting(pool: PoolOf) -> None:
    old = pool(2).run(pid)
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="asked for") as caught:
        pool(2).run(fail_on, 1)
    assert time.monotonic() - start < 20
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1 of 2" in notes
    assert "in fail_on" in notes
    assert not pool(2).alive
    assert set(pool(2).run(pid)).isdisjoint(old)


@pytest.mark.slow
def test_a_dying_rank_is_named(pool: PoolOf) -> None:
    with pytest.raises(RankDied, match=r"rank 1 of 2 died \(SIGKILL\)"):
        pool(2).run(exit_on, 1)
    assert len(pool(2).run(pid)) == 2


@pytest.mark.slow
def test_a_rank_that_died_between_calls_is_replaced(pool: PoolOf) -> None:
    victim = pool(2).run(pid)[1]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while pool(2)._workers[1].process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert victim not in pool(2).run(pid)


def test_a_hanging_rank_is_named_with_its_stack(pool: PoolOf) -> None:
    pool(2).run(pid)  # the processes have started and imported this module
    with pytest.raises(RankTimeout, match=r"ranks \[0\] of 2 gave no answer within 3 s") as caught:
        pool(2).run(sleep_on, 0, timeout=3)
    assert "in sleep_on" in str(caught.value)


@pytest.mark.slow
def test_objects_that_cannot_be_pickled_are_reported(pool: PoolOf) -> None:
    with pytest.raises(RemoteError, match="Local: kept as text"):
        pool(1).run(fail_unpicklably)
    with pytest.raises((AttributeError, pools.pickle.PicklingError)):
        pool(1).run(unpicklable_result)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pools.close_all()
    monkeypatch.setattr(pools, "MAX_PROCESSES", 3)
    yield
    pools.close_all()


@pytest.mark.usefixtures("small_limit")
@pytest.mark.slow
def test_the_least_recently_used_pool_is_closed(pool: PoolOf) -> None:
    pool(1).run(pid)
    pool(2).run(pid)
    assert pool(1).alive
    pool(1).run(pid)
    pool(3).run(pid)
    assert [pool(n).alive for n in (1, 2, 3)] == [False, False, True]


def test_a_pool_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Pool(0)
