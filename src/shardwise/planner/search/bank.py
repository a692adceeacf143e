"""Layouts, solved when they are first asked for.

Enters: a folded model, a cluster, constraints of the user, and the memory of a device that a plan
may use. Leaves: `Works` for a number of tensor-parallel ranks, quick or lean in memory, with the
gap that the solver proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shardwise.cluster import Mesh
from shardwise.ir import Node
from shardwise.layouts.beam import assign, cut_tables
from shardwise.layouts.build import Built, build
from shardwise.layouts.factor_graph import Floats
from shardwise.layouts.options import Option, Options
from shardwise.layouts.problem import Assignment, LayoutAxis, LayoutSolution, LayoutTask, Task
from shardwise.layouts.solve import MAX_JOINT, assignments_of, solve_options
from shardwise.layouts.tie_layers import LayerTies
from shardwise.planner.search.near import nearest, nearest_lean
from shardwise.planner.search.prices import CallPrices
from shardwise.planner.strategies.fields import batch_inputs, tensor_axes
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Placement, Shard
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.fold import Fold
from shardwise.simulation.times import Group
from shardwise.simulation.works import Works, batch_rows

TIME_LIMIT_S = 60.0
TYPICAL_MICROBATCHES = 4  # for which layouts are solved; they hold for any number
LONG_ROW = 128  # elements
QUICKEST, LEAN, MIXED, LEANEST, POLISHED = range(5)  # kinds of layouts; the last and all above
WEIGHTS = {LEAN: 0.5, LEANEST: 1e4}  # what filling the memory costs there, in micro-batches


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Solved layouts, ready to be simulated."""

    works: Works
    solution: LayoutSolution
    axes: tuple[tuple[str, int], ...]  # tensor-parallel mesh axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearby:
    """Layouts under the `number` by which `Bank.get` gives them.

    `seconds` are those of nodes and of what moves between them, for one micro-batch: a step takes
    no fewer. `likely` has its part of the gradients' sums and of the optimizer, too, as a guess.
    `state_bytes` are the parameters that a rank holds and all that belongs to them; `saved_bytes`
    is what nodes keep of a micro-batch for its backward.
    """

    seconds: float
    likely: float
    number: int
    state_bytes: float
    saved_bytes: float


class _Counting(CallPrices):
    """Prices that tell the sizes of results, too."""

    def made_bytes(self, built: Built) -> dict[int, Floats]:
        """The bytes that nodes make on a rank, for every state of every variable."""
        found = {number: np.zeros(len(v)) for number, v in built.model.variables.items()}
        for node in self.graph.nodes:
            options = built.options[node.name]
            found[built.nodes[node.name]] += [self._made(node, option) for option in options]
        return found

    def _made(self, node: Node, option: Option) -> float:
        return sum(
            self._bytes(value, self._layout(placements))
            for value, placements in zip(node.outputs, option.gives, strict=True)
        )


