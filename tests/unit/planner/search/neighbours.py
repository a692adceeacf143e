"""Figures of all layouts of a graph, put together from a few lowered ones.

All layouts are the union of `Family`s, each a product of choices of the nodes; `Figures` has the
times and parameters of all members of a family.

The time of a node depends on its own choice and on those of its neighbours: the nodes that make its
operands, the nodes that used them before (a redistribution serves all uses), and all users of a
parameter, which is stored in one layout for all of them. Sharding an input costs nothing. There is
one exception: values that every rank computes from parameters alone (`same`) leave the reduction of
their gradients to the parameters if all work at their end differs, so that work and its ends are
one neighbourhood. In a family, `same` is fixed. Layouts are lowered until every choice of every
neighbourhood has occurred in one of them: some hundreds, where there are hundreds of thousands.

For a number of rows, `WorkloadModel.at` returns the figures of that program, or of a line through
two others if the entire layout is on such a line. If that makes the figures of any neighbourhood
differ between two layouts, the minimum over all these programs is used; the figures are then lower
bounds (not `is_exact`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from shardwise.arrays import float_arrays
from shardwise.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.sharding.candidates import Candidate, Pass, Same, candidates
from shardwise.sharding.factors import analyze
from shardwise.simulation.costs import ExecutionConfig
from shardwise.simulation.estimate import Evaluator, workloads_of
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.stages import Layers
from shardwise.simulation.workload import Workload, WorkloadModel
from tests.unit.planner.search.execution_space import Kind, plan_of

LINES = ((2, 4), (1, 2), (4, 8))  # rows of programs between which `WorkloadModel.at` interpolates
EXACT, TINY = 1e-9, 1e-15  # relative, and seconds
TIMES = ("forward", "backward", "weight")
TRIALS = 4  # layouts in which a neighbourhood is tried before it counts as impossible
Choices = tuple[int, ...]  # the numbers of the choices of all nodes of a graph
Key = tuple[int, Choices, Choices]  # a node, its neighbours, their choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The layouts in which the choice of every node is in its domain."""

    domains: tuple[Choices, ...]
    members: tuple[Choices, ...]  # the neighbourhood of every node

    @property
    def size(self) -> int:
        return int(np.prod([len(d) for d in self.domains]))

    def key(self, node: int, choices: Sequence[int]) -> Key:
        members = self.members[node]
        return (node, members, tuple(choices[i] for i in members))

    def keys(self, node: int) -> Iterator[Key]:
        """Yield all choices of a neighbourhood, in the order of its table."""
        members = self.members[node]
        for chosen in product(*(self.domains[i] for i in members)):
            yield (node, members, chosen)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of every node (second to last dim) of layouts (last dim), for a micro-batch.

    `times` are the seconds of forward, backward and weight, for every class of ranks.
    """

    times: np.ndarray
    numel: np.ndarray  # elements on a rank of the parameters that a node is the first to use
    storage: np.ndarray  # a number, equal for parameters that are stored and reduced equally
    lowered: np.ndarray  # 0 where no lowered layout has these choices

    def fastest(self, which: int) -> np.ndarray:
        """Return the seconds of every node on the fastest class of ranks."""
        seconds: np.ndarray = self.times[which::3].min(axis=0)
        return seconds

    def select(self, layouts: np.ndarray) -> Figures:
        """Return the figures of some of the layouts."""
        fields = (self.times, self.numel, self.storage, self.lowered)
        return Figures(*(field[..., layouts] for field in fields))

    @property
    def rows(self) -> np.ndarray:
        """All figures, with a column for every layout."""
        parts = (*self.times, self.numel, self.storage, self.lowered)
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


class _FixedRows(WorkloadModel):
    """A model that returns the program of exactly these rows, or one on a line through others."""

    def __init__(self, workloads: WorkloadModel, line: tuple[int, int] | None) -> None:
        super().__init__(workloads.fold, workloads.facts, workloads.assignments, workloads.roles)
        self.workloads, self.line = workloads, line

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        if self.line is None or not self.workloads.batch:
            return self.workloads.at(rows, exact=True)
        one, two = (self.workloads.at(r, exact=True) for r in self.line)
        if one.rows < two.rows and one.has_same_calls(two):
            return one.between(two, rows)
        return self.workloads.at(rows)


class Neighbours:
    """The figures of all layouts, for one number of tensor-parallel ranks."""

    def __init__(self, graph: Graph, cluster: Cluster, tp: int) -> None:
        self.graph, self.cluster, self.tp = graph, cluster, tp
        facts = analyze(graph)
        self.carries = facts.carries_grad
        self.parameters = {p.value for p in graph.parameters}
        self.rows = [
            self._useful(i, candidates(facts.rules[n.name], facts.structures[n.name]))
            for i, n in enumerate(graph.nodes)
        ]
        self.makers = {name: i for i, n in enumerate(graph.nodes) for name in n.outputs}
        self.users: dict[str, set[int]] = {}
        for i, node in enumerate(graph.nodes):
            for name in node.inputs:
                self.users.setdefault(name, set()).add(i)
        self._workloads: dict[Choices, WorkloadModel | None] = {}
        self._evaluators: dict[object, Evaluator] = {}
        self._storage: dict[object, int] = {}
        self._parameters: dict[WorkloadModel, tuple[np.ndarray, np.ndarray]] = {}
        self._parts: dict[Kind, dict[Key, np.ndarray]] = {}
        self._variants: dict[Choices, list[WorkloadModel]] = {}
        self.is_exact: dict[Kind, bool] = {}  # whether `parts` are exact, not lower bounds
        self.lowered = 0

    def _useful(self, index: int, choices: tuple[Candidate, ...]) -> list[Candidate]:
        """Return all choices except to pass on partial sums that no operand has.

        Parameters and inputs are never partial sums, only the results of nodes can be.
        """
        made = {name for node in self.graph.nodes[:index] for name in node.outputs}
        inputs = self.graph.nodes[index].inputs
        return [
            c
            for c in choices
            if not isinstance(c.choice, Pass) or any(inputs[i] in made for i in c.choice.operands)
        ]

    # ------------------------------------------------------------ layouts

    @cached_property
    def unsharded(self) -> Evaluator:
        """An evaluator for schedules, devices and messages of the cluster."""
        return Evaluator(FoldedGraph.of(self.graph), self.cluster)

    def evaluator(self, workloads: WorkloadModel) -> Evaluator:
        """Return the evaluator of all layouts that fold equally."""
        key = (workloads.fold.order, tuple(n.name for n in workloads.fold.graph.nodes))
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(workloads.fold, self.cluster)
        return self._evaluators[key]

    def plan(self, choices: Choices) -> Plan:
        """Return the plan of a layout; parameters are stored as their first use needs."""
        chosen = [row[c] for row, c in zip(self.rows, choices, strict=True)]
        return plan_of(self.graph, chosen if self.tp > 1 else (), self.tp)

    def workloads(self, choices: Choices) -> WorkloadModel | None:
        """Return the workload of a layout, or None if its choices are incompatible."""
        if choices not in self._workloads:
            self.lowered += 1
            try:
                model = next(iter(workloads_of(self.graph, self.plan(choices))[1].values()))
                model.at(1)
            except ShardwiseError:
                model = None
            self._workloads[choices] = model
        return self._workloads[choices]

    def layers(self, workloads: WorkloadModel, kind: Kind) -> list[Layers]:
        """Return the layers of every class of ranks, for a micro-batch."""
        execution = ExecutionConfig(
            groups=kind.groups, cuts=(0,), placement=(0,), num_microbatches=kind.num_microbatches
        )
        evaluator = self.evaluator(workloads)
        layers = [
            one for g in range(kind.pp) for one in evaluator.group_layers(workloads, execution, g)
        ]
        return list({id(one): one for one in layers}.values())

    def crosses(self) -> np.ndarray:
        """Return for every boundary whether a value that carries a gradient would be sent."""
        crosses = np.zeros(len(self.rows), dtype=bool)
        for name, maker in self.makers.items():
            if name in self.carries:
                crosses[maker + 1 : max(self.users.get(name, {maker})) + 1] = True
        return crosses

    def result_layouts(self, choices: np.ndarray) -> np.ndarray:
        """Return a number for the result layouts of every node (row), in layouts (columns)."""
        results = np.zeros(choices.shape)
        for node, row in enumerate(self.rows):
            numbers: dict[object, int] = {}
            by_choice = [numbers.setdefault(c.results, len(numbers)) for c in row]
            results[node] = np.array(by_choice)[choices[node]]
        return results

    # ------------------------------------------------------------ neighbourhoods

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """All layouts, by the nodes that every rank computes from parameters alone."""
        if self.tp == 1:
            nodes = range(len(self.rows))
            return (Family(domains=((0,),) * len(self.rows), members=tuple((i,) for i in nodes)),)
        return tuple(self._family(domains, same) for domains, same in self._split((), frozenset()))

    def _split(
        self, domains: tuple[Choices, ...], same: frozenset[int]
    ) -> Iterator[tuple[tuple[Choices, ...], frozenset[int]]]:
        at = len(domains)
        if at == len(self.rows):
            yield domains, same
            return
        numbers = tuple(range(len(self.rows[at])))
        carrying = [name for name in self.graph.nodes[at].inputs if name in self.carries]
        made = {self.makers[name] for name in carrying if name in self.makers}
        if not carrying or not made <= same:
            yield from self._split((*domains, numbers), same)
            return
        assert isinstance(self.rows[at][0].choice, Same)
        yield from self._split((*domains, numbers[:1]), same | {at})
        if numbers[1:]:
            yield from self._split((*domains, numbers[1:]), same)

    def _family(self, domains: tuple[Choices, ...], same: frozenset[int]) -> Family:
        tied = set(same)
        for node in same:
            for name in self.graph.nodes[node].outputs:
                tied |= self.users.get(name, set())
        return Family(
            domains=domains,
            members=tuple(
                tuple(sorted(self._near(i) | (tied if i in tied else set())))
                for i in range(len(domains))
            ),
        )

    def _near(self, index: int) -> set[int]:
        neighbours = {index}
        for name in self.graph.nodes[index].inputs:
            if name in self.makers:
                neighbours |= {self.makers[name], *(i for i in self.users[name] if i < index)}
            elif name in self.parameters:
                neighbours |= self.users[name]
        return neighbours

    @cached_property
    def examples(self) -> dict[Key, list[Choices]]:
        """Lowered layouts for every neighbourhood; none if it cannot be lowered."""
        examples: dict[Key, list[Choices]] = {}
        rng = random.Random(0)
        for family in self.families:
            nodes = range(len(family.domains))
            open_ = [[key for key in family.keys(i) if key not in examples] for i in nodes]
            tries: dict[Key, int] = {}
            while any(open_):
                choices, first = _covering(family, open_, rng)
                lowered = self.workloads(choices) is not None
                for i in nodes if lowered else ():
                    examples.setdefault(family.key(i, choices), []).append(choices)
                tries[first] = tries.get(first, 0) + 1
                if tries[first] == TRIALS:
                    examples.setdefault(first, [])
                open_ = [[key for key in keys if key not in examples] for keys in open_]
        return examples

    # ------------------------------------------------------------ figures

    def figures(self, choices: Choices, kind: Kind) -> np.ndarray:
        """Return the figures (rows, as in `Figures`) of a lowered layout's nodes (columns)."""
        workloads = self.workloads(choices)
        assert workloads is not None
        return self._figures(workloads, workloads, kind)

    def _figures(self, workloads: WorkloadModel, variant: WorkloadModel, kind: Kind) -> np.ndarray:
        classes = self.layers(variant, kind)
        times = [np.diff(one.sums[name]) for one in classes for name in TIMES]
        if workloads not in self._parameters:  # they do not depend on the rows
            self._parameters[workloads] = self._find_parameters(classes[0])
        return np.stack([*times, *self._parameters[workloads], np.ones(len(self.rows))])

    def _find_parameters(self, layers: Layers) -> tuple[np.ndarray, np.ndarray]:
        """Return the elements that a node is the first to use, and a number for their storage."""
        execution = ExecutionConfig(groups=(), cuts=(0,), placement=(0,))
        numel, storage = np.zeros(len(self.rows)), [list[object]() for _ in self.rows]
        for (axes, _, itemsize, _), share in layers.parameters(execution).items():
            numel += np.diff(share.numel)
            columns = [np.diff(getattr(share, name)) for name in float_arrays(type(share))]
            for i, values in enumerate(zip(*columns, strict=True)):
                if any(values):
                    storage[i].append((axes, itemsize, values))
        numbers = [self._storage.setdefault(tuple(sorted(s)), len(self._storage)) for s in storage]
        return numel, np.array(numbers, dtype=np.float64)

    def _min_figures(self, choices: Choices, kind: Kind) -> np.ndarray:
        """Return lower bounds on the simulator's figures for these nodes in any layout."""
        workloads = self.workloads(choices)
        assert workloads is not None
        if choices not in self._variants:
            fixed = [_FixedRows(workloads, line) for line in (None, *LINES)]
            self._variants[choices] = [workloads, *fixed]
        variants = self._variants[choices]
        return np.min([self._figures(workloads, v, kind) for v in variants], axis=0)

    def parts(self, kind: Kind) -> dict[Key, np.ndarray]:
        """Return the figures of every neighbourhood."""
        if kind not in self._parts:
            collected = self._collected(self.figures, kind)
            self.is_exact[kind] = all(
                np.allclose(rows.min(axis=0), rows.max(axis=0), rtol=EXACT, atol=TINY)
                for rows in collected.values()
            )
            if not self.is_exact[kind]:
                collected = self._collected(self._min_figures, kind)
            self._parts[kind] = {key: rows.min(axis=0) for key, rows in collected.items()}
        return self._parts[kind]

    def _collected(
        self, figures: Callable[[Choices, Kind], np.ndarray], kind: Kind
    ) -> dict[Key, np.ndarray]:
        """Return the figures of every neighbourhood in all its lowered layouts."""
        lowered = {c for layouts in self.examples.values() for c in layouts}
        by_layout = {c: figures(c, kind) for c in lowered}
        return {
            key: np.stack([by_layout[c][:, key[0]] for c in layouts])
            for key, layouts in self.examples.items()
            if layouts
        }

    def tables(self, family: Family, kind: Kind) -> list[np.ndarray]:
        """Return the figures (rows) of every node, by choices of its neighbourhood (columns)."""
        parts = self.parts(kind)
        unknown = np.zeros(len(next(iter(parts.values()))))
        return [
            np.stack([parts.get(key, unknown) for key in family.keys(i)], axis=1)
            for i in range(len(family.domains))
        ]


