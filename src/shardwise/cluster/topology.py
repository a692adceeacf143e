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
from shardwise.cluster.links import Link, expand, expand_all

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster

NONE = -1  # no resource
ResourceKind = tuple[str, str, tuple[str, ...]]  # kind, a name for all equal ones, their nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The resources that traffic from one rank to another crosses, in order."""

    resources: tuple[str, ...]
    latency_s: float


class Topology:
    """Arrays over ranks, nodes and resources; the ports of ranks are the first resources.

    Rank r's ports are the resources r (out) and num_ranks + r (in). `levels` and `trunks` are, for
    each level of switches and for each trunk, the switch or the end that a node is at, or -1.
    """

    def __init__(self, cluster: Cluster) -> None:
        entries = cluster.nodes
        self.cluster, self.num_ranks = cluster, cluster.num_ranks
        self._entry = np.repeat(np.arange(len(entries)), [e.copies for e in entries])  # of nodes
        per_node = np.array([e.count for e in entries])[self._entry]
        self.node = np.repeat(np.arange(len(self._entry)), per_node)
        self._names = [name for e in entries for name in expand(e.name)]
        self._index = {name: i for i, name in enumerate(self._names)}
        self._labels: list[tuple[str, ResourceKind]] = []
        self._extra: list[float] = []  # capacities after the ports
        island_of_node, links = self._islands()
        self.island = island_of_node[self.node]
        self.link_latency_s = np.array([link.latency_s if link else 0.0 for link in links])
        self.link_message_s = np.array([link.message_s if link else 0.0 for link in links])
        self.factors = tuple(link.collectives if link else () for link in links)
        self.bus = self._buses(island_of_node, links)
        local = np.arange(self.num_ranks) - (np.cumsum(per_node) - per_node)[self.node]
        self.out_card, self.in_card, self.card_latency_s = self._cards(local)
        self.levels, self.first_switch, self.switch_latency_s = self._switches()
        self.trunks, self.first_trunk, self.trunk_latency_s = self._trunks()
        self.network_latency_s = cluster.network.latency_s
        # The rate of one device into and out of its island.
        rates = [x.bandwidth_bytes_per_s * x.efficiency if x else math.inf for x in links]
        port = np.array(rates)[self.island]
        self.capacity = np.concatenate([port, port, np.array(self._extra, dtype=np.float64)])

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
        return self._labels[resource - 2 * self.num_ranks][0]

    def kind(self, resource: int) -> ResourceKind:
        """Return what a resource is, which is the same for equal ones."""
        if resource >= 2 * self.num_ranks:
            return self._labels[resource - 2 * self.num_ranks][1]
        name = self.cluster.nodes[self._entry[self.node[resource % self.num_ranks]]].name
        return "inside", f"links of devices, {name}", (name,)

    @cached_property
    def capacities(self) -> Mapping[str, float]:
        """The bytes per second of every resource, by name."""
        names = (self.label(i) for i in range(len(self.capacity)))
        return dict(zip(names, self.capacity.tolist(), strict=True))

    # ------------------------------------------------------------ the resources, kind by kind
    def _add(self, label: str, kind: ResourceKind, capacity: float) -> int:
        self._labels.append((label, kind))
        self._extra.append(capacity)
        return 2 * self.num_ranks + len(self._extra) - 1

    def _islands(self) -> tuple[Ints, list[Link | None]]:
        """Return the island of each node and the link of each island."""
        domain_of = np.full(len(self._names), NONE)
        links: list[Link | None] = []
        for domain in self.cluster.network.domains:
            for group in domain.groups():
                domain_of[[self._index[name] for name in group]] = len(links)
                links.append(domain.link)
        others = np.flatnonzero(domain_of == NONE)
        domain_of[others] = len(links) + np.arange(len(others))
        links += [self.cluster.nodes[e].link for e in self._entry[others]]
        return domain_of, links

    def _buses(self, island_of_node: Ints, links: list[Link | None]) -> Ints:
        bus = np.full(len(links), NONE)
        _, first_node = np.unique(island_of_node, return_index=True)
        for island, link in enumerate(links):
            if link is not None and link.bus_bytes_per_s < math.inf:
                node = first_node[island]
                entry = self.cluster.nodes[self._entry[node]].name
                kind = ("inside", f"bus, {entry}", (entry,))
                rate = link.bus_bytes_per_s * link.efficiency
                bus[island] = self._add(f"bus {self._names[node]}", kind, rate)
        return bus

    def _cards(self, local: Ints) -> tuple[Ints, Ints, Floats]:
        """Return each rank's resource for sending, for receiving, and its card's latency."""
        out = np.full(self.num_ranks, NONE)
        latency = np.zeros(self.num_ranks)
        nics = [entry.nic for entry in self.cluster.nodes]
        if all(nic is None for nic in nics):
            return out, out, latency
        first = np.zeros(len(self._names), dtype=np.int64)
        for i, (name, e) in enumerate(zip(self._names, self._entry, strict=True)):
            nic = nics[e]
            if nic is None:
                continue
            first[i] = 2 * self.num_ranks + len(self._extra)
            entry = self.cluster.nodes[e].name
            kind = ("between", f"network cards, {entry}", (entry,))
            cards = [f"nic {name}.{c} {end}" for c in range(nic.count) for end in ("out", "in")]
            self._labels += [(card, kind) for card in cards]
            self._extra += [nic.bandwidth_bytes_per_s * nic.efficiency] * len(cards)
        of_rank = self._entry[self.node]
        counts = np.array([nic.count if nic else 1 for nic in nics])[of_rank]
        card = local * counts // np.bincount(self.node)[self.node]
        has = np.array([nic is not None for nic in nics])[of_rank]
        out = np.where(has, first[self.node] + 2 * card, NONE)
        latency = np.array([nic.latency_s if nic else 0.0 for nic in nics])[of_rank]
        return out, np.where(has, out + 1, NONE), latency

    def _switches(self) -> tuple[tuple[Ints, ...], int, Floats]:
        """Assign switches, with an uplink and a downlink each, to levels with no node twice."""
        first = 2 * self.num_ranks + len(self._extra)
        levels: list[Ints] = []
        latencies: list[float] = []
        for switch in self.cluster.network.switches:
            groups = switch.groups()
            for i, group in enumerate(groups):
                nodes = np.array([self._index[name] for name in group])
                level = next((x for x in levels if np.all(x[nodes] == NONE)), None)
                if level is None:
                    level = np.full(len(self._names), NONE)
                    levels.append(level)
                level[nodes] = len(latencies)
                latencies.append(switch.latency_s)
                capacity = switch.uplink_bytes_per_s
                if capacity is None:
                    nics = [self.cluster.nodes[e].nic for e in self._entry[nodes]]
                    rates = (
                        n.bandwidth_bytes_per_s * n.efficiency * n.count if n else math.inf
                        for n in nics
                    )
                    capacity = sum(rates) / switch.oversubscription
                label = f"switch {switch.name}" + (f".{i}" if len(groups) > 1 else "")
                kind = ("switch", f"switch {switch.name}", switch.nodes)
                self._add(f"{label} up", kind, capacity)
                self._add(f"{label} down", kind, capacity)
        return tuple(levels), first, np.array(latencies or [0.0])

    def _trunks(self) -> tuple[tuple[Ints, ...], int, Floats]:
        first = 2 * self.num_ranks + len(self._extra)
        ends: list[Ints] = []
        for trunk in self.cluster.network.trunks:
            end = np.full(len(self._names), NONE)
            for side, patterns in enumerate(trunk.between):
                end[[self._index[name] for name in expand_all(patterns)]] = side
                label = f"trunk {trunk.name} {('there', 'back')[side]}"
                kind = ("trunk", f"trunk {trunk.name}", (*trunk.between[0], *trunk.between[1]))
                self._add(label, kind, trunk.bandwidth_bytes_per_s)
            ends.append(end)
        latencies: Any = [trunk.latency_s for trunk in self.cluster.network.trunks] or [0.0]
        return tuple(ends), first, np.array(latencies)
