"""Ranks as forks of this process: `together`; and a fork that makes them later: `standby`.

Enters: what every rank does. Leaves: what every rank found. Forks have the graph, the program and
the user's own functions, which cannot travel; what they found comes back as JSON.

Torch built for GPUs starts threads when autograd is first used, on tensors without data as well,
and refuses it in forks after that. So a process that will compute costs makes a fork before, which
stands by and makes the ranks when it is asked to. Ranks are processors' and see no GPUs: autograd
would start threads for them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from threading import BrokenBarrierError
from time import monotonic
from typing import Any, TypeVar

import torch

from shardwise.errors import RankError, ShardwiseError
from shardwise.pages import keep_pages

TIMEOUT_S = 120.0
Found = TypeVar("Found")
Ask = Callable[[Any], Any]
_LEFT = "left by another"


def together(
    work: Callable[[int, Callable[[], object]], Found], ranks: int, timeout_s: float = TIMEOUT_S
) -> list[Found]:
    """What `work(rank, meet)` returned in every rank's process; in `meet()` they wait for all.

    The first rank that fails by itself is named, not those that waited for it.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(ranks)
    ends, workers = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        args = (work, rank, barrier, theirs, timeout_s)
        worker = context.Process(target=_work, args=args, daemon=True)
        worker.start()
        theirs.close()
        ends.append(mine)
        workers.append(worker)
    try:
        return _answers(ends, timeout_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join(timeout_s)


@contextlib.contextmanager
def standby(serve: Callable[[Any], Any], timeout_s: float = 2 * TIMEOUT_S) -> Iterator[Ask]:
    """A fork of this process as it is now, which answers what it is asked, in JSON, by `serve`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stand_by, args=(serve, ours, theirs))
    process.start()
    theirs.close()

    def ask(question: Any) -> Any:
        asked = json.dumps(question).encode()
        try:
            ours.send_bytes(asked)
        except OSError:
            raise RankError("the process in which plans run has ended") from None
        if not ours.poll(timeout_s):
            ours.close()  # what comes later would be taken for the next answer
            raise RankError(f"there was no answer within {timeout_s:g} s")
        answer = _answer(ours, 0)
        if "failed" in answer:
            raise RankError(answer["failed"], hint=_hint(answer["failed"]))
        return answer["found"]

    try:
        yield ask
    finally:
        ours.close()  # it ends
        assert process.pid is not None
        wait_for([process.sentinel], 1.0)  # until it is joined, its number is nobody else's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with ranks that it may have left
        process.kill()
        process.join(timeout_s)


def _stand_by(serve: Callable[[Any], Any], other: Connection, end: Connection) -> None:
    os.setpgrp()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    other.close()
    while True:
        try:
            question = json.loads(end.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = {"found": serve(question)}
        except ShardwiseError as error:
            answer = {"failed": error.message}
        except Exception as error:  # a model's own operators may fail in any way
            answer = {"failed": _first_line(error)}
        try:
            end.send_bytes(json.dumps(answer).encode())
        except OSError:  # nobody waits for it
            return


def _work(work: Any, rank: int, barrier: Any, end: Connection, timeout_s: float) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    keep_pages()  # as ranks do
    try:
        answer: dict[str, Any] = {"found": work(rank, lambda: barrier.wait(timeout_s))}
    except BrokenBarrierError:
        answer = {"failed": _LEFT}
    except Exception as error:  # a model's own operators may fail in any way
        answer = {"failed": _first_line(error)}
        barrier.abort()
    end.send_bytes(json.dumps(answer).encode())
    end.close()


def _answers(ends: list[Connection], timeout_s: float) -> list[Any]:
    """In the order of ranks, as they arrive; the first failure ends the waiting for others."""
    found: dict[int, Any] = {}
    left: list[int] = []
    until = monotonic() + timeout_s
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
        raise RankError(f"rank {names} did not end within {timeout_s:g} s")
    return [found[rank] for rank in range(len(ends))]


def _first_line(error: Exception) -> str:
    """Errors of CUDA go on with advice for its developers."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _hint(failed: str) -> str:
    """Autograd, or a GPU's driver, was used here before the fork was made."""
    if "autograd's threading" in failed:
        return "shardwise tune, or a fresh process"
    if "CUDA" in failed:
        return "CUDA_VISIBLE_DEVICES= in the environment: no GPU is planned for"
    return ""


def _answer(end: Connection, rank: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(end.recv_bytes())
    except (EOFError, OSError):
        raise RankError(f"rank {rank} died while it ran here") from None
    return answer
