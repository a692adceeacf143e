"""The joint layout problem as variables with states and costs between them.

A `Variable` is a node (its states are joint options) or a source (its states are storages). The
cost of a solution is the sum of

- `unary[s]` of every variable's state `s`;
- `table[s, t]` of every pair of variables: moving a value from its producer to its one user;
- of every `MultiUse`, a value with several uses: each of the moves that its uses need, once.

States may also have a weight in bytes, whose sum is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
INF = float("inf")


@dataclass(slots=True)
class Variable:
    """Costs of the states that are left; `index` are their numbers among all states."""

    unary: Floats
    weight: Floats
    index: Ints

    @staticmethod
    def of(unary: Sequence[float], weight: Sequence[float]) -> Variable:
        return Variable(
            np.asarray(unary, dtype=np.float64),
            np.asarray(weight, dtype=np.float64),
            np.arange(len(unary), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.unary)

    def keep(self, kept: Ints) -> None:
        self.unary, self.weight = self.unary[kept], self.weight[kept]
        self.index = self.index[kept]


@dataclass(slots=True)
class Use:
    """A use of a star's value: which need each state of the variable has.

    The end of a value (the loss is whole) is a use without a variable, whose need is fixed.
    """

    variable: int | None
    need: Ints


@dataclass(slots=True)
class MultiUse:
    """A value with several uses.

    `held` says how each state of the producer holds it. `steps[h, n]` are the moves from holding
    `h` to need `n`, or None; `prices[h, step]` what each costs. `same[n]` are the mesh axes on
    which a need is for the same work, `whole[h]` those on which a holding is R and thereby asks
    for at least one such use.
    """

    value: str
    producer: int
    held: Ints
    uses: list[Use]
    steps: dict[tuple[int, int], tuple[int, ...] | None]
    prices: dict[tuple[int, int], float]
    same: dict[int, frozenset[int]]
    whole: dict[int, frozenset[int]]

    def cost(self, held: int, needs: Sequence[int]) -> float:
        """Return what one holding and the needs of all uses cost."""
        asked = self.whole[held]
        for need in needs:
            asked -= self.same[need]
        if asked:
            return INF
        taken: set[int] = set()
        for need in needs:
            path = self.steps[held, need]
            if path is None:
                return INF
            taken.update(path)
        return float(sum(self.prices[held, step] for step in sorted(taken)))

    def classes(self) -> tuple[list[int], list[list[int]]]:
        """Return the holdings and the needs of every use that are left, in order."""
        return sorted(set(self.held.tolist())), [sorted(set(u.need.tolist())) for u in self.uses]

    def num_entries(self) -> int:
        """Return how many costs `small_table` has."""
        holds, needs = self.classes()
        return len(holds) * prod(len(n) for n in needs)

    def small_table(self) -> Floats:
        """Return what each holding and each need of every use cost together."""
        holds, needs = self.classes()
        return np.stack([_held_table(self, held, needs) for held in holds])

    def table(self) -> Floats:
        """Return the costs for all states of the producer and of the uses that have a variable."""
        holds, needs = self.classes()
        rows = [np.searchsorted(holds, self.held)]
        rows += [np.searchsorted(n, u.need) for n, u in zip(needs, self.uses, strict=True)]
        table = self.small_table()[np.ix_(*rows)]
        ends = tuple(i + 1 for i, use in enumerate(self.uses) if use.variable is None)
        return np.asarray(table.squeeze(axis=ends))

    def members(self) -> list[int]:
        """Return the variables it joins, the producer first."""
        return [self.producer, *(u.variable for u in self.uses if u.variable is not None)]

    def keep(self, variable: int, kept: Ints) -> None:
        if variable == self.producer:
            self.held = self.held[kept]
        for use in self.uses:
            if use.variable == variable:
                use.need = use.need[kept]


@dataclass(slots=True)
class Model:
    """All variables and costs; `pairs[a, b]` with a < b."""

    variables: dict[int, Variable] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    stars: list[MultiUse] = field(default_factory=list)
    constant: float = 0.0
    weight: float = 0.0  # of what is decided
    limit: float | None = None

    def add_pair(self, a: int, b: int, table: Floats) -> None:
        """Add a cost between two variables."""
        if a > b:
            a, b, table = b, a, table.T
        known = self.pairs.get((a, b))
        self.pairs[a, b] = table if known is None else known + table

    def weigh(self, chosen: Mapping[int, int]) -> float:
        """Return the bytes of these states of all variables."""
        return sum(float(v.weight[chosen[number]]) for number, v in self.variables.items())

    def neighbours(self) -> dict[int, list[tuple[int, int]]]:
        """Return the pairs of every variable."""
        found: dict[int, list[tuple[int, int]]] = {v: [] for v in self.variables}
        for key in self.pairs:
            for variable in key:
                found[variable].append(key)
        return found

    def table(self, key: tuple[int, int], variable: int) -> Floats:
        """Return the table of a pair with this variable's states as rows."""
        table = self.pairs[key]
        return table if key[0] == variable else table.T

    def keep(self, variable: int, kept: Ints) -> None:
        """Keep these states of a variable only."""
        self.variables[variable].keep(kept)
        for key in [k for k in self.pairs if variable in k]:
            table = self.pairs[key]
            self.pairs[key] = table[kept] if key[0] == variable else table[:, kept]
        for star in self.stars:
            if variable in star.members():
                star.keep(variable, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """States by number among all states of a variable; the cost and its bound."""

    chosen: dict[int, int]
    cost: float
    bound: float
    num_variables: int


def _held_table(star: MultiUse, held: int, needs: list[list[int]]) -> Floats:
    """Return the costs of one holding over the needs of every use: each move once."""
    count = len(needs)

    def along(index: int, values: list[float]) -> Floats:
        shape = [1] * count
        shape[index] = len(values)
        return np.asarray(values, dtype=np.float64).reshape(shape)

    total = np.zeros([len(n) for n in needs])
    paths = [[star.steps[held, n] for n in mine] for mine in needs]
    for i, mine in enumerate(paths):
        total = total + along(i, [INF if path is None else 0.0 for path in mine])
    for step in sorted({s for mine in paths for path in mine for s in path or ()}):
        price = star.prices[held, step]
        if price > 0:
            spared = reduce(
                np.multiply,
                (
                    along(i, [float(step not in (path or ())) for path in mine])
                    for i, mine in enumerate(paths)
                ),
            )
            total = total + price * (1.0 - spared)
    for axis in sorted(star.whole[held]):
        lacking = reduce(
            np.multiply,
            (
                along(i, [float(axis not in star.same[n]) for n in mine])
                for i, mine in enumerate(needs)
            ),
        )
        total = np.where(np.broadcast_to(lacking, total.shape) > 0, INF, total)
    return total
