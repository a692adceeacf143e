"""Names the rank that died or failed, on all the others.

When a rank dies in mid-step, its peers get errors that do not name it, and their peers only see
that those gave up. The ranks therefore talk through the store of the default process group, which
needs none of the broken connections:

- *Signs of life.* A thread of every rank counts up a number in the store every half second. A
  slow rank, or one that waits, is alive; one whose number stands still for four seconds is not.
- *Reports.* A rank that leaves a step by an exception says so.
- *The cause.* The first rank that knows why writes it down, once: a rank's own exception, or the
  ranks that died. All ranks name this one cause, however they came to fail themselves.

A rank that loses a connection waits for a cause, or until it has found the dead ranks itself; at
most ten seconds, and never longer than the time-out. If the store is lost, its host is gone: rank
0, or torchrun's agent. As rank 0 may merely have given up, it stays until the others know the
cause, which their threads look up with every sign of life; at most three seconds.

What cannot be done: to wake a rank that gloo keeps waiting for a living one. It wakes up when that
one's process ends, or at the process group's own time-out. And gloo waits for unfinished work when
the interpreter ends; after a failure, a process that is still ending after five seconds is ended
with exit status 1.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed
import torch.distributed as dist

from shardwise.errors import LinkError, RankError

__all__ = ["has_ended", "naming_failures", "report_of", "show_life"]

BEAT_S = 0.5
DEAD_AFTER_S = 4.0
GRACE_S = 10.0
LINGER_S = 3.0
EXIT_S = 5.0
POLL_S = 0.05
LEFT = -1  # the count of a process that has ended in an orderly way

_COMMUNICATION = re.compile(
    r"gloo/|\bgloo\b.*(fail|time)|NCCL|Connection (closed|reset|refused)|Broken pipe"
    r"|Timed out waiting|timeout caused pair closure|Socket Timeout|recvValue|sendBytes",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why all ranks fail: in words, and the ranks it is about."""

    text: str
    ranks: list[int]


class _Watch:
    """One rank's view of the others: its signs of life, its reports, and the common cause."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # A connection each: one that waits would hold the other up.
        default: Any = torch.distributed.distributed_c10d._get_default_store()
        self._store, self._beating = default.clone(), default.clone()
        for store in (self._store, self._beating):
            store.set_timeout(datetime.timedelta(seconds=GRACE_S))
        self.last_cause: _Cause | None = None
        self._reported, self._settled = False, ""  # what to take back when the user goes on
        self._stop = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._live, name="shardwise-life", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def _live(self) -> None:
        """Show signs of life, and look up the cause while the store is there."""
        count = 0
        with contextlib.suppress(RuntimeError):
            while not self._stop.wait(BEAT_S) and dist.group.WORLD is self.group:
                count += 1
                self.last_cause = _cause(_read(self._beating, "cause"))
                self._beat(count)

    def _beat(self, count: int) -> None:
        value = json.dumps([count, self.last_cause is not None])
        self._beating.set(f"shardwise/life/{self.rank}", value)

    def _leave(self) -> None:
        self._stop.set()
        self._thread.join(BEAT_S)
        with contextlib.suppress(RuntimeError):
            self._beat(LEFT)

    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def reported(self, rank: int) -> str | None:
        return _read(self._store, f"report/{rank}")

    def life(self, rank: int) -> tuple[int | None, bool]:
        """A rank's count, and whether it knows a cause."""
        found = _read(self._store, f"life/{rank}")
        if found is None:
            return None, False
        count, knows = json.loads(found)
        return count, knows

    def cause(self) -> _Cause | None:
        return _cause(_read(self._store, "cause"))

    def report(self, what: str) -> None:
        self._reported = True
        self._store.set(f"shardwise/report/{self.rank}", what)

    def settle(self, cause: _Cause) -> _Cause:
        """Write the cause down, unless there is one; the one that is there then."""
        mine = json.dumps([cause.text, cause.ranks])
        settled = self._store.compare_set("shardwise/cause", "", mine).decode()
        if settled == mine:
            self._settled = mine
        return _cause(settled) or cause

    def retract(self) -> None:
        """Go on after an error that the user has dealt with."""
        if not self._reported:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"shardwise/report/{self.rank}", "")
            if self._settled:
                self._store.compare_set("shardwise/cause", self._settled, "")
        self._reported, self._settled = False, ""

    def linger(self, cause: _Cause) -> None:
        """Keep the store, which rank 0 may host, until the others know the cause."""
        if self.rank != 0:
            return
        deadline = time.monotonic() + LINGER_S
        waiting = [rank for rank in self.others() if rank not in cause.ranks]
        with contextlib.suppress(RuntimeError):
            while waiting and time.monotonic() < deadline:
                waiting = [r for r in waiting if not (self.reported(r) or self.life(r)[1])]
                time.sleep(POLL_S)


def _read(store: Any, key: str) -> str | None:
    """A value that was set and not emptied since; never waits."""
    key = f"shardwise/{key}"
    return (store.get(key).decode() or None) if store.check([key]) else None


