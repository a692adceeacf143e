"""Layouts, solved when they are first asked for.

Enters: a folded model, a cluster and constraints of the user. Leaves: `Works` for a number of
tensor-parallel ranks, quickest or leanest in memory, with the gap that the solver proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from shardwise.cluster import Mesh
from shardwise.planner.layouts import LayoutAxis, LayoutSolution, LayoutTask, solve_layouts
from shardwise.planner.layouts.alike import Likeness
from shardwise.planner.search.prices import CallPrices
from shardwise.planner.strategies.fields import batch_inputs, tensor_axes
from shardwise.sharding.assign import Assignment, Task, assign
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Placement, Shard
from shardwise.sharding.tables import cut_tables
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.fold import Fold
from shardwise.simulation.times import Group
from shardwise.simulation.works import Works, batch_rows

TIME_LIMIT_S = 60.0
TYPICAL_MICROBATCHES = 4  # for which layouts are solved; they hold for any number
LONG_ROW = 128  # elements
QUICKEST, LEANEST, MIXED = 0, 1, 2  # kinds of layouts
LEAN = 0.5  # what filling a device's memory costs in the leanest layouts, in micro-batches


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Solved layouts, ready to be simulated."""

    works: Works
    solution: LayoutSolution
    axes: tuple[tuple[str, int], ...]  # tensor-parallel mesh axes


class Bank:
    """Solves each number of tensor-parallel ranks once."""

    def __init__(
        self,
        fold: Fold,
        facts: Facts,
        evaluator: Evaluator,
        constraints: Mapping[str, Mapping[str, Placement]],
        nodes: Mapping[str, Mapping[str, str]],
        likeness: Likeness,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.likeness = likeness
        self.fold, self.facts, self.evaluator = fold, facts, evaluator
        self.constraints, self.nodes, self.report = constraints, nodes, report
        self.inputs = batch_inputs(fold.graph, None)
        self.rows = batch_rows(fold.graph)
        self._found: dict[tuple[int, int], Layouts] = {}
        self._batch: Assignment | None = None

    def get(self, tp: int, layout: int) -> Layouts:
        """The layouts for `tp` ranks: 0 the quickest, 1 the leanest, 2 with the batch cut too."""
        key = (tp, layout)
        if key not in self._found:
            self._found[key] = self._solve(tp, layout)
        return self._found[key]

    def _solve(self, tp: int, layout: int) -> Layouts:
        self.report(f"layouts for tp={tp}" + ("", ", lean", ", mixed")[layout])
        graph = self.fold.graph
        sizes = tensor_axes(graph, self.facts, tp) if tp > 1 else ()
        tensor = tuple((f"tp{i}" if i else "tp", n) for i, n in enumerate(sizes))
        axes = []
        cuts = self._cuts()
        cluster = self.evaluator.cluster
        dp = max(1, min(cluster.num_ranks // tp, self.rows))
        parts = dp if layout == MIXED else self._parts(dp)
        if cuts:
            axes.append(LayoutAxis(name="dp", ranks=parts, role="batch", inputs=cuts))
        axes += [LayoutAxis(name=name, ranks=n) for name, n in tensor]
        group = Group(
            mesh=Mesh(axes=(("dp", dp), *tensor)),
            ranks=tuple(range(min(dp * tp, cluster.num_ranks))),
        )
        weight = 0.0
        if layout == LEANEST:
            limit = cluster.device(0).usable_bytes
            weight = LEAN * self.get(tp, 0).solution.cost_s / limit
        names = tuple(axis.name for axis in axes)
        task = LayoutTask(
            axes=tuple(axes),
            parameters={
                value: {a: p for a, p in placements.items() if a in names}
                for value, placements in self.constraints.items()
            },
            nodes=self._choices(cuts, parts, names) if cuts else {},
            copies=self.likeness.copies,
            moves=self.likeness.moves,
            alike=self.likeness.alike,
            memory_weight=weight,
        )
        prices = CallPrices(
            graph,
            self.facts,
            task,
            group,
            cluster.device(0),
            self.evaluator.clock,
            microbatches=1.0 if layout == MIXED else TYPICAL_MICROBATCHES,
        )
        solution = solve_layouts(graph, self.facts, task, prices, time_limit_s=TIME_LIMIT_S)
        roles = {axis.name: "batch" if axis.role == "batch" else "parameters" for axis in axes}
        works = Works(self.fold, self.facts, solution.assignments, roles)
        return Layouts(works=works, solution=solution, axes=tensor)

    def _parts(self, dp: int) -> int:
        """Of how many parts of the batch layouts are solved for one.

        A row that is long itself, as a text, is enough; else a typical micro-batch is taken.
        """
        shapes = [self.fold.graph.values[i.value].shape for i in self.fold.graph.inputs]
        longest = max((prod(shape[1:]) for shape in shapes if shape), default=1)
        if longest >= LONG_ROW:
            return self.rows
        return min(self.rows, dp * TYPICAL_MICROBATCHES)

    def _choices(
        self, cuts: Mapping[str, Placement], parts: int, names: tuple[str, ...]
    ) -> dict[str, dict[str, str]]:
        """What the user fixed; on "dp" every node takes the batch cut where it has one.

        Nothing else on that axis is cheaper: parameters are whole on it, so its only other choice
        is to do the same work on every rank.
        """
        if self._batch is None:
            task = Task(axis="dp", ranks=parts, inputs=cuts)
            graph, facts = self.fold.graph, self.facts
            (self._batch,) = cut_tables(graph, facts, (assign(graph, facts, task),), {})
        found = {name: {"dp": str(c.choice)} for name, c in self._batch.nodes.items()}
        for name, choices in self.nodes.items():
            found.setdefault(name, {}).update({a: c for a, c in choices.items() if a in names})
        return found

    def _cuts(self) -> dict[str, Placement]:
        found: dict[str, Placement] = {}
        for source in self.fold.graph.inputs:
            dim = self.inputs.get(source.name)
            if dim is not None:
                size = self.fold.graph.values[source.value].shape[dim]
                found[source.value] = Shard(dim, ((1, size, 1),))
        return found
