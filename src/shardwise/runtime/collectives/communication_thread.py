"""Run communication in one thread, and hand out a `Handle` for each job.

All ranks submit their jobs in the same order. After a job has failed, connections are in an unknown
state: all later jobs fail with its error.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from shardwise.errors import RankError

__all__ = ["CommunicationThread", "Handle"]


class Handle:
    """A collective that runs."""

    def __init__(self, limit_s: float) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._limit_s = limit_s

    def done(self) -> bool:
        """Return whether the collective has ended, successfully or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the collective has ended; raise its error if it failed."""
        limit = self._limit_s if timeout_s is None else timeout_s
        if not self._over.wait(limit):
            raise RankError(f"a collective is not over after {limit:g} s")
        if self._error is not None:
            raise self._error

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._over.set()


class _Jobs:
    """What the thread works on; it holds nothing of the thread's owner."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Callable[[], None], Handle] | None] = (
            queue.SimpleQueue()
        )
        self.failed: BaseException | None = None

    def work(self) -> None:
        while (result := self.waiting.get()) is not None:
            job, handle = result
            error = self.failed
            if error is None:
                try:
                    job()
                except BaseException as problem:
                    error = self.failed = problem
            del result, job  # the data of a job live no longer than it
            handle._finish(error)


class CommunicationThread:
    """Does jobs one after the other; ends when it is closed or nobody has it any more."""

    def __init__(self, name: str) -> None:
        self._jobs = _Jobs()
        self._last: Handle | None = None
        self._thread = threading.Thread(target=self._jobs.work, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.waiting.put, None)
        self._end.atexit = False  # a daemon thread needs no end then

    @property
    def failed(self) -> BaseException | None:
        """Why nothing can be done any more."""
        return self._jobs.failed

    def start(self, job: Callable[[], None], limit_s: float) -> Handle:
        """Do `job`, which takes at most `limit_s`, after all that was given before."""
        if self._end.alive is False:
            raise RankError("a collective was started after `close`")
        before = self._last
        ahead = 0.0 if before is None or before.done() else before._limit_s
        handle = self._last = Handle(limit_s + ahead)
        self._jobs.waiting.put((job, handle))
        return handle

    def close(self, timeout_s: float) -> bool:
        """End after what was given, or leave it to itself when that takes too long; whether it has
        ended.
        """
        self._end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
