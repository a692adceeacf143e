"""Runs rounds of messages on a GPU's stream, over NCCL.

Enters: `Rounds`, and memory on a device. Leaves: the result in it, or `EdgeLost`. All rounds are
given to a stream at once; then this thread watches how far it has come. NCCL does not say which
message it waits for: of the round that is not over in time, the first receive is named, else the
first send.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.runtime.failures import Wait
from shardwise.runtime.message_rounds import Exchange, Rounds, run_rounds
from shardwise.runtime.message_run import EdgeLost
from shardwise.runtime.message_script import Act

__all__ = ["lost_edge", "run_on_stream"]

POLL_S = 100e-6


def run_on_stream(
    rounds: Rounds,
    memory: Mapping[str, Tensor],
    exchange: Exchange,
    *,
    rank: int,
    timeout_s: float,
) -> None:
    """All rounds, after what the current stream has; returns when the device has done them."""
    device = memory["data"].device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ends: list[tuple[tuple[Act, ...], torch.cuda.Event]] = []
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run_rounds(
            rounds,
            memory,
            exchange,
            after=lambda acts: ends.append((acts, stream.record_event())),
        )
    for acts, end in ends:
        deadline = time.monotonic() + timeout_s
        while not end.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise lost_edge(acts, rank)
            time.sleep(POLL_S)


def lost_edge(acts: Sequence[Act], rank: int) -> EdgeLost:
    """The edge to name when a round is not over."""
    act = next((act for act in acts if act.kind == "take"), acts[0])
    ends = (act.peer, rank) if act.kind == "take" else (rank, act.peer)
    return EdgeLost(Wait(edge=ends, sent={}, posted={}), act.number)
