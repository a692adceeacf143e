"""How the ranks along a mesh axis share what is cut over it: evenly, or by weights.

Enters: the number of ranks, or their weights. Leaves: the number as an `int`, of which `Shares` is
one that remembers unequal weights, and the `part` of each rank. The compiler and the runtime both
take sizes of mesh axes to `part`, so that neither asks which of the two it is.

An even cut is that of `numpy.array_split`: sizes differ by at most one, the larger ones first. By
weights, part i ends at the whole number nearest to `size` times its share of all weights up to i:
no boundary is off by more than one half. A part may be empty in either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from itertools import product as combinations
from math import gcd, prod
from typing import Any

from shardwise.errors import ClusterError

__all__ = ["Shares", "axes_of", "grain", "lengths", "part", "product", "written"]


class Shares(int):
    """The number of ranks along a mesh axis that take unequal shares.

    It counts as that number, but equals only the same shares. Weights have no common divisor.

    >>> two = Shares(4, 2)
    >>> two, str(two), two + 1, two == 2, [part(7, two, i) for i in range(two)]
    (Shares(2, 1), '2:1', 3, False, [(0, 5), (5, 2)])
    """

    weights: tuple[int, ...]
    ends: tuple[int, ...]  # the sum of the weights before each rank, and of all

    def __new__(cls, *weights: int) -> Shares:
        whole = all(isinstance(w, int) and not isinstance(w, bool) for w in weights)
        if not whole or min(weights, default=0) < 0 or not any(weights):
            raise ClusterError(
                f"shares {list(weights)}, they need whole numbers of at least 0, not all of them 0",
                hint="[2, 1]: two ranks, of which the first takes two thirds",
            )
        made = super().__new__(cls, len(weights))
        made.weights = tuple(int(w) // gcd(*weights) for w in weights)
        made.ends = tuple(accumulate(made.weights, initial=0))
        return made

    @staticmethod
    def of(weights: Sequence[int]) -> int:
        """Shares with these weights; a plain number of ranks if all are the same.

        >>> Shares.of([3, 3]), Shares.of([3, 1])
        (2, Shares(3, 1))
        """
        shares = Shares(*weights)
        return shares if len(set(shares.weights)) > 1 else int(shares)

    def end(self, size: int, index: int) -> int:
        """Where the parts before `index` end."""
        total = self.ends[-1]
        return (2 * size * self.ends[index] + total) // (2 * total)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self.weights == other.weights

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.weights)

    def __repr__(self) -> str:
        return f"Shares({', '.join(map(str, self.weights))})"

    def __str__(self) -> str:
        return ":".join(map(str, self.weights))

    def __getnewargs__(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.weights


@lru_cache(maxsize=1 << 16)
def part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of `parts`, which may be `Shares`.

    >>> [part(7, 3, i) for i in range(3)], part(4, 5, 4), part(8, Shares(3, 1), 1)
    ([(0, 3), (3, 2), (5, 2)], (4, 0), (6, 2))
    """
    if isinstance(parts, Shares):
        start = parts.end(size, index)
        return start, parts.end(size, index + 1) - start
    small, extra = divmod(size, parts)
    return index * small + min(index, extra), small + (index < extra)


def lengths(size: int, parts: int) -> set[int]:
    """The different lengths that parts have.

    >>> sorted(lengths(7, 3)), sorted(lengths(8, Shares(5, 2, 1)))
    ([2, 3], [1, 2, 5])
    """
    if isinstance(parts, Shares):
        return {
            stop - start for start, stop in pairwise(parts.end(size, i) for i in range(parts + 1))
        }
    return {part(size, parts, i)[1] for i in (0, parts - 1)}


def grain(parts: int) -> int:
    """A multiple of this is cut exactly, and so are its parts by another axis' grain.

    >>> grain(4), grain(Shares(2, 1))
    (4, 3)
    """
    return parts.ends[-1] if isinstance(parts, Shares) else parts


def product(several: Iterable[int]) -> int:
    """Mesh axes taken as one, the last one fastest.

    >>> product([2, 3]), product([2, Shares(3, 1)])
    (6, Shares(3, 1, 3, 1))
    """
    sizes = list(several)
    if not any(isinstance(size, Shares) for size in sizes):
        return prod(sizes)
    weights = [size.weights if isinstance(size, Shares) else (1,) * size for size in sizes]
    return Shares.of([prod(chosen) for chosen in combinations(*weights)])


def axes_of(axes: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Mesh axes as a person wrote them, each with a number of ranks or a list of their weights.

    >>> axes_of({"dp": (2, 1), "tp": [1, 1]})
    {'dp': Shares(2, 1), 'tp': 2}
    """
    return {name: _extent(name, given) for name, given in dict(axes).items()}


def _extent(name: str, given: Any) -> int:
    try:
        if isinstance(given, Shares):
            return Shares.of(given.weights)
        if isinstance(given, tuple | list):
            return Shares.of(given)
    except ClusterError as error:
        raise ClusterError(f"mesh axis {name} has {error.message}", hint=error.hint) from None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ClusterError(
            f"mesh axis {name} has size {given!r}, needs a whole number of at least 1, or the "
            "shares of its ranks",
            hint=f"{name}=1, or {name}=(2, 1) for two thirds and one third",
        )
    return given


def written(parts: int) -> int | list[int]:
    """The inverse of `axes_of` for one axis: what plans and generated files say.

    >>> written(2), written(Shares(2, 1))
    (2, [2, 1])
    """
    return list(parts.weights) if isinstance(parts, Shares) else parts
