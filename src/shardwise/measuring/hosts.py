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
import subprocess
import sys
from collections.abc import Iterator, Sequence

from shardwise.collectives import Network
from shardwise.errors import LaunchError
from shardwise.measuring.namespaces import Layout, layout
from shardwise.processes import (
    is_abandoned,
    owned,
    run_commands,
    terminated_as_interrupt,
)

PREFIX = "sw"  # of namespaces
COMMAND_S = 30.0  # limit of one call of ip or tc
SETTINGS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[Layout]:
    """The network, as long as the context lasts."""
    check_tools()
    _remove_left_behind()
    plan = layout(network, owned(PREFIX) + secrets.token_hex(2))
    with terminated_as_interrupt():
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
    run_commands(
        [
            ["ip", "netns", "exec", host, *command]
            for host, command in zip(plan.hosts, commands, strict=True)
        ],
        what="the emulated network",
        timeout_s=timeout_s,
        environment={**environment, "GLOO_SOCKET_IFNAME": "eth0"},
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
        if is_abandoned(name, PREFIX):
            _call(["ip", "netns", "delete", name], check=False)
