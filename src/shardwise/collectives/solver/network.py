"""The network model: ranks, resources with capacities, and which resources each send uses.

An edge is a pair of ranks that can send; it uses a set of resources (cards, ports, buses, switches,
trunks), each with a capacity shared by all its users. A `Network` stores edges as arrays and is
built from a `Cluster` or from names, capacities and sends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Floats, Ints
from shardwise.errors import ClusterError, did_you_mean

if TYPE_CHECKING:
    from shardwise.cluster import Cluster


NONE = -1  # index of no resource or edge
SLOWEST, FASTEST = 1e-30, 1e30  # bytes per second, within the range of floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """The resources that a send from one rank to another uses, and its latency."""

    resources: tuple[str, ...]
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: cached properties
class Network:
    """Edges between ranks and the resources they use.

    `uses[e]` are the resources of edge e, padded with -1; `message_s` is the time of a message on
    a rank. `groups` are sets of ranks that belong together, such as those of a node; bounds
    consider the cuts around them.

    >>> ring = Network.of_links({(i, (i + 1) % 3): 1e9 for i in range(3)})
    >>> ring.num_ranks, ring.resources[0]
    (3, 'link 0->1')
    """

    names: tuple[str, ...]
    resources: tuple[str, ...]
    capacity: Floats
    source: Ints
    target: Ints
    uses: Ints
    latency_s: Floats
    message_s: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()

    # ------------------------------------------------------------ constructors
    @classmethod
    def of_cluster(cls, cluster: Cluster, ranks: Sequence[int] | None = None) -> Network:
        """Return the network between `ranks` of a cluster, by default all; rank i is `ranks[i]`."""
        chosen = list(range(cluster.num_ranks)) if ranks is None else list(ranks)
        if len(set(chosen)) != len(chosen):
            raise ClusterError(f"ranks {chosen} contain a duplicate", hint="each rank once")
        for rank in chosen:
            cluster.path(rank, rank)  # raises for a rank that does not exist
        topology = cluster.topology
        members = np.array(chosen, dtype=np.int64)
        source, target = np.nonzero(~np.eye(len(members), dtype=bool))
        columns, latency = topology.crossed(members[source], members[target])
        used = np.stack(columns, axis=1)
        capacity = topology.capacity
        used[(used != NONE) & ~np.isfinite(capacity[used])] = NONE  # unlimited
        ids, flat = np.unique(used, return_inverse=True)
        flat = flat.reshape(used.shape)
        if len(ids) and ids[0] == NONE:
            ids, flat = ids[1:], flat - 1
        for i in ids.tolist():
            _rate(topology.label(i), float(capacity[i]))
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(topology.node[members].tolist()):
            nodes.setdefault(node, []).append(rank)
        return cls(
            names=tuple(str(rank) for rank in chosen),
            resources=tuple(topology.label(int(i)) for i in ids),
            capacity=capacity[ids],
            source=source,
            target=target,
            uses=np.asarray(flat[:, (flat != NONE).any(axis=0)], dtype=np.int64),
            latency_s=np.asarray(latency, dtype=np.float64),
            message_s=_message_s(cluster, chosen),
            groups=tuple(tuple(ranks) for ranks in nodes.values()),
        )

    @classmethod
    def of(
        cls,
        ranks: Sequence[str],
        capacities: Mapping[str, float],
        sends: Mapping[tuple[str, str], Send],
        *,
        message_s: float = 0.0,
    ) -> Network:
        """Return the network of these ranks, resources in bytes per second, and possible sends."""
        ranks = [str(name) for name in ranks]
        if not ranks:
            raise ClusterError("a network needs at least one rank", hint='ranks: ["0", "1"]')
        for name, occurrences in Counter(ranks).items():
            if occurrences > 1:
                raise ClusterError(f"{occurrences} ranks are named {name!r}", hint="unique names")
        rates = {name: _rate(f"capacity of {name!r}", value) for name, value in capacities.items()}
        finite = [name for name, value in rates.items() if value < math.inf]
        index = {name: i for i, name in enumerate(finite)}
        place = {name: i for i, name in enumerate(ranks)}
        ends: list[tuple[int, int]] = []
        used: list[list[int]] = []
        latencies: list[float] = []
        for pair, send in sends.items():
            a, b = map(str, pair)
            where = f"send {a} -> {b}"
            for name in (a, b):
                if name not in place:
                    message = f"no rank {name!r}{did_you_mean(name, ranks)}"
                    raise ClusterError(message, where=where, hint=f"ranks: {', '.join(ranks)}")
            if a == b:
                raise ClusterError("a rank cannot send to itself", where=where)
            latencies.append(_seconds("latency", send.latency_s, where))
            for name in send.resources:
                if name not in capacities:
                    raise ClusterError(
                        f"no resource {name!r}{did_you_mean(name, capacities)}", where=where
                    )
            ends.append((place[a], place[b]))
            used.append(sorted({index[name] for name in send.resources if name in index}))
        return cls(
            names=tuple(ranks),
            resources=tuple(finite),
            capacity=np.array([rates[name] for name in finite], dtype=np.float64),
            source=np.array([a for a, _ in ends], dtype=np.int64),
            target=np.array([b for _, b in ends], dtype=np.int64),
            uses=padded(used),
            latency_s=np.array(latencies, dtype=np.float64),
            message_s=_seconds("message_s", message_s),
        )

    @classmethod
    def of_links(
        cls,
        bandwidths: Mapping[tuple[int, int], float],
        *,
        num_ranks: int | None = None,
        latency_s: float = 0.0,
    ) -> Network:
        """Return a network with a dedicated link for each pair, in bytes per second."""
        count = num_ranks or 1 + max((max(pair) for pair in bandwidths), default=0)
        names = [f"link {a}->{b}" for a, b in bandwidths]
        return cls.of(
            [str(i) for i in range(count)],
            dict(zip(names, bandwidths.values(), strict=True)),
            {
                (str(a), str(b)): Send(resources=(name,), latency_s=latency_s)
                for (a, b), name in zip(bandwidths, names, strict=True)
            },
        )

    @classmethod
    def of_cards(
        cls,
        out: Sequence[float],
        into: Sequence[float] | None = None,
        *,
        latency_s: float = 0.0,
        message_s: float = 0.0,
    ) -> Network:
        """Return a network of ranks with one full-duplex card each on a non-blocking switch."""
        into = out if into is None else into
        if len(into) != len(out):
            raise ClusterError(
                f"{len(out)} outgoing and {len(into)} incoming rates",
                hint="one of each for every rank",
            )
        names = [str(i) for i in range(len(out))]
        capacities = {f"nic {i} out": out[i] for i in range(len(out))}
        capacities |= {f"nic {i} in": into[i] for i in range(len(out))}
        sends = {
            (a, b): Send(resources=(f"nic {a} out", f"nic {b} in"), latency_s=latency_s)
            for a in names
            for b in names
            if a != b
        }
        return cls.of(names, capacities, sends, message_s=message_s)

    # ------------------------------------------------------------ derived values
    @property
    def num_ranks(self) -> int:
        return len(self.names)

    @property
    def num_edges(self) -> int:
        return len(self.source)

    @cached_property
    def edge(self) -> Ints:
        """The index of the edge from i to j, or -1, as a matrix."""
        index = np.full((self.num_ranks, self.num_ranks), NONE, dtype=np.int64)
        index[self.source, self.target] = np.arange(self.num_edges)
        return index

    @cached_property
    def bandwidth(self) -> Floats:
        """The bytes per second of each edge when no other is active."""
        padded = np.append(self.capacity, math.inf)
        return np.asarray(padded[self.uses].min(axis=1, initial=math.inf))

    def loads(self, edges: Ints) -> Floats:
        """Return how often each resource is used by `edges`, counting repetitions."""
        used = self.uses[edges].ravel() + 1
        return np.bincount(used, minlength=len(self.resources) + 1)[1:].astype(np.float64)

    def prices(self, of_resource: Floats) -> Floats:
        """Return the sum of the prices of the resources that each edge uses."""
        padded = np.append(of_resource, 0.0)
        return np.asarray(padded[self.uses].sum(axis=1))

    def matrix(self, of_edge: Floats) -> Floats:
        """Return a value per edge as a matrix; infinite where there is no edge."""
        values = np.full((self.num_ranks, self.num_ranks), math.inf)
        values[self.source, self.target] = of_edge
        return values

    def check_reach(self, root: int, *, outward: bool, inward: bool) -> None:
        """Raise if a rank cannot be reached from the root, or cannot reach it."""
        pairs = []
        if outward:
            pairs += [(root, r) for r in self._unreached(self.source, self.target, root)]
        if inward:
            pairs += [(r, root) for r in self._unreached(self.target, self.source, root)]
        if pairs:
            a, b = (self.names[rank] for rank in pairs[0])
            raise ClusterError(
                f"rank {b} cannot be reached from rank {a}, directly or through others: "
                f"{self.num_edges} sends between {self.num_ranks} ranks are possible",
                hint=f"a link that leads to {b}",
            )

    def _unreached(self, source: Ints, target: Ints, start: int) -> list[int]:
        """Return the ranks that cannot be reached from `start` over any number of edges."""
        reached = np.arange(self.num_ranks) == start
        while not reached[target[reached[source]]].all():
            reached[target[reached[source]]] = True
        return np.flatnonzero(~reached).tolist()


def padded(rows: Sequence[Sequence[int]]) -> Ints:
    """Return rows of resources as a matrix, filled up with `NONE`."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[NONE] * (width - len(row))] for row in rows]
    return np.array(filled, dtype=np.int64).reshape(len(rows), width)


