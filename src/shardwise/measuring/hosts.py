"""Emulated hosts: namespaces made, used by processes, and removed.

Enters: a `Network`, and a command for each rank. Leaves: the network as a context; on the way out,
by whatever way, its processes and namespaces are gone. What a killed run left behind is removed by
the next.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from shardwise.collectives import Network
from shardwise.errors import LaunchError
from shardwise.measuring.namespaces import Layout, layout

COMMAND_S = 30.0  # limit of one call of ip or tc
SETTINGS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[Layout]:
    """The network, as long as the context lasts."""
    check_tools()
    _remove_left_behind()
    plan = layout(network, f"sw{os.getpid()}-{secrets.token_hex(2)}")
    with _terminated_as_interrupt():
        try:
            _make(plan)
            yield plan
        finally:
            for name in plan.names:
                _call(["ip", "netns", "delete", name], check=False)


def run_all(
    plan: Layout,
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    environment: dict[str, str],
) -> None:
    """A command in the namespace of each rank; all are over, or dead, when this returns."""
    started: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for host, command in zip(plan.hosts, commands, strict=True):
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *command],
                    env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": "eth0"},
                    stdout=sys.stderr,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for us, who then end them
                )
            )
        _wait(started, deadline, timeout_s)
    finally:
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            process.wait(COMMAND_S)


def _wait(started: Sequence[subprocess.Popen[str]], deadline: float, timeout_s: float) -> None:
    while any(process.poll() is None for process in started):
        for rank, process in enumerate(started):
            if process.poll():
                raise LaunchError(
                    f"rank {rank} of the emulated network ended with {process.returncode}",
                    hint="what it wrote above",
                )
        if time.monotonic() > deadline:
            running = [rank for rank, process in enumerate(started) if process.poll() is None]
            raise LaunchError(
                f"ranks {running} of the emulated network were not done after {timeout_s:.0f} s",
                hint="a longer --timeout, or fewer bytes",
            )
        time.sleep(0.02)
    for rank, process in enumerate(started):
        if process.returncode:
            raise LaunchError(
                f"rank {rank} of the emulated network ended with {process.returncode}"
            )


def check_tools() -> None:
    """Refuse where namespaces cannot be made, and say why."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LaunchError(
                f"networks are emulated with {tool!r}, which is not installed",
                hint="apt-get install iproute2",
            )
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LaunchError(
            "networks are emulated with Linux namespaces, which only root makes",
            hint=f"sudo {shutil.which('shardwise') or 'shardwise'} collective bench … --emulate",
        )


def _make(plan: Layout) -> None:
    for name in plan.names:
        _call(["ip", "netns", "add", name])
    write = "; ".join(f"echo {v} > /proc/sys/net/ipv4/{k}" for k, v in SETTINGS.items())
    for name in plan.names:
        _call(["ip", "netns", "exec", name, "sh", "-c", write])
    for name, lines in plan.ip.items():
        _call(["ip", "-n", name, "-batch", "-"], lines)
    _call(["tc", "-n", plan.middle, "-batch", "-"], plan.tc)


def _call(command: Sequence[str], lines: Sequence[str] = (), *, check: bool = True) -> None:
    try:
        done = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{' '.join(command)}` took more than {COMMAND_S:g} s") from None
    if check and done.returncode:
        raise LaunchError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}",
            hint="root in a container needs CAP_NET_ADMIN and CAP_SYS_ADMIN",
        )


def _remove_left_behind() -> None:
    """Namespaces of runs that are no more."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    for line in listed.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        owner = name.partition("-")[0].removeprefix("sw")
        if name.startswith("sw") and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            _call(["ip", "netns", "delete", name], check=False)


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
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
