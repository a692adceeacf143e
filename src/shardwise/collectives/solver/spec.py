"""The specification of a collective, and the lower bound on its time by cuts of the network.

A `Demand` says whether data flow into roots, out of them or both, and what fraction of the data has
its root on each rank.

Data must cross the boundary of any set S of ranks: with x(S) the fraction whose roots are in S, 1 -
x(S) of the data leave S as sums and 1 - x(S) enter it as results. For a family of sets, all these
constraints together form a small linear program over the traffic of each edge and the roots. Its
value, in seconds per byte, bounds every algorithm that moves sums and copies, and the program over
trees is never below it. With all sets in the family the two are equal (Edmonds).
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from shardwise.arrays import Floats
from shardwise.collectives.messages.program import OPERATIONS, ROOTED, SUMMING
from shardwise.collectives.solver.network import Network, Symmetry
from shardwise.errors import ClusterError, did_you_mean

ALL_SETS = 5  # with at most this many ranks, use every set


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A collective operation; `shares` is the fraction of the data rooted at each rank.

    For an all-reduce, `shares` is None: roots are free. `counts` is as in `MessageProgram`.
    """

    operation: str
    shares: tuple[float, ...] | None
    root: int | None = None
    counts: tuple[int, ...] = ()

    @property
    def inward(self) -> bool:
        """Whether data are summed on the way to the roots."""
        return self.operation in SUMMING

    @property
    def outward(self) -> bool:
        """Whether results are sent from the roots."""
        return self.operation in ("all_reduce", "all_gather", "broadcast")

    def colors(self, count: int) -> list[int]:
        """Return a color per rank; ranks of the same color play the same role in the operation."""
        if self.shares is None:
            return [0] * count
        color = {share: i for i, share in enumerate(sorted(set(self.shares)))}
        return [color[share] for share in self.shares]


def demand_of(
    network: Network,
    operation: str,
    *,
    root: int | None = None,
    shares: Sequence[float] | None = None,
) -> Demand:
    """Return the validated demand, by default with equal shares."""
    count = network.num_ranks
    if operation not in OPERATIONS:
        raise ClusterError(
            f"no operation {operation!r}{did_you_mean(str(operation), OPERATIONS)}",
            hint=", ".join(OPERATIONS),
        )
    rooted = operation in ROOTED
    if root is not None and not rooted:
        raise ClusterError(f"{operation} has no root", hint="root for broadcast and reduce")
    if shares is not None and (rooted or operation == "all_reduce"):
        raise ClusterError(f"{operation} has no shares", hint="leave them out")
    normalized: tuple[float, ...] | None = None
    if rooted:
        root = 0 if root is None else whole_number(root, "root")
        if not 0 <= root < count:
            raise ClusterError(f"root {root} is outside a network of {count} ranks")
        normalized = tuple(float(rank == root) for rank in range(count))
    elif operation != "all_reduce":
        normalized = _normalized([1.0] * count if shares is None else shares, count)
    demand = Demand(operation=operation, shares=normalized, root=root)
    # Without a root, every pair of ranks must be connected: both directions from rank 0 suffice.
    outward, inward = root is None or demand.outward, root is None or demand.inward
    network.check_reach(root or 0, outward=outward, inward=inward)
    return demand