def _message_s(cluster: Cluster, ranks: Sequence[int]) -> float:
    """Return the time of a message on a rank, by default the overhead of an operator."""
    islands = np.unique(cluster.topology.island[np.array(ranks, dtype=np.int64)])
    message_s = cluster.network.message_s
    if len(islands) == 1:
        message_s = cluster.topology.link_message_s[islands[0]]
    return float(message_s) or max((cluster.device(rank).overhead_s for rank in ranks), default=0.0)


def _rate(what: str, value: object) -> float:
    """Return bytes per second; an infinite rate means no limit."""
    rate = _number(value)
    if not rate > 0:
        raise ClusterError(f"{what} is {value!r}, must be a number of bytes per second above 0")
    if not (SLOWEST <= rate <= FASTEST or rate == math.inf):
        raise ClusterError(
            f"{what} is {value!r}, must be {SLOWEST:g} to {FASTEST:g} bytes per second",
            hint="inf for no limit",
        )
    return rate


def _seconds(what: str, value: object, where: str | None = None) -> float:
    seconds = _number(value)
    if not 0 <= seconds < math.inf:
        raise ClusterError(f"{what} is {value!r}, must be a number >= 0", where=where)
    return seconds


def _number(value: object) -> float:
    """Return a Python or NumPy number as a float, infinite if too large; NaN for other types."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


# Detect ranks that a network cannot distinguish.
#
# A `Symmetry` is a commutative group of permutations of the ranks under which sends, their
# latencies and the capacities of the resources they use are unchanged, and which preserves a given
# color per rank (the root, a share of the data). Linear programs are solved once per orbit:
# averaging a solution over the group does not make it worse.
#
# Blocks of ranks are compared by exchanging them: first single ranks, then classes of exchangeable
# ranks, and so on for devices, nodes and racks. The group rotates all classes of a level at once,
# which keeps it small.


Words = NDArray[np.uint64]
Block = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Symmetry:
    """A group of permutations, the identity first; an orbit is labelled by its smallest member."""

    elements: tuple[Ints, ...]
    rank_orbit: Ints
    resource_orbit: Ints
    edge_orbit: Ints
    blocks: tuple[Block, ...]

    @property
    def order(self) -> int:
        return len(self.elements)

    def representatives(self) -> list[int]:
        """Return the first rank of each orbit."""
        return [int(r) for r in np.unique(self.rank_orbit)]


def find_symmetry(network: Network, colors: Sequence[int] | None = None) -> Symmetry:
    """Return the symmetry group that the search detects; there may be more symmetries."""
    count = network.num_ranks
    tester = _Tester(network, np.array(colors or [0] * count))
    generators: list[tuple[Ints, int]] = []
    blocks: list[Block] = [(rank,) for rank in range(count)]
    all_blocks: list[Block] = []
    while True:
        classes = _classes(blocks, tester)
        if len(classes) == len(blocks):
            break
        generators += _rotation(classes, count)
        blocks = [tuple(r for block in members for r in block) for members in classes]
        all_blocks += blocks
    if not generators:
        generators = _smallest_rotation(count, tester)
    generators = _small_group(generators, 2 * count)
    elements = [np.arange(count)]
    for turn, order in generators:
        powers = [np.arange(count)]
        for _ in range(order - 1):
            powers.append(turn[powers[-1]])
        elements = [power[element] for power in powers for element in elements]
    edges = [network.edge[turn[network.source], turn[network.target]] for turn, _ in generators]
    resources = [tester.resources(turn) for turn, _ in generators]
    orders = [order for _, order in generators]
    return Symmetry(
        elements=tuple(elements),
        rank_orbit=_orbits(count, [turn for turn, _ in generators], orders),
        resource_orbit=_orbits(len(network.resources), resources, orders),
        edge_orbit=_orbits(network.num_edges, edges, orders),
        blocks=tuple(block for block in all_blocks if len(block) < count),
    )


class _Tester:
    """Test whether a permutation preserves the network, by sums of random words per resource."""

    def __init__(self, network: Network, colors: Ints) -> None:
        count = network.num_ranks
        self.network, self.colors = network, colors
        random = np.random.default_rng(0)
        self.words = random.integers(0, 2**63, size=(count, count), dtype=np.uint64)
        _, latency = np.unique(network.latency_s, return_inverse=True)
        self.factor = (2 * latency + 1).astype(np.uint64)
        _, self.kind = np.unique(network.capacity, return_inverse=True)
        both = np.concatenate([network.source, network.target])
        order = np.argsort(both, kind="stable") % max(network.num_edges, 1)
        self.of_rank = np.split(order, np.cumsum(np.bincount(both, minlength=count))[:-1])

    def preserves(self, turn: Ints, moved: Sequence[int]) -> bool:
        """Return whether `turn`, which moves only the ranks in `moved`, preserves the network."""
        if (self.colors[turn] != self.colors).any():
            return False
        edges = np.unique(np.concatenate([self.of_rank[r] for r in moved]))
        source, target = self.network.source[edges], self.network.target[edges]
        if (self.network.edge[turn[source], turn[target]] < 0).any():
            return False
        before, after = self._words(edges, None), self._words(edges, turn)
        if int(before.sum()) != int(after.sum()):
            return False
        touched = np.unique(self.network.uses[edges])
        touched = touched[touched >= 0]
        totals = [self._sums(edges, words)[touched] for words in (before, after)]
        return all(
            (a == b).all() for a, b in zip(*(self._sorted(t, touched) for t in totals), strict=True)
        )

    def resources(self, turn: Ints) -> Ints:
        """Return the resource onto which each resource is mapped."""
        edges = np.arange(self.network.num_edges)
        here = self._sums(edges, self._words(edges, None))
        there = self._sums(edges, self._words(edges, turn))
        mapped = np.empty(len(here), dtype=np.int64)
        mapped[np.lexsort((there, self.kind))] = np.lexsort((here, self.kind))
        return mapped

    def _words(self, edges: Ints, turn: Ints | None) -> Words:
        source, target = self.network.source[edges], self.network.target[edges]
        if turn is not None:
            source, target = turn[source], turn[target]
        return np.asarray(self.words[source, target] * self.factor[edges])

    def _sums(self, edges: Ints, words: Words) -> Words:
        totals = np.zeros(len(self.network.resources) + 1, dtype=np.uint64)
        for column in self.network.uses[edges].T:
            np.add.at(totals, column, words)  # -1 (no resource) indexes the last entry
        return totals[:-1]

    def _sorted(self, totals: Words, touched: Ints) -> tuple[Words, Ints]:
        kind = self.kind[touched]
        order = np.lexsort((totals, kind))
        return totals[order], kind[order]


def _classes(blocks: list[Block], tester: _Tester) -> list[list[Block]]:
    """Return classes of blocks; the blocks of a class can be exchanged rank by rank."""
    classes: list[list[Block]] = []
    for block in blocks:
        for members in reversed(classes):  # neighbours are likely equivalent
            first = members[0]
            exchange = np.arange(len(tester.colors))
            if len(first) == len(block):
                exchange[list(first)], exchange[list(block)] = block, first
                if tester.preserves(exchange, [*first, *block]):
                    members.append(block)
                    break
        else:
            classes.append([block])
    return classes


def _rotation(classes: list[list[Block]], count: int) -> list[tuple[Ints, int]]:
    """Return the simultaneous rotation of a level's classes by one place; skip large orders."""
    turn, order = np.arange(count), 1
    for blocks in sorted(classes, key=len, reverse=True):
        combined = math.lcm(order, len(blocks))
        if len(blocks) > 1 and combined <= 2 * count:
            order = combined
            for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
                turn[list(block)] = following
    return [(turn, order)] if order > 1 else []


def _smallest_rotation(count: int, tester: _Tester) -> list[tuple[Ints, int]]:
    """Return the smallest rotation of all ranks that preserves the network, as in a ring."""
    for step in range(1, count):
        if count % step == 0:
            turn = (np.arange(count) + step) % count
            if tester.preserves(turn, range(count)):
                return [(turn, count // step)]
    return []


def _small_group(generators: list[tuple[Ints, int]], max_order: int) -> list[tuple[Ints, int]]:
    """Return commuting generators, whose products form a group of at most `max_order`."""
    commuting: list[tuple[Ints, int]] = []
    total = 1
    for turn, order in generators:
        commutes = all((turn[other] == other[turn]).all() for other, _ in commuting)
        if commutes and total * order <= max_order:
            total *= order
            commuting.append((turn, order))
    return commuting


def _orbits(size: int, turns: list[Ints], orders: list[int]) -> Ints:
    """Return the smallest index onto which each index can be mapped."""
    label = np.arange(size)
    for turn, order in zip(turns, orders, strict=True):
        step, reach = turn, 1
        while reach < order:
            label = np.minimum(label, label[step])
            step, reach = step[step], 2 * reach
    return label
