"""Split a size over the ranks of a mesh axis, evenly or by weights.

The size of a mesh axis is a plain number of ranks that take equal parts, or `Shares` for ranks that
take unequal ones. Compiler and runtime pass either to `part`, which handles both.

An even split is that of `numpy.array_split`: sizes differ by at most one, the larger ones first. By
weights, part i ends at the integer nearest to `size` times the sum of the first i + 1 weights over
the sum of all: no boundary is off by more than one half. In both cases a part may be empty.

A dim of a tensor may be a concatenation of segments, each a product `outer x size x inner`, whose
factor `size` is split: `dim_runs` returns the positions of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from itertools import product as combinations
from math import gcd, prod
from typing import Any, TypeAlias

from shardwise.errors import ClusterError


@dataclass(frozen=True, slots=True, init=False)
class Shares:
    """The weights by which the ranks along a mesh axis share whatever is split over it.

    Weights are divided by their greatest common divisor, so that equal splits compare equal.

    >>> shares = Shares(4, 2)
    >>> shares, str(shares), len(shares), [part(7, shares, i) for i in range(2)]
    (Shares(2, 1), '2:1', 2, [(0, 5), (5, 2)])
    """

    weights: tuple[int, ...]
    ends: tuple[int, ...] = field(compare=False)  # sums of the weights before each rank, and of all

    def __init__(self, *weights: int) -> None:
        integers = all(isinstance(w, int) and not isinstance(w, bool) for w in weights)
        if not integers or min(weights, default=0) < 0 or not any(weights):
            raise ClusterError(
                f"shares {list(weights)}, which must be integers of at least 0 and not all 0",
                hint="[2, 1] for two ranks, of which the first takes two thirds",
            )
        divisor = gcd(*weights)
        object.__setattr__(self, "weights", tuple(w // divisor for w in weights))
        object.__setattr__(self, "ends", tuple(accumulate(self.weights, initial=0)))

    @staticmethod
    def of(weights: Sequence[int]) -> AxisSize:
        """Return shares with these weights, or the number of ranks if all weights are equal.

        >>> Shares.of([3, 3]), Shares.of([3, 1])
        (2, Shares(3, 1))
        """
        shares = Shares(*weights)
        return shares if len(set(shares.weights)) > 1 else len(shares)

    def start(self, size: int, index: int) -> int:
        """Return where part `index` of `size` elements starts."""
        total = self.ends[-1]
        return (2 * size * self.ends[index] + total) // (2 * total)

    def __len__(self) -> int:
        return len(self.weights)

    def __repr__(self) -> str:
        return f"Shares({', '.join(map(str, self.weights))})"

    def __str__(self) -> str:
        return ":".join(map(str, self.weights))


AxisSize: TypeAlias = int | Shares
Segments = tuple[tuple[int, int, int], ...]  # outer, size, inner
Runs = tuple[tuple[int, int], ...]  # start and length, in order, not adjacent


def num_ranks(axis: AxisSize) -> int:
    """Return the number of ranks along a mesh axis of this size.

    >>> num_ranks(4), num_ranks(Shares(2, 1))
    (4, 2)
    """
    return len(axis) if isinstance(axis, Shares) else axis


@lru_cache(maxsize=1 << 16)
def part(size: int, axis: AxisSize, index: int) -> tuple[int, int]:
    """Return start and length of the part of rank `index` along an axis.

    >>> [part(7, 3, i) for i in range(3)], part(4, 5, 4), part(8, Shares(3, 1), 1)
    ([(0, 3), (3, 2), (5, 2)], (4, 0), (6, 2))
    """
    if isinstance(axis, Shares):
        start = axis.start(size, index)
        return start, axis.start(size, index + 1) - start
    small, extra = divmod(size, axis)
    return index * small + min(index, extra), small + (index < extra)


def nested_part(size: int, axes: Iterable[tuple[AxisSize, int]]) -> tuple[int, int]:
    """Return start and length of a part; each axis splits what the axes before it leave.

    >>> nested_part(8, [(2, 1), (2, 0)])
    (4, 2)
    """
    start = 0
    for axis, index in axes:
        offset, size = part(size, axis, index)
        start += offset
    return start, size


def dim_runs(splits: Iterable[tuple[Segments, AxisSize, int]]) -> Runs:
    """Return the positions of the rank with index `i` on each axis, for splits `(of, axis, i)`.

    Axes split different factors of the dim, or the same one, nested.

    >>> dim_runs([(((3, 4, 2),), 2, 1)]), dim_runs([(((2, 4, 1),), 2, 0), (((1, 2, 4),), 2, 1)])
    (((4, 4), (12, 4), (20, 4)), ((4, 2),))
    """
    axes_of_factor: dict[Segments, list[tuple[AxisSize, int]]] = {}
    for of, axis, index in splits:
        axes_of_factor.setdefault(of, []).append((axis, index))
    runs: Runs | None = None
    for of, axes in axes_of_factor.items():
        of_factor = _segment_runs(of, [nested_part(size, axes) for _, size, _ in of])
        runs = of_factor if runs is None else _intersection(runs, of_factor)
    return runs or ()


def _segment_runs(of: Segments, parts: Sequence[tuple[int, int]]) -> Runs:
    """Return the positions of a part of every segment."""
    runs: list[tuple[int, int]] = []
    offset = 0
    for (outer, size, inner), (start, length) in zip(of, parts, strict=True):
        for step in range(outer if length * inner else 0):
            begin = offset + (step * size + start) * inner
            if runs and sum(runs[-1]) == begin:
                runs[-1] = (runs[-1][0], runs[-1][1] + length * inner)
            else:
                runs.append((begin, length * inner))
        offset += outer * size * inner
    return tuple(runs)


def _intersection(a: Runs, b: Runs) -> Runs:
    common = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(sum(a[i]), sum(b[j]))
        if begin < end:
            common.append((begin, end - begin))
        if sum(a[i]) < sum(b[j]):
            i += 1
        else:
            j += 1
    return tuple(common)


def lengths(size: int, axis: AxisSize) -> set[int]:
    """Return the distinct lengths of the parts.

    >>> sorted(lengths(7, 3)), sorted(lengths(8, Shares(5, 2, 1)))
    ([2, 3], [1, 2, 5])
    """
    if isinstance(axis, Shares):
        starts = [axis.start(size, i) for i in range(len(axis) + 1)]
        return {stop - start for start, stop in pairwise(starts)}
    return {part(size, axis, i)[1] for i in (0, axis - 1)}


def grain(axis: AxisSize) -> int:
    """Return the smallest size that an axis splits exactly.

    A multiple of the grains of several axes is also split exactly if the axes are nested.

    >>> grain(4), grain(Shares(2, 1))
    (4, 3)
    """
    return axis.ends[-1] if isinstance(axis, Shares) else axis


def product(axes: Iterable[AxisSize]) -> AxisSize:
    """Return the size of several mesh axes combined into one, the last one fastest.

    >>> product([2, 3]), product([2, Shares(3, 1)])
    (6, Shares(3, 1, 3, 1))
    """
    weights = [axis.weights if isinstance(axis, Shares) else (1,) * axis for axis in axes]
    return Shares.of([prod(chosen) for chosen in combinations(*weights)])


def axes_of(axes: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, AxisSize]:
    """Return mesh axes from numbers of ranks or lists of weights, as users write them.

    >>> axes_of({"dp": (2, 1), "tp": [1, 1]})
    {'dp': Shares(2, 1), 'tp': 2}
    """
    return {name: _axis_size(name, size) for name, size in dict(axes).items()}


def _axis_size(name: str, size: Any) -> AxisSize:
    try:
        if isinstance(size, Shares | tuple | list):
            return Shares.of(size.weights if isinstance(size, Shares) else size)
    except ClusterError as error:
        raise ClusterError(f"mesh axis {name} has {error.message}", hint=error.hint) from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ClusterError(
            f"mesh axis {name} has size {size!r}, which must be an integer of at least 1 or the "
            "shares of its ranks",
            hint=f"{name}=1, or {name}=(2, 1) for two thirds and one third",
        )
    return size


def written(axis: AxisSize) -> int | list[int]:
    """Return the size of an axis as plans and generated files write it, readable by `axes_of`.

    >>> written(2), written(Shares(2, 1))
    (2, [2, 1])
    """
    return list(axis.weights) if isinstance(axis, Shares) else axis
