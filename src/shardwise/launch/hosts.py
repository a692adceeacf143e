"""Find where the ranks of a cluster start, and build the commands that start them.

Every node runs `shardwise.launch.node`, which starts `torchrun` and ends it when the launcher is
gone. Nodes may have different numbers of devices: torchrun's agents exchange the
numbers, and ranks are numbered node by node, in the order of the cluster file.
"""

import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster, ClusterNode, Ssh, Start
from shardwise.errors import ClusterError
from shardwise.listening import is_loopback

LOCAL_NAMES = ("local", "localhost")
DEFAULT_TIMEOUT_S = 120.0  # importing torch from a cold network drive takes a minute
DEFAULT_GRACE_S = 20.0
CONNECT_S = 10
# ssh's own keep-alive messages: a node that disappears is noticed after a minute.
KEEP_ALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=4")
UNBUFFERED = ("PYTHONUNBUFFERED", "1")  # so that lines arrive as they are printed
Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node and how to start processes on it.

    Without `ssh`, it is this machine. An empty `folder` or `python` means the launcher's own.
    """

    name: str
    address: str
    num_devices: int
    kind: str
    ssh: Ssh | None
    folder: str
    python: str
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """The command that starts one node's ranks; it runs here and connects to the node by ssh."""

    node: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Time limits: for starting, and for a node to end after it was asked to."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    grace_s: float = DEFAULT_GRACE_S


DEFAULTS = Settings()


# ------------------------------------------------------------ hosts
def cluster_hosts(
    cluster: Cluster, *, ssh_program: str | None = None, environment: Environment = ()
) -> tuple[Host, ...]:
    """Return the hosts; `ssh_program` and `environment` take precedence over the cluster file."""
    hosts = []
    for node in cluster.machines():
        start = Start(environment=environment).over(node.start.over(cluster.start))
        if "=" in start.python:
            raise ClusterError(
                f"env would read {start.python!r} as a variable", where=f"node {node.name}"
            )
        ssh = _ssh(node, single=cluster.num_nodes == 1)
        if ssh is not None and ssh_program is not None:
            ssh = replace(ssh, program=ssh_program)
        hosts.append(
            Host(
                name=node.name,
                address=_address(node),
                num_devices=node.count,
                kind=node.device.kind,
                ssh=ssh,
                folder=start.folder,
                python=start.python,
                environment=start.environment,
            )
        )
    return tuple(hosts)


def master_address(hosts: Sequence[Host]) -> str:
    """Return the address of the first node at which the ranks of all nodes rendezvous."""
    if all(host.ssh is None for host in hosts):
        return "localhost"
    first = hosts[0]
    remote = [host.address for host in hosts if not is_loopback(host.address)]
    if is_loopback(first.address) and remote:
        raise ClusterError(
            f"the other nodes cannot reach the first one as {first.address!r}",
            where=f"node {first.name}",
            hint=f"address: {_own_address(remote[0])}",
        )
    return first.address


def _own_address(peer: str) -> str:
    """Return this machine's address in the network of `peer`, without sending anything."""
    try:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # UDP: only selects the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "10.0.0.1"


def _address(node: ClusterNode) -> str:
    address = node.address or node.name
    return "localhost" if address in LOCAL_NAMES else address


def _ssh(node: ClusterNode, *, single: bool) -> Ssh | None:
    """Return the ssh settings of a node, or None if its processes start on this machine.

    A node without settings is reached by plain ssh, unless it is this machine or the only node.
    """
    address, ssh = _address(node), node.ssh or Ssh()
    is_local = (
        (single and node.ssh is None)
        or node.name in LOCAL_NAMES
        or is_loopback(address)
        or _is_own(address)
    )
    if node.ssh is not None or not is_local:
        for word in (address, ssh.user):
            if word.startswith("-"):
                raise ClusterError(
                    f"ssh would read {word!r} as an option", where=f"node {node.name}"
                )
        if not ssh.program:
            raise ClusterError(
                "no ssh program", where=f"node {node.name}", hint="ssh: {program: ssh}"
            )
    return None if is_local and ssh == Ssh() else ssh


def _is_own(address: str) -> bool:
    """Return whether this is the machine's host name or an address of one of its interfaces."""
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


