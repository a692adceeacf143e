"""What a plan may take of a device, and of its host."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import shardwise as sw
from benchmarks.models import GPT, tokens
from shardwise.cluster import Cluster, Device
from shardwise.simulation.estimate import Estimate
from shardwise.simulation.memory import (
    ALLOCATOR_BYTES,
    COMMUNICATOR_BYTES,
    WORKSPACE_BYTES,
    Budget,
    MemoryUse,
)

GIB = 2**30


def device(**changes: Any) -> Device:
    return replace(Cluster.preset("h200").device(0), **changes)


def test_communicators_and_the_allocator_take_their_part() -> None:
    alone, three = Budget.of(device()), Budget.of(device(), communicators=3)
    free = device().usable_bytes - WORKSPACE_BYTES
    assert alone.taken(alone.limit_bytes) == pytest.approx(free)
    assert three.taken(alone.limit_bytes) - three.taken(three.limit_bytes) == pytest.approx(
        2 * COMMUNICATOR_BYTES
    )
    assert alone.taken(0) == ALLOCATOR_BYTES
    for budget in (alone, three):
        assert sum(budget.others().values()) + budget.limit_bytes == pytest.approx(
            device().memory_bytes
        )


def test_a_processor_gives_all_that_is_free() -> None:
    cpu = Cluster.local(1).device(0)
    assert Budget.of(cpu, communicators=4).limit_bytes == cpu.usable_bytes


@cache
def estimate(**options: Any) -> Estimate:
    with torch.device("meta"):
        model = GPT(layers=2, width=64, heads=2, length=64, vocab=512)
    graph = sw.capture(model, tokens(16, 64, 512))
    cluster = Cluster.preset("h200", nodes=2)
    plan = sw.strategies.hybrid(graph, cluster, dp=4, tp=2, pp=2, num_microbatches=4, **options)
    return sw.simulate(graph, plan, cluster)


def test_groups_that_talk_are_counted() -> None:
    """Along dp, along tp, with all ranks, and with the other stage: three more than one."""
    for use in estimate().memory:
        assert use.others["communicators"] == 3 * COMMUNICATOR_BYTES
        assert use.limit_bytes == pytest.approx(Budget.of(device(), 4).limit_bytes)


def test_what_is_offloaded_is_in_host_memory() -> None:
    plain = estimate(zero=3).memory[0]
    moved = estimate(zero=3, offload="optimizer").memory[0]
    assert plain.host_bytes == 0
    assert moved.parts["optimizer"] == 0
    assert moved.host_bytes == pytest.approx(2 * plain.parts["optimizer"])
    kept = estimate(zero=3, offload="activations").memory[0]
    assert kept.parts["optimizer"] == plain.parts["optimizer"]
    assert kept.host_bytes > 0


def test_host_memory_is_a_limit() -> None:
    use = MemoryUse(
        group=0, peak_bytes=GIB, limit_bytes=2 * GIB, parts={}, when="optimizer",
        host_bytes=3 * GIB, host_limit_bytes=2.5 * GIB,
    )  # fmt: skip
    assert not use.fits
    assert use.is_host_bound
    assert replace(use, host_limit_bytes=float("inf")).fits
