"""The moves between placements with their prices, each found once.

Enters: a graph, a `LayoutTask`, `Prices`. Leaves: `Paths`, which `build` asks.
"""

from __future__ import annotations

from shardwise.errors import ProgramError
from shardwise.ir import Graph, TensorType
from shardwise.planner.layouts.task import LayoutTask, Placements, Prices
from shardwise.program.moves import plan_moves
from shardwise.sharding.placements import Layout

Step = tuple[int, int]  # the numbers of the placements before and after a move


class Paths:
    """The moves between placements with their prices, remembered; placements have numbers."""

    def __init__(self, graph: Graph, task: LayoutTask, prices: Prices) -> None:
        self.graph, self.prices = graph, prices
        self.names, self.sizes = task.names, task.sizes
        self.numbers: dict[Placements, int] = {}
        self.layouts: list[Layout] = []
        self._known: dict[tuple[int, int, bool], tuple[Step, ...] | None] = {}
        self._prices: dict[tuple[TensorType, int, int, bool], float] = {}

    def number(self, placements: Placements) -> int:
        """The number of placements."""
        found = self.numbers.get(placements)
        if found is None:
            found = self.numbers[placements] = len(self.layouts)
            self.layouts.append(Layout(tuple(zip(self.names, placements, strict=True))))
        return found

    def between(self, held: int, needed: int, grad: bool) -> tuple[Step, ...] | None:
        """Each move as (placements before, after); None where there is no way."""
        if held == needed:
            return ()
        key = (held, needed, grad)
        if key not in self._known:
            self._known[key] = self._find(held, needed, grad)
        return self._known[key]

    def _find(self, held: int, needed: int, grad: bool) -> tuple[Step, ...] | None:
        try:
            moves = plan_moves(self.layouts[held], self.layouts[needed], self.sizes, grad)
        except (ProgramError, KeyError):  # no such row in the table of moves
            return None
        return tuple(
            (self.number(_placements(m.before)), self.number(_placements(m.layout))) for m in moves
        )

    def price(self, value: str, step: Step, grad: bool) -> float:
        """What a move of a value costs."""
        key = (self.graph.values[value], *step, grad)
        found = self._prices.get(key)
        if found is None:
            before, after = (_placements(self.layouts[i]) for i in step)
            found = self._prices[key] = self.prices.move(value, before, after, grad)
        return found


def _placements(layout: Layout) -> Placements:
    return tuple(p for _, p in layout.axes)
