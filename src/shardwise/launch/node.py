"""What runs on a node: a guard of torchrun that leaves no process behind.

Enters: torchrun's arguments, and what the launcher says on standard input. Leaves: torchrun's exit
code. When the launcher asks for it, is gone (the end of standard input, which is what a lost ssh
connection looks like from here) or falls silent, torchrun is asked to end, and after a while every
descendant is killed, whatever session it moved to. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

POLL_S = 0.1
STOP, KILL, BEAT = b"stop", b"kill", b"."
BEAT_EVERY_S = 20.0
SILENCE_S = 300.0  # of a launcher that has spoken before
NOBODY_S = 2.0  # standard input that ends so soon, with no word, was never a launcher
LEFTOVERS_S = 5.0  # for what outlives torchrun
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALLED = 128
NO_SIGNAL = 0


class Guard:
    """One torchrun and all that descends from it."""

    def __init__(self, argv: Sequence[str], folder: str, grace_s: float) -> None:
        self._argv, self._folder, self._grace_s = list(argv), folder, grace_s
        self._began = time.monotonic()
        self._heard = 0.0  # when the launcher last said something; 0: never
        self._watching = True
        self._deadline: float | None = None  # when what is left is killed

    def run(self) -> int:
        """Start, watch and clean up."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        child = subprocess.Popen(
            self._argv,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_bind_to_parent(),
        )
        told = False
        while child.poll() is None:
            self._listen()
            if self._deadline is not None and not told:
                child.terminate()
                told = True
            if self._deadline is not None and time.monotonic() >= self._deadline:
                child.kill()
        code = child.returncode
        self._sweep(patient=code == 0)
        return code if code >= 0 else SIGNALLED - code

    def _sweep(self, *, patient: bool) -> None:
        """Wait for what outlives torchrun, ask it to end, kill it."""
        if patient and self._all_end(NO_SIGNAL, time.monotonic() + LEFTOVERS_S):
            return
        self._stop(LEFTOVERS_S)
        if not self._all_end(signal.SIGTERM, math.inf):
            self._deadline = None
            self._all_end(signal.SIGKILL, time.monotonic() + LEFTOVERS_S)

    def _all_end(self, number: int, until: float) -> bool:
        """Send every descendant the signal once; whether all ended in time."""
        told: set[int] = set()
        while time.monotonic() < min(until, self._deadline or math.inf):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = descendants(os.getpid())
            if not left:
                return True
            for pid in set(left) - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told.update(left)
            self._listen()
        return False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(self._grace_s)

    def _stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _listen(self) -> None:
        """Wait a moment for a word of the launcher."""
        now = time.monotonic()
        if self._heard and now - self._heard > SILENCE_S:
            self._stop(self._grace_s)
        if not self._watching or not select.select([0], [], [], POLL_S)[0]:
            time.sleep(0 if self._watching else POLL_S)
            return
        try:
            words = os.read(0, 4096)
        except OSError:
            words = b""
        if not words:
            self._watching = False
            if self._heard or now - self._began > NOBODY_S:
                self._stop(self._grace_s)
            return
        self._heard = now
        if KILL in words:
            self._stop(0)
        elif STOP in words:
            self._stop(self._grace_s)


def _prctl() -> Callable[[int, int], object] | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda option, value: libc.prctl(option, value, 0, 0, 0)


def _bind_to_parent() -> Callable[[], None] | None:
    """Orphans become our children; the child gets SIGTERM even if we are killed with SIGKILL."""
    prctl = _prctl()
    if prctl is None:
        return None
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return bind


def descendants(root: int) -> list[int]:
    """Return the living processes that `root` or its descendants started, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = entry.read_text(errors="replace").partition(" (")
        except OSError:
            continue
        state, parent = rest.rpartition(") ")[2].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(pid))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def main(arguments: Sequence[str]) -> int:
    """`run … -- TORCHRUN ARGUMENTS`, or `check …`."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.node", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="start the ranks of this node")
    check = verbs.add_parser("check", help="say whether they could start")
    for verb in (run, check):
        verb.add_argument("--folder", default=".")
    run.add_argument("--grace", type=float, default=20.0)
    check.add_argument("--script", default="")
    check.add_argument("--port", type=int, default=None)
    check.add_argument("--meet", default="")
    check.add_argument("--gpus", action="store_true")
    mine, torchrun = _cut(arguments)
    given = parser.parse_args(mine)
    folder = os.path.expanduser(given.folder)
    if given.verb == "check":
        from shardwise.launch.check import show

        show(folder, given.script, given.meet, given.port, given.gpus)
        return 0
    # Programs beside this interpreter, such as `shardwise`, come before others of their name.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    argv = [sys.executable, "-m", "shardwise.launch.torchrun", *torchrun]
    return Guard(argv, folder, given.grace).run()


def _cut(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Before and after the first `--`."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
