"""Layouts for tensor parallelism, solved when they are first needed, and their costs.

`LayoutCache` returns the workload of a rank for a number of tensor-parallel ranks, in a fast
variant or one that saves memory, with the optimality gap that the solver proved. `CallPrices` gives
the layout solver the simulator's costs, node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from shardwise.arrays import Floats
from shardwise.cluster import Device, Mesh
from shardwise.cost import CallCost, Signature, adamw, call_signature, cost_of, kernel_seconds
from shardwise.ir import Graph, Node, TensorType
from shardwise.layouts.beam import assign, shard_tables
from shardwise.layouts.build import Built, build
from shardwise.layouts.moves import plan_moves
from shardwise.layouts.options import Options
from shardwise.layouts.problem import (
    Assignment,
    LayoutAxis,
    LayoutSolution,
    LayoutTask,
    Placements,
    Task,
)
from shardwise.layouts.solve import MAX_JOINT, assignments_of, solve
from shardwise.planner.k_best import k_best, k_best_lean
from shardwise.planner.strategies.make import batch_inputs, tensor_axes
from shardwise.program.lower import local_call
from shardwise.redistribution import REDISTRIBUTIONS
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Layout, Placement, Replicate, Shard, local_shape
from shardwise.simulation.costs import ClusterCosts, Group, cached
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.workload import WorkloadModel, batch_rows

TIME_LIMIT_S = 60.0
TYPICAL_MICROBATCHES = 4  # for which layouts are solved; they are valid for any number
LONG_ROW = 128  # elements
FASTEST, LEAN, MIXED, LEANEST, RANKED = range(5)  # variants; ids >= RANKED come from `k_best`
WEIGHTS = {LEAN: 0.5, LEANEST: 1e4}  # price of filling the memory, in micro-batches


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Solved layouts, ready to be simulated."""

    workloads: WorkloadModel
    solution: LayoutSolution
    axes: tuple[tuple[str, int], ...]  # tensor-parallel mesh axes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayouts:
    """Layouts that `LayoutCache.get` returns as the variant `number`.

    `seconds` is a lower bound on the time of a micro-batch: that of its nodes and redistributions.
    `likely` adds a guess of its part of gradient reductions and of the optimizer. `state_bytes`
    are a rank's parameters, gradients and optimizer state; `saved_bytes` is saved for backward.
    """

    seconds: float
    likely: float
    number: int
    state_bytes: float
    saved_bytes: float


