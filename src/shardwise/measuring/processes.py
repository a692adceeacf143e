"""Processes of a measurement that leave nothing behind.

Enters: a command for each rank. Leaves: nothing; all are over when `run_processes` returns, and the
kernel ends them if we are killed. What a killed run could not remove carries its process id
(`owned`), so that the next run knows it (`is_abandoned`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from shardwise.errors import LaunchError

PR_SET_PDEATHSIG = 1
END_S = 30.0  # limit for a process that was killed


def run_processes(
    commands: Sequence[Sequence[str]], *, what: str, timeout_s: float, environment: dict[str, str]
) -> None:
    """A process for each rank of `what`; all are over, or dead, when this returns."""
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    bind = _bound_to_us()
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdout=sys.stderr,
                    start_new_session=True,  # Ctrl-C is for us, who then end them
                    preexec_fn=bind,
                )
            )
        _wait(started, what, deadline, timeout_s)
    finally:
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            process.wait(END_S)


def _bound_to_us() -> Callable[[], None] | None:
    """Return a hook that kills the child when this process ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait(
    started: Sequence[subprocess.Popen[bytes]], what: str, deadline: float, timeout_s: float
) -> None:
    while True:
        running = [rank for rank, process in enumerate(started) if process.poll() is None]
        for rank, process in enumerate(started):
            if process.returncode:
                raise LaunchError(
                    f"rank {rank} of {what} ended with {process.returncode}",
                    hint="what it wrote above",
                )
        if not running:
            return
        if time.monotonic() > deadline:
            raise LaunchError(
                f"ranks {running} of {what} were not done after {timeout_s:.0f} s",
                hint="a longer --timeout-s, or fewer bytes",
            )
        time.sleep(0.02)


def owned(prefix: str) -> str:
    """Return the beginning of a name that tells whose it is."""
    return f"{prefix}{os.getpid()}-"


def is_abandoned(name: str, prefix: str) -> bool:
    """Whether a name begins as `owned` says, with the id of a process that is no more."""
    owner = name.removeprefix(prefix).partition("-")[0]
    return name.startswith(prefix) and owner.isdigit() and not os.path.exists(f"/proc/{owner}")


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Being told to end is like Ctrl-C: what was made is removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
