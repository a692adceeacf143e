"""Describe links between the devices of a node, between nodes and between switches.

`topology.py` derives from these bandwidths and latencies the resources that traffic shares. Nodes
are named by patterns: `gpu[0-63]` stands for 64 of them.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

from shardwise.cluster.device import Curve
from shardwise.errors import ClusterError
from shardwise.schema import AS_MAPPING, ONE_OR_MORE, Form, OneOf, Range, Stored, check_fields

MAX_COUNT = 10**6  # of ranks, nodes, network cards and so on
MAX_NAME = 255  # characters of a host name
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_RANGE = re.compile(r"^([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)$")


@cache
def expand(pattern: str) -> tuple[str, ...]:
    """Return all names of a pattern, in order.

    >>> expand("gpu[08-10,20]")
    ('gpu08', 'gpu09', 'gpu10', 'gpu20')
    >>> expand("localhost")
    ('localhost',)
    """
    match = _RANGE.match(pattern)
    if match is None:
        if not pattern or "[" in pattern or "]" in pattern:
            raise _malformed(pattern)
        return (pattern,)
    head, inside, tail = match.groups()
    if len(head) + len(tail) > MAX_NAME:
        raise ClusterError(f"{pattern[:60]!r}… is a name of more than {MAX_NAME} characters")
    parts = [_numbers(part) for part in inside.split(",")]
    if sum(len(numbers) for numbers, _ in parts) > MAX_COUNT:
        raise ClusterError(f"more than {MAX_COUNT:,} names in {pattern[:60]!r}", hint="gpu[0-63]")
    return tuple(
        f"{head}{str(number).zfill(width)}{tail}" for numbers, width in parts for number in numbers
    )


@cache
def count(pattern: str) -> int:
    """Return how many names the pattern stands for."""
    return len(expand(pattern)) if "[" in pattern or "]" in pattern or not pattern else 1


def expand_all(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of several patterns, in order."""
    return tuple(name for pattern in patterns for name in expand(pattern))


def _checked(pattern: str) -> str:
    expand(pattern)  # raises
    return pattern


Pattern = Annotated[str, Form(_checked)]  # a name or a range of names in a file


def _numbers(part: str) -> tuple[range, int]:
    """Return the numbers of `08-10`, and the digits that each is written with."""
    match = _NUMBERS.fullmatch(part.strip())
    if match is None:
        raise _malformed(part)
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise _malformed(part)
    return range(int(first), int(last) + 1), len(first)


def _malformed(text: str) -> ClusterError:
    return ClusterError(f"{text[:80]!r} is neither a name nor a range of names", hint="gpu[0-63]")


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

