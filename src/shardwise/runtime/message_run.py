"""Runs a rank's script over gloo, message by message.

Enters: a `Script` and this rank's memory. Leaves: the operation's result in it, or `EdgeLost` with
the edge that was waited for. Only this rank's own waits are known here; whose fault it is, `blame`
finds with the other ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.runtime.failures import Wait
from shardwise.runtime.message_script import Script

__all__ = ["EdgeLost", "Links", "hang_up", "run_script"]

TAG = 7_012
_HANG_UP_TAG = 7_013  # of a message that nobody sends


class Links(Protocol):
    """Sends and receives between ranks, as gloo has them."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


class EdgeLost(Exception):
    """What a rank waited for, for one of its instructions, neither left nor came."""

    def __init__(self, wait: Wait, number: int) -> None:
        super().__init__(f"edge {wait.edge[0]} -> {wait.edge[1]}, instruction {number}")
        self.wait, self.number = wait, number


def run_script(
    script: Script,
    memory: Mapping[str, Tensor],
    links: Links,
    rank: int,
    timeout_s: float,
) -> None:
    """All acts, then wait for the sends that are still under way."""
    posted: dict[int, deque[Any]] = {peer: deque() for peer in script.peers}
    sends: list[tuple[Any, int] | None] = []
    limit = timedelta(seconds=timeout_s)
    at = begun = 0
    try:
        for begun, act in enumerate(script.acts):
            at = begun
            kind, _, peer, (where, start, stop), place, order = act
            if kind == "take":
                posted[peer].popleft().wait(limit)
                if place is not None:
                    mine = memory[place.memory][place.start : place.stop]
                    mine.add_(memory[where][start:stop])
            elif kind == "post":
                posted[peer].append(links.recv([memory[where][start:stop]], peer, TAG))
            elif kind == "send":
                sends.append((links.send([memory[where][start:stop]], peer, TAG), at))
            elif (found := sends[order]) is not None:
                found[0].wait(limit)
                sends[order] = None
        begun = len(script.acts)
        for found in sends:
            if found is not None:
                work, at = found
                work.wait(limit)
    except (RuntimeError, ValueError) as error:
        raise _lost(script, rank, at, begun) from error


def _lost(script: Script, rank: int, at: int, ended: int) -> EdgeLost:
    """What act `at` waited for, when those before `ended` had been begun."""
    act, begun = script.acts[at], script.acts[:ended]
    sent = dict(Counter(a.peer for a in begun if a.kind == "send"))
    posted = dict(Counter(a.peer for a in begun if a.kind == "post"))
    if act.kind in ("send", "settle"):
        edge = rank, act.peer
        earlier = [a for a in script.acts if a.kind == "send" and a.order < act.order]
    else:
        edge = act.peer, rank
        earlier = [a for a in script.acts[:at] if a.kind == "take"]
    message = sum(a.peer == act.peer for a in earlier)
    return EdgeLost(Wait(edge=edge, message=message, sent=sent, posted=posted), act.number)


def hang_up(links: Links) -> None:
    """Close this rank's connections, so that nobody waits for it any longer.

    gloo has no call for that, but closes all connections when one wait is too long.
    """
    try:
        work = links.recv([torch.empty(1)], (links.rank() + 1) % links.size(), _HANG_UP_TAG)
        work.wait(timedelta(milliseconds=1))
    except (RuntimeError, ValueError):
        return
