"""x"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from shardwise.arrays import Bools, Floats, Ints
from shardwise.collectives.solver.master_lp import Answer, Column, Master, generate
from shardwise.collectives.solver.network import Network, Symmetry
from shardwise.collectives.solver.spec import Demand

# Spanning trees of minimum cost, and cheap trees of bounded depth.
#
# Costs are a matrix, infinite where there is no edge, and the root must reach every rank. A tree is
# the parent of every rank, -1 at the root. For trees directed into the root, pass the transposed
# matrix.


def cheapest(cost: Floats, root: int) -> Ints:
    """Return the minimum spanning tree rooted at `root` (Chu-Liu, Edmonds); `cost[u, v]` is of u ->
    v.

    Every rank takes its cheapest parent. Each cycle that this creates is contracted into one rank,
    whose incoming edges cost what they add to the cycle; repeat until there is no cycle.
    """
    cost = cost.copy()
    np.fill_diagonal(cost, math.inf)
    parent: Ints = _contract(cost, root)
    parent[root] = -1
    return parent


def _contract(cost: Floats, root: int) -> Ints:
    size = len(cost)
    everyone = np.arange(size)
    parent: Ints = cost.argmin(axis=0)
    parent[root] = root
    cycles = _cycles(parent.tolist(), root)
    if not cycles:
        return parent
    best = cost[parent, everyone]
    label = np.full(size, -1, dtype=np.int64)
    for i, cycle in enumerate(cycles):
        label[cycle] = i
    singles = np.flatnonzero(label < 0)
    label[singles] = len(cycles) + np.arange(len(singles))
    within = label < len(cycles)
    reduced = cost - np.where(within, best, 0.0)

    count = len(cycles) + len(singles)
    entry = np.empty(
        (size, count), dtype=np.int64
    )  # rank of the part at which the edge from u arrives
    entry[:, len(cycles) :] = singles
    for i, cycle in enumerate(cycles):
        entry[:, i] = cycle[reduced[:, cycle].argmin(axis=1)]
    arriving = reduced[everyone[:, None], entry]
    leaving = np.empty((count, count), dtype=np.int64)  # rank of the part from which it leaves
    leaving[len(cycles) :] = singles[:, None]
    for i, cycle in enumerate(cycles):
        leaving[i] = cycle[arriving[cycle].argmin(axis=0)]
    smaller = arriving[leaving, np.arange(count)]
    np.fill_diagonal(smaller, math.inf)
    inner = int(label[root])
    outer = _contract(smaller, inner)
    parts = np.delete(np.arange(count), inner)
    first = leaving[outer[parts], parts]
    parent[entry[first, parts]] = first
    return parent


def _cycles(parent: list[int], root: int) -> list[Ints]:
    seen = [-1] * len(parent)
    seen[root] = root
    cycles = []
    for start in range(len(parent)):
        at = start
        while seen[at] < 0:
            seen[at] = start
            at = parent[at]
        if seen[at] == start and at != root:
            cycle = [at]
            while parent[cycle[-1]] != at:
                cycle.append(parent[cycle[-1]])
            cycles.append(np.array(cycle, dtype=np.int64))
    return cycles


def shallow(
    cost: Floats, delay: Floats, roots: Ints, weights: Floats, max_depth: int
) -> tuple[Ints, Bools]:
    """Return a tree of at most `max_depth` hops for each root and weight, and which of them exist.

    Trees grow rank by rank, each step minimizing price plus `weight` times the arrival time. Weight
    0 gives Prim's algorithm, a large weight Dijkstra's. All trees grow at once, vectorized.
    """
    size, row = len(cost), np.arange(len(roots))
    parent = np.full((len(roots), size), -1, dtype=np.int64)
    depth = np.zeros((len(roots), size), dtype=np.int64)
    late = np.zeros((len(roots), size))
    best = np.full((len(roots), size), math.inf)
    outside = np.ones((len(roots), size), dtype=bool)
    complete = np.ones(len(roots), dtype=bool)
    joined = np.asarray(roots)
    for _ in range(size - 1):
        outside[row, joined] = False
        best[row, joined] = math.inf
        since = late[row, joined]
        offer = cost[joined] + weights[:, None] * (since[:, None] + delay[joined])
        offer[depth[row, joined] >= max_depth] = math.inf
        better = outside & (offer < best)
        best = np.where(better, offer, best)
        parent = np.where(better, joined[:, None], parent)
        joined = best.argmin(axis=1)
        complete &= best[row, joined] < math.inf
        above = parent[row, joined]
        depth[row, joined] = depth[row, above] + 1
        late[row, joined] = late[row, above] + np.where(complete, delay[above, joined], 0.0)
    return parent, complete


def depths(parent: Ints) -> Ints:
    """Return the number of hops from the root to every rank, for one tree or several."""
    hops = (parent >= 0).astype(np.int64)
    above = np.where(parent >= 0, parent, np.arange(parent.shape[-1]))
    for _ in range(parent.shape[-1].bit_length()):  # pointer doubling; the root adds 0
        hops = hops + np.take_along_axis(hops, above, -1)
        above = np.take_along_axis(above, above, -1)
    return hops


DROPPED = (0.03, 3e-3)  # fractions of the data below which a tree is dropped
HOPELESS = 1.5  # times the useful time: more columns will not help
GUESSES, STEEP = 8, 4.0  # initial prices, and by how much the most used edge becomes dearer
SLACK = 1e-3  # relative cost allowed for fewer or shallower trees
WEIGHTS = (1e-3, 0.03, 1.0)  # weight of depth relative to prices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A part of the data: the tree along which it is summed into `root`, and the one along which
    the result is copied out.

    Trees are parents by rank, -1 at the root; None if the operation has no such half.
    """

    weight: float
    root: int
    inward: Ints | None
    outward: Ints | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The parts of one solution; `depth` is the largest number of hops in a tree."""

    parts: tuple[Part, ...]
    s_per_byte: float
    depth: int


class TreeProblem:
    """The flows of a demand on a network, one pair of flows or one per orbit of roots."""

    def __init__(
        self,
        network: Network,
        demand: Demand,
        symmetry: Symmetry,
        *,
        most_chunks: float = math.inf,
    ) -> None:
        """Set up the problem for a program of at most `most_chunks`."""
        self.network, self.demand, self.symmetry = network, demand, symmetry
        self.most_chunks = most_chunks
        shares = demand.shares
        self.roots = [
            root for root in symmetry.representatives() if shares is None or shares[root] > 0
        ]
        self.place = {root: i for i, root in enumerate(self.roots)}
        self.directions = [
            direction for direction, used in ((0, demand.inward), (1, demand.outward)) if used
        ]
        labels, self.orbit = np.unique(symmetry.resource_orbit, return_inverse=True)
        sizes = np.bincount(symmetry.rank_orbit, minlength=network.num_ranks)
        each = None if shares is None else [shares[r] * float(sizes[r]) for r in self.roots]
        self.master = Master(
            capacity=np.bincount(
                self.orbit, weights=network.capacity, minlength=len(labels)
            ).astype(np.float64),
            num_flows=len(self.roots) * len(self.directions),
            demand=None if each is None else np.repeat(np.array(each), len(self.directions)),
        )
        usual = network.latency_s + network.message_s
        self.delay = network.matrix(usual / max(float(usual.max(initial=0.0)), 1e-12) + 1.0)
        self.used = np.append(self.orbit, len(labels))[
            network.uses
        ]  # -1 (none) indexes the last entry
        self.bound = 0.0
        self.prices: Floats = np.zeros(0)
        self.columns: dict[tuple[int, bytes], Column] = {}

    # ------------------------------------------------------------ columns

    def flow(self, root: int, direction: int) -> int:
        """Return the index of a flow."""
        return self.place[root] * len(self.directions) + self.directions.index(direction)

    def made(self, flows: Sequence[int], direction: int, parents: Ints) -> list[Column]:
        """Return trees as columns; direction 0 means trees into the root."""
        place, rank = np.nonzero(parents >= 0)
        other = parents[place, rank]
        edge = self.network.edge
        edges = edge[rank, other] if direction == 0 else edge[other, rank]
        width = len(self.master.capacity) + 1
        used = self.used[edges] + width * place[:, None]
        count = np.bincount(used.ravel(), minlength=width * len(parents)).astype(np.float64)
        loads = count.reshape(len(parents), width)[:, :-1]
        deep = depths(parents).max(axis=1, initial=0).tolist()
        return [
            Column(flow=flow, path=parents[i], load=loads[i], depth=deep[i])
            for i, flow in enumerate(flows)
        ]

    def costs(self, prices: Floats) -> Floats:
        """Return the price of each edge as a matrix, given prices per orbit."""
        return self.network.matrix(self.network.prices(prices[self.orbit]))

    def price(self, prices: Floats) -> tuple[list[Column], Floats]:
        """Return the cheapest tree of every flow, and its cost."""
        cost = self.costs(prices)
        columns, costs_of_flows = [], np.zeros(self.master.num_flows)
        for direction in self.directions:
            side = cost.T if direction == 0 else cost
            parents = np.array([cheapest(side, root) for root in self.roots])
            flows = [self.flow(root, direction) for root in self.roots]
            columns += self.made(flows, direction, parents)
        for column in columns:
            costs_of_flows[column.flow] = column.load @ prices
        return columns, costs_of_flows

    def grown(self, prices: Floats, weights: Sequence[float], max_depth: int) -> list[Column]:
        """Return trees of at most `max_depth` hops that are cheap at these prices."""
        cost = self.costs(prices)
        finite = cost[np.isfinite(cost) & (cost > 0)]
        unit = float(finite.mean()) if len(finite) else 1.0
        roots = np.repeat(np.array(self.roots, dtype=np.int64), len(weights))
        late = np.tile(np.maximum(np.array(weights), 1e-9) * unit, len(self.roots))
        columns = []
        for direction in self.directions:
            sides = (cost.T, self.delay.T) if direction == 0 else (cost, self.delay)
            parents, complete = shallow(*sides, roots, late, max_depth)
            flows = [self.flow(root, direction) for root in roots[complete].tolist()]
            columns += self.made(flows, direction, parents[complete])
        return columns

    # ------------------------------------------------------------ solutions

    def optimum(self, extra: Sequence[Column], limit_s: float) -> Packing:
        """Return the fastest packing of any depth; sets `bound` and `prices`."""
        start = [*self._guesses(), *extra]
        generated = generate(self.master, start, self.price, limit_s=limit_s)
        self.bound, self.prices = generated.bound, generated.prices
        self.columns = {column.key: column for column in generated.columns}
        return self.packing(generated.columns, generated.answer)

    def _guesses(self) -> list[Column]:
        """Return initial trees: at even prices, and then with used edges made more expensive."""
        even = 1.0 / np.maximum(self.master.capacity, 1e-300)
        columns = self.grown(even, (0.0, 1.0), self.network.num_ranks)
        used = np.zeros_like(even)
        for _ in range(GUESSES):
            for column in columns[-self.master.num_flows :]:
                used += column.load * even
            prices = even * np.exp(STEEP * used / max(float(used.max(initial=0.0)), 1e-300))
            columns += self.grown(prices, (0.0,), self.network.num_ranks)
        return columns

    def within(self, max_depth: int, rounds: int, useful: float) -> Packing | None:
        """Return a fast packing of trees of at most `max_depth` hops, or None if a root has no such
        tree or it seems to take more than `useful` seconds per byte.
        """
        grown = self.grown(self.prices, WEIGHTS, max_depth)
        if self.master.bound(self._least(grown)) > useful:
            return None  # such trees are too expensive at the prices that prove the bound
        for column in grown:
            self.columns.setdefault(column.key, column)
        answer: Answer | None = None
        columns = [c for c in self.columns.values() if c.depth <= max_depth]
        if len({column.flow for column in columns}) < self.master.num_flows:
            return None
        for _ in range(rounds):
            before, answer = answer, self.master.solve(columns)
            if answer.time <= self.bound * (1 + SLACK):
                break
            if before is not None and answer.time > before.time * (1 - SLACK):
                break
            if answer.time > useful * HOPELESS:
                return None
            total = float(answer.prices @ self.master.capacity)
            more = self.grown(answer.prices / total, WEIGHTS, max_depth) if total > 0 else []
            new = {c.key: c for c in more if c.key not in self.columns}
            if not new:
                break
            self.columns |= new
            columns += new.values()
        assert answer is not None
        if answer.time > useful:
            return None
        return self.packing(columns[: len(answer.weights)], answer)

    def _least(self, columns: Sequence[Column]) -> Floats:
        """Return the cost of the cheapest of these columns for every flow."""
        minimum = np.full(self.master.num_flows, np.inf)
        if columns:
            costs = np.array([column.load for column in columns]) @ self.prices
            np.minimum.at(minimum, [column.flow for column in columns], costs)
        return minimum

    def packing(self, columns: Sequence[Column], answer: Answer) -> Packing:
        """Return the answer with few trees, as parts over the entire symmetry group."""
        columns, answer = self._trimmed(columns, answer)
        used = [
            (column, float(weight))
            for column, weight in zip(columns, answer.weights, strict=True)
            if weight > 1e-9
        ]
        parts = [copy for part in self._paired(used) for copy in self._copies(part)]
        return Packing(
            parts=tuple(parts),
            s_per_byte=answer.time,
            depth=max((column.depth for column, _ in used), default=0),
        )

    def filled(self, s_per_byte: float, depth: int) -> float:
        """Return seconds per byte including pipeline fill.

        If each edge carries its share of all messages one after the other, a hop takes as long as
        one message.
        """
        per_edge = self.most_chunks * (self.network.num_ranks - 1) / self.network.num_edges
        return s_per_byte * (1 + depth * len(self.directions) / max(per_edge, 1.0))

    def _trimmed(self, columns: Sequence[Column], answer: Answer) -> tuple[list[Column], Answer]:
        """Return the columns and answer without trees that carry little, if that costs next to
        nothing.
        """
        for threshold in DROPPED:
            strong = self._strong(columns, answer.weights, threshold)
            if len(strong) < np.count_nonzero(answer.weights) and self._covers(strong):
                again = self.master.solve(strong)
                if again.time <= answer.time * (1 + SLACK):
                    return strong, again
        return list(columns), answer

    def _strong(self, columns: Sequence[Column], weights: Floats, threshold: float) -> list[Column]:
        """Return the columns that carry much of their flow or of all data."""
        heaviest = np.zeros(self.master.num_flows)
        np.maximum.at(heaviest, [column.flow for column in columns], weights)
        fixed = self.demand.shares is not None
        return [
            column
            for column, weight in zip(columns, weights, strict=True)
            if weight >= threshold * (heaviest[column.flow] if fixed else 1.0) and weight > 0
        ]

    def _covers(self, columns: Sequence[Column]) -> bool:
        flows = {column.flow for column in columns}
        if self.demand.shares is not None:
            return len(flows) == self.master.num_flows
        return any({2 * i, 2 * i + 1} <= flows for i in range(len(self.roots)))

    def _paired(self, used: Sequence[tuple[Column, float]]) -> list[Part]:
        """Return trees into a root joined with trees out of it that carry equally much data."""
        parts = []
        for root in self.roots:
            sides = [
                [(c.path, w) for c, w in used if c.flow == self.flow(root, direction)]
                for direction in self.directions
            ]
            ends = [accumulate((weight for _, weight in side), initial=0.0) for side in sides]
            cuts = sorted({round(end, 12) for side in ends for end in side})
            for low, high in pairwise(cuts):
                if high - low < 1e-9:
                    continue
                trees = [_at(side, (low + high) / 2) for side in sides]
                by_direction = dict(zip(self.directions, trees, strict=True))
                parts.append(
                    Part(
                        weight=high - low,
                        root=root,
                        inward=by_direction.get(0),
                        outward=by_direction.get(1),
                    )
                )
        return parts

    def _copies(self, part: Part) -> Iterable[Part]:
        """Yield the part once for each permutation of the symmetry, with its data divided among
        them.
        """
        for turn in self.symmetry.elements:
            yield Part(
                weight=part.weight / self.symmetry.order,
                root=int(turn[part.root]),
                inward=_turned(part.inward, turn),
                outward=_turned(part.outward, turn),
            )


def _at(side: Sequence[tuple[Ints, float]], position: float) -> Ints:
    """Return the tree that carries the data at a position."""
    end = 0.0
    for tree, weight in side:
        end += weight
        if position < end:
            return tree
    return side[-1][0]


def _turned(parent: Ints | None, turn: Ints) -> Ints | None:
    if parent is None:
        return None
    turned = np.full(len(parent), -1, dtype=np.int64)
    turned[turn] = np.where(parent >= 0, turn[parent], -1)
    return turned


def load_time(network: Network, parts: Iterable[Part]) -> float:
    """Return the seconds per byte of the busiest resource."""
    load = np.zeros(len(network.resources))
    for part in parts:
        for direction, parent in ((0, part.inward), (1, part.outward)):
            if parent is not None:
                rank = np.flatnonzero(parent >= 0)
                ends = (rank, parent[rank]) if direction == 0 else (parent[rank], rank)
                load += part.weight * network.loads(network.edge[ends])
    return float((load / network.capacity).max(initial=0.0)) if len(load) else 0.0


def deepest(parts: Iterable[Part]) -> int:
    """Return the largest number of hops of any tree."""
    trees = [tree for part in parts for tree in (part.inward, part.outward) if tree is not None]
    return max((int(depths(tree).max(initial=0)) for tree in trees), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The ranks from sender to receiver; `weight` is the fraction of a rank's data."""

    ranks: tuple[int, ...]
    weight: float


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routes, the seconds per byte they take, and the lower bound."""

    routes: tuple[Route, ...]
    s_per_byte: float
    bound: float


class RouteProblem:
    """The routing problem, with one flow per orbit of pairs of ranks."""

    def __init__(self, network: Network, demand: Demand, symmetry: Symmetry) -> None:
        assert demand.shares is not None
        self.network, self.symmetry = network, symmetry
        count = network.num_ranks
        shares = demand.shares
        self.pairs = [
            (a, b)
            for a in symmetry.representatives()
            for b in range(count)
            if a != b and shares[b] > 0
        ]
        # Only pairs that start at a representative; one stands for its whole orbit.
        sizes = np.bincount(symmetry.rank_orbit, minlength=count)
        _, self.orbit = np.unique(symmetry.resource_orbit, return_inverse=True)
        capacity = np.bincount(self.orbit, weights=network.capacity)
        self.master = Master(
            capacity=capacity.astype(np.float64),
            num_flows=len(self.pairs),
            demand=np.array([shares[b] * float(sizes[a]) for a, b in self.pairs]),
        )
        self.prices: Floats = np.zeros(0)

    def solve(self, limit_s: float) -> Routing:
        """Return the fastest routes."""
        start, _ = self.price(np.zeros(len(self.master.capacity)))
        generated = generate(self.master, start, self.price, limit_s=limit_s)
        self.prices = generated.prices
        routes = [
            Route(ranks=tuple(int(r) for r in turn[column.path]), weight=float(weight) / each)
            for column, weight in zip(generated.columns, generated.answer.weights, strict=True)
            if weight > 1e-9 * self.master.demand[column.flow]  # type: ignore[index]
            for each in [float(self.symmetry.order)]
            for turn in self.symmetry.elements
        ]
        return Routing(
            routes=tuple(routes), s_per_byte=generated.answer.time, bound=generated.bound
        )

    def price(self, prices: Floats) -> tuple[list[Column], Floats]:
        """Return the cheapest route of every pair; ties go to the fewest hops."""
        exact = self.network.prices(prices[self.orbit])
        small = 1e-9 * max(float(exact.mean()) if len(exact) else 0.0, 1e-300)
        cost = self.network.matrix(exact + small)
        following = _next_hops(cost)
        columns, costs_of_pairs = [], np.zeros(len(self.pairs))
        for flow, (a, b) in enumerate(self.pairs):
            path = [a]
            while path[-1] != b:
                path.append(int(following[path[-1], b]))
            ranks = np.array(path, dtype=np.int64)
            load = self.network.loads(self.network.edge[ranks[:-1], ranks[1:]])
            summed = np.bincount(self.orbit, weights=load, minlength=len(prices))
            column = Column(
                flow=flow, path=ranks, load=summed.astype(np.float64), depth=len(path) - 1
            )
            columns.append(column)
            costs_of_pairs[flow] = column.load @ prices
        # The tie-breaking term must not enter the bound.
        return columns, np.maximum(costs_of_pairs - small * self.network.num_ranks, 0.0)


def _next_hops(cost: Floats) -> Ints:
    """Return the next rank on the cheapest path from i to j (Floyd, Warshall)."""
    count = len(cost)
    best = cost.copy()
    np.fill_diagonal(best, 0.0)
    following = np.broadcast_to(np.arange(count), (count, count)).copy()
    for middle in range(count):
        through = best[:, middle, None] + best[middle]
        shorter = through < best
        best[shorter] = through[shorter]
        following = np.where(shorter, following[:, middle, None], following)
    return following