def _cause(text: str | None) -> _Cause | None:
    return None if text is None else _Cause(*json.loads(text))


_watch: _Watch | None = None  # of the default process group


def show_life() -> None:
    """Begin to show signs of life, if there are other ranks: a rank is known from here on."""
    _current_watch()


def report_of(rank: int) -> str | None:
    """Return the failure that a rank has reported, as far as this rank can know it."""
    with contextlib.suppress(RuntimeError):
        return None if _watch is None else _watch.reported(rank)
    return None


def has_ended(rank: int) -> bool:
    """Return whether a rank has ended in an orderly way, or its store no longer answers."""
    with contextlib.suppress(RuntimeError):
        return _watch is None or _watch.life(rank)[0] == LEFT
    return True


def _current_watch() -> _Watch | None:
    global _watch
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _watch is None or _watch.group is not dist.group.WORLD:
        try:
            _watch = _Watch()
        except RuntimeError as error:
            raise RankError(_store_lost().text, where=f"rank {dist.get_rank()}") from error
    return _watch


@contextlib.contextmanager
def naming_failures(timeout: float) -> Iterator[None]:
    """Turn a failure of communication within the body into a `RankError` that names its cause.

    Any other exception is told to the other ranks, who name this rank and it, and goes on as it
    is. Finding the cause takes at most `timeout` seconds. All ranks use this around the same work.
    """
    watch = _current_watch()
    if watch is None:
        yield
        return
    watch.retract()
    try:
        yield
    except BaseException as error:
        _end_in_time()
        if not _is_communication(error):
            _tell(watch, error)
            raise
        cause = _find_cause(watch, error, timeout)
        raise RankError(
            cause.text,
            where=f"rank {watch.rank} saw: {_first_line(error)}",
            hint=f"look at the log of rank {cause.ranks[0]}" if cause.ranks else None,
        ) from error


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, (dist.DistError, LinkError)):
        return True
    return type(error) is RuntimeError and bool(_COMMUNICATION.search(str(error)))


def _tell(watch: _Watch, error: BaseException) -> None:
    """Publish this rank's own failure."""
    what = f"{type(error).__name__}: {_first_line(error)}"
    with contextlib.suppress(RuntimeError):
        cause = watch.settle(_Cause(f"rank {watch.rank} failed: {what}", [watch.rank]))
        watch.report(what)
        if isinstance(error, Exception):
            watch.linger(cause)


def _find_cause(watch: _Watch, error: BaseException, timeout: float) -> _Cause:
    try:
        watch.report(_first_line(error))
        cause = watch.settle(_look_around(watch, min(timeout, GRACE_S), _first_line(error)))
        watch.linger(cause)
        return cause
    except RuntimeError:
        return watch.last_cause or _store_lost()


def _look_around(watch: _Watch, grace: float, seen: str) -> _Cause:
    """Wait for a cause, for ranks to turn out dead, or for the end of the grace."""
    begin = time.monotonic()
    dead_after = min(DEAD_AFTER_S, 0.8 * grace)
    lives: dict[int, tuple[int | None, float]] = {}
    while True:
        now = time.monotonic()
        cause = watch.cause()
        if cause is not None:
            return cause
        silent = [rank for rank in watch.others() if not watch.reported(rank)]
        for rank in silent:
            count = watch.life(rank)[0]
            if rank not in lives or lives[rank][0] != count:
                lives[rank] = count, now
        still = [r for r in silent if now - lives[r][1] >= dead_after]
        dead = [r for r in still if lives[r][0] not in (None, LEFT)]
        if dead:
            return _Cause(f"{_ranks(dead)} died: no sign of life for {dead_after:g} s", dead)
        left = [r for r in still if lives[r][0] == LEFT]
        if left:
            return _Cause(f"{_ranks(left)} ended before the step did", left)
        if not silent or now - begin >= grace:
            return _nobody(watch, silent, [r for r in silent if lives[r][0] is None], seen)
        time.sleep(POLL_S)


def _nobody(watch: _Watch, silent: list[int], unknown: list[int], seen: str) -> _Cause:
    """No rank is known to have died or failed by itself."""
    saw = f"rank {watch.rank} saw: {seen}"
    if unknown:
        return _Cause(f"{_ranks(unknown)} never came to a step; {saw}", unknown)
    if silent:
        late = f"{_ranks(silent)} did not come in time (slow, or waiting for another)"
        return _Cause(f"no rank died, but {late}; {saw}", silent)
    return _Cause(f"no rank died, but connections broke; {saw}", [])


def _store_lost() -> _Cause:
    if dist.is_torchelastic_launched():
        return _Cause("the launcher, which hosts the store, is gone", [])
    return _Cause("rank 0 died: the store that it hosts is gone", [0])


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_ending = False


def _end_in_time() -> None:
    """From now on, an end of the interpreter that gloo's threads hold up is cut short."""
    global _ending
    if not _ending:
        _ending = True
        atexit.register(_cut_short)


def _cut_short() -> None:
    nowhere = open(os.devnull, "w")  # noqa: SIM115  open until the process is gone
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=nowhere)