Names = Annotated[tuple[Pattern, ...], ONE_OR_MORE, Stored(single=True)]
Latency = Annotated[float, Range(0), Stored("latency_us", "1e-6")]
MessageTime = Annotated[float, Range(0), Stored("message_us", "1e-6")]
Every = Annotated[int, Range(0, MAX_COUNT)]
# Reductions inside a switch can exceed the bandwidth of a link, but not twofold.
Efficiency = Annotated[float, Range(0, 2, above=True)]
GBIT = "125e6"  # bytes per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The ratio of an operation's measured time to the time its links need.

    `latency` scales the constant part and `bytes`, by size, the part of each byte. `ranks` is the
    size of the groups it was measured on; 0 stands for any.
    """

    ranks: Annotated[int, Range(0, MAX_COUNT)] = 0
    latency: Annotated[float, Range(0, above=True), Stored(always=True)] = 1.0
    bytes: Annotated[Curve, Stored(always=True)] = ONE

    def __post_init__(self) -> None:
        check_fields(self, ClusterError, "collectives")


Factors = Annotated[
    tuple[tuple[Annotated[str, OneOf(OPERATIONS, "collective")], tuple[Factor, ...]], ...],
    AS_MAPPING,
]
_PLAIN = Factor()


def factor_of(factors: Factors, operation: str, ranks: int) -> Factor:
    """Return the factor of `operation` on groups of `ranks`, interpolated by size."""
    measured = sorted(dict(factors).get(operation, ()), key=lambda factor: factor.ranks)
    if not measured:
        return _PLAIN
    above = next((f for f in measured if f.ranks >= ranks), measured[-1])
    below = next((f for f in reversed(measured) if f.ranks <= ranks), measured[0])
    if below.ranks == above.ranks or not below.ranks:
        return above
    share = math.log(ranks / below.ranks) / math.log(above.ranks / below.ranks)
    sizes = sorted({size for f in (below, above) for size, _ in f.bytes.points})
    points = [(x, below.bytes.at(x) ** (1 - share) * above.bytes.at(x) ** share) for x in sizes]
    latency = below.latency ** (1 - share) * above.latency**share
    return Factor(latency=latency, bytes=Curve(tuple(points)), ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection, in each direction: time = latency_s + bytes / (bandwidth × efficiency).

    Between the devices of a node, the bandwidth is that of one device into and out of a crossbar;
    `bus_bytes_per_s` limits all of them together. `efficiency` is the fraction of the bandwidth
    that the communication library achieves. `collectives` are measured factors beyond that,
    `shared` those of the same operations through shared memory. `message_s` is the time that a
    message costs its sender and its receiver besides the transfer.
    """

    # Infinite only from a rank to itself, which no file describes.
    bandwidth_bytes_per_s: Annotated[
        float, Range(0, above=True, infinite=True), Stored("bandwidth_gb_per_s", "1e9", finite=True)
    ]
    latency_s: Latency
    bus_bytes_per_s: Annotated[
        float, Range(0, above=True, infinite=True), Stored("bus_gb_per_s", "1e9")
    ] = math.inf
    efficiency: Efficiency = 1.0
    collectives: Factors = ()
    shared: Factors = ()
    message_s: MessageTime = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ClusterError, "link")
        _check_factors(self.collectives, "link.collectives")
        _check_factors(self.shared, "link.shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """The network cards of a node: `count` equal ones, which serve equally many devices."""

    count: Annotated[int, Range(1, MAX_COUNT), Stored(always=True)] = 1
    bandwidth_bytes_per_s: Annotated[
        float, Range(0, above=True), Stored("bandwidth_gbit_per_s", GBIT)
    ]
    latency_s: Annotated[float, Range(0), Stored("latency_us", "1e-6", always=True)] = 0.0
    efficiency: Efficiency = 1.0

    def __post_init__(self) -> None:
        check_fields(self, ClusterError, "nic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Nodes whose devices share one link, as in a GB200 rack, in domains of `every` nodes."""

    nodes: Names
    every: Every = 0
    link: Link

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of each domain's nodes."""
        return _every(self.nodes, self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Nodes behind a switch, or behind equal switches of `every` nodes each.

    The uplink and the downlink carry `uplink_bytes_per_s` each, or else the sum of the nodes'
    network cards divided by `oversubscription`.
    """

    name: str
    nodes: Names
    every: Every = 0
    uplink_bytes_per_s: Annotated[
        float | None, Range(0, above=True), Stored("uplink_gbit_per_s", GBIT)
    ] = None
    oversubscription: Annotated[float, Range(0, above=True)] = 1.0
    latency_s: Latency = 0.0

    def __post_init__(self) -> None:
        where = f"switch {self.name}"
        check_fields(self, ClusterError, where)
        if self.uplink_bytes_per_s is not None and self.oversubscription != 1:
            raise ClusterError(
                "uplink and oversubscription are mutually exclusive", where=where, hint="set one"
            )

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of each switch's nodes."""
        return _every(self.nodes, self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """One line that all traffic between two sets of nodes shares, in each direction."""

    name: str
    between: tuple[Names, Names]
    bandwidth_bytes_per_s: Annotated[
        float, Range(0, above=True), Stored("bandwidth_gbit_per_s", GBIT)
    ]
    latency_s: Annotated[float, Range(0), Stored("latency_us", "1e-6", always=True)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ClusterError, f"trunk {self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between nodes; `message_s` is as for a link."""

    latency_s: Latency = 0.0
    message_s: MessageTime = 0.0
    collectives: Factors = ()
    domains: tuple[Domain, ...] = ()
    switches: tuple[Switch, ...] = ()
    trunks: tuple[Trunk, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ClusterError, "network")
        _check_factors(self.collectives, "network.collectives")

    def with_nodes(
        self, select: Callable[[tuple[str, ...], int], tuple[str, ...]], prefix: str = ""
    ) -> "Network":
        """Return the network of other nodes; `prefix` is put before names of switches and trunks.

        `select` receives the patterns of each part, and the size of the groups that they form or 0.
        Parts for which it returns nothing are dropped.
        """
        domains = [replace(d, nodes=select(d.nodes, d.every)) for d in self.domains]
        switches = [
            replace(s, name=prefix + s.name, nodes=select(s.nodes, s.every)) for s in self.switches
        ]
        trunks = [
            replace(t, name=prefix + t.name, between=(select(a, 0), select(b, 0)))
            for t in self.trunks
            for a, b in (t.between,)
        ]
        return replace(
            self,
            domains=tuple(d for d in domains if d.nodes),
            switches=tuple(s for s in switches if s.nodes),
            trunks=tuple(t for t in trunks if all(t.between)),
        )


def _check_factors(factors: Factors, where: str) -> None:
    """Raise for two factors of an operation on groups of the same size."""
    for name, of_operation in factors:
        ranks = [factor.ranks for factor in of_operation]
        if len(set(ranks)) != len(ranks) or (0 in ranks and len(ranks) > 1):
            raise ClusterError(
                f"{name} has several factors for groups of the same size",
                where=where,
                hint=f"{name}: [{{ranks: 2, bytes: 1.5}}, {{ranks: 8, bytes: 1.2}}]",
            )


def _every(patterns: tuple[str, ...], size: int) -> tuple[tuple[str, ...], ...]:
    names = expand_all(patterns)
    if not size:
        return (names,)
    return tuple(names[i : i + size] for i in range(0, len(names), size))
