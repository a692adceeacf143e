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
from typing import TYPE_CHECKING, Annotated, Any

from shardwise.cluster.device import Device
from shardwise.cluster.links import (
    GBIT,
    MAX_COUNT,
    Domain,
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


DEFAULT_START = Start()
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
    start: Start = DEFAULT_START

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
    start: Start = DEFAULT_START

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
        """Return `num_ranks` CPU processes on this machine, connected by gloo over loopback.

        They share the memory of this machine equally. Compute rates and the link are estimates for
        a server CPU, one thread per rank; `shardwise profile` measures them instead. If there are
        more ranks than cores, ranks share the cores.
        """
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ClusterError(
                f"a cluster needs at least 1 rank, got {num_ranks!r}", hint="Cluster.local(2)"
            )
        share = min(1.0, (os.cpu_count() or 1) / num_ranks)
        (node,) = cls.preset("cpu", nodes=1, devices_per_node=num_ranks).nodes
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
        """Return equal nodes of a known kind, for example `Cluster.preset("h100", nodes=8)`.

        `nic_gbit_per_s` is the total of all network cards of a node.
        """
        from shardwise.cluster.presets import find_preset

        base = find_preset(kind)
        per_node = base.devices_per_node if devices_per_node is None else devices_per_node
        for name, value in (("nodes", nodes), ("devices_per_node", per_node)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ClusterError(
                    f"{name} is {value!r}, must be an integer of at least 1",
                    hint=f'Cluster.preset("{kind}", nodes=2, devices_per_node=8)',
                )
        names = "node0" if nodes == 1 else f"node[0-{nodes - 1}]"
        network = base.network
        if network_latency_us is not None:
            network = replace(network, latency_s=network_latency_us * 1e-6)
        if oversubscription != 1:
            switch = Switch(name="leaf", nodes=(names,), every=1, oversubscription=oversubscription)
            network = replace(network, switches=(switch,))
        link: Link | None = base.link
        if base.domain_devices > per_node and nodes > 1:
            every = max(1, base.domain_devices // per_node)
            domain = Domain(nodes=(names,), every=min(every, nodes), link=base.link)
            network, link = replace(network, domains=(domain,)), None
        # As many network cards per device as in a full node, but at least one.
        cards = max(1, round(base.nic.count * per_node / base.devices_per_node))
        nic = replace(base.nic, count=cards)
        if nic_gbit_per_s is not None:
            cards = min(cards, per_node)
            rate = nic_gbit_per_s * float(GBIT) / cards
            nic = replace(nic, count=cards, bandwidth_bytes_per_s=rate)
        node = ClusterNode(name=names, devices=(base.device,) * per_node, link=link, nic=nic)
        return cls(name=f"{kind}-{nodes * per_node}", nodes=(node,), network=network)

    @cached_property
    def num_ranks(self) -> int:
        return sum(node.count * node.copies for node in self.nodes)

    @cached_property
    def num_nodes(self) -> int:
        return sum(node.copies for node in self.nodes)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of all fields."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    @cached_property
    def topology(self) -> Topology:
        """The resources that traffic shares, as arrays over ranks."""
        from shardwise.cluster.topology import Topology

        return Topology(self)

    @property
    def capacities(self) -> Mapping[str, float]:
        """The bytes per second of every directed resource, by name."""
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

    def with_device(self, name: str, **changes: Any) -> Cluster:
        """Return the cluster with some fields changed of all devices of this name."""

        def changed(device: Device) -> Device:
            return replace(device, **changes) if device.name == name else device

        nodes = (replace(n, devices=tuple(map(changed, n.devices))) for n in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def subset(self, ranks: Collection[int]) -> Cluster:
        """Return the cluster of these ranks, numbered from 0 in the same order.

        If only some devices of a node remain, `CUDA_VISIBLE_DEVICES` selects them. Raise a
        `ClusterError` if the network is described by groups of nodes that this would change.
        """
        remaining = set(ranks)
        outside = sorted(rank for rank in remaining if not 0 <= rank < self.num_ranks)
        if not remaining or outside:
            raise ClusterError(
                f"ranks {outside} are not among the {self.num_ranks} of cluster {self.name}"
            )
        if len(remaining) == self.num_ranks:
            return self
        nodes = tuple(_remaining_nodes(self, remaining))
        if len(nodes) == nodes[0].copies == 1 < self.num_nodes:
            # Without settings for ssh, the launcher would start a single node on this machine.
            nodes = (replace(nodes[0], ssh=nodes[0].ssh or Ssh()),)
        names = set(expand_all(node.name for node in nodes))
        return replace(
            self,
            name=f"{len(remaining)} of {self.num_ranks} ranks of {self.name}",
            nodes=nodes,
            network=_remaining_network(self.network, names),
        )

    def link_between(self, a: int, b: int) -> Link:
        """Return the link from rank `a` to rank `b` in the absence of other traffic."""
        path = self.path(a, b)
        slowest = min((self.capacities[name] for name in path.resources), default=math.inf)
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
        """Write the cluster to a YAML file."""
        write_text(path, self.to_yaml(), ClusterError)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file."""
        is_folder = Path(path).is_dir()
        hint = f"{Path(path) / 'cluster.yaml'}" if is_folder else f"shardwise profile -o {path}"
        text = read_text(path, ClusterError, what="cluster file", hint=hint, max_bytes=MAX_BYTES)
        return cls.from_yaml(text, str(path))

    def __str__(self) -> str:
        parts = []
        for node in self.nodes:
            counts = Counter(node.devices).items()
            devices = " + ".join(f"{number} x {device}" for device, number in counts)
            copies = "" if node.copies == 1 else f", {node.copies} nodes"
            parts.append(f"{devices} on {node.name}{copies}")
        return f"Cluster {self.name}: {self.num_ranks} ranks; {'; '.join(parts)}"


def machine_memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return _FALLBACK_MEMORY_BYTES


# ------------------------------------------------------------ consistency
def check(cluster: Cluster) -> None:
    """Raise if parts of a cluster contradict each other."""
    node_names = _check_names(cluster)
    domain_of = _check_domains(cluster, node_names)
    _check_links(cluster, set(domain_of))
    _check_switches(cluster, node_names, domain_of)
    for index, trunk in enumerate(cluster.network.trunks):
        with _errors_at(f"trunk {trunk.name}", "network", "trunks", index):
            _check_trunk(trunk, node_names, domain_of)
    for kind in ("switches", "trunks"):
        names = [item.name for item in getattr(cluster.network, kind)]
        for index, name in enumerate(names):
            if name in names[:index]:
                with _errors_at(f"network.{kind}", "network", kind, index):
                    raise ClusterError(f"{names.count(name)} {kind} are named {name!r}")


@contextmanager
def _errors_at(what: str, *part: str | int) -> Iterator[None]:
    """Attribute errors to this part of the cluster."""
    try:
        yield
    except ClusterError as error:
        raise ClusterError(error.message, where=what, hint=error.hint, part=part) from None


def _check_names(cluster: Cluster) -> set[str]:
    names = Counter(name for node in cluster.nodes for name in expand(node.name))
    repeated = {name for name, number in names.items() if number > 1}
    for index, node in reversed(list(enumerate(cluster.nodes))):
        for name in sorted(repeated.intersection(expand(node.name))):
            with _errors_at(f"node {node.name}", "nodes", index):
                raise ClusterError(f"{names[name]} nodes are named {name!r}", hint="unique names")
    return set(names)


def _check_domains(cluster: Cluster, node_names: set[str]) -> dict[str, int]:
    domain_of: dict[str, int] = {}
    groups = 0
    for index, domain in enumerate(cluster.network.domains):
        with _errors_at(f"domain of {', '.join(domain.nodes)}", "network", "domains", index):
            _check_finite(domain.link)
            _check_nodes(domain.nodes, node_names)
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
            in_domain = [name in in_domains for name in expand(node.name)]
            if node.link is not None:
                _check_finite(node.link)
            if any(in_domain) and node.link is not None:
                raise ClusterError("has its own link and is in a domain", hint="remove its link")
            if not all(in_domain) and node.link is None and node.count > 1:
                raise ClusterError(
                    f"has {node.count} devices without a link between them",
                    hint="link: {bandwidth_gb_per_s: 450, latency_us: 1}",
                )
            if node.nic is None and cluster.num_nodes > 1:
                raise ClusterError(
                    "has no nic to reach the other nodes",
                    hint="nic: {count: 8, bandwidth_gbit_per_s: 400, latency_us: 2}",
                )


def _check_finite(link: Link) -> None:
    """Raise for infinite bandwidth, which only the link from a rank to itself may have."""
    if link.bandwidth_bytes_per_s == math.inf:
        raise ClusterError("bandwidth_bytes_per_s is inf, must be a finite number", where="link")


def _check_switches(cluster: Cluster, node_names: set[str], domain_of: Mapping[str, int]) -> None:
    groups = []
    for index, switch in enumerate(cluster.network.switches):
        with _errors_at(f"switch {switch.name}", "network", "switches", index):
            _check_nodes(switch.nodes, node_names)
            for group in switch.groups():
                _check_domain_is_complete(group, domain_of)
                groups.append((index, frozenset(group)))
    _check_nesting(cluster.network.switches, groups)


def _check_nesting(
    switches: Sequence[Switch], switched: Iterable[tuple[int, frozenset[str]]]
) -> None:
    """Raise if groups overlap without one containing the other; each has its switch's index."""
    groups = sorted(switched, key=lambda item: -len(item[1]))
    smallest: dict[str, int] = {}  # node -> the smallest group so far
    for number, (index, group) in enumerate(groups):
        for other in sorted({smallest[name] for name in group if name in smallest}):
            outer = groups[other][1]
            if group <= outer:
                continue
            switch, larger = switches[index], switches[groups[other][0]]
            with _errors_at(f"switch {switch.name}", "network", "switches", index):
                raise ClusterError(
                    f"switches {larger.name} and {switch.name} share {min(group & outer)}, but "
                    f"{min(outer - group)} and {min(group - outer)} are behind only one of them",
                    hint="put all nodes of the smaller switch behind the larger one, or none",
                )
        smallest.update(dict.fromkeys(group, number))


def _check_trunk(trunk: Trunk, node_names: set[str], domain_of: Mapping[str, int]) -> None:
    for side in trunk.between:
        _check_nodes(side, node_names)
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


def _check_nodes(patterns: Iterable[str], node_names: set[str]) -> None:
    names = expand_all(patterns)
    for name in names:
        if name not in node_names:
            raise ClusterError(
                f"no node {name!r}{did_you_mean(name, sorted(node_names))}",
                hint=f"name one of the {len(node_names)} nodes, such as {min(node_names)}",
            )
    if not names:
        raise ClusterError("no node is named", hint=f"nodes: [{min(node_names)}]")
    if len(set(names)) != len(names):
        raise ClusterError("a node is named twice")


# ------------------------------------------------------------ subsets
VISIBLE = "CUDA_VISIBLE_DEVICES"


def _remaining_nodes(cluster: Cluster, ranks: set[int]) -> Iterator[ClusterNode]:
    first = 0
    for node in cluster.nodes:
        starts = range(first, first + node.copies * node.count, node.count)
        devices_of_copies = [[i for i in range(node.count) if a + i in ranks] for a in starts]
        first = starts.stop
        if all(devices == devices_of_copies[0] for devices in devices_of_copies):
            if devices_of_copies[0]:
                yield _with_devices(node, devices_of_copies[0])
            continue
        for index, devices in enumerate(devices_of_copies):
            if devices:
                yield _with_devices(node.machine(index), devices)


def _with_devices(node: ClusterNode, local: list[int]) -> ClusterNode:
    if len(local) == node.count:
        return node
    start = node.start
    if node.device.kind != "cpu":
        environment = dict(start.environment)
        before = environment.get(VISIBLE)
        visible = before.split(",") if before else [str(i) for i in range(node.count)]
        environment[VISIBLE] = ",".join(visible[i] for i in local)
        start = replace(start, environment=tuple(environment.items()))
    return replace(node, devices=tuple(node.devices[i] for i in local), start=start)


def _remaining_network(network: Network, names: set[str]) -> Network:
    def select(patterns: tuple[str, ...], every: int) -> tuple[str, ...]:
        all_names = expand_all(patterns)
        selected = tuple(name for name in all_names if name in names)
        if every and selected and len(selected) < len(all_names):
            raise ClusterError(f"cannot remove nodes that form groups of {every}")
        return patterns if len(selected) == len(all_names) else selected

    return network.with_nodes(select)
