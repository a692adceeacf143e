"""A rank that is stopped or killed while collectives run: all others name it, and none hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch

from shardwise.collectives import Network, solve
from shardwise.runtime.collectives.messenger import Messenger
from shardwise.runtime.collectives.shared_memory import SharedBuckets
from tests.support.faults import survivors

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
