"""Ranks that are missing or differ are named by all the others, in time."""

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from shardwise.errors import RankError
from shardwise.runtime.start import agree, require_ranks
from tests.support.pool import Pool


def same() -> str:
    agree("abc", timeout=20)
    agree("def", timeout=20)
    return "ok"


def different() -> str:
    try:
        agree("abc" if dist.get_rank() != 1 else "xyz", timeout=20)
    except RankError as error:
        return str(error)
    return "no error"


def missing(seconds: float) -> tuple[str, float]:
    begin = time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(seconds * 2.5)  # so late that the others have given up
    try:
        agree("abc", timeout=seconds)
    except RankError as error:
        return str(error), time.monotonic() - begin
    return "no error", 0.0


def too_many() -> list[str]:
    found = []
    for num in (0, 2, 5):
        try:
            require_ranks(num)
        except RankError as error:
            found.append(str(error))
    require_ranks(3)
    return found


@pytest.mark.distributed
def test_ranks_with_the_same_program_go_on(pool: Callable[[int], Pool]) -> None:
    assert pool(3).run(same) == ["ok"] * 3


@pytest.mark.distributed
def test_ranks_that_differ_are_named(pool: Callable[[int], Pool]) -> None:
    for message in pool(3).run(different):
        assert "ranks [0, 2]: abc; ranks [1]: xyz" in message


@pytest.mark.distributed
def test_a_missing_rank_is_named_in_time(pool: Callable[[int], Pool]) -> None:
    results = pool(3).run(missing, 1.0)
    for message, seconds in results:
        assert "ranks [2] of 3 did not start within 1 s" in message
        assert seconds < 6
    assert all(seconds < 2 for _, seconds in results[:2])


@pytest.mark.distributed
def test_the_number_of_ranks_is_checked(pool: Callable[[int], Pool]) -> None:
    none, fewer, more = pool(3).run(too_many)[0]
    assert "at least one rank" in none
    assert "for 2 ranks, the default group has 3" in fewer
    assert "for 5 ranks, the default group has 3" in more
    assert "torchrun --nproc-per-node 5" in more
