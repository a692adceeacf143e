"""Pack spanning trees into a network by linear programming.

`TreeProblem` prices new columns for the master problem of `master_lp`: the cheapest spanning tree
of each root. A tree is an array with the parent of every rank, -1 at the root. Costs are matrices,
infinite where there is no edge; for trees directed into the root, pass the transposed matrix.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from shardwise.arrays import Bools, Floats, Ints
from shardwise.collectives.messages.choice import Tree
from shardwise.collectives.solver.master_lp import Answer, Column, Master, generate
from shardwise.collectives.solver.network import Network, Symmetry
from shardwise.collectives.solver.spec import Demand


# ------------------------------------------------------------ spanning trees
def cheapest(cost: Floats, root: int) -> Ints:
    """Return the minimum spanning tree out of `root`, which must reach every rank.

    This is the algorithm of Chu-Liu and Edmonds: every rank takes its cheapest parent. Each cycle
    that this creates is contracted into one rank, whose incoming edges cost what they add to the
    cycle; repeat until there is no cycle.
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
    # entry[u, part]: the rank of the part at which the edge from u arrives.
    entry = np.empty((size, count), dtype=np.int64)
    entry[:, len(cycles) :] = singles
    for i, cycle in enumerate(cycles):
        entry[:, i] = cycle[reduced[:, cycle].argmin(axis=1)]
    arriving = reduced[everyone[:, None], entry]
    # leaving[a, b]: the rank of part a from which the edge to part b leaves.
    leaving = np.empty((count, count), dtype=np.int64)
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
    visited_from = [-1] * len(parent)
    visited_from[root] = root
    cycles = []
    for start in range(len(parent)):
        rank = start
        while visited_from[rank] < 0:
            visited_from[rank] = start
            rank = parent[rank]
        if visited_from[rank] == start and rank != root:
            cycle = [rank]
            while parent[cycle[-1]] != rank:
                cycle.append(parent[cycle[-1]])
            cycles.append(np.array(cycle, dtype=np.int64))
    return cycles


def shallow(
    cost: Floats, delay: Floats, roots: Ints, weights: Floats, max_depth: int
) -> tuple[Ints, Bools]:
    """Return a tree of at most `max_depth` hops per root and weight, and whether each exists.

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


# ------------------------------------------------------------ packings of trees
DROPPED = (0.03, 3e-3)  # fractions of the data below which a tree is dropped
HOPELESS = 1.5  # times the useful time: more columns will not help
GUESSES, STEEP = 8, 4.0  # initial prices, and by how much the most used edge becomes dearer
SLACK = 1e-3  # relative cost allowed for fewer or shallower trees
WEIGHTS = (1e-3, 0.03, 1.0)  # weight of depth relative to prices
INWARD, OUTWARD = 0, 1  # directions of a tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The trees of one solution; `depth` is the largest number of hops in a tree."""

    trees: tuple[Tree, ...]
    s_per_byte: float
    depth: int