def _covering(
    family: Family, open_: Sequence[Sequence[Key]], rng: random.Random
) -> tuple[Choices, Key]:
    """Return a layout with new neighbourhoods, and the first of these."""
    chosen: dict[int, int] = {}
    first: Key | None = None
    for keys in sorted(open_, key=len, reverse=True):
        fitting = [
            key
            for key in keys
            if all(chosen.get(i, c) == c for i, c in zip(key[1], key[2], strict=True))
        ]
        if fitting:
            key = rng.choice(fitting)
            first = first or key
            chosen.update(zip(key[1], key[2], strict=True))
    assert first is not None
    return tuple(chosen.get(i, rng.choice(d)) for i, d in enumerate(family.domains)), first


def figures_of(
    family: Family, tables: Sequence[np.ndarray], first: int, end: int
) -> tuple[np.ndarray, Figures]:
    """Return the choices (a row for every node) and figures of layouts `first:end` of a family."""
    sizes = [len(d) for d in family.domains]
    places = np.unravel_index(np.arange(first, end), sizes)
    choices = np.stack([np.array(d)[p] for d, p in zip(family.domains, places, strict=True)])
    rows = []
    for table, members in zip(tables, family.members, strict=True):
        at = np.ravel_multi_index([places[j] for j in members], [sizes[j] for j in members])
        rows.append(table[:, at])
    figures = np.stack(rows, axis=1)
    numel, storage, lowered = figures[-3:]
    return choices, Figures(times=figures[:-3], numel=numel, storage=storage, lowered=lowered)
