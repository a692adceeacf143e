"""The memory of a device and of its host that a plan may use."""

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


def test_communicators_and_the_allocator_reserve_memory() -> None:
    single, three = Budget.of(device()), Budget.of(device(), communicators=3)
    free = device().usable_bytes - WORKSPACE_BYTES
    assert single.taken(single.limit_bytes) == pytest.approx(free)
    assert three.taken(single.limit_bytes) - three.taken(three.limit_bytes) == pytest.approx(
        2 * COMMUNICATOR_BYTES
    )
    assert single.taken(0) == ALLOCATOR_BYTES
    for budget in (single, three):
        assert sum(budget.others().values()) + budget.limit_bytes == pytest.approx(
            device().memory_bytes
        )


def test_a_cpu_offers_all_usable_memory() -> None:
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


def test_communicators_are_counted() -> None:
    """There are three more than one: along dp, along tp, with all ranks, with the other stage."""
    for use in estimate().memory:
        assert use.others["communicators"] == 3 * COMMUNICATOR_BYTES
        assert use.limit_bytes == pytest.approx(Budget.of(device(), 4).limit_bytes)


def test_offloaded_tensors_are_in_host_memory() -> None:
    plain = estimate(zero=3).memory[0]
    optimizer = estimate(zero=3, offload="optimizer").memory[0]
    assert plain.host_bytes == 0
    assert optimizer.parts["optimizer"] == 0
    assert optimizer.host_bytes == pytest.approx(2 * plain.parts["optimizer"])
    activations = estimate(zero=3, offload="activations").memory[0]
    assert activations.parts["optimizer"] == plain.parts["optimizer"]
    assert activations.host_bytes > 0


def test_host_memory_is_a_limit() -> None:
    use = MemoryUse(
        group=0, peak_bytes=GIB, limit_bytes=2 * GIB, parts={}, when="optimizer",
        host_bytes=3 * GIB, host_limit_bytes=2.5 * GIB,
    )  # fmt: skip
    assert not use.fits
    assert use.is_host_bound
    assert replace(use, host_limit_bytes=float("inf")).fits
