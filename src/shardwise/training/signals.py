"""Requests to stop, from the system or from a callback, that all ranks follow together.

SIGTERM, or SIGINT once, asks for a stop after the step under way; a second SIGINT ends at once. A
request on one rank becomes that of all by a maximum over ranks, once a step. The signal handler
itself says that the request was heard: a step may take minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

import torch

from shardwise.runtime.mesh import Axis

__all__ = ["EXIT_STOPPED", "Stop", "StopRequests", "WorkerStart"]

EXIT_STOPPED = 75  # EX_TEMPFAIL: the state is saved; run the same command again to continue
_WORKER_S, _AGAIN_S = 300, 30  # that a loading process goes on after a signal, and another one
_SAME_S = 2.0  # a terminal and torchrun both pass one Ctrl-C on


class Stop(IntEnum):
    """Why to stop; a larger one wins."""

    NO = 0
    CALLBACK = 1
    SIGNAL = 2


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Lets a loader's process finish the step under way after a signal to the whole group.

    Slurm's scancel and systemd signal all processes at once. The training itself stops after its
    step, for which it still needs this process: it ends some minutes later, or half a minute after
    another signal, if it has not been told to end by then. `then` is the user's `worker_init_fn`.
    """

    then: Callable[[int], Any] | None = None

    def __call__(self, worker: int) -> None:
        """Begin a process; it may still take other signals for its own."""
        left = iter((_WORKER_S,))

        def heard(number: int, frame: FrameType | None) -> None:
            signal.alarm(next(left, _AGAIN_S))

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, heard)
        if self.then is not None:
            self.then(worker)


class StopRequests:
    """What this rank was asked, and what all have agreed on."""

    def __init__(self) -> None:
        self.asked = Stop.NO
        self._interrupted: float | None = None
        self._answer = ""

    @contextlib.contextmanager
    def listening(self, answer: str = "") -> Iterator[None]:
        """Inside, signals are requests; only the main thread can listen.

        `answer` is what the first signal writes to stderr at once.
        """
        self._answer = answer
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._heard)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > _SAME_S:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        if self._answer and self.asked is not Stop.SIGNAL:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            begin = "\n" if sys.stderr.isatty() else ""
            with contextlib.suppress(OSError):  # written past buffers that may be in use
                os.write(2, f"{begin}{name}: {self._answer}\n".encode())
        self.asked = Stop.SIGNAL

    def ask(self) -> None:
        """A callback wants to stop."""
        self.asked = max(self.asked, Stop.CALLBACK)

    def agreed(self, everyone: Axis, device: torch.device, wish: bool = False) -> tuple[Stop, bool]:
        """The largest request of any rank, and whether any has the wish; all ranks call it."""
        if everyone.size == 1:
            return self.asked, wish
        mine = torch.tensor([int(self.asked), int(wish)], device=device)
        stop, wished = everyone.all_reduce(mine, "max").wait().tolist()
        return Stop(stop), bool(wished)
