"""Describe a cluster: nodes with devices, and the network between them.

A `Cluster` comes from a YAML file, a preset, or a number of ranks on this machine; plans are made
for one, and estimates are computed from it. Ranks are numbered node by node, device by device.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardwise.cluster.device import Device
from shardwise.cluster.links import (
    MAX_COUNT,
    Link,
    Network,
    Nic,
    Pattern,
    Switch,
    Trunk,
    count,
    expand,
    expand_all,
)
from shardwise.errors import ClusterError, did_you_mean
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
    """How to reach a node to start its ranks: `program -o OPTION -i KEY -p PORT user@address`."""

    user: Annotated[str, Stored(always=True)] = ""
    key: Annotated[str, Stored(always=True)] = ""
    port: Port = 22
    program: str = "ssh"
    options: Annotated[tuple[str, ...], ONE_OR_MORE] = ()

    def __post_init__(self) -> None:
        check_fields(self, ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How to start a node's ranks; empty settings are those of the launching machine."""

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
                hint="describe a node for each kind",
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
    """Nodes, and the network between them; the ranks rendezvous at `port` of the first node.

    `start` applies to every node that does not override it.

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
        if self.num_ranks > MAX_COUNT:
            raise ClusterError(
                f"{self.num_ranks:,} ranks, more than {MAX_COUNT:,}", part=("nodes",)
            )
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

        `nic_gbit_per_s` is the total of all network cards of a node.
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
        """Return the link from rank `a` to rank `b` in the absence of other traffic."""
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


# ------------------------------------------------------------ consistency


def check(cluster: Cluster) -> None:
    """Refuse a cluster whose parts contradict each other."""
    known = _check_names(cluster)
    domain_of = _check_domains(cluster, known)
    _check_links(cluster, set(domain_of))
    _check_switches(cluster, known, domain_of)
    for index, trunk in enumerate(cluster.network.trunks):
        with _errors_at(f"trunk {trunk.name}", "network", "trunks", index):
            _check_trunk(trunk, known, domain_of)
    for kind in ("switches", "trunks"):
        given = [item.name for item in getattr(cluster.network, kind)]
        for index, name in enumerate(given):
            if name in given[:index]:
                with _errors_at(f"network.{kind}", "network", kind, index):
                    raise ClusterError(f"{given.count(name)} {kind} are named {name!r}")


@contextmanager
def _errors_at(what: str, *part: str | int) -> Iterator[None]:
    """Attribute errors to this part of the cluster."""
    try:
        yield
    except ClusterError as error:
        raise ClusterError(error.message, where=what, hint=error.hint, part=part) from None


def _check_names(cluster: Cluster) -> set[str]:
    known = Counter(name for node in cluster.nodes for name in expand(node.name))
    twice = {name for name, number in known.items() if number > 1}
    for index, node in reversed(list(enumerate(cluster.nodes))):
        for name in sorted(twice.intersection(expand(node.name))):
            with _errors_at(f"node {node.name}", "nodes", index):
                raise ClusterError(
                    f"{known[name]} nodes are named {name!r}", hint="name each differently"
                )
    return set(known)


def _check_domains(cluster: Cluster, known: set[str]) -> dict[str, int]:
    domain_of: dict[str, int] = {}
    groups = 0
    for index, domain in enumerate(cluster.network.domains):
        with _errors_at(f"domain of {', '.join(domain.nodes)}", "network", "domains", index):
            _check_finite(domain.link)
            _check_known(domain.nodes, known)
            for group in domain.groups():
                for name in group:
                    if name in domain_of:
                        raise ClusterError(f"node {name} is in two domains")
                    domain_of[name] = groups
                groups += 1
    return domain_of


def _check_links(cluster: Cluster, in_domains: set[str]) -> None:
    for index, node in enumerate(cluster.nodes):
        with _errors_at(f"node {node.name}", "nodes", index):
            inside = [name in in_domains for name in expand(node.name)]
            if node.link is not None:
                _check_finite(node.link)
            if any(inside) and node.link is not None:
                raise ClusterError("has its own link and is in a domain", hint="remove its link")
            if not all(inside) and node.link is None and node.count > 1:
                raise ClusterError(
                    f"{node.count} devices without a link between them",
                    hint="link: {bandwidth_gb_per_s: 450, latency_us: 1}",
                )
            if node.nic is None and cluster.num_nodes > 1:
                raise ClusterError(
                    "has no nic to reach the other nodes",
                    hint="nic: {count: 8, bandwidth_gbit_per_s: 400, latency_us: 2}",
                )


def _check_finite(link: Link) -> None:
    """Refuse infinite bandwidth, which only the link from a rank to itself may have."""
    if link.bandwidth_bytes_per_s == math.inf:
        raise ClusterError("bandwidth_bytes_per_s is inf, must be a finite number", where="link")


def _check_switches(cluster: Cluster, known: set[str], domain_of: Mapping[str, int]) -> None:
    groups = []
    for index, switch in enumerate(cluster.network.switches):
        with _errors_at(f"switch {switch.name}", "network", "switches", index):
            _check_known(switch.nodes, known)
            for group in switch.groups():
                _check_domain_is_complete(group, domain_of)
                groups.append((index, frozenset(group)))
    _check_nesting(cluster.network.switches, groups)


def _check_nesting(
    switches: Sequence[Switch], switched: Iterable[tuple[int, frozenset[str]]]
) -> None:
    """Refuse groups that overlap without one containing the other; each has its switch's index."""
    groups = sorted(switched, key=lambda each: -len(each[1]))
    around: dict[str, int] = {}  # node -> the smallest group so far
    for number, (index, group) in enumerate(groups):
        within = {around[name] for name in group if name in around}
        for other in sorted(within):
            outer = groups[other][1]
            if group <= outer:
                continue
            switch, before = switches[index], switches[groups[other][0]]
            with _errors_at(f"switch {switch.name}", "network", "switches", index):
                raise ClusterError(
                    f"switches {before.name} and {switch.name} share {min(group & outer)}, but "
                    f"{min(outer - group)} and {min(group - outer)} are behind one of them alone",
                    hint="put all nodes of the smaller switch behind the larger one, or none",
                )
        around.update(dict.fromkeys(group, number))


