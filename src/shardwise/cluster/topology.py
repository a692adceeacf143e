"""Model the resources that traffic shares, as arrays over ranks.

A `Topology` holds the capacity of every directed resource of a cluster. For arrays of pairs of
ranks, it returns the resources that each pair crosses, and the latency.

An *island* is a set of ranks that one link connects: the devices of a node, or of a domain of
nodes. Within one, traffic leaves through the sender's port, enters through the receiver's, and
crosses the bus if there is one. Between islands it crosses the sender's card, every switch above
the sender and not the receiver, the trunk between them, every switch above the receiver and not the
sender, and the receiver's card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Floats, Ints
from shardwise.cluster.links import Factors, Link, expand, expand_all

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster

NONE = -1  # no resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The resources that traffic from one rank to another crosses, in order."""

    resources: tuple[str, ...]
    latency_s: float


@dataclass(frozen=True, kw_only=True)  # no slots: names are computed on first use
class Topology:
    """Arrays over ranks, nodes and resources; the ports of ranks are the first resources.

    Rank r's ports are the resources r (out) and num_ranks + r (in). `levels` and `trunks` are, for
    each level of switches and for each trunk, the switch or the end that a node is at, or -1.
    """

    num_ranks: int
    node: Ints
    island: Ints
    out_card: Ints
    in_card: Ints
    card_latency_s: Floats
    bus: Ints
    link_latency_s: Floats
    link_message_s: Floats
    factors: tuple[Factors, ...]
    levels: tuple[Ints, ...]
    trunks: tuple[Ints, ...]
    first_switch: int
    switch_latency_s: Floats
    first_trunk: int
    trunk_latency_s: Floats
    network_latency_s: float
    capacity: Floats
    labels: tuple[str, ...]

    def crossed(self, a: Ints, b: Ints) -> tuple[list[Ints], Floats]:
        """Return columns of the resources from `a[i]` to `b[i]` (-1: none), and the latencies."""
        same = self.island[a] == self.island[b]
        node_a, node_b = self.node[a], self.node[b]
        columns = [
            np.where(same, a, self.out_card[a]),
            np.where(same, self.bus[self.island[a]], NONE),
        ]
        far_s = self.network_latency_s + self.card_latency_s[a] + self.card_latency_s[b]
        for level in self.levels:
            from_a, to_b = level[node_a], level[node_b]
            differ = (from_a != to_b) & ~same
            for switch, offset in ((from_a, 0), (to_b, 1)):
                used = differ & (switch >= 0)
                columns.append(np.where(used, self.first_switch + 2 * switch + offset, NONE))
                far_s = far_s + np.where(used, self.switch_latency_s[switch], 0.0)
        for index, end in enumerate(self.trunks):
            from_a, to_b = end[node_a], end[node_b]
            used = (from_a >= 0) & (to_b >= 0) & (from_a != to_b) & ~same
            columns.append(np.where(used, self.first_trunk + 2 * index + from_a, NONE))
            far_s = far_s + np.where(used, self.trunk_latency_s[index], 0.0)
        columns.append(np.where(same, b + self.num_ranks, self.in_card[b]))
        return columns, np.where(same, self.link_latency_s[self.island[a]], far_s)

    def figures(self, ranks: Ints) -> bytes:
        """Return a key of the ranks' connections: groups with equal keys have equal traffic times.

        It has the rates of their ports and cards, the switches that they share and their rates, and
        the ends of trunks that they are at.
        """
        nodes = self.node[ranks]
        rows: list[NDArray[Any]] = [self.capacity[ranks]]
        islands, cards = self.island[ranks], self.out_card[ranks]
        rows += [islands - islands[0], self.link_latency_s[islands], self.card_latency_s[ranks]]
        rows.append(np.where(cards >= 0, self.capacity[cards], 0.0))
        for level in self.levels:
            switch = level[nodes]
            uplink = self.capacity[self.first_switch + 2 * switch]
            rows += [switch - switch[0], np.where(switch >= 0, uplink, 0.0)]
        rows += [end[nodes] for end in self.trunks]
        return b"".join(row.tobytes() for row in rows)

    def path(self, a: int, b: int) -> Path:
        """Return the path of one pair; a rank reaches itself without delay."""
        if a == b:
            return Path(resources=(), latency_s=0.0)
        columns, latency = self.crossed(np.array([a]), np.array([b]))
        ids = [int(column[0]) for column in columns]
        resources = tuple(self.label(i) for i in ids if i != NONE)
        return Path(resources=resources, latency_s=float(latency[0]))

    def label(self, resource: int) -> str:
        """Return the name of a resource."""
        if resource < 2 * self.num_ranks:
            direction = "out" if resource < self.num_ranks else "in"
            return f"device {resource % self.num_ranks} {direction}"
        return self.labels[resource - 2 * self.num_ranks]

    @cached_property
    def capacities(self) -> Mapping[str, float]:
        """The bytes per second of every resource, by name."""
        names = (self.label(i) for i in range(len(self.capacity)))
        return dict(zip(names, self.capacity.tolist(), strict=True))


