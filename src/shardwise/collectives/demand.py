"""What an operation asks of a network.

Enters: the name of an operation, the root or the shares of the ranks. Leaves: `Demand`: whether
data flow into roots, out of them or both, and how much of it each rank is the root of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from shardwise.collectives.network import Network
from shardwise.errors import ClusterError, did_you_mean

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`shares` are the parts of the data that each rank is the root of; None leaves them free.

    Of an all-to-all, they are the parts of each rank's data that go to each rank.
    """

    operation: str
    shares: tuple[float, ...] | None
    root: int | None = None

    @property
    def inward(self) -> bool:
        """Whether sums are made on the way to roots."""
        return self.operation in ("all_reduce", "reduce_scatter", "reduce")

    @property
    def outward(self) -> bool:
        """Whether results leave the roots."""
        return self.operation in ("all_reduce", "all_gather", "broadcast")

    def colors(self, count: int) -> list[int]:
        """Ranks of one color have the same part in the operation."""
        if self.shares is None:
            return [0] * count
        known = {share: i for i, share in enumerate(sorted(set(self.shares)))}
        return [known[share] for share in self.shares]


def demand_of(
    network: Network,
    operation: str,
    *,
    root: int | None = None,
    shares: Sequence[float] | None = None,
) -> Demand:
    """Return the checked demand; equal shares unless others are given."""
    count = network.num_ranks
    if operation not in OPERATIONS:
        raise ClusterError(
            f"no operation {operation!r}{did_you_mean(str(operation), OPERATIONS)}",
            hint=", ".join(OPERATIONS),
        )
    rooted = operation in ("broadcast", "reduce")
    if root is not None and not rooted:
        raise ClusterError(f"{operation} has no root", hint="root for broadcast and reduce")
    if rooted:
        root = 0 if root is None else whole_number(root, "root")
        if not 0 <= root < count:
            raise ClusterError(f"root {root} is outside a network of {count} ranks")
        given: tuple[float, ...] | None = tuple(float(rank == root) for rank in range(count))
    elif operation == "all_reduce":
        given = None
    else:
        given = _normal(shares if shares is not None else [1.0] * count, count)
    if (shares is not None and given is None) or (rooted and shares is not None):
        raise ClusterError(f"{operation} has no shares", hint="leave them out")
    demand = Demand(operation=operation, shares=given, root=root)
    _check_reach(network, demand)
    return demand


def whole_number(value: object, what: str) -> int:
    """Return a whole number, of Python or NumPy."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ClusterError(f"{what} is {value!r}, must be a whole number") from None


def _normal(shares: Sequence[float], count: int) -> tuple[float, ...]:
    if len(shares) != count:
        raise ClusterError(f"{len(shares)} shares for {count} ranks", hint="one for each rank")
    if any(not 0 <= share < math.inf for share in shares) or not sum(shares) > 0:
        raise ClusterError(f"shares {list(shares)} are not all numbers of at least 0, one above")
    total = sum(shares)
    return tuple(share / total for share in shares)


def _check_reach(network: Network, demand: Demand) -> None:
    """Everyone must reach, or be reached from, every root; for free roots and routes, everyone."""
    if demand.root is None:
        network.check_reach(outward=[0], inward=[0])
        return
    network.check_reach(
        outward=[demand.root] if demand.outward else [],
        inward=[demand.root] if demand.inward else [],
    )
