"""Run on a node of a launch: guard `torchrun` so that no process is left behind, or check the node.

The guard returns torchrun's exit code. When the launcher asks for it, goes silent or disappears
(standard input ends, which is how a lost ssh connection looks from here), the guard terminates
torchrun and, after a grace period, kills every descendant, in whatever session it runs.
Only the standard library is imported here, and torch to count GPUs: a node that lacks a package
can still report it.
"""

import argparse
import contextlib
import ctypes
import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

POLL_S = 0.1
STOP, KILL, HEARTBEAT = b"stop", b"kill", b"."  # the launcher's messages on standard input
HEARTBEAT_INTERVAL_S = 20.0
SILENCE_S = 300.0  # without a message from a launcher that has sent one before
NO_LAUNCHER_S = 2.0  # standard input that ends this early, without a message, is not a launcher
LEFTOVERS_S = 5.0  # for processes that outlive torchrun
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNAL_STATUS = 128  # plus the signal's number, as shells report it
NO_SIGNAL = 0
ANSWER_PREFIX = "shardwise-node "


def exit_status(code: int) -> int:
    """Return a shell's exit status for a process's return code, which is negative for signals."""
    return code if code >= 0 else SIGNAL_STATUS - code


# ------------------------------------------------------------ the guard
class Guard:
    """One torchrun process and all its descendants."""

    def __init__(self, argv: Sequence[str], folder: str, grace_s: float) -> None:
        self._argv, self._folder, self._grace_s = list(argv), folder, grace_s
        self._started_at = time.monotonic()
        self._last_message_at = 0.0  # 0: the launcher has not sent any
        self._listening = True
        self._deadline: float | None = None  # when remaining processes are killed

    def run(self) -> int:
        """Start torchrun, watch it and clean up."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        no_input, bind = subprocess.DEVNULL, _bind_to_parent()
        child = subprocess.Popen(
            self._argv, cwd=self._folder, stdin=no_input, start_new_session=True, preexec_fn=bind
        )
        terminated = False
        while child.poll() is None:
            self._listen()
            if self._deadline is not None and not terminated:
                child.terminate()
                terminated = True
            if self._deadline is not None and time.monotonic() >= self._deadline:
                child.kill()
        self._end_leftovers(wait=child.returncode == 0)
        return exit_status(child.returncode)

    def _end_leftovers(self, *, wait: bool) -> None:
        """Wait for processes that outlive torchrun if `wait`, then terminate and kill them."""
        if wait and self._all_end(NO_SIGNAL, time.monotonic() + LEFTOVERS_S):
            return
        self._stop(LEFTOVERS_S)
        if not self._all_end(signal.SIGTERM, math.inf):
            self._deadline = None
            self._all_end(signal.SIGKILL, time.monotonic() + LEFTOVERS_S)

    def _all_end(self, number: int, until: float) -> bool:
        """Send every descendant a signal once; return whether all of them ended in time."""
        signalled: set[int] = set()
        while time.monotonic() < min(until, self._deadline or math.inf):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            remaining = descendants(os.getpid())
            if not remaining:
                return True
            for pid in set(remaining) - signalled:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            signalled.update(remaining)
            self._listen()
        return False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(self._grace_s)

    def _stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _listen(self) -> None:
        """Wait a moment for a message from the launcher."""
        now = time.monotonic()
        if self._last_message_at and now - self._last_message_at > SILENCE_S:
            self._stop(self._grace_s)
        if not self._listening or not select.select([0], [], [], POLL_S)[0]:
            time.sleep(0 if self._listening else POLL_S)
            return
        try:
            message = os.read(0, 4096)
        except OSError:
            message = b""
        if not message:
            self._listening = False
            if self._last_message_at or now - self._started_at > NO_LAUNCHER_S:
                self._stop(self._grace_s)
            return
        self._last_message_at = now
        if KILL in message:
            self._stop(0)
        elif STOP in message:
            self._stop(self._grace_s)


def _bind_to_parent() -> Callable[[], None] | None:
    """Adopt orphaned descendants; return a function that binds a new child to this process.

    The kernel then sends the child SIGTERM even if this process is killed with SIGKILL.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the living processes that `root` or its descendants started, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, fields = entry.read_text(errors="replace").partition(" (")
        except OSError:
            continue
        # The process's name, in parentheses, may itself contain ") ".
        state, parent = fields.rpartition(") ")[2].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(pid))
    result, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        result += below
        queue += below
    return result


# ------------------------------------------------------------ the check
def examine(
    folder: str, script: str, master_addr: str, port: int | None, gpus: bool
) -> dict[str, Any]:
    """Describe this node: versions, available files, GPUs, and a port that is free."""
    answer: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "shardwise": _version("shardwise"),
        "folder": os.path.isdir(folder),
        "script": not script or os.path.isfile(os.path.join(folder, script)),
        "master_addr": not master_addr or _resolves(master_addr),
    }
    if gpus:
        import torch

        answer["gpus"] = torch.cuda.device_count()
    if port is not None:
        answer["port"] = port if port and _is_free(port) else _free_port()
    return answer


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _is_free(port: int) -> bool:
    """Return whether a server could listen at this port on every address."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            server = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # IPv6 is not available
        with server:
            # As torch's store does: connections that are closing do not block the port.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                server.bind((address, port))
                server.listen(1)
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    return False
    return True


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


def main(arguments: Sequence[str]) -> int:
    """Run `run … -- TORCHRUN ARGUMENTS` or `check …`."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.node", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="start the ranks of this node")
    check = verbs.add_parser("check", help="report whether ranks can start here, as JSON")
    for verb in (run, check):
        verb.add_argument("--folder", default=".")
    run.add_argument("--grace", type=float, default=20.0)
    check.add_argument("--script", default="")
    check.add_argument("--port", type=int, default=None)
    check.add_argument("--master-addr", default="")
    check.add_argument("--gpus", action="store_true")
    words = list(arguments)
    separator = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:separator])
    folder = os.path.expanduser(options.folder)
    if options.verb == "check":
        answer = examine(folder, options.script, options.master_addr, options.port, options.gpus)
        sys.stdout.write(f"\n{ANSWER_PREFIX}{json.dumps(answer)}\n")
        return 0
    # Programs beside this interpreter, such as `shardwise`, precede others of the same name.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    argv = [sys.executable, "-m", "shardwise.launch.torchrun", *words[separator + 1 :]]
    return Guard(argv, folder, options.grace).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