class TreeProblem:
    """Pack trees for a demand: one flow per orbit of roots and direction.

    The program may have at most `max_chunks`.
    """

    def __init__(
        self, network: Network, demand: Demand, symmetry: Symmetry, *, max_chunks: float = math.inf
    ) -> None:
        self.network, self.demand, self.symmetry = network, demand, symmetry
        self.max_chunks = max_chunks
        shares = demand.shares
        self.roots = [
            root for root in symmetry.representatives() if shares is None or shares[root] > 0
        ]
        self.place = {root: i for i, root in enumerate(self.roots)}
        self.directions = [
            direction
            for direction, is_used in ((INWARD, demand.inward), (OUTWARD, demand.outward))
            if is_used
        ]
        labels, self.orbit = np.unique(symmetry.resource_orbit, return_inverse=True)
        sizes = np.bincount(symmetry.rank_orbit, minlength=network.num_ranks)
        amounts = None if shares is None else [shares[r] * float(sizes[r]) for r in self.roots]
        self.master = Master(
            capacity=np.bincount(
                self.orbit, weights=network.capacity, minlength=len(labels)
            ).astype(np.float64),
            num_flows=len(self.roots) * len(self.directions),
            demand=None if amounts is None else np.repeat(np.array(amounts), len(self.directions)),
        )
        hop_s = network.latency_s + network.message_s
        self.delay = network.matrix(hop_s / max(float(hop_s.max(initial=0.0)), 1e-12) + 1.0)
        # -1 (no resource) indexes the last entry.
        self.used = np.append(self.orbit, len(labels))[network.uses]
        self.bound = 0.0
        self.prices: Floats = np.zeros(0)
        self.columns: dict[tuple[int, bytes], Column] = {}

    # ------------------------------------------------------------ columns
    def flow(self, root: int, direction: int) -> int:
        """Return the index of a flow."""
        return self.place[root] * len(self.directions) + self.directions.index(direction)

    def columns_of(self, flows: Sequence[int], direction: int, parents: Ints) -> list[Column]:
        """Return trees as columns, with the load of each on every orbit of resources."""
        tree, rank = np.nonzero(parents >= 0)
        parent = parents[tree, rank]
        edge = self.network.edge
        edges = edge[rank, parent] if direction == INWARD else edge[parent, rank]
        width = len(self.master.capacity) + 1
        used = self.used[edges] + width * tree[:, None]
        count = np.bincount(used.ravel(), minlength=width * len(parents)).astype(np.float64)
        loads = count.reshape(len(parents), width)[:, :-1]
        max_depths = depths(parents).max(axis=1, initial=0).tolist()
        return [
            Column(flow=flow, path=parents[i], load=loads[i], depth=max_depths[i])
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
            directed = cost.T if direction == INWARD else cost
            parents = np.array([cheapest(directed, root) for root in self.roots])
            flows = [self.flow(root, direction) for root in self.roots]
            columns += self.columns_of(flows, direction, parents)
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
            matrices = (cost.T, self.delay.T) if direction == INWARD else (cost, self.delay)
            parents, complete = shallow(*matrices, roots, late, max_depth)
            flows = [self.flow(root, direction) for root in roots[complete].tolist()]
            columns += self.columns_of(flows, direction, parents[complete])
        return columns

    # ------------------------------------------------------------ solutions
    def optimum(self, limit_s: float) -> Packing:
        """Return the fastest packing of any depth; set `bound` and `prices`."""
        generated = generate(self.master, self._guesses(), self.price, limit_s=limit_s)
        self.bound, self.prices = generated.bound, generated.prices
        self.columns = {column.key: column for column in generated.columns}
        return self.packing(generated.columns, generated.answer)

    def _guesses(self) -> list[Column]:
        """Return initial trees: at even prices, then with rising prices on the edges in use."""
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
        """Return a fast packing of trees of at most `max_depth` hops.

        Return None if a root has no such tree, or if the packing seems to take more than `useful`
        seconds per byte.
        """
        grown = self.grown(self.prices, WEIGHTS, max_depth)
        cheapest_costs = np.full(self.master.num_flows, np.inf)
        if grown:
            costs = np.array([column.load for column in grown]) @ self.prices
            np.minimum.at(cheapest_costs, [column.flow for column in grown], costs)
        if self.master.bound(cheapest_costs) > useful:
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

    def packing(self, columns: Sequence[Column], answer: Answer) -> Packing:
        """Return the answer with few trees, copied over the entire symmetry group."""
        columns, answer = self._trimmed(columns, answer)
        used = [
            (column, float(weight))
            for column, weight in zip(columns, answer.weights, strict=True)
            if weight > 1e-9
        ]
        return Packing(
            trees=tuple(copy for tree in self._paired(used) for copy in self._copies(tree)),
            s_per_byte=answer.time,
            depth=max((column.depth for column, _ in used), default=0),
        )

    def filled(self, s_per_byte: float, depth: int) -> float:
        """Return seconds per byte including pipeline fill.

        If each edge carries its share of all messages one after the other, a hop takes as long as
        one message.
        """
        per_edge = self.max_chunks * (self.network.num_ranks - 1) / self.network.num_edges
        return s_per_byte * (1 + depth * len(self.directions) / max(per_edge, 1.0))

    def _trimmed(self, columns: Sequence[Column], answer: Answer) -> tuple[list[Column], Answer]:
        """Drop trees that carry little of their flow, or of all data, if that costs little time."""
        heaviest = np.zeros(self.master.num_flows)
        np.maximum.at(heaviest, [column.flow for column in columns], answer.weights)
        fixed = self.demand.shares is not None
        for threshold in DROPPED:
            heavy = [
                column
                for column, weight in zip(columns, answer.weights, strict=True)
                if weight >= threshold * (heaviest[column.flow] if fixed else 1.0) and weight > 0
            ]
            if len(heavy) < np.count_nonzero(answer.weights) and self._covers(heavy):
                trimmed = self.master.solve(heavy)
                if trimmed.time <= answer.time * (1 + SLACK):
                    return heavy, trimmed
        return list(columns), answer

    def _covers(self, columns: Sequence[Column]) -> bool:
        """Return whether the columns can carry all data."""
        flows = {column.flow for column in columns}
        if self.demand.shares is not None:
            return len(flows) == self.master.num_flows
        return any({2 * i, 2 * i + 1} <= flows for i in range(len(self.roots)))

    def _paired(self, used: Sequence[tuple[Column, float]]) -> list[Tree]:
        """Join trees into a root with trees out of it that carry the same data."""
        trees = []
        for root in self.roots:
            sides = [
                [(c.path, w) for c, w in used if c.flow == self.flow(root, direction)]
                for direction in self.directions
            ]
            ends = [accumulate((weight for _, weight in side), initial=0.0) for side in sides]
            breaks = sorted({round(end, 12) for side in ends for end in side})
            for low, high in pairwise(breaks):
                if high - low < 1e-9:
                    continue
                halves = [tuple(_at(side, (low + high) / 2).tolist()) for side in sides]
                by_direction = dict(zip(self.directions, halves, strict=True))
                inward, outward = (by_direction.get(side, ()) for side in (INWARD, OUTWARD))
                trees.append(Tree(weight=high - low, root=root, inward=inward, outward=outward))
        return trees

    def _copies(self, tree: Tree) -> Iterable[Tree]:
        """Yield the tree under each permutation of the symmetry; the copies share its data."""
        for turn in self.symmetry.elements:
            yield Tree(
                weight=tree.weight / self.symmetry.order,
                root=int(turn[tree.root]),
                inward=_permuted(tree.inward, turn),
                outward=_permuted(tree.outward, turn),
            )


def _at(side: Sequence[tuple[Ints, float]], position: float) -> Ints:
    """Return the tree that carries the data at a position."""
    end = 0.0
    for tree, weight in side:
        end += weight
        if position < end:
            return tree
    return side[-1][0]


def _permuted(parents: tuple[int, ...], turn: Ints) -> tuple[int, ...]:
    permuted = [-1] * len(parents)
    for rank, parent in enumerate(parents):
        permuted[turn[rank]] = int(turn[parent]) if parent >= 0 else -1
    return tuple(permuted)


def edges_of(network: Network, parents: tuple[int, ...], direction: int) -> Ints:
    """Return the edges of a tree, -1 where the network has no such edge."""
    parent = np.array(parents, dtype=np.int64)
    rank = np.flatnonzero(parent >= 0)
    ends = (rank, parent[rank]) if direction == INWARD else (parent[rank], rank)
    return np.asarray(network.edge[ends])


def load_time(network: Network, trees: Iterable[Tree]) -> float:
    """Return the seconds per byte of the busiest resource."""
    load = np.zeros(len(network.resources))
    for tree in trees:
        for direction, parents in ((INWARD, tree.inward), (OUTWARD, tree.outward)):
            load += tree.weight * network.loads(edges_of(network, parents, direction))
    return float((load / network.capacity).max(initial=0.0)) if len(load) else 0.0


def max_depth_of(trees: Iterable[Tree]) -> int:
    """Return the largest number of hops in any tree."""
    halves = [half for tree in trees for half in (tree.inward, tree.outward) if half]
    return max((int(depths(np.array(half)).max(initial=0)) for half in halves), default=0)
