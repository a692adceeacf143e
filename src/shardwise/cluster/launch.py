"""The commands that start one process per device, a command for each node.

Enters: a cluster and what each rank is to run. Leaves: `NodeCommand`s; nothing is started here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster.cluster import Cluster, ClusterNode
from shardwise.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """What starts the ranks of one node: `argv` runs here, and reaches the node by ssh itself."""

    node: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.argv)


def launch_commands(cluster: Cluster, argv: Sequence[str]) -> tuple[NodeCommand, ...]:
    """One `torchrun` per node for the program `argv`; ranks meet at the first node's address.

    >>> print(*launch_commands(Cluster.local(2), ["train.py", "--name", "a b"]))
    torchrun --nnodes 1 --nproc-per-node 2 --node-rank 0 --master-addr localhost \
--master-port 29500 train.py --name 'a b'
    """
    if not argv:
        raise ClusterError("nothing to run", hint='launch_commands(cluster, ["train.py"])')
    machines = cluster.machines()
    first = machines[0].address or machines[0].name
    return tuple(
        NodeCommand(
            node=machine.name,
            argv=_reached(
                machine,
                (
                    "torchrun",
                    *("--nnodes", str(len(machines))),
                    *("--nproc-per-node", str(machine.count)),
                    *("--node-rank", str(index)),
                    *("--master-addr", first),
                    *("--master-port", str(cluster.port)),
                    *argv,
                ),
            ),
        )
        for index, machine in enumerate(machines)
    )


def _reached(machine: ClusterNode, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command as ssh takes it; a node without ssh settings is this machine."""
    if machine.ssh is None:
        return argv
    address = machine.address or machine.name
    if address.startswith("-") or machine.ssh.user.startswith("-"):
        raise ClusterError(f"ssh would read {address!r} as an option", where=f"node {machine.name}")
    target = f"{machine.ssh.user}@{address}" if machine.ssh.user else address
    key = ("-i", machine.ssh.key) if machine.ssh.key else ()
    return ("ssh", *key, "-p", str(machine.ssh.port), target, shlex.join(argv))
