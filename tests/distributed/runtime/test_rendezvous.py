"""Ranks that fail, are missing or differ are named by all the others, in time."""

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from shardwise.errors import RankError
from shardwise.runtime.rendezvous import require_ranks, starting
from tests.support.pool import Pool


def agree(fingerprint: str, timeout: float = 20.0) -> str:
    try:
        with starting(timeout) as agree_on:
            agree_on(fingerprint)
    except RankError as error:
        return str(error)
    return "agreed"


def same() -> list[str]:
    return [agree("abc"), agree("def")]


def different() -> str:
    return agree("abc" if dist.get_rank() != 1 else "xyz")


def missing(seconds: float) -> tuple[str, float]:
    dist.barrier()  # so that only rank 2 is late
    begin = time.monotonic()
    if dist.get_rank() == 2:
        dist.barrier()  # with the others when they have given up
        return agree("abc", seconds), 0.0
    message = agree("abc", seconds)
    dist.barrier()
    return message, time.monotonic() - begin


def failing() -> tuple[str, float, str]:
    begin = time.monotonic()
    message = agree("abc") if dist.get_rank() != 1 else _fail()
    return message, time.monotonic() - begin, agree("def")


def _fail() -> str:
    try:
        with starting(20.0):
            raise OSError("no space left on device")
    except OSError as error:
        return str(error)


def too_many() -> list[str]:
    messages = []
    for num in (0, 2, 5):
        try:
            require_ranks(num)
        except RankError as error:
            messages.append(str(error))
    require_ranks(3)
    return messages


@pytest.mark.distributed
def test_ranks_with_the_same_program_agree(pool: Callable[[int], Pool]) -> None:
    assert pool(3).run(same) == [["agreed", "agreed"]] * 3


@pytest.mark.distributed
def test_ranks_that_differ_are_named(pool: Callable[[int], Pool]) -> None:
    for message in pool(3).run(different):
        assert "ranks [0, 2]: abc; ranks [1]: xyz" in message


@pytest.mark.distributed
def test_a_missing_rank_is_named_in_time(pool: Callable[[int], Pool]) -> None:
    results = pool(3).run(missing, 2.0)
    for message, seconds in results:
        assert "ranks [2] of 3 " in message
        assert " 2 s" in message
        assert seconds < 20


@pytest.mark.distributed
def test_a_rank_that_fails_is_named_at_once_and_all_can_start_again(
    pool: Callable[[int], Pool],
) -> None:
    named = "rank 1 of 3 failed before the start: OSError: no space left on device"
    for rank, (message, seconds, again) in enumerate(pool(3).run(failing)):
        assert message.startswith(named if rank != 1 else "no space left")
        assert seconds < 15  # of 20
        assert again == "agreed"


@pytest.mark.distributed
def test_the_number_of_ranks_is_checked(pool: Callable[[int], Pool]) -> None:
    none, fewer, more = pool(3).run(too_many)[0]
    assert "at least one rank" in none
    assert "for 2 ranks, the default group has 3" in fewer
    assert "for 5 ranks, the default group has 3" in more
    assert "torchrun --nproc-per-node 5" in more
