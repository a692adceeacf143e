"""Finds the edge at which a collective is stuck, on all ranks that wait.

Enters: the edge that this rank waits for. Leaves: the one that is the cause.

Whoever gives up says in the store of the process group for whom it waited. If I wait for rank 1,
and rank 1 says that it waits for rank 3, which says nothing, then it is the edge between 3 and 1
that all of us name. Two ranks that wait for each other name the edge between them.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed

__all__ = ["Blame"]

GRACE_S = 2.0
POLL_S = 0.02
T = TypeVar("T")

Edge = tuple[int, int]


class Blame:
    """What the ranks of a group say; `name` is the same on all of them and nobody else's."""

    def __init__(self, name: str, rank: int, num_ranks: int) -> None:
        self.rank, self.others = rank, [r for r in range(num_ranks) if r != rank]
        self._prefix = f"shardwise/blame/{name}"
        default: Any = torch.distributed.distributed_c10d._get_default_store()
        self._store = default.clone()  # a wait of another user's would hold this one up
        self._store.set_timeout(datetime.timedelta(seconds=GRACE_S))

    def find(self, edge: Edge, say: Callable[[], None], grace_s: float = GRACE_S) -> Edge:
        """The edge to name; `say` is called when this rank's own has been told."""
        waits = {self.rank: edge}
        if not _bounded(lambda: self._tell(edge), grace_s):
            say()
            return edge
        say()
        deadline = time.monotonic() + grace_s
        while len(waits) <= len(self.others) and time.monotonic() < deadline:
            found = _bounded(self._others_say, deadline - time.monotonic() + POLL_S)
            if found is None:
                break
            waits.update(found)
            time.sleep(POLL_S)
        return follow(waits, self.rank)

    def _tell(self, edge: Edge) -> bool:
        self._store.set(f"{self._prefix}/{self.rank}", json.dumps(edge))
        return True

    def _others_say(self) -> dict[int, Edge]:
        found: dict[int, Edge] = {}
        for other in self.others:
            key = f"{self._prefix}/{other}"
            if self._store.check([key]):
                sender, receiver = json.loads(self._store.get(key))
                found[other] = sender, receiver
        return found


def follow(waits: Mapping[int, Edge], rank: int) -> Edge:
    """From rank to rank, for whom each waits, to one who does not say, or said before."""
    seen: set[int] = set()
    edge = waits[rank]
    while rank in waits and rank not in seen:
        seen.add(rank)
        edge = waits[rank]
        rank = edge[0] if edge[1] == rank else edge[1]
    return edge


def _bounded(ask: Callable[[], T], limit_s: float) -> T | None:
    """What the store says; None if it, or its host, does not answer in time."""
    answers: list[T] = []

    def work() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = threading.Thread(target=work, name="blame", daemon=True)
    thread.start()
    thread.join(max(0.0, limit_s))
    return answers[0] if answers else None
