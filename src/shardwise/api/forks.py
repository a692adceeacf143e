"""Ranks as forks of this process: `together`.

Enters: what every rank does. Leaves: what every rank found. Forks have the graph, the program and
the user's own functions, which cannot travel; what they found comes back as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from threading import BrokenBarrierError
from time import monotonic
from typing import Any, TypeVar

import torch

from shardwise.errors import RankError

TIMEOUT_S = 120.0
Found = TypeVar("Found")
_LEFT = "left by another"


def together(
    work: Callable[[int, Callable[[], object]], Found], ranks: int, timeout: float = TIMEOUT_S
) -> list[Found]:
    """What `work(rank, meet)` returned in every rank's process; in `meet()` they wait for all.

    The first rank that fails by itself is named, not those that waited for it.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(ranks)
    ends, workers = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        args = (work, rank, barrier, theirs, timeout)
        worker = context.Process(target=_work, args=args, daemon=True)
        worker.start()
        theirs.close()
        ends.append(mine)
        workers.append(worker)
    try:
        return _answers(ends, timeout)
    finally:
        for worker in workers:
            worker.kill()
            worker.join(timeout)


def _work(work: Any, rank: int, barrier: Any, end: Connection, timeout: float) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    try:
        answer: dict[str, Any] = {"found": work(rank, lambda: barrier.wait(timeout))}
    except BrokenBarrierError:
        answer = {"failed": _LEFT}
    except Exception as error:  # a model's own operators may fail in any way
        answer = {"failed": f"{type(error).__name__}: {error}"}
        barrier.abort()
    end.send_bytes(json.dumps(answer).encode())
    end.close()


def _answers(ends: list[Connection], timeout: float) -> list[Any]:
    """In the order of ranks, as they arrive; the first failure ends the waiting for others."""
    found: dict[int, Any] = {}
    left: list[int] = []
    until = monotonic() + timeout
    while len(found) + len(left) < len(ends):
        missing = [r for r in range(len(ends)) if r not in found and r not in left]
        ready = wait_for([ends[r] for r in missing], max(0.0, until - monotonic()))
        if not ready:
            break
        for rank in (r for r in missing if ends[r] in ready):
            answer = _answer(ends[rank], rank)
            if "found" in answer:
                found[rank] = answer["found"]
            elif answer["failed"] == _LEFT:
                left.append(rank)
            else:
                raise RankError(
                    f"rank {rank} cannot run here: {answer['failed']}", hint=_hint(answer["failed"])
                )
    if len(found) < len(ends):
        late = [r for r in range(len(ends)) if r not in found and r not in left] or left
        names = ", ".join(map(str, late))
        raise RankError(f"rank {names} did not end within {timeout:g} s")
    return [found[rank] for rank in range(len(ends))]


def _hint(failed: str) -> str:
    """With torch built for GPUs, forks of a process that used autograd cannot use it."""
    return "a build of torch for processors" if "autograd's threading" in failed else ""


def _answer(end: Connection, rank: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(end.recv_bytes())
    except EOFError:
        raise RankError(f"rank {rank} died while it ran here") from None
    return answer
