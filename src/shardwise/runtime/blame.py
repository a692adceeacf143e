"""Finds the edge at which a collective is stuck, on all ranks that wait.

Enters: what this rank waits for. Leaves: the edge that is the cause.

Whoever gives up says in the store of the process group for whom it waited. If I wait for rank 1,
and rank 1 says that it waits for rank 3, which says nothing, then it is the edge between 3 and 1
that all of us name. If all say something, then ranks wait for each other in a circle, and a link is
dead: the one whose message has been sent, as its sender says, and has not come.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed

__all__ = ["Blame", "Wait", "follow"]

GRACE_S = 2.0
POLL_S = 0.02
T = TypeVar("T")

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Which message of an edge, counted from 0, a rank waits for; how many it has begun to send to
    and receive from each rank.
    """

    edge: Edge
    message: int = 0
    sent: Mapping[int, int]
    posted: Mapping[int, int]

    @staticmethod
    def from_json(text: str | bytes) -> Wait:
        found = json.loads(text)
        sent, posted = ({int(p): n for p, n in found[k].items()} for k in ("sent", "posted"))
        sender, receiver = found["edge"]
        return Wait(edge=(sender, receiver), message=found["message"], sent=sent, posted=posted)


class Blame:
    """What the ranks of a group say; `name` is the same on all of them and nobody else's."""

    def __init__(self, name: str, rank: int, num_ranks: int) -> None:
        self.rank, self.others = rank, [r for r in range(num_ranks) if r != rank]
        self._prefix = f"shardwise/blame/{name}"
        default: Any = torch.distributed.distributed_c10d._get_default_store()
        self._store = default.clone()  # a wait of another user's would hold this one up
        self._store.set_timeout(datetime.timedelta(seconds=GRACE_S))

    def find(self, wait: Wait, say: Callable[[], None], grace_s: float = GRACE_S) -> Edge:
        """The edge to name; `say` is called when this rank's own has been told."""
        waits = {self.rank: wait}
        told = _bounded(lambda: self._tell(wait), grace_s)
        say()
        deadline = time.monotonic() + grace_s
        while told and len(waits) <= len(self.others) and time.monotonic() < deadline:
            found = _bounded(self._others_say, deadline - time.monotonic() + POLL_S)
            if found is None:
                break
            waits.update(found)
            time.sleep(POLL_S)
        return follow(waits, self.rank)

    def _tell(self, wait: Wait) -> bool:
        self._store.set(f"{self._prefix}/{self.rank}", json.dumps(asdict(wait)))
        return True

    def _others_say(self) -> dict[int, Wait]:
        found: dict[int, Wait] = {}
        for other in self.others:
            key = f"{self._prefix}/{other}"
            if self._store.check([key]):
                found[other] = Wait.from_json(self._store.get(key))
        return found


def follow(waits: Mapping[int, Wait], rank: int) -> Edge:
    """From rank to rank, for whom each waits, to one who says nothing, or said before."""
    path: list[int] = []
    while rank in waits and rank not in path:
        path.append(rank)
        rank = _other_end(waits[rank].edge, rank)
    if rank not in waits:
        return waits[path[-1]].edge
    circle = sorted(path[path.index(rank) :])
    dead = [waits[member].edge for member in circle if _is_under_way(waits, member)]
    return dead[0] if dead else waits[circle[0]].edge


def _other_end(edge: Edge, rank: int) -> int:
    return edge[0] if edge[1] == rank else edge[1]


def _is_under_way(waits: Mapping[int, Wait], rank: int) -> bool:
    """Whether the other end has done its part for the message that a rank waits for."""
    wait = waits[rank]
    other = _other_end(wait.edge, rank)
    begun = waits[other].sent if other == wait.edge[0] else waits[other].posted
    return begun.get(rank, 0) > wait.message


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
