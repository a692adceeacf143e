"""Sends that nobody waits for: a thread lets their memory go once they are done.

Point-to-point works of gloo cannot be asked whether they are done, and waiting for them in the
order of actions could block a rank that others wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from shardwise.runtime.transport import Pending

__all__ = ["Retirement"]

_Sends = tuple[Sequence[Pending], Callable[[], None] | None]


class Retirement:
    """Waits for sends in the background; `finish` waits for all of them and raises what failed."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Sends | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, sends: Sequence[Pending], done: Callable[[], None] | None = None) -> None:
        """Take over some sends; `done` is called after them."""
        if all(send.is_done for send in sends):
            if done is not None:
                done()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sends", daemon=True)
            self._thread.start()
        self._waiting.put((sends, done))

    def finish(self) -> None:
        """Wait for all sends."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Wait for nothing more, after an error; what is open ends with its time-out."""
        self._waiting.put(None)
        self._waiting, self._thread, self._error = queue.SimpleQueue(), None, None

    def _run(self) -> None:
        waiting = self._waiting
        while (item := waiting.get()) is not None:
            sends, done = item
            del item
            try:
                for send in sends:
                    send.wait()
                if done is not None:
                    done()
            except BaseException as error:
                self._error = self._error or error
            sends = ()
