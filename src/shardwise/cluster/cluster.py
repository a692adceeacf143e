"""The cluster: nodes with devices, and the network between them.

A `Cluster` comes from a YAML file, a preset, or a number of ranks on this machine; plans are made
for one, and estimates are computed from it. Ranks are numbered node by node, device by device.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardwise.cluster.device import Device
from shardwise.cluster.links import Link, Network, Nic
from shardwise.cluster.names import MOST, Pattern, count, expand, expand_all
from shardwise.errors import ClusterError
from shardwise.files import read_text, write_text
from shardwise.schema import AS_MAPPING, ONE_OR_MORE, Range, Stored, check_fields

if TYPE_CHECKING:
    from shardwise.cluster.topology import Path as LinkPath
    from shardwise.cluster.topology import Topology


DEFAULT_PORT = 29500  # torchrun's
NO_NETWORK = Network()
MAX_BYTES = 16 << 20  # of a cluster file
_FALLBACK_MEMORY_BYTES = 8 * 2**30

Port = Annotated[int, Range(1, 2**16 - 1), Stored(always=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """How a node is reached to start its ranks: `program -o OPTION -i KEY -p PORT user@address`."""

    user: Annotated[str, Stored(always=True)] = ""
    key: Annotated[str, Stored(always=True)] = ""
    port: Port = 22
    program: str = "ssh"
    options: Annotated[tuple[str, ...], ONE_OR_MORE] = ()

    def __post_init__(self) -> None:
        check_fields(self, ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a node's ranks start; empty settings are those of the launching machine."""

    folder: str = ""
    python: str = ""
    environment: Annotated[tuple[tuple[str, str], ...], AS_MAPPING] = ()

    def __post_init__(self) -> None:
        for name, value in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ClusterError(
                    f"{name!r} is not a valid name of an environment variable",
                    hint="NCCL_DEBUG: INFO",
                )
            if "\0" in value:
                raise ClusterError(f"the value of {name} contains a null byte")

    def over(self, base: Start) -> Start:
        """Return these settings, completed by those of `base`."""
        environment = dict(base.environment) | dict(self.environment)
        return Start(
            folder=self.folder or base.folder,
            python=self.python or base.python,
            environment=tuple(environment.items()),
        )