def whole_number(value: object, what: str) -> int:
    """Return `value` as an integer; Python and NumPy integers are accepted."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ClusterError(f"{what} is {value!r}, must be a whole number") from None


def _normalized(shares: Sequence[float], count: int) -> tuple[float, ...]:
    if len(shares) != count:
        raise ClusterError(f"{len(shares)} shares for {count} ranks", hint="one for each rank")
    if any(not 0 <= share < math.inf for share in shares) or not sum(shares) > 0:
        raise ClusterError(
            f"shares {list(shares)} must be finite numbers of at least 0, and not all 0"
        )
    total = sum(shares)
    return tuple(share / total for share in shares)


# ------------------------------------------------------------ bounds
def cut_bound(network: Network, demand: Demand, symmetry: Symmetry) -> float:
    """Return the lower bound, in seconds per byte, implied by the cuts of `family`."""
    if network.num_ranks < 2 or not len(network.resources):
        return 0.0
    return _Cuts(network, demand, symmetry).solve(family(network, symmetry))


def family(network: Network, symmetry: Symmetry) -> list[tuple[int, ...]]:
    """Return single ranks, the groups of the network and of its symmetry, and their complements."""
    count = network.num_ranks
    if count <= ALL_SETS:
        sizes = range(1, count)
        return [s for size in sizes for s in itertools.combinations(range(count), size)]
    sets: list[tuple[int, ...]] = [(rank,) for rank in symmetry.representatives()]
    sets += [*network.groups, *symmetry.blocks]
    complements = [tuple(r for r in range(count) if r not in set(s)) for s in sets]
    return [s for s in dict.fromkeys([*sets, *complements]) if 0 < len(s) < count]


class _Cuts:
    """The linear program over traffic per orbit of edges, roots per orbit of ranks, and time."""

    def __init__(self, network: Network, demand: Demand, symmetry: Symmetry) -> None:
        self.network, self.demand = network, demand
        _, self.edge = np.unique(symmetry.edge_orbit, return_inverse=True)
        _, self.rank = np.unique(symmetry.rank_orbit, return_inverse=True)
        _, self.resource = np.unique(symmetry.resource_orbit, return_inverse=True)
        self.edge_size = np.bincount(self.edge)
        self.rank_size = np.bincount(self.rank)
        self.copies = demand.inward + demand.outward
        self.first_root = self.copies * len(self.edge_size)
        free = demand.shares is None
        self.width = self.first_root + (len(self.rank_size) if free else 0) + 1

    def solve(self, sets: Iterable[tuple[int, ...]]) -> float:
        limits, scale = self._limits()
        rows, minimum = self._crossings(sets)
        equal = None
        if self.demand.shares is None:
            equal = np.zeros((1, self.width))
            equal[0, self.first_root : -1] = 1.0
        result = linprog(
            np.append(np.zeros(self.width - 1), 1.0),
            A_ub=csr_array(np.vstack([-rows, limits])),
            b_ub=np.concatenate([-minimum, np.zeros(len(limits))]),
            A_eq=equal,
            b_eq=None if equal is None else [1.0],
            method="highs-ds",
        )
        return max(0.0, float(result.fun) / scale) if result.x is not None else 0.0

    def _limits(self) -> tuple[Floats, float]:
        """Return the constraints that no orbit of resources exceeds its capacity times the time."""
        uses = self.network.uses
        edges = np.repeat(self.edge, uses.shape[1])[uses.ravel() >= 0]
        used = self.resource[uses.ravel()[uses.ravel() >= 0]]
        shape = (int(self.resource.max()) + 1, len(self.edge_size))
        count = coo_array((np.ones(len(used)), (used, edges)), shape=shape).toarray()
        capacity = np.bincount(self.resource, weights=self.network.capacity)
        per_edge = count / self.edge_size / capacity[:, None]
        scale = 1.0 / float(per_edge.max())  # the solver's tolerances assume values near 1
        rows = np.zeros((shape[0], self.width))
        for copy in range(self.copies):
            rows[:, copy * shape[1] : (copy + 1) * shape[1]] = per_edge * scale
        rows[:, -1] = -1.0
        return rows, scale

    def _crossings(self, sets: Iterable[tuple[int, ...]]) -> tuple[Floats, Floats]:
        """Return the constraints of all cuts: rows over the variables and their minimums."""
        rows, minimum = [], []
        for ranks in sets:
            inside = np.zeros(self.network.num_ranks, dtype=bool)
            inside[list(ranks)] = True
            leaves = inside[self.network.source] & ~inside[self.network.target]
            enters = ~inside[self.network.source] & inside[self.network.target]
            directions = [leaves] * self.demand.inward + [enters] * self.demand.outward
            for copy, crossing in enumerate(directions):
                row = np.zeros(self.width)
                size = len(self.edge_size)
                fraction = np.bincount(self.edge[crossing], minlength=size) / self.edge_size
                row[copy * size : (copy + 1) * size] = fraction
                if self.demand.shares is None:
                    roots_inside = np.bincount(self.rank[inside], minlength=len(self.rank_size))
                    row[self.first_root : -1] = roots_inside / self.rank_size
                rows.append(row)
                # What must cross the boundary, plus free roots inside.
                shares = self.demand.shares
                minimum.append(1.0 if shares is None else float(np.array(shares)[~inside].sum()))
        return np.array(rows), np.array(minimum)
