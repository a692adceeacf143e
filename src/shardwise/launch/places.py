"""Where the ranks of a cluster start: each machine with all that a launch needs to know of it.

Enters: `Cluster`, and what the command line changes of it. Leaves: `Place`s in rank order; nothing
is reached here, and no name is looked up.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster, ClusterNode, Ssh, Start
from shardwise.errors import ClusterError

LOCAL_NAMES = ("local", "localhost")
Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One machine. Without `ssh` it is this one; empty `folder` and `python` are as here."""

    name: str
    address: str
    num_devices: int
    kind: str
    ssh: Ssh | None
    folder: str
    python: str
    environment: Environment

    @property
    def is_here(self) -> bool:
        return self.ssh is None


def places(
    cluster: Cluster, *, ssh_program: str | None = None, environment: Environment = ()
) -> tuple[Place, ...]:
    """Every machine; `ssh_program` and `environment` go before what the file says."""
    extra = Start(environment=environment)
    found = []
    for machine in cluster.machines():
        start = extra.over(machine.start.over(cluster.start))
        if "=" in start.python:
            raise ClusterError(
                f"env would read {start.python!r} as a variable", where=f"node {machine.name}"
            )
        ssh = _ssh(machine, alone=cluster.num_nodes == 1)
        if ssh is not None and ssh_program is not None:
            ssh = replace(ssh, program=ssh_program)
        found.append(
            Place(
                name=machine.name,
                address=_address(machine),
                num_devices=machine.count,
                kind=machine.device.kind,
                ssh=ssh,
                folder=start.folder,
                python=start.python,
                environment=start.environment,
            )
        )
    return tuple(found)


def meeting_address(found: Sequence[Place]) -> str:
    """Where the ranks meet: the first node, under an address that all the others can use."""
    first = found[0]
    if all(place.is_here for place in found):
        return "localhost"
    if _is_loopback(first.address) and any(not _is_loopback(p.address) for p in found):
        own = own_address(next(p.address for p in found if not _is_loopback(p.address)))
        raise ClusterError(
            f"the other nodes cannot reach the first one as {first.address!r}",
            where=f"node {first.name}",
            hint=f"address: {own}",
        )
    return first.address


def own_address(towards: str) -> str:
    """Return this machine's address in the network of `towards`; nothing is sent to find it."""
    try:
        family = socket.AF_INET6 if ":" in towards else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "10.0.0.1"


def _address(machine: ClusterNode) -> str:
    address = machine.address or machine.name
    return "localhost" if address in LOCAL_NAMES else address


def _ssh(machine: ClusterNode, *, alone: bool) -> Ssh | None:
    """What the file says; otherwise plain ssh, but for this machine and for a lone node."""
    if machine.ssh is not None:
        _check_ssh(machine, machine.ssh)
        if machine.ssh != Ssh():
            return machine.ssh
    address = _address(machine)
    alone = alone and machine.ssh is None
    if alone or machine.name in LOCAL_NAMES or _is_loopback(address) or _is_own(address):
        return None
    ssh = Ssh()
    _check_ssh(machine, ssh)
    return ssh


def _check_ssh(machine: ClusterNode, ssh: Ssh) -> None:
    address = _address(machine)
    for word in (address, ssh.user):
        if word.startswith("-"):
            raise ClusterError(
                f"ssh would read {word!r} as an option", where=f"node {machine.name}"
            )
    if not ssh.program:
        raise ClusterError(
            "no ssh program", where=f"node {machine.name}", hint="ssh: {program: ssh}"
        )


def _is_loopback(address: str) -> bool:
    try:
        return address in LOCAL_NAMES or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_own(address: str) -> bool:
    """Whether it is this machine's host name, or a number that one of its cards has."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        host = socket.gethostname()
        return address in (host, host.partition(".")[0])
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
