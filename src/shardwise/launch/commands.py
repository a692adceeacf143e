"""The commands that start one process per device, a command for each node.

Enters: a cluster and what each rank is to run. Leaves: `NodeCommand`s; nothing is started here.
Every node runs `shardwise.launch.node`, which starts `torchrun` and ends it when its launcher is
gone. Nodes may have different numbers of devices: torchrun's agents tell each other theirs, and
ranks are numbered node by node, as in the cluster file.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError
from shardwise.launch.places import Environment, Place, meeting_address, places

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
