"""Collectives through shared memory: correct and bitwise equal; errors name ranks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import LinkError, ProgramError, RankError
from shardwise.runtime.collectives import links as links
from shardwise.runtime.collectives import shared_memory as segments
from shardwise.runtime.collectives.shared_memory import Call, SharedBuckets
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

STAGE_BYTES = 10_000  # several pieces


def opened(timeout_s: float = 30.0) -> SharedBuckets:
    shared = SharedBuckets.open(timeout_s=timeout_s, stage_bytes=STAGE_BYTES)
    assert shared is not None
    return shared


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=made, dtype=torch.float64).mul(4).to(dtype)


def total(inputs: list[Tensor]) -> Tensor:
    """Reduce in rank order; dtypes below 32 bits in float32."""
    narrow = inputs[0].dtype.is_floating_point and inputs[0].dtype.itemsize < 4
    result = inputs[0].float() if narrow else inputs[0].clone()
    for each in inputs[1:]:
        result = result + each.float() if narrow else result + each
    return result.to(inputs[0].dtype)


def uneven(numel: int, count: int) -> list[int]:
    parts = [numel * (rank + 1) // (count * (count + 1) // 2) for rank in range(count - 1)]
    return [*parts, numel - sum(parts)]


def all_operations(numel: int, kind: str, place: str) -> list[str]:
    """Return the operations with wrong results; a "mixed" place is shared on rank 0 only."""
    rank, count, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, kind)
    shared, wrong = opened(), []
    inputs = [values(r, numel, dtype) for r in range(count)]
    counts = uneven(numel, count)
    ends = [sum(counts[:r]) for r in range(count + 1)]
    own = slice(ends[rank], ends[rank + 1])
    bucket = shared.allocate(numel + 3, dtype)

    def fresh() -> Tensor:
        if place == "bucket" or (place == "mixed" and rank == 0):
            data = bucket[3:]
            assert shared.is_resident(data)
        else:
            data = (
                torch.empty(numel, 2, dtype=dtype)[:, 1] if place == "strided" else bucket.clone()
            )
            data = data if place == "strided" else data[3:]
            assert not shared.is_resident(data)
        return data.copy_(inputs[rank])

    def expect(what: str, result: Tensor, expected: Tensor) -> None:
        if not torch.equal(result, expected):
            wrong.append(f"{what} of {numel} {kind} {place}")

    summed = total(inputs)
    shared.all_reduce(data := fresh()).wait()
    expect("all_reduce", data, summed)
    shared.reduce(data := fresh(), root=1).wait()
    expect("reduce", data, summed if rank == 1 else inputs[rank])
    shared.reduce_scatter(data := fresh(), counts).wait()
    expect("reduce_scatter", data[own], summed[own])
    shared.all_gather(data := fresh(), counts).wait()
    expect("all_gather", data, torch.cat([x[ends[r] : ends[r + 1]] for r, x in enumerate(inputs)]))
    shared.broadcast(data := fresh(), root=count - 1).wait()
    expect("broadcast", data, inputs[-1])
    if not dtype.is_complex and dtype is not torch.bool:
        shared.all_reduce(data := fresh(), "max").wait()
        expect("max", data, torch.stack([x.double() for x in inputs]).amax(0).to(dtype))
    shared.close()
    expect("after close", data, data)
    return wrong


@pytest.mark.parametrize(
    ("numel", "kind", "place"),
    [
        (10_007, "float32", "bucket"),
        (10_007, "float64", "private"),
        (5_001, "bfloat16", "mixed"),
        (4_003, "float16", "strided"),
        (3, "int64", "private"),
        (2, "uint8", "bucket"),
        (0, "float32", "private"),
        (3_000, "bool", "mixed"),
        (3_000, "complex64", "strided"),
    ],
)
def test_results_are_correct(pool: Callable[[int], Pool], numel, kind, place):
    for wrong in pool(4).run(f"{__name__}:all_operations", numel, kind, place, timeout=60):
        assert not wrong


def many_under_way() -> list[float]:
    """Handles in order, whatever the order of waits, and after the object is gone."""
    shared, rank = opened(), dist.get_rank()
    buckets = [shared.allocate(1_000 * (i + 1), torch.float64) for i in range(5)]
    for number, bucket in enumerate(buckets):
        bucket.fill_(rank + number)
    handles = [shared.all_reduce(bucket) for bucket in buckets]
    del shared
    for handle in reversed(handles):
        handle.wait()
    assert all(handle.done() for handle in handles)
    return [float(bucket.mean()) for bucket in buckets]


def test_collectives_run_in_order(pool: Callable[[int], Pool]):
    for results in pool(4).run(f"{__name__}:many_under_way", timeout=60):
        assert results == [6 + 4 * number for number in range(5)]


def leaves_nothing() -> tuple[set[str], int]:
    before = {str(path) for path in Path("/dev/shm").iterdir()}
    files = len(os.listdir("/proc/self/fd"))
    shared = opened()
    bucket = shared.allocate(100_000)
    shared.all_reduce(bucket).wait()
    left = {str(path) for path in Path("/dev/shm").iterdir()} - before
    shared.free(bucket)
    shared.close()
    return left, len(os.listdir("/proc/self/fd")) - files


def test_nothing_is_left_behind(pool: Callable[[int], Pool]):
    for left, files in pool(2).run(f"{__name__}:leaves_nothing", timeout=60):
        assert not left
        assert files <= 0


def differing() -> list[str]:
    """The error of each rank when ranks call different operations."""
    messages = []
    for wrong in ("size", "operation", "memory"):
        shared, rank = opened(), dist.get_rank()
        try:
            if wrong == "memory":
                shared.allocate(100 + rank)
            elif wrong == "operation" and rank == 1:
                shared.broadcast(torch.ones(8)).wait()
            else:
                shared.all_reduce(torch.ones(8 + (rank if wrong == "size" else 0))).wait()
        except RankError as error:
            messages.append(str(error))
        with pytest.raises(RankError) as again:
            shared.all_reduce(torch.ones(3)).wait()
        assert str(again.value) == messages[-1]
    return messages


def test_ranks_that_call_different_operations_raise(pool: Callable[[int], Pool]):
    for size, operation, memory in pool(2).run(f"{__name__}:differing", timeout=60):
        assert "all_reduce (sum) of 8 float32" in size
        assert "of 9 float32" in size
        assert "broadcast of 8 float32 with root 0" in operation
        assert "404 bytes" in memory


def failing() -> tuple[str, float]:
    """The error of each rank when the work of rank 1 fails."""

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    shared, work = opened(), Call.work
    if dist.get_rank() == 1:
        Call.work = fails
    began = time.monotonic()
    try:
        shared.all_reduce(torch.ones(100)).wait()
    except RankError as error:
        return error.message, time.monotonic() - began
    finally:
        Call.work = work
    return "nothing", 0.0


def test_the_reason_of_a_failed_rank_is_raised_on_all(pool: Callable[[int], Pool]):
    for message, took in pool(3).run(f"{__name__}:failing", timeout=60):
        assert message == "rank 1: MemoryError: no room"
        assert took < 15  # of 30


def refused() -> None:
    shared = opened()
    for call in (
        lambda: shared.all_reduce(torch.ones(3), "sun"),
        lambda: shared.all_reduce(torch.ones(3, device="meta")),
        lambda: shared.all_reduce(torch.ones(3, dtype=torch.complex64), "max"),
        lambda: shared.broadcast(torch.ones(3), root=2),
        lambda: shared.all_gather(torch.ones(3), [1, 1]),
    ):
        with pytest.raises(ProgramError):
            call()
    shared.close()
    with pytest.raises(RankError, match="after `close`"):
        shared.all_reduce(torch.ones(3))


def test_wrong_calls_are_refused(pool: Callable[[int], Pool]):
    pool(2).run(f"{__name__}:refused", timeout=60)


def absent() -> tuple[str, float]:
    """The error of each rank when rank 2 does not take part."""
    shared = opened(timeout_s=2.0)
    dist.barrier()  # so that a slow start is not taken for a missing rank
    began = time.monotonic()
    message = "nothing"
    try:
        if dist.get_rank() != 2:
            shared.all_reduce(torch.ones(100)).wait()
    except LinkError as error:
        message = str(error)
    took = time.monotonic() - began
    dist.barrier()  # rank 2 keeps its connections open until the others have given up
    return message, took


@pytest.mark.slow
def test_a_missing_rank_is_named_by_all(pool: Callable[[int], Pool]):
    answers = pool(4).run(f"{__name__}:absent", timeout=60)
    for rank in (0, 1, 3):
        message, took = answers[rank]
        assert f"edge 2 -> {rank}" in message
        assert "rank 2 sent nothing" in message
        assert took < 20


def without(what: str) -> tuple[bool, list[str]]:
    """Whether there is shared memory when rank 1 lacks something, and the warnings."""
    first = dist.get_rank() == 1
    originals = links.host_identity, segments._reserve
    if first and what == "host":
        links.host_identity = lambda: "elsewhere"
    if first and what == "memory":
        segments._reserve = lambda num_bytes: (-1, f"no {num_bytes} bytes")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shared = SharedBuckets.open(timeout_s=30)
            if what == "bucket" and shared is not None:
                if first:
                    segments._reserve = lambda num_bytes: (-1, f"no {num_bytes} bytes")
                for _ in range(2):
                    bucket = shared.allocate(5)
                    assert not shared.is_resident(bucket)
                    shared.all_reduce(bucket.fill_(1)).wait()
                    assert bucket.tolist() == [2.0] * 5
    finally:
        links.host_identity, segments._reserve = originals
    return shared is not None, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("what", "available", "num_warnings"),
    [("host", False, 0), ("memory", False, 1), ("bucket", True, 1)],
)
def test_without_shared_memory_there_are_warnings(
    pool: Callable[[int], Pool], what, available, num_warnings
):
    answers = pool(2).run(f"{__name__}:without", what, timeout=60)
    assert [is_open for is_open, _ in answers] == [available] * 2
    assert [len(messages) for _, messages in answers] == [num_warnings, 0]
