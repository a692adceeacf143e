"""Ranks that a network cannot tell apart.

Enters: a `Network`, and a color per rank that must stay (the root, a share of the data). Leaves:
`Symmetry`: a commuting group of permutations of the ranks under which sends, their latencies and
the capacities of what they use stay the same. A program that is linear is solved once for each
orbit: the average of a solution over the group is as good as the solution.

Blocks of ranks are compared by exchanging them: first single ranks, then the classes of ranks that
could be exchanged, and so on: devices, nodes, racks. The group rotates all classes of a level at
once, which keeps it small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Ints
from shardwise.collectives.network import Network

Words = NDArray[np.uint64]
Block = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Symmetry:
    """`elements` are all permutations of the group, the identity first; orbits are by label."""

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
    """Return the permutations that were found; there may be more."""
    count = network.num_ranks
    tester = _Tester(network, np.array(colors or [0] * count))
    generators: list[tuple[Ints, int]] = []
    blocks: list[Block] = [(rank,) for rank in range(count)]
    seen: list[Block] = []
    while True:
        classes = _classes(blocks, tester)
        if len(classes) == len(blocks):
            break
        generators += _rotation(classes, count)
        blocks = [tuple(r for block in each for r in block) for each in classes]
        seen += blocks
    if not generators:
        generators = _turns(count, tester)
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
        blocks=tuple(block for block in seen if len(block) < count),
    )


class _Tester:
    """Whether a permutation changes the network, by sums of random words over each resource."""

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

    def keeps(self, turn: Ints, moved: Sequence[int]) -> bool:
        """Whether `turn`, which moves only the ranks `moved`, leaves everything as it is."""
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
        """Return the resource that each becomes."""
        edges = np.arange(self.network.num_edges)
        here = self._sums(edges, self._words(edges, None))
        there = self._sums(edges, self._words(edges, turn))
        found = np.empty(len(here), dtype=np.int64)
        found[np.lexsort((there, self.kind))] = np.lexsort((here, self.kind))
        return found

    def _words(self, edges: Ints, turn: Ints | None) -> Words:
        source, target = self.network.source[edges], self.network.target[edges]
        if turn is not None:
            source, target = turn[source], turn[target]
        return np.asarray(self.words[source, target] * self.factor[edges])

    def _sums(self, edges: Ints, words: Words) -> Words:
        totals = np.zeros(len(self.network.resources) + 1, dtype=np.uint64)
        for column in self.network.uses[edges].T:
            np.add.at(totals, column, words)  # -1, no resource, is the last
        return totals[:-1]

    def _sorted(self, totals: Words, touched: Ints) -> tuple[Words, Ints]:
        kind = self.kind[touched]
        order = np.lexsort((totals, kind))
        return totals[order], kind[order]


def _classes(blocks: list[Block], tester: _Tester) -> list[list[Block]]:
    """Blocks in classes; those of a class can be exchanged, rank by rank."""
    classes: list[list[Block]] = []
    for block in blocks:
        for known in reversed(classes):  # neighbours are likely alike
            if len(known[0]) == len(block) and tester.keeps(
                _exchange(known[0], block, len(tester.colors)), [*known[0], *block]
            ):
                known.append(block)
                break
        else:
            classes.append([block])
    return classes


def _exchange(a: Block, b: Block, count: int) -> Ints:
    turn = np.arange(count)
    turn[list(a)], turn[list(b)] = b, a
    return turn


def _rotation(classes: list[list[Block]], count: int) -> list[tuple[Ints, int]]:
    """All classes of a level turned by one place at once, if that does not take too many turns."""
    turn, order = np.arange(count), 1
    for blocks in sorted(classes, key=len, reverse=True):
        together = math.lcm(order, len(blocks))
        if len(blocks) > 1 and together <= 2 * count:
            order = together
            for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
                turn[list(block)] = following
    return [(turn, order)] if order > 1 else []


def _turns(count: int, tester: _Tester) -> list[tuple[Ints, int]]:
    """Return the smallest rotation of all ranks in their order that keeps the network:
    for rings.
    """
    for step in range(1, count):
        if count % step == 0:
            turn = (np.arange(count) + step) % count
            if tester.keeps(turn, range(count)):
                return [(turn, count // step)]
    return []


def _small_group(generators: list[tuple[Ints, int]], most: int) -> list[tuple[Ints, int]]:
    """Those that commute with the ones before, so that their products form a group, of `most`."""
    kept: list[tuple[Ints, int]] = []
    total = 1
    for turn, order in generators:
        commutes = all((turn[other] == other[turn]).all() for other, _ in kept)
        if commutes and total * order <= most:
            total *= order
            kept.append((turn, order))
    return kept


def _orbits(size: int, turns: list[Ints], orders: list[int]) -> Ints:
    """Return the least index that each can become."""
    label = np.arange(size)
    for turn, order in zip(turns, orders, strict=True):
        step, reach = turn, 1
        while reach < order:
            label = np.minimum(label, label[step])
            step, reach = step[step], 2 * reach
    return label