# ------------------------------------------------------------ commands
def launch_commands(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    port: int | None = None,
    ssh_program: str | None = None,
    environment: Environment = (),
    settings: Settings = DEFAULTS,
) -> tuple[NodeCommand, ...]:
    """Return one command per node for the program `argv`; ranks rendezvous at the first node.

    >>> (command,) = launch_commands(Cluster.local(2), ["train.py", "--name", "a b"])
    >>> str(command).endswith("--rdzv-conf timeout=120 -- train.py --name 'a b'")
    True
    """
    hosts = cluster_hosts(cluster, ssh_program=ssh_program, environment=environment)
    return node_commands(hosts, argv, port=port or cluster.port, settings=settings)


def node_commands(
    hosts: Sequence[Host], argv: Sequence[str], *, port: int, settings: Settings = DEFAULTS
) -> tuple[NodeCommand, ...]:
    """Return the command of each host."""
    program = rank_program(argv)
    address = master_address(hosts)
    return tuple(
        NodeCommand(
            node=host.name,
            argv=node_argv(
                host,
                (
                    "run",
                    *("--folder", host.folder or os.getcwd()),
                    *("--grace", f"{settings.grace_s:g}"),
                    "--",
                    *torchrun_arguments(len(hosts), host.num_devices, str(index)),
                    *("--master-addr", address),
                    *("--master-port", str(port)),
                    *("--rdzv-conf", f"timeout={max(1, round(settings.timeout_s))}"),
                    *program,
                ),
                settings.timeout_s,
            ),
        )
        for index, host in enumerate(hosts)
    )


def torchrun_arguments(num_nodes: int, num_devices: int, node_rank: str) -> tuple[str, ...]:
    """Return torchrun's options for the number of nodes and processes."""
    return (
        *("--nnodes", str(num_nodes)),
        *("--nproc-per-node", str(num_devices)),
        *("--node-rank", node_rank),
    )


def rank_program(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the program of each rank as torchrun takes it: a script, `-m module`, or a command.

    The `--` keeps torchrun from parsing the program's arguments as its own.

    >>> rank_program(["shardwise", "train", "config.yaml"])
    ('-m', '--', 'shardwise.cli', 'train', 'config.yaml')
    """
    words = list(argv)
    if any("\0" in word for word in words):
        raise ClusterError("an argument contains a zero byte")
    if words and os.path.basename(words[0]) in ("python", "python3"):
        words = words[1:]  # each node has its own interpreter
    example = "shardwise launch --cluster FILE -- train.py"
    if not words or words == ["-m"]:
        raise ClusterError("nothing to run", hint=example)
    if words[0] == "torchrun":
        raise ClusterError(
            "shardwise launch starts torchrun itself",
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
        raise ClusterError(f"{words[0]!r} is not a program", hint=example)
    return ("--no-python", "--", *words)


def node_argv(host: Host, arguments: Sequence[str], timeout_s: float) -> tuple[str, ...]:
    """Return the local command that runs `python -m shardwise.launch.node` on a host."""
    environment = dict([UNBUFFERED, *host.environment])
    words = ("env", *(f"{name}={value}" for name, value in environment.items()))
    python = host.python or sys.executable
    module = ("-m", "shardwise.launch.node", *arguments)
    ssh = host.ssh
    if ssh is None:
        return (*words, os.path.expanduser(python), *module)
    connect_s = max(1, min(CONNECT_S, round(timeout_s)))
    options = [*ssh.options, "BatchMode=yes", f"ConnectTimeout={connect_s}", *KEEP_ALIVE]
    return (
        *(ssh.program, "-T"),
        *(word for option in options for word in ("-o", option)),
        *(("-i", ssh.key, "-o", "IdentitiesOnly=yes") if ssh.key else ()),
        # Port 22 is left to ssh, whose own configuration may override it.
        *(("-p", str(ssh.port)) if ssh.port != 22 else ()),
        f"{ssh.user}@{host.address}" if ssh.user else host.address,
        f"{shlex.join(words)} {quoted_path(python)} {shlex.join(module)}",
    )


def quoted_path(path: str) -> str:
    """Quote a path for a shell that expands a leading `~/` and nothing else.

    >>> quoted_path("~/my env/bin/python")
    "~/'my env/bin/python'"
    """
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