class LayoutCache:
    """Solve the layouts of each number of tensor-parallel ranks once."""

    def __init__(
        self,
        fold: FoldedGraph,
        facts: Facts,
        evaluator: Evaluator,
        constraints: Mapping[str, Mapping[str, Placement]],
        ties: LayoutTask,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ties = ties
        usable = float(evaluator.cluster.device(0).usable_bytes)
        self.memory_bytes = min(usable, evaluator.memory_limit)
        self.fold, self.facts, self.evaluator = fold, facts, evaluator
        self.constraints, self.report = constraints, report
        self.inputs = batch_inputs(fold.graph, None)
        self.rows = batch_rows(fold.graph)
        self._full: LayoutCache | None = None  # the cache of the full batch, for `with_rows`
        self._solved: dict[tuple[int, int], Layouts] = {}
        self._numbers: dict[tuple[int, str], int] = {}  # variants from `k_best`
        self._batch: Assignment | None = None
        self._problems: dict[tuple[int, int], tuple[Options, CallPrices]] = {}

    def get(self, tp: int, layout: int) -> Layouts:
        """Return the layouts for `tp` ranks, of the variant `layout`.

        `FASTEST` minimizes time, `LEAN` weighs memory against time, `MIXED` also shards the batch,
        and `LEANEST` minimizes memory.
        """
        key = (tp, layout)
        if key not in self._solved:
            if self._full is None:
                self._solved[key] = self._solve(tp, layout)
            else:
                layouts = self._full.get(tp, layout)
                fewer = layouts.workloads.with_rows(self.rows)
                self._solved[key] = replace(layouts, workloads=fewer)
        return self._solved[key]

    def k_best(
        self, tp: int, dp: int, num_microbatches: int, group: Group, k: int, below: float
    ) -> tuple[list[RankedLayouts], bool]:
        """Return the likely cheapest layouts for a micro-batch, with and without a price on memory.

        The second value is True if no other layouts take less than `below` in their nodes. Of
        layouts that cost the same at every node, only the one with the smallest results is
        returned.
        """
        tensor = self._tensor(tp)
        task = self._task(tensor, max(1, min(self.rows, dp * num_microbatches)))
        options, prices = self._priced(task, group, num_microbatches)
        if options.num_joint() > MAX_JOINT:
            return [], False
        built = build(options, prices)
        stored = {  # costs of parameters, by the variable of how they are stored
            number: built.model.variables[number].unary
            for number in {built.sources[value] for value in built.parameters}
        }
        below += sum(float(c.max()) for c in stored.values())
        sizes = prices.made_bytes(built)
        cheapest = k_best(built.model, k, below, built.sources.values(), sizes)
        solutions = {tuple(choice.chosen.items()): choice for choice in cheapest.solutions}
        for weight in WEIGHTS.values() if solutions else ():
            per_byte = weight * cheapest.solutions[0].cost / self.memory_bytes
            for choice in k_best_lean(built.model, k, per_byte, built.sources.values(), sizes):
                solutions.setdefault(tuple(choice.chosen.items()), choice)
        ranked = []
        for choice in solutions.values():
            chosen = choice.chosen
            assignments = assignments_of(task, built, chosen, choice.cost)
            states = sum(float(built.model.variables[n].weight[chosen[n]]) for n in stored)
            ranked.append(
                RankedLayouts(
                    seconds=choice.cost - sum(float(c[chosen[n]]) for n, c in stored.items()),
                    likely=choice.cost,
                    number=self._number(tp, assignments, tensor),
                    state_bytes=states,
                    saved_bytes=built.model.weigh(chosen) - states,
                )
            )
        return ranked, cheapest.complete

    def min_numel(self, tp: int) -> float:
        """Return the number of trained elements on a rank if all parameters are sharded."""
        trained = (p.value for p in self.fold.graph.parameters if p.requires_grad)
        return sum(prod(self.fold.graph.values[value].shape) for value in trained) / tp

    def _number(
        self, tp: int, assignments: tuple[Assignment, ...], tensor: tuple[tuple[str, int], ...]
    ) -> int:
        """Return the variant under which `get` returns these layouts."""
        names = [axis for axis, _ in tensor]
        texts = [
            [*map(str, a.nodes.values()), *map(str, a.parameters.values())]
            for a in assignments
            if a.axis in names
        ]
        key = (tp, str(texts))
        if key not in self._numbers:
            number = self._numbers[key] = RANKED + len(self._numbers)
            solution = replace(self.get(tp, FASTEST).solution, assignments=assignments)
            self._solved[tp, number] = self._layouts(solution, tensor)
        return self._numbers[key]

    def with_rows(self, rows: int) -> LayoutCache:
        """Return a cache of the same layouts for a batch of fewer rows."""
        smaller = copy(self)
        smaller.rows, smaller._full, smaller._solved = rows, self, {}
        return smaller

    def _solve(self, tp: int, layout: int) -> Layouts:
        self.report(f"layouts for tp={tp}" + ("", ", lean", ", mixed", ", leanest")[layout])
        key = (tp, layout if layout in (MIXED, LEANEST) else FASTEST)
        if key not in self._problems:
            self._problems[key] = self._problem(*key)
        options, prices = self._problems[key]
        if layout in WEIGHTS:
            cost = WEIGHTS[layout] * self.get(tp, FASTEST).solution.cost_s
            options = options.weighing(cost / self.memory_bytes)
        solution = solve(options, prices, time_limit_s=TIME_LIMIT_S)
        return self._layouts(solution, self._tensor(tp))

    def _problem(self, tp: int, layout: int) -> tuple[Options, CallPrices]:
        """Return the options of nodes on `tp` ranks, and their prices.

        In the leanest layouts, parameters may be stored in a layout other than that of their use.
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
        return self._priced(task, group, 1.0 if mixed else TYPICAL_MICROBATCHES)

    def _priced(
        self, task: LayoutTask, group: Group, num_microbatches: float
    ) -> tuple[Options, CallPrices]:
        graph, device = self.fold.graph, self.evaluator.cluster.device(0)
        costs = self.evaluator.costs
        prices = CallPrices(graph, self.facts, task, group, device, costs, num_microbatches)
        return Options(graph, self.facts, task), prices

    def _layouts(self, solution: LayoutSolution, tensor: tuple[tuple[str, int], ...]) -> Layouts:
        names = [axis for axis, _ in tensor]
        roles = {a.axis: "parameters" if a.axis in names else "batch" for a in solution.assignments}
        workloads = WorkloadModel(self.fold, self.facts, solution.assignments, roles)
        return Layouts(workloads=workloads, solution=solution, axes=tensor)

    def _tensor(self, tp: int) -> tuple[tuple[str, int], ...]:
        """Return the tensor-parallel mesh axes."""
        sizes = tensor_axes(self.fold.graph, self.facts, tp) if tp > 1 else ()
        return tuple((f"tp{i}" if i else "tp", n) for i, n in enumerate(sizes))

    def _task(self, tensor: tuple[tuple[str, int], ...], parts: int) -> LayoutTask:
        """Return the layout problem of a rank that has one of `parts` parts of the batch."""
        shards = self._input_shards()
        axes = [LayoutAxis(name=name, ranks=n) for name, n in tensor]
        if shards:
            axes.insert(0, LayoutAxis(name="dp", ranks=parts, role="batch", inputs=shards))
        names = tuple(axis.name for axis in axes)
        return replace(
            self.ties,
            axes=tuple(axes),
            parameters={
                value: {a: p for a, p in placements.items() if a in names}
                for value, placements in self.constraints.items()
            },
            nodes=self._batch_choices(shards, parts) if shards else {},
        )

    def _parts(self, dp: int) -> int:
        """Return the number of parts of the batch; layouts are solved for one part.

        A part is one row if rows are long, as in language models, else a typical micro-batch.
        """
        shapes = [self.fold.graph.values[i.value].shape for i in self.fold.graph.inputs]
        longest = max((prod(shape[1:]) for shape in shapes if shape), default=1)
        if longest >= LONG_ROW:
            return self.rows
        return min(self.rows, dp * TYPICAL_MICROBATCHES)

    def _batch_choices(
        self, shards: Mapping[str, Placement], parts: int
    ) -> dict[str, dict[str, str]]:
        """Return the choice of every node on "dp", which shards the batch where possible.

        No choice is cheaper: the axis replicates parameters, so the only alternative is to do the
        same work on every rank.
        """
        if self._batch is None:
            task = Task(axis="dp", ranks=parts, inputs=shards)
            graph, facts = self.fold.graph, self.facts
            (self._batch,) = shard_tables(graph, facts, (assign(graph, facts, task),), {})
        return {name: {"dp": str(c.choice)} for name, c in self._batch.nodes.items()}

    def _input_shards(self) -> dict[str, Placement]:
        values = self.fold.graph.values
        return {
            source.value: Shard(dim, ((1, values[source.value].shape[dim], 1),))
            for source in self.fold.graph.inputs
            if (dim := self.inputs.get(source.name)) is not None
        }


EXPOSED = 0.3  # a guess: the fraction of gradient reductions that backward does not hide
Call = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]  # operator, arguments, keywords


class CallPrices:
    """Seconds of one micro-batch on one rank, node by node, for the layout solver.

    The mesh of `task` determines shapes: its batch axis stands for data parallelism and
    micro-batches together. `group` has the ranks that communicate. Costs that occur once a step
    count `1 / num_microbatches`.
    """

    def __init__(
        self,
        graph: Graph,
        facts: Facts,
        task: LayoutTask,
        group: Group,
        device: Device,
        costs: ClusterCosts,
        num_microbatches: float,
    ) -> None:
        self.graph, self.facts, self.device, self.costs = graph, facts, device, costs
        self.group, self.num_microbatches = group, num_microbatches
        self.names = task.names
        self.sizes = task.sizes
        self.coordinate = {axis.name: (0, axis.ranks) for axis in task.axes}
        self.parameters = {p.value: p for p in graph.parameters}
        self.local_values = {i.value for i in graph.inputs} | {b.value for b in graph.buffers}
        self.local_values |= {c.value for c in graph.constants}
        self._kinds: dict[str, Signature] = {}
        self._costs: dict[tuple[Signature, tuple[Candidate, ...]], CallCost] = {}

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Return the seconds of forward and backward of a node on its local shapes."""
        cost = self._cost(node, choice)
        seconds = sum(kernel_seconds(k, self.device) for k in (*cost.forward, *cost.backward))
        for collective in (*cost.collectives, *cost.backward_collectives):
            seconds += self.costs.collective_seconds(
                collective.op, self.group, collective.axes, collective.num_bytes
            )
        return seconds

    def move(self, value: str, current: Placements, needed: Placements, grad: bool) -> float:
        """Return the seconds of a redistribution in forward, and with `grad` in backward."""
        seconds = 0.0
        kind = self.graph.values[value]
        layouts = self._layout(current), self._layout(needed)
        for move in plan_moves(*layouts, self.sizes, grad, kind):
            entry = REDISTRIBUTIONS[move.fn]
            before, after = self._bytes(value, move.before), self._bytes(value, move.layout)
            size = entry.num_bytes(before, after)
            for op in (entry.forward.collective, entry.backward.collective if grad else ""):
                if op and value not in self.local_values:
                    seconds += self.costs.collective_seconds(op, self.group, move.axes, size)
        return seconds

    def store(self, parameter: str, stored: Placements) -> float:
        """Return the seconds of a gradient's reduction and the optimizer, per micro-batch."""
        entry = self.parameters[parameter]
        layout = self._layout(stored)
        sync = tuple(
            a
            for a, p in layout.axes
            if isinstance(p, Replicate) and p.partial_grad and self.sizes[a] != 1
        )
        size = self._bytes(entry.value, layout)
        if not entry.requires_grad:
            return 0.0
        seconds = EXPOSED * self.costs.collective_seconds("all_reduce", self.group, sync, size)
        numel = size / self.graph.values[entry.value].dtype.itemsize
        update = self.costs.update(self.device, numel, numel, 1)
        if update is None:
            update = adamw.fused_seconds(numel, self.device, calls=0)
        return (seconds + update) / self.num_microbatches

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        """Return the bytes of a parameter with its gradient and optimizer state."""
        entry = self.parameters[parameter]
        kind = self.graph.values[entry.value].dtype.itemsize
        size = self._bytes(entry.value, self._layout(stored))
        return size + (adamw.STATE_BYTES * size / kind if entry.requires_grad else 0.0)

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Return the bytes that a node saves for backward, besides its operands."""
        cost = self._cost(node, choice)
        return float(sum(s.num_bytes for s in cost.saved if s.operand is None))

    def made_bytes(self, built: Built) -> dict[int, Floats]:
        """Return the bytes that nodes produce on a rank, for every state of every variable."""
        sizes = {number: np.zeros(len(v)) for number, v in built.model.variables.items()}
        for node in self.graph.nodes:
            for position, value in enumerate(node.outputs):
                layouts = (self._layout(o.gives[position]) for o in built.options[node.name])
                sizes[built.nodes[node.name]] += [self._bytes(value, layout) for layout in layouts]
        return sizes

    def _layout(self, placements: Placements) -> Layout:
        return Layout(tuple(zip(self.names, placements, strict=True)))

    def _bytes(self, value: str, layout: Layout) -> float:
        kind = self.graph.values[value]
        return float(prod(local_shape(layout, kind.shape, self.coordinate)) * kind.dtype.itemsize)

    def _cost(self, node: Node, choice: tuple[Candidate, ...]) -> CallCost:
        """Return the cost of a node's call on its local shapes, computed once for equal nodes."""
        if node.name not in self._kinds:
            values = self.graph.values
            kinds = [[values[n] for n in names] for names in (node.inputs, node.outputs)]
            self._kinds[node.name] = self._signature(node, (node.op, node.args, node.kwargs), kinds)
        key = (self._kinds[node.name], choice)
        return cached(self._costs, key, lambda: self._find_cost(node, choice))

    def _signature(self, node: Node, call: Call, kinds: list[list[TensorType]]) -> Signature:
        """Return the signature of a node's call with these types of operands and of results."""
        (operands, results), grads = kinds, self.facts.carries_grad
        trained = node.grad_enabled and any(o in grads for o in node.outputs)
        return call_signature(
            *call,
            operands,
            frozenset(i for i, n in enumerate(node.inputs) if trained and n in grads),
            frozenset(i for i, n in enumerate(node.inputs) if n in self.parameters),
            results=results,
            autocast=node.autocast,
            function=self.graph.functions.get(call[0]),
            device=self.device.kind,
        )

    def _find_cost(self, node: Node, choice: tuple[Candidate, ...]) -> CallCost:
        needs = tuple(
            self._layout(tuple(c.operands[i] for c in choice)) for i in range(len(node.inputs))
        )
        gives = tuple(
            self._layout(tuple(c.results[i] for c in choice)) for i in range(len(node.outputs))
        )
        call = local_call(
            node,
            self.facts,
            self.graph.values,
            [(axis, c.choice) for axis, c in zip(self.names, choice, strict=True)],
            needs,
            gives,
            self.coordinate,
        )
        pairs = ((node.inputs, needs), (node.outputs, gives))
        kinds = [[self._local(n, p) for n, p in zip(*pair, strict=True)] for pair in pairs]
        return cost_of(self._signature(node, (call.fn, call.args, call.kwargs), kinds))

    def _local(self, value: str, layout: Layout) -> TensorType:
        kind = self.graph.values[value]
        shape = local_shape(layout, kind.shape, self.coordinate)
        return replace(kind, shape=shape).expected