def _check_trunk(trunk: Trunk, known: set[str], domain_of: Mapping[str, int]) -> None:
    for side in trunk.between:
        _check_known(side, known)
    ends = [set(expand_all(side)) for side in trunk.between]
    if ends[0] & ends[1]:
        raise ClusterError(
            f"node {min(ends[0] & ends[1])} is at both ends", hint="list each node at one end"
        )
    shared = {domain_of[n] for n in ends[0] if n in domain_of}
    for name in sorted(ends[1]):
        if domain_of.get(name) in shared:
            raise ClusterError(
                f"node {name} is in a domain with nodes of the other end",
                hint="keep the nodes of a domain at one end",
            )


def _check_domain_is_complete(group: tuple[str, ...], domain_of: Mapping[str, int]) -> None:
    sizes = Counter(domain_of.values())
    for domain, number in Counter(domain_of[n] for n in group if n in domain_of).items():
        if number != sizes[domain]:
            raise ClusterError(
                f"holds {number} of the {sizes[domain]} nodes of a domain",
                hint="put all of them behind the switch, or none",
            )


def _check_known(patterns: Iterable[str], known: set[str]) -> None:
    names = expand_all(patterns)
    for name in names:
        if name not in known:
            raise ClusterError(
                f"no node {name!r}{did_you_mean(name, sorted(known))}",
                hint=f"name one of the {len(known)} nodes, such as {min(known)}",
            )
    if not names:
        raise ClusterError("no node is named", hint=f"nodes: [{min(known)}]")
    if len(set(names)) != len(names):
        raise ClusterError("a node is named twice")


# ------------------------------------------------------------ a part of a cluster


VISIBLE = "CUDA_VISIBLE_DEVICES"


def subset(cluster: Cluster, ranks: Collection[int]) -> Cluster:
    """Return the cluster of these ranks, in its order.

    Where only some devices of a node remain, `CUDA_VISIBLE_DEVICES` selects them. Raises a
    `ClusterError` where the network is described in groups of nodes that this would change.
    """
    wanted = set(ranks)
    outside = sorted(rank for rank in wanted if not 0 <= rank < cluster.num_ranks)
    if not wanted or outside:
        raise ClusterError(
            f"ranks {outside} are not among the {cluster.num_ranks} of cluster {cluster.name}"
        )
    if len(wanted) == cluster.num_ranks:
        return cluster
    nodes = tuple(_nodes(cluster, wanted))
    if len(nodes) == nodes[0].copies == 1 < cluster.num_nodes:
        # Without settings for ssh, the launcher would start a single node on this machine.
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
    """Return the network of the nodes in `names`."""

    def select(patterns: tuple[str, ...], every: int) -> tuple[str, ...]:
        known = expand_all(patterns)
        selected = tuple(name for name in known if name in names)
        if every and selected and len(selected) < len(known):
            raise ClusterError(f"cannot remove nodes that form groups of {every}")
        return patterns if len(selected) == len(known) else selected

    domains = [replace(d, nodes=select(d.nodes, d.every)) for d in network.domains]
    switches = [replace(s, nodes=select(s.nodes, s.every)) for s in network.switches]
    trunks = [
        replace(t, between=(select(t.between[0], 0), select(t.between[1], 0)))
        for t in network.trunks
    ]
    return replace(
        network,
        domains=tuple(d for d in domains if d.nodes),
        switches=tuple(s for s in switches if s.nodes),
        trunks=tuple(t for t in trunks if all(t.between)),
    )