AS_HERE = Start()
NodeDevices = Annotated[tuple[Device, ...], "by names of the file's devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One node, or several equal ones: `gpu[0-63]` stands for 64.

    `link` connects its devices, `nic` the node with the others. An empty address is the name.
    """

    name: Pattern
    devices: NodeDevices
    link: Link | None = None
    nic: Nic | None = None
    address: Pattern = ""
    ssh: Ssh | None = None
    start: Start = AS_HERE

    def __post_init__(self) -> None:
        where = f"node {self.name}"
        expand(self.name)  # raises
        if not self.devices:
            raise ClusterError("has no devices", where=where, hint="devices: {h100: 8}")
        kinds = sorted({device.kind for device in self.devices})
        if len(kinds) > 1:
            raise ClusterError(
                f"devices of kinds {' and '.join(kinds)}: the ranks of a node use one library",
                where=where,
                hint="a node each",
            )
        if self.address and count(self.address) != self.copies:
            raise ClusterError(
                f"{count(self.address)} addresses in {self.address!r} for {self.copies} nodes",
                where=where,
                hint=f"address: 10.0.0.[1-{self.copies}]",
            )

    @property
    def copies(self) -> int:
        return count(self.name)

    @property
    def count(self) -> int:
        """The number of devices of each node."""
        return len(self.devices)

    @property
    def device(self) -> Device:
        """The first device."""
        return self.devices[0]

    def machine(self, index: int) -> ClusterNode:
        """Return the `index`-th of the nodes that this stands for."""
        if self.copies == 1 and self.address:
            return self
        address = expand(self.address or self.name)[index]
        return replace(self, name=expand(self.name)[index], address=address)


@dataclass(frozen=True, kw_only=True)  # no slots: the topology is computed once, on first use
class Cluster:
    """Nodes, and the network between them; `port` is where the ranks meet, on the first node.

    `start` holds for every node that does not say otherwise.

    >>> Cluster.local(4).num_ranks
    4
    >>> Cluster.preset("h100", nodes=8, devices_per_node=8).num_ranks
    64
    """

    name: str
    nodes: tuple[ClusterNode, ...]
    network: Network = NO_NETWORK
    port: Port = DEFAULT_PORT
    start: Start = AS_HERE

    def __post_init__(self) -> None:
        check_fields(self, ClusterError)
        if not self.nodes:
            raise ClusterError(
                f"cluster {self.name} has no nodes", hint="Cluster.local(4)", part=("nodes",)
            )
        if self.num_ranks > MOST:
            raise ClusterError(f"{self.num_ranks:,} ranks, more than {MOST:,}", part=("nodes",))
        from shardwise.cluster.check import check

        check(self)

    @classmethod
    def local(cls, num_ranks: int) -> Cluster:
        """`num_ranks` CPU processes on this machine, connected by gloo over loopback.

        Memory is this machine's, shared equally. Compute rates and the link are estimates for a
        server CPU, one thread per rank, not a measurement of this machine (`shardwise profile` is
        one); ranks beyond its number of cores share them.
        """
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ClusterError(
                f"a cluster needs at least 1 rank, not {num_ranks!r}", hint="Cluster.local(2)"
            )
        from shardwise.cluster.presets import preset

        share = min(1.0, (os.cpu_count() or 1) / num_ranks)
        (node,) = preset("cpu", nodes=1, devices_per_node=num_ranks).nodes
        device = replace(node.device, memory_bytes=machine_memory_bytes() // num_ranks, speed=share)
        local = replace(node, name="localhost", devices=(device,) * num_ranks, nic=None)
        return cls(name="local", nodes=(local,))

    @classmethod
    def preset(
        cls,
        kind: str,
        *,
        nodes: int = 1,
        devices_per_node: int | None = None,
        nic_gbit_per_s: float | None = None,
        network_latency_us: float | None = None,
        oversubscription: float = 1.0,
    ) -> Cluster:
        """Equal nodes of a known kind, for example `Cluster.preset("h100", nodes=8)`.

        `nic_gbit_per_s` is that of all cards of a node together.
        """
        from shardwise.cluster.presets import preset

        return preset(
            kind,
            nodes=nodes,
            devices_per_node=devices_per_node,
            nic_gbit_per_s=nic_gbit_per_s,
            network_latency_us=network_latency_us,
            oversubscription=oversubscription,
        )

    @cached_property
    def num_ranks(self) -> int:
        return sum(node.count * node.copies for node in self.nodes)

    @cached_property
    def num_nodes(self) -> int:
        return sum(node.copies for node in self.nodes)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of every field."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    @cached_property
    def topology(self) -> Topology:
        """The resources that traffic shares, as arrays over ranks."""
        from shardwise.cluster.topology import build_topology

        return build_topology(self)

    @property
    def capacities(self) -> Mapping[str, float]:
        """Bytes per second of every directed resource: ports, buses, cards, switches, trunks."""
        return self.topology.capacities

    def path(self, a: int, b: int) -> LinkPath:
        """Return the resources that traffic from rank `a` to rank `b` crosses, and its latency."""
        self._check_rank(a)
        self._check_rank(b)
        return self.topology.path(a, b)

    def device(self, rank: int) -> Device:
        """Return the device that `rank` runs on."""
        entry, _, local = self._locate(rank)
        return self.nodes[entry].devices[local]

    def node_of(self, rank: int) -> ClusterNode:
        """Return the node that `rank` runs on."""
        entry, index, _ = self._locate(rank)
        return self.nodes[entry].machine(index)

    def machines(self) -> tuple[ClusterNode, ...]:
        """Return every node, one by one."""
        return tuple(node.machine(i) for node in self.nodes for i in range(node.copies))

    def subset(self, ranks: Collection[int]) -> Cluster:
        """Return the cluster of some of these ranks, numbered from 0 in this order."""
        return subset(self, ranks)

    def link_between(self, a: int, b: int) -> Link:
        """Return the link that traffic from rank `a` to rank `b` would see on its own."""
        path = self.path(a, b)
        capacities = self.topology.capacity_of
        slowest = min((capacities(name) for name in path.resources), default=math.inf)
        return Link(bandwidth_bytes_per_s=slowest, latency_s=path.latency_s)

    def _locate(self, rank: int) -> tuple[int, int, int]:
        """Return the entry of `nodes`, the index of its node and the index of the device there."""
        self._check_rank(rank)
        for index, node in enumerate(self.nodes):
            if rank < node.count * node.copies:
                return index, rank // node.count, rank % node.count
            rank -= node.count * node.copies
        raise AssertionError("unreachable")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ClusterError(f"rank {rank} is outside a cluster of {self.num_ranks} ranks")

    def to_yaml(self) -> str:
        """Return the cluster as versioned YAML text, readable and editable."""
        from shardwise.cluster.files import to_yaml

        return to_yaml(self)

    @classmethod
    def from_yaml(cls, text: str, where: str = "cluster") -> Cluster:
        """Return the cluster that a YAML or JSON text describes; errors name the line and field."""
        from shardwise.cluster.files import from_yaml

        return from_yaml(text, where)

    def save(self, path: str | Path) -> None:
        """Write `to_yaml` to `path`."""
        write_text(path, self.to_yaml(), ClusterError)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file."""
        inside = Path(path) / "cluster.yaml"
        hint = f"{inside}" if Path(path).is_dir() else f"shardwise profile -o {path}"
        text = read_text(path, ClusterError, what="cluster file", hint=hint, max_bytes=MAX_BYTES)
        return cls.from_yaml(text, str(path))

    def __str__(self) -> str:
        parts = []
        for node in self.nodes:
            kinds = {device: node.devices.count(device) for device in node.devices}
            each = " + ".join(f"{number} x {device}" for device, number in kinds.items())
            nodes = "" if node.copies == 1 else f", {node.copies} nodes"
            parts.append(f"{each} on {node.name}{nodes}")
        return f"Cluster {self.name}: {self.num_ranks} ranks; {'; '.join(parts)}"


def machine_memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return _FALLBACK_MEMORY_BYTES


# A part of a cluster: some of its devices, as a cluster of their own.


VISIBLE = "CUDA_VISIBLE_DEVICES"


def subset(cluster: Cluster, ranks: Collection[int]) -> Cluster:
    """Return the cluster of these ranks, in its order.

    On a node of which only some devices are left, `CUDA_VISIBLE_DEVICES` says which. Raises a
    `ClusterError` where the network is described in groups of nodes that this would change.
    """
    wanted = set(ranks)
    outside = sorted(rank for rank in wanted if not 0 <= rank < cluster.num_ranks)
    if not wanted or outside:
        raise ClusterError(f"ranks {outside} of {cluster.num_ranks} of cluster {cluster.name}")
    if len(wanted) == cluster.num_ranks:
        return cluster
    nodes = tuple(_nodes(cluster, wanted))
    if len(nodes) == nodes[0].copies == 1 < cluster.num_nodes:
        # A lone node of which nothing is said would be started on this machine.
        nodes = (replace(nodes[0], ssh=nodes[0].ssh or Ssh()),)
    names = set(expand_all(node.name for node in nodes))
    return replace(
        cluster,
        name=f"{len(wanted)} of {cluster.num_ranks} ranks of {cluster.name}",
        nodes=nodes,
        network=_network(cluster.network, names),
    )


def _nodes(cluster: Cluster, wanted: set[int]) -> Iterator[ClusterNode]:
    first = 0
    for node in cluster.nodes:
        machines = []
        for _ in range(node.copies):
            machines.append([i for i in range(node.count) if first + i in wanted])
            first += node.count
        if all(local == machines[0] for local in machines):
            if machines[0]:
                yield _with_devices(node, machines[0])
            continue
        for index, local in enumerate(machines):
            if local:
                yield _with_devices(node.machine(index), local)


def _with_devices(node: ClusterNode, local: list[int]) -> ClusterNode:
    if len(local) == node.count:
        return node
    start = node.start
    if node.device.kind != "cpu":
        before = dict(start.environment).get(VISIBLE)
        visible = before.split(",") if before else [str(i) for i in range(node.count)]
        given = {**dict(start.environment), VISIBLE: ",".join(visible[i] for i in local)}
        start = replace(start, environment=tuple(given.items()))
    return replace(node, devices=tuple(node.devices[i] for i in local), start=start)


def _network(network: Network, names: set[str]) -> Network:
    """Return the network without nodes that are left out."""

    def rest(patterns: tuple[str, ...], every: int) -> tuple[str, ...]:
        known = [name for pattern in patterns for name in expand(pattern)]
        kept = tuple(name for name in known if name in names)
        if every and kept and len(kept) < len(known):
            raise ClusterError(f"nodes of which every {every} form a group cannot be left out")
        return patterns if len(kept) == len(known) else kept

    domains = [replace(d, nodes=rest(d.nodes, d.every)) for d in network.domains]
    switches = [replace(s, nodes=rest(s.nodes, s.every)) for s in network.switches]
    trunks = [
        replace(t, between=(rest(t.between[0], 0), rest(t.between[1], 0))) for t in network.trunks
    ]
    return replace(
        network,
        domains=tuple(d for d in domains if d.nodes),
        switches=tuple(s for s in switches if s.nodes),
        trunks=tuple(t for t in trunks if all(t.between)),
    )
