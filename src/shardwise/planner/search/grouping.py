"""Which ranks form a group, and how much of the work each takes.

Enters: a cluster whose devices may be unequal. Leaves: `Grouping`s: groups of ranks in the order of
their stages, with the speed of each, and the share of the batch of every rank along "dp".

Equal devices have one grouping: ranks in order. Unequal ones are also tried by kind, so that a
group has equal devices, and in groups of unequal size; shares along "dp" follow speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from shardwise.cluster import Mesh
from shardwise.errors import InfeasiblePlan
from shardwise.shares import Shares
from shardwise.simulation.times import Group

RESOLUTION = 24  # parts into which the fastest rank's share is divided


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Ranks of every group, in mesh order, and how fast each rank is."""

    ranks: tuple[tuple[int, ...], ...]
    rates: tuple[tuple[float, ...], ...]  # of every rank, relative

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of every group: shares of its batch let all its ranks work at their own rate."""
        return tuple(sum(rates) for rates in self.rates)

    def groups(self, tp: int, axes: Sequence[tuple[str, int]]) -> tuple[Group, ...]:
        """The groups as meshes of dp x tp."""
        found = []
        for ranks, rates in zip(self.ranks, self.rates, strict=True):
            dp, rest = divmod(len(ranks), tp)
            if rest or not dp:
                raise InfeasiblePlan(f"tp={tp} on a group of {len(ranks)} ranks")
            shares = weights([min(rates[i * tp : (i + 1) * tp]) for i in range(dp)])
            size = dp if len(set(shares)) == 1 else Shares(*shares)
            mesh = Mesh(axes=((("dp", size),) if dp > 1 else ()) + tuple(axes))
            found.append(Group(mesh=mesh, ranks=ranks))
        return tuple(found)


def weights(rates: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in the ratio of the rates.

    >>> weights([1.0, 0.5])
    (2, 1)
    """
    most = max(rates)
    found = [max(1, round(RESOLUTION * rate / most)) for rate in rates]
    common = gcd(*found)
    return tuple(number // common for number in found)


def groupings(
    num_ranks: int, rates: Sequence[float], kinds: Sequence[int], pp: int
) -> list[Grouping]:
    """The groupings of `pp` groups to try; `rates` and `kinds` are those of the ranks."""
    natural = list(range(num_ranks))
    orders = [_even(natural, pp)]
    if len(set(kinds)) > 1:
        by_kind = sorted(natural, key=lambda r: (-rates[r], kinds[r], r))
        orders += [_even(by_kind, pp), _even(by_kind[::-1], pp), _by_kind(by_kind, kinds, pp)]
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for order in orders:
        if order is not None:
            found.setdefault(order)
    return [
        Grouping(ranks=ranks, rates=tuple(tuple(rates[r] for r in mine) for mine in ranks))
        for ranks in found
    ]


def _even(ranks: Sequence[int], pp: int) -> tuple[tuple[int, ...], ...] | None:
    size, rest = divmod(len(ranks), pp)
    if rest:
        return None
    return tuple(tuple(ranks[g * size : (g + 1) * size]) for g in range(pp))


def _by_kind(
    ranks: Sequence[int], kinds: Sequence[int], pp: int
) -> tuple[tuple[int, ...], ...] | None:
    """Groups of equal devices: each kind has as many groups as its part of the ranks."""
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(kinds[rank], []).append(rank)
    if pp < len(members):
        return None
    counts = {kind: max(1, round(pp * len(mine) / len(ranks))) for kind, mine in members.items()}
    while sum(counts.values()) > pp:
        counts[max(counts, key=lambda k: (counts[k], k))] -= 1
    while sum(counts.values()) < pp:
        counts[max(counts, key=lambda k: (len(members[k]) / counts[k], k))] += 1
    found: list[tuple[int, ...]] = []
    for kind, mine in members.items():
        size, rest = divmod(len(mine), counts[kind])
        if rest or not size:
            return None
        found += [tuple(mine[g * size : (g + 1) * size]) for g in range(counts[kind])]
    return tuple(found)
