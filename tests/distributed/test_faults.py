"""A rank that is stopped or killed while collectives run: all others name it, and none hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from shardwise.collectives import Network, solve
from shardwise.runtime.collectives.messenger import Messenger
from shardwise.runtime.collectives.shared_memory import SharedBuckets
from tests.support.faults import survivors
from tests.support.training import make

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TIMEOUT_S = 3.0


def messages(ready: Callable[[], None]) -> None:
    """All-reduces along a line of ranks, so that not all wait for the victim itself."""
    line = {edge: 1e9 for a in range(3) for edge in ((a, a + 1), (a + 1, a))}
    program = solve(Network.of_links(line), "all_reduce", 1_000_000).program
    messenger, data = Messenger(timeout_s=TIMEOUT_S), torch.ones(1_000_000)
    messenger.run(program, data)
    ready()
    while True:
        messenger.run(program, data)


def memory(ready: Callable[[], None]) -> None:
    shared = SharedBuckets.open(timeout_s=TIMEOUT_S)
    assert shared is not None
    bucket = shared.allocate(1_000_000)
    shared.all_reduce(bucket).wait()
    ready()
    while True:
        shared.all_reduce(bucket).wait()


@pytest.mark.parametrize("path", ["messages", "memory"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_name_the_edge(path, how, victim):
    reports = survivors(f"{__name__}:{path}", 4, victim=victim, how=how, limit_s=30)
    assert len(reports) == 3, reports
    for text, seconds in reports.values():
        assert text.startswith("LinkError")
        edge = text.partition("edge ")[2].partition(";")[0]
        assert str(victim) in edge.split(" -> "), text
        assert seconds < (TIMEOUT_S if how is signal.SIGKILL else 2 * TIMEOUT_S) + 5


def updates(ready: Callable[[], None]) -> None:
    """Clip and update without end, after a single forward and backward."""
    model, batch = make("odd")
    plan = sw.strategies.zero1(sw.capture(model, batch), sw.Cluster.local(3))
    pm = sw.parallelize(model, batch, plan=plan, timeout_s=10.0)
    optimizer = sw.optimizer(pm, torch.optim.AdamW)
    pm.train_step(batch)
    ready()
    while True:
        sw.clip_grad_norm_(pm, 1.0)
        optimizer.step()


def test_a_rank_killed_outside_of_the_step_is_named():
    reports = survivors(f"{__name__}:updates", 3, victim=1, how=signal.SIGKILL, limit_s=30)
    assert len(reports) == 2, reports
    for text, _ in reports.values():
        assert text.startswith("RankError: rank 1 died"), text
