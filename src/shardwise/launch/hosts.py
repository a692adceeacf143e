"""Where the ranks of a cluster start: each machine with all that a launch needs to know of it."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import sys
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


# The commands that start one process per device, a command for each node.
#
# Every node runs `shardwise.launch.node`, which starts `torchrun` and ends it when its launcher is
# gone. Nodes may have different numbers of devices: torchrun's agents tell each other theirs, and
# ranks are numbered node by node, as in the cluster file.


DEFAULT_TIMEOUT_S = 120.0  # torch from a cold network drive takes a minute
DEFAULT_GRACE_S = 20.0
CONNECT_S = 10
# Sent through the connection: a node that is gone is noticed after a minute.
ALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=4")
UNBUFFERED = ("PYTHONUNBUFFERED", "1")  # lines arrive as they are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """What starts the ranks of one node: `argv` runs here, and reaches the node by ssh itself."""

    node: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long the start may take, and how long a node has to end once it is asked to."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    grace_s: float = DEFAULT_GRACE_S


DEFAULTS = Settings()


def launch_commands(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    port: int | None = None,
    ssh_program: str | None = None,
    environment: Environment = (),
    settings: Settings = DEFAULTS,
) -> tuple[NodeCommand, ...]:
    """One command per node for the program `argv`; ranks meet at the first node's address.

    >>> (command,) = launch_commands(Cluster.local(2), ["train.py", "--name", "a b"])
    >>> str(command).endswith("--rdzv-conf timeout=120 -- train.py --name 'a b'")
    True
    """
    found = places(cluster, ssh_program=ssh_program, environment=environment)
    return node_commands(found, argv, port=port or cluster.port, settings=settings)


def node_commands(
    found: Sequence[Place], argv: Sequence[str], *, port: int, settings: Settings = DEFAULTS
) -> tuple[NodeCommand, ...]:
    """Return the commands for machines that are known."""
    program = rank_program(argv)
    address = meeting_address(found)
    return tuple(
        NodeCommand(
            node=place.name,
            argv=reach(
                place,
                (
                    "run",
                    *("--folder", place.folder or os.getcwd()),
                    *("--grace", f"{settings.grace_s:g}"),
                    "--",
                    *torchrun_arguments(len(found), place.num_devices, str(index)),
                    *("--master-addr", address),
                    *("--master-port", str(port)),
                    *("--rdzv-conf", f"timeout={max(1, round(settings.timeout_s))}"),
                    *program,
                ),
                settings.timeout_s,
            ),
        )
        for index, place in enumerate(found)
    )


def torchrun_arguments(num_nodes: int, num_devices: int, node_rank: str) -> tuple[str, ...]:
    """Return the sizes, as torchrun takes them."""
    return (
        *("--nnodes", str(num_nodes)),
        *("--nproc-per-node", str(num_devices)),
        *("--node-rank", node_rank),
    )


def rank_program(argv: Sequence[str]) -> tuple[str, ...]:
    """What each rank runs, as torchrun takes it: a script, `-m module`, or any program.

    The `--` keeps torchrun from reading an argument as its own.

    >>> rank_program(["shardwise", "train", "config.yaml"])
    ('-m', '--', 'shardwise.cli', 'train', 'config.yaml')
    """
    words = list(argv)
    if any("\0" in word for word in words):
        raise ClusterError("an argument has a zero byte")
    if words and os.path.basename(words[0]) in ("python", "python3"):
        words = words[1:]  # each node has its own
    if not words or words == ["-m"]:
        raise ClusterError("nothing to run", hint="shardwise launch --cluster FILE -- train.py")
    if words[0] == "torchrun":
        raise ClusterError(
            "torchrun is started for you",
            where=shlex.join(argv),
            hint=f"shardwise launch … -- {shlex.join(words[1:])}",
        )
    if words[0] == "-m":
        return ("-m", "--", *words[1:])
    if words[0] == "shardwise":
        return ("-m", "--", "shardwise.cli", *words[1:])
    if words[0].endswith(".py"):
        return ("--", *words)
    if words[0].startswith("-"):
        raise ClusterError(
            f"{words[0]!r} is no program", hint="shardwise launch --cluster FILE -- train.py"
        )
    return ("--no-python", "--", *words)


def script_of(program: Sequence[str]) -> str:
    """Return the file that every node must have, or nothing."""
    return program[1] if program[0] == "--" else ""


def reach(place: Place, arguments: Sequence[str], timeout_s: float) -> tuple[str, ...]:
    """`python -m shardwise.launch.node ARGUMENTS` on that machine, as it is typed here."""
    environment = dict([UNBUFFERED, *place.environment])
    words = ("env", *(f"{name}={value}" for name, value in environment.items()))
    python = place.python or sys.executable
    module = ("-m", "shardwise.launch.node", *arguments)
    ssh = place.ssh
    if ssh is None:
        return (*words, os.path.expanduser(python), *module)
    options = [*ssh.options, "BatchMode=yes", f"ConnectTimeout={connect_s(timeout_s)}", *ALIVE]
    key = ("-i", ssh.key, "-o", "IdentitiesOnly=yes") if ssh.key else ()
    return (
        *(ssh.program, "-T"),
        *(word for option in options for word in ("-o", option)),
        *key,
        *(("-p", str(ssh.port)) if ssh.port != 22 else ()),  # 22, or what ~/.ssh/config says
        f"{ssh.user}@{place.address}" if ssh.user else place.address,
        f"{shlex.join(words)} {quoted_path(python)} {shlex.join(module)}",
    )


def connect_s(timeout_s: float) -> int:
    """What one attempt to connect may take of the time for the start."""
    return max(1, min(CONNECT_S, round(timeout_s)))


def quoted_path(path: str) -> str:
    """Return a path for a shell: `~/` stays what it means there, all else is taken as it is.

    >>> quoted_path("~/my env/bin/python")
    "~/'my env/bin/python'"
    """
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