class Bank:
    """Solves each number of tensor-parallel ranks once."""

    def __init__(
        self,
        fold: Fold,
        facts: Facts,
        evaluator: Evaluator,
        constraints: Mapping[str, Mapping[str, Placement]],
        nodes: Mapping[str, Mapping[str, str]],
        likeness: LayerTies,
        memory_limit: float | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.likeness = likeness
        usable = float(evaluator.cluster.device(0).usable_bytes)
        self.memory_bytes = usable if memory_limit is None else min(usable, memory_limit)
        self.fold, self.facts, self.evaluator = fold, facts, evaluator
        self.constraints, self.nodes, self.report = constraints, nodes, report
        self.inputs = batch_inputs(fold.graph, None)
        self.rows = batch_rows(fold.graph)
        self._found: dict[tuple[int, int], Layouts] = {}
        self._numbers: dict[tuple[int, str], int] = {}  # of layouts that `near` found
        self._batch: Assignment | None = None
        self._asked: dict[tuple[int, int], tuple[Options, CallPrices]] = {}

    def get(self, tp: int, layout: int) -> Layouts:
        """The layouts for `tp` ranks, of the kind `layout`.

        `QUICKEST`; `LEAN`, which weigh memory against time; `MIXED`, with the batch cut too;
        `LEANEST`, of which memory is nearly all that counts. From `POLISHED` on they are those of
        `near`.
        """
        key = (tp, layout)
        if key not in self._found:
            self._found[key] = self._solve(tp, layout)
        return self._found[key]

    def near(
        self,
        tp: int,
        dp: int,
        num_microbatches: int,
        group: Group,
        most: int,
        below: float,
        *,
        lean: bool = False,
    ) -> tuple[list[Nearby], bool]:
        """The likely cheapest layouts for a micro-batch of a point; with `lean` those, too, that
        are the cheapest with a price on memory.

        Of layouts that cost the same at every node there is the one whose nodes make least.
        `below` is what nodes may take, and whether there are no others below that is said too.
        """
        tensor, graph = self._tensor(tp), self.fold.graph
        task = self._task(tensor, max(1, min(self.rows, dp * num_microbatches)))
        options = Options(graph, self.facts, task)
        if options.num_joint() > MAX_JOINT:
            return [], False
        device, clock = self.evaluator.cluster.device(0), self.evaluator.clock
        prices = _Counting(graph, self.facts, task, group, device, clock, num_microbatches)
        built = build(options, prices, limit=float("inf"))
        held = {  # what parameters cost, by the variables of how they are stored
            number: built.model.variables[number].unary
            for number in {built.sources[value] for value in built.parameters}
        }
        below += sum(float(costs.max()) for costs in held.values())
        sizes = prices.made_bytes(built)
        found = nearest(built.model, most, below, built.sources.values(), sizes)
        solutions = {tuple(near.chosen.items()): near for near in found.solutions}
        for weight in WEIGHTS.values() if lean and solutions else ():
            per_byte = weight * found.solutions[0].cost / self.memory_bytes
            for near in nearest_lean(built.model, most, per_byte, built.sources.values(), sizes):
                solutions.setdefault(tuple(near.chosen.items()), near)
        nearby = []
        for near in solutions.values():
            assignments = assignments_of(task, built, near.chosen, near.cost)
            states = sum(float(built.model.variables[n].weight[near.chosen[n]]) for n in held)
            total = built.model.weigh(near.chosen)
            nearby.append(
                Nearby(
                    seconds=near.cost - sum(float(c[near.chosen[n]]) for n, c in held.items()),
                    likely=near.cost,
                    number=self._number(tp, assignments, tensor),
                    state_bytes=states,
                    saved_bytes=total - states,
                )
            )
        return nearby, found.complete

    def least_numel(self, tp: int) -> float:
        """The trained elements that a rank holds if all of them are cut."""
        trained = (p.value for p in self.fold.graph.parameters if p.requires_grad)
        return sum(prod(self.fold.graph.values[value].shape) for value in trained) / tp

    def _number(
        self, tp: int, assignments: tuple[Assignment, ...], tensor: tuple[tuple[str, int], ...]
    ) -> int:
        """The number under which `get` gives these layouts."""
        names = [axis for axis, _ in tensor]
        mine = [a for a in assignments if a.axis in names]
        text = str([[*map(str, a.nodes.values()), *map(str, a.parameters.values())] for a in mine])
        key = (tp, text)
        if key not in self._numbers:
            number = self._numbers[key] = POLISHED + len(self._numbers)
            solution = replace(self.get(tp, QUICKEST).solution, assignments=assignments)
            self._found[tp, number] = self._layouts(solution, tensor)
        return self._numbers[key]

    def _solve(self, tp: int, layout: int) -> Layouts:
        self.report(f"layouts for tp={tp}" + ("", ", lean", ", mixed", ", leanest")[layout])
        key = (tp, layout if layout in (MIXED, LEANEST) else QUICKEST)
        if key not in self._asked:
            self._asked[key] = self._problem(*key)
        options, prices = self._asked[key]
        if layout in WEIGHTS:
            cost = WEIGHTS[layout] * self.get(tp, QUICKEST).solution.cost_s
            options = options.weighing(cost / self.memory_bytes)
        solution = solve_options(options, prices, time_limit_s=TIME_LIMIT_S)
        return self._layouts(solution, self._tensor(tp))

    def _problem(self, tp: int, layout: int) -> tuple[Options, CallPrices]:
        """What nodes may do on `tp` ranks, and what it costs.

        In the leanest layouts parameters may be stored otherwise than they are used.
        """
        mixed = layout == MIXED
        tensor, cluster = self._tensor(tp), self.evaluator.cluster
        dp = max(1, min(cluster.num_ranks // tp, self.rows))
        group = Group(
            mesh=Mesh(axes=(("dp", dp), *tensor)),
            ranks=tuple(range(min(dp * tp, cluster.num_ranks))),
        )
        task = self._task(tensor, dp if mixed else self._parts(dp))
        task = replace(task, move_parameters=layout == LEANEST)
        graph = self.fold.graph
        prices = CallPrices(
            graph,
            self.facts,
            task,
            group,
            cluster.device(0),
            self.evaluator.clock,
            num_microbatches=1.0 if mixed else TYPICAL_MICROBATCHES,
        )
        return Options(graph, self.facts, task), prices

    def _layouts(self, solution: LayoutSolution, tensor: tuple[tuple[str, int], ...]) -> Layouts:
        names = [axis for axis, _ in tensor]
        roles = {a.axis: "parameters" if a.axis in names else "batch" for a in solution.assignments}
        works = Works(self.fold, self.facts, solution.assignments, roles)
        return Layouts(works=works, solution=solution, axes=tensor)

    def _tensor(self, tp: int) -> tuple[tuple[str, int], ...]:
        """The tensor-parallel mesh axes."""
        sizes = tensor_axes(self.fold.graph, self.facts, tp) if tp > 1 else ()
        return tuple((f"tp{i}" if i else "tp", n) for i, n in enumerate(sizes))

    def _task(self, tensor: tuple[tuple[str, int], ...], parts: int) -> LayoutTask:
        """The problem of a rank that has one of `parts` of the batch."""
        cuts = self._cuts()
        axes = [LayoutAxis(name=name, ranks=n) for name, n in tensor]
        if cuts:
            axes.insert(0, LayoutAxis(name="dp", ranks=parts, role="batch", inputs=cuts))
        names = tuple(axis.name for axis in axes)
        return LayoutTask(
            axes=tuple(axes),
            parameters={
                value: {a: p for a, p in placements.items() if a in names}
                for value, placements in self.constraints.items()
            },
            nodes=self._choices(cuts, parts, names) if cuts else {},
            copies=self.likeness.copies,
            moves=self.likeness.moves,
            alike=self.likeness.alike,
        )

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
