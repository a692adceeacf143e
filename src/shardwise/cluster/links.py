"""Links: what connects devices of a node, nodes with the network, and switches with each other.

Enters: bandwidths and latencies. Leaves: frozen descriptions; `topology.py` makes of them the
resources that traffic shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.cluster.device import Curve, require_finite, require_not_negative, require_positive
from shardwise.cluster.names import expand_all
from shardwise.errors import ClusterError, did_you_mean

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
)
ONE = Curve.constant(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """How many times longer an operation takes than its wires ask for: its start, and each byte.

    The factor of the bytes is by size. `ranks` is the size of the groups that it was measured on;
    0 stands for any.
    """

    latency: float = 1.0
    bytes: Curve = ONE
    ranks: int = 0

    def __post_init__(self) -> None:
        require_finite("latency", self.latency, "collectives")
        require_not_negative("ranks", self.ranks, "collectives")


Factors = tuple[tuple[str, tuple[Factor, ...]], ...]
_PLAIN = Factor()


def factor_of(factors: Factors, operation: str, ranks: int) -> Factor:
    """The factor of `operation` on groups of `ranks`, from the nearest sizes that are known."""
    known = sorted(dict(factors).get(operation, ()), key=lambda factor: factor.ranks)
    if not known:
        return _PLAIN
    above = next((f for f in known if f.ranks >= ranks), known[-1])
    below = next((f for f in reversed(known) if f.ranks <= ranks), known[0])
    if below.ranks == above.ranks or not below.ranks:
        return above
    share = math.log(ranks / below.ranks) / math.log(above.ranks / below.ranks)
    sizes = sorted({size for f in (below, above) for size, _ in f.bytes.points})
    mixed = [(x, below.bytes.at(x) ** (1 - share) * above.bytes.at(x) ** share) for x in sizes]
    latency = below.latency ** (1 - share) * above.latency**share
    return Factor(latency=latency, bytes=Curve(tuple(mixed)), ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection, in each direction: time = latency_s + bytes / (bandwidth × efficiency).

    Between the devices of a node, the bandwidth is one device's, into and out of a crossbar;
    `bus_bytes_per_s` limits all of them together. `efficiency` is what the communication library
    reaches of the wire, `collectives` what it was measured to need beyond that, `shared` what the
    same operations need through memory that processes share. `message_s` is what a message costs
    its sender and its receiver beside the wire.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    bus_bytes_per_s: float = math.inf
    efficiency: float = 1.0
    collectives: Factors = ()
    shared: Factors = ()
    message_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, "link")
        require_positive("bus_bytes_per_s", self.bus_bytes_per_s, "link")
        _require_efficiency(self.efficiency, "link")
        require_not_negative("latency_s", self.latency_s, "link")
        require_not_negative("message_s", self.message_s, "link")
        check_operations(self.collectives, "link.collectives")
        check_operations(self.shared, "link.shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """The network cards of a node: `count` equal ones, each serving as many devices."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    count: int = 1
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        require_finite("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, "nic")
        _require_efficiency(self.efficiency, "nic")
        require_positive("count", self.count, "nic")
        require_not_negative("latency_s", self.latency_s, "nic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Nodes whose devices share one link, as in a rack of GB200; every `every` nodes are one."""

    nodes: tuple[str, ...]
    link: Link
    every: int = 0

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of each domain's nodes."""
        return _every(self.nodes, self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Nodes behind a switch, or several alike of `every` nodes each; what leaves them crosses it.

    The way up, and the way down, carry `uplink_bytes_per_s`, or what the nodes' cards carry
    together divided by `oversubscription`.
    """

    name: str
    nodes: tuple[str, ...]
    every: int = 0
    uplink_bytes_per_s: float | None = None
    oversubscription: float = 1.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"switch {self.name}"
        require_finite("oversubscription", self.oversubscription, where)
        if self.uplink_bytes_per_s is not None:
            require_finite("uplink_bytes_per_s", self.uplink_bytes_per_s, where)
            if self.oversubscription != 1:
                raise ClusterError(
                    "an uplink and an oversubscription say the same", where=where, hint="give one"
                )
        require_not_negative("latency_s", self.latency_s, where)

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of each switch's nodes."""
        return _every(self.nodes, self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """One line that all traffic between two sets of nodes shares, in each direction."""

    name: str
    between: tuple[tuple[str, ...], tuple[str, ...]]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"trunk {self.name}"
        require_finite("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, where)
        require_not_negative("latency_s", self.latency_s, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between the nodes' cards; `message_s` is as for a link."""

    latency_s: float = 0.0
    message_s: float = 0.0
    collectives: Factors = ()
    domains: tuple[Domain, ...] = ()
    switches: tuple[Switch, ...] = ()
    trunks: tuple[Trunk, ...] = ()

    def __post_init__(self) -> None:
        require_not_negative("latency_s", self.latency_s, "network")
        require_not_negative("message_s", self.message_s, "network")
        check_operations(self.collectives, "network.collectives")


def _require_efficiency(value: float, where: str) -> None:
    """Sums in a switch reach more than the wire carries, though not twice as much."""
    require_finite("efficiency", value, where)
    if value > 2:
        raise ClusterError(
            f"efficiency is {value:g}, more than twice the wire", where=where, hint="0.8 for 80%"
        )


def check_operations(factors: Factors, where: str) -> None:
    """Refuse factors of operations that there are not."""
    for name, known in factors:
        ranks = [factor.ranks for factor in known]
        if len(set(ranks)) != len(ranks) or (0 in ranks and len(ranks) > 1):
            raise ClusterError(
                f"{name} has several factors for groups of the same size",
                where=where,
                hint=f"{name}: [{{ranks: 2, bytes: 1.5}}, {{ranks: 8, bytes: 1.2}}]",
            )
        if name not in OPERATIONS:
            raise ClusterError(
                f"no collective {name!r}{did_you_mean(name, OPERATIONS)}",
                where=where,
                hint=", ".join(OPERATIONS),
            )


def _every(patterns: tuple[str, ...], size: int) -> tuple[tuple[str, ...], ...]:
    names = expand_all(patterns)
    if not size:
        return (names,)
    return tuple(names[i : i + size] for i in range(0, len(names), size))
