"""Sends that nobody waits for: a thread does, and the next action lets their memory go.

Point-to-point works of gloo cannot be asked whether they are done, and waiting for them in the
order of actions could block a rank that others wait for. The memory is left to the thread that
allocated it: profilers do not see what others free.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shardwise.runtime.transport import Pending

__all__ = ["Retirement"]

_Done = Callable[[], None] | None


class Retirement:
    """Waits for sends in the background; `finish` waits for all of them and raises what failed."""

    def __init__(self) -> None:
        self._held: deque[Sequence[Pending]] = deque()
        self._released = 0
        self._waiter: _Waiter | None = None

    def add(self, sends: Sequence[Pending], done: _Done = None) -> None:
        """Take over some sends; `done` is called after them."""
        if all(send.is_done for send in sends):
            if done is not None:
                done()
            return
        if self._waiter is None:
            self._waiter = _Waiter()
            self._waiter.start()
        self._held.append(sends)
        self._waiter.waiting.put((sends, done))

    def release(self) -> None:
        """Let go of what has been sent."""
        if self._waiter is not None:
            while self._released < self._waiter.finished:
                self._held.popleft()
                self._released += 1

    def finish(self) -> None:
        """Wait for all sends."""
        waiter = self._waiter
        if waiter is not None:
            waiter.waiting.put(None)
            waiter.join()
        self._forget()
        if waiter is not None and waiter.error is not None:
            raise waiter.error

    def abandon(self) -> None:
        """Wait for nothing more, after an error; what is open ends with its time-out."""
        if self._waiter is not None:
            self._waiter.waiting.put(None)
        self._forget()

    def _forget(self) -> None:
        self._held.clear()
        self._released, self._waiter = 0, None


class _Waiter(threading.Thread):
    """Waits for what is put into `waiting`, in order, until None; counts what it is done with."""

    def __init__(self) -> None:
        super().__init__(name="sends", daemon=True)
        self.waiting: queue.SimpleQueue[tuple[Sequence[Pending], _Done] | None]
        self.waiting = queue.SimpleQueue()
        self.finished = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        while (item := self.waiting.get()) is not None:
            self._wait(*item)
            del item
            self.finished += 1

    def _wait(self, sends: Sequence[Pending], done: _Done) -> None:
        try:
            for send in sends:
                send.wait()
            if done is not None:
                done()
        except BaseException as error:
            self.error = self.error or error