class TopologyBuilder:
    """Build the topology of a cluster; resources are added one kind after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.num_ranks = cluster.num_ranks
        entries = cluster.nodes
        self.entry = np.repeat(np.arange(len(entries)), [e.copies for e in entries])
        per_node = np.array([e.count for e in entries])[self.entry]
        self.node = np.repeat(np.arange(len(self.entry)), per_node)
        starts = np.cumsum(per_node) - per_node
        self.local = np.arange(self.num_ranks) - starts[self.node]
        self.names = [name for e in entries for name in expand(e.name)]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.labels: list[str] = []
        self.extra: list[float] = []  # capacities after the ports

    def build(self) -> Topology:
        """Return the topology."""
        island_of_node, links = self._islands()
        island = island_of_node[self.node]
        # The rate of one device into and out of its island.
        rates = [x.bandwidth_bytes_per_s * x.efficiency if x else math.inf for x in links]
        port = np.array(rates)[island]
        bus = self._buses(links)
        out_card, in_card, card_latency_s = self._cards()
        levels, first_switch, switch_latency_s = self._switches()
        trunks, first_trunk, trunk_latency_s = self._trunks()
        return Topology(
            num_ranks=self.num_ranks,
            node=self.node,
            island=island,
            out_card=out_card,
            in_card=in_card,
            card_latency_s=card_latency_s,
            bus=bus,
            link_latency_s=np.array([link.latency_s if link else 0.0 for link in links]),
            link_message_s=np.array([link.message_s if link else 0.0 for link in links]),
            factors=tuple(link.collectives if link else () for link in links),
            levels=levels,
            trunks=trunks,
            first_switch=first_switch,
            switch_latency_s=switch_latency_s,
            first_trunk=first_trunk,
            trunk_latency_s=trunk_latency_s,
            network_latency_s=self.cluster.network.latency_s,
            capacity=np.concatenate([port, port, np.array(self.extra, dtype=np.float64)]),
            labels=tuple(self.labels),
        )

    def _add(self, label: str, capacity: float) -> int:
        self.labels.append(label)
        self.extra.append(capacity)
        return 2 * self.num_ranks + len(self.extra) - 1

    def _islands(self) -> tuple[Ints, list[Link | None]]:
        """Return the island of each node and the link of each island."""
        domain_of = np.full(len(self.names), NONE)
        links: list[Link | None] = []
        for domain in self.cluster.network.domains:
            for group in domain.groups():
                domain_of[[self.index[name] for name in group]] = len(links)
                links.append(domain.link)
        others = np.flatnonzero(domain_of == NONE)
        domain_of[others] = len(links) + np.arange(len(others))
        links += [self.cluster.nodes[e].link for e in self.entry[others]]
        self.island_of_node = domain_of
        return domain_of, links

    def _buses(self, links: list[Link | None]) -> Ints:
        bus = np.full(len(links), NONE)
        if all(link is None or link.bus_bytes_per_s == math.inf for link in links):
            return bus
        first_node = np.full(len(links), len(self.names))
        np.minimum.at(first_node, self.island_of_node, np.arange(len(self.names)))
        for island, link in enumerate(links):
            if link is not None and link.bus_bytes_per_s < math.inf:
                label = f"bus {self.names[first_node[island]]}"
                bus[island] = self._add(label, link.bus_bytes_per_s * link.efficiency)
        return bus

    def _cards(self) -> tuple[Ints, Ints, Floats]:
        """Return each rank's resource for sending, for receiving, and its card's latency."""
        out = np.full(self.num_ranks, NONE)
        latency = np.zeros(self.num_ranks)
        nics = [entry.nic for entry in self.cluster.nodes]
        if all(nic is None for nic in nics):
            return out, out, latency
        first = np.zeros(len(self.names), dtype=np.int64)
        for i, (name, e) in enumerate(zip(self.names, self.entry, strict=True)):
            nic = nics[e]
            if nic is None:
                continue
            first[i] = 2 * self.num_ranks + len(self.extra)
            rate = nic.bandwidth_bytes_per_s * nic.efficiency
            self.extra += [rate] * (2 * nic.count)
            self.labels += [f"nic {name}.{c} {w}" for c in range(nic.count) for w in ("out", "in")]
        counts = np.array([nic.count if nic else 1 for nic in nics])[self.entry]
        per_node = np.bincount(self.node, minlength=len(self.names))
        card = self.local * counts[self.node] // per_node[self.node]
        has = np.array([nic is not None for nic in nics])[self.entry][self.node]
        out = np.where(has, first[self.node] + 2 * card, NONE)
        latency = np.array([nic.latency_s if nic else 0.0 for nic in nics])[self.entry][self.node]
        return out, np.where(has, out + 1, NONE), latency

    def _switches(self) -> tuple[tuple[Ints, ...], int, Floats]:
        """Assign switches, with an uplink and a downlink each, to levels with no node twice."""
        first = 2 * self.num_ranks + len(self.extra)
        levels: list[Ints] = []
        latencies: list[float] = []
        for switch in self.cluster.network.switches:
            groups = switch.groups()
            for i, group in enumerate(groups):
                nodes = np.array([self.index[name] for name in group])
                level = next((x for x in levels if np.all(x[nodes] == NONE)), None)
                if level is None:
                    level = np.full(len(self.names), NONE)
                    levels.append(level)
                level[nodes] = len(latencies)
                latencies.append(switch.latency_s)
                capacity = switch.uplink_bytes_per_s
                if capacity is None:
                    capacity = self._cards_of(nodes) / switch.oversubscription
                label = f"switch {switch.name}" + (f".{i}" if len(groups) > 1 else "")
                self._add(f"{label} up", capacity)
                self._add(f"{label} down", capacity)
        return tuple(levels), first, np.array(latencies or [0.0])

    def _cards_of(self, nodes: Ints) -> float:
        nics = [self.cluster.nodes[e].nic for e in self.entry[nodes]]
        rates = [n.bandwidth_bytes_per_s * n.efficiency * n.count if n else math.inf for n in nics]
        return sum(rates)

    def _trunks(self) -> tuple[tuple[Ints, ...], int, Floats]:
        first = 2 * self.num_ranks + len(self.extra)
        ends: list[Ints] = []
        for trunk in self.cluster.network.trunks:
            end = np.full(len(self.names), NONE)
            for side, patterns in enumerate(trunk.between):
                end[[self.index[name] for name in expand_all(patterns)]] = side
                direction = ("there", "back")[side]
                self._add(f"trunk {trunk.name} {direction}", trunk.bandwidth_bytes_per_s)
            ends.append(end)
        latencies: Any = [trunk.latency_s for trunk in self.cluster.network.trunks] or [0.0]
        return tuple(ends), first, np.array(latencies)
