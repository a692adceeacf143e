"""What nodes take by their neighbourhoods: all layouts of a graph from a few lowered ones.

Enters: a graph, a cluster, a number of tensor-parallel ranks. Leaves: `Family`s, which are products
of choices that together are all layouts, and `Figures` of all their members.

What a node takes depends on its own choice and on those of its neighbours: who makes its operands,
who used them before (a conversion serves all uses), and who else uses a parameter, as that is held
for all of them; parts of inputs cost nothing. That is all but for one case: values that come from
parameters by the same work on all ranks (`same`) leave the sum of their gradients to the
parameters if all work at their end differs; so that work and its ends are one neighbourhood. In a
family `same` is fixed. Layouts are lowered until every choice of every neighbourhood has been seen
in one of them, which are some hundreds where layouts are hundreds of thousands.

For a number of rows `WorkloadModel.at` has the figures of the very program, or of one on a line
through two others, by whether the whole layout is on such a line. Where that made the figures of
any neighbourhood differ between two layouts, the least of all these programs' are taken: then they
are bounds (not `is_exact`).
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
from tests.unit.planner.search.tried import Kind, plan_of

LINES = ((2, 4), (1, 2), (4, 8))  # rows of programs between which `WorkloadModel.at` interpolates
EXACT, TINY = 1e-9, 1e-15  # relative, and seconds
TIMES = ("forward", "backward", "weight")
TRIALS = 4  # layouts in which a neighbourhood is tried that cannot be lowered
Choices = tuple[int, ...]  # of all nodes of a graph, by number
Key = tuple[int, Choices, Choices]  # a node, its neighbours, their choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The layouts in which every node takes one of its `domains`."""

    domains: tuple[Choices, ...]
    members: tuple[Choices, ...]  # the neighbourhood of every node

    @property
    def size(self) -> int:
        return int(np.prod([len(d) for d in self.domains]))

    def key(self, node: int, choices: Sequence[int]) -> Key:
        mine = self.members[node]
        return (node, mine, tuple(choices[i] for i in mine))

    def keys(self, node: int) -> Iterator[Key]:
        """All choices of a neighbourhood, in the order of a table of them."""
        mine = self.members[node]
        for chosen in product(*(self.domains[i] for i in mine)):
            yield (node, mine, chosen)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of layouts (last dim): what each of their nodes (dim before it) takes for a micro-batch.

    `times` are seconds of forward, backward and weight, for every class of ranks; where ranks
    differ, no node of any of them takes less than the least.
    """

    times: np.ndarray
    numel: np.ndarray  # of the parameters of which a node is the first user, on a rank
    held: np.ndarray  # a number: the same for parameters that are held and summed alike
    known: np.ndarray  # 0 where a node cannot be lowered so, as far as is known

    def least(self, which: int) -> np.ndarray:
        """Seconds of every node on the quickest class of ranks."""
        found: np.ndarray = self.times[which::3].min(axis=0)
        return found

    def only(self, kept: np.ndarray) -> Figures:
        """Of some of the layouts."""
        fields = (self.times, self.numel, self.held, self.known)
        return Figures(*(field[..., kept] for field in fields))

    @property
    def rows(self) -> np.ndarray:
        """Everything, a column for every layout."""
        parts = (*self.times, self.numel, self.held, self.known)
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


class _Asked(WorkloadModel):
    """A model that gives the program of the very rows, or one on a line through others."""

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
        self._works: dict[Choices, WorkloadModel | None] = {}
        self._evaluators: dict[object, Evaluator] = {}
        self._held: dict[object, int] = {}
        self._stored: dict[WorkloadModel, tuple[np.ndarray, np.ndarray]] = {}
        self._parts: dict[Kind, dict[Key, np.ndarray]] = {}
        self._asked: dict[Choices, list[WorkloadModel]] = {}
        self.is_exact: dict[Kind, bool] = {}  # whether `parts` are figures, or bounds of them
        self.lowered = 0

    def _useful(self, index: int, found: tuple[Candidate, ...]) -> list[Candidate]:
        """All but passing on sums that no operand has: the same work on all ranks, and a sum more.

        Parameters and inputs are whole; only a node's result can be a part of a sum.
        """
        made = {name for node in self.graph.nodes[:index] for name in node.outputs}
        inputs = self.graph.nodes[index].inputs
        return [
            c
            for c in found
            if not isinstance(c.choice, Pass) or any(inputs[i] in made for i in c.choice.operands)
        ]

    # ------------------------------------------------------------ layouts

    @cached_property
    def whole(self) -> Evaluator:
        """Of the cluster's figures: schedules, devices, messages."""
        return Evaluator(FoldedGraph.of(self.graph), self.cluster)

    def evaluator(self, workloads: WorkloadModel) -> Evaluator:
        """For layouts that fold alike: layers that choose otherwise are not folded."""
        key = (workloads.fold.order, tuple(n.name for n in workloads.fold.graph.nodes))
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(workloads.fold, self.cluster)
        return self._evaluators[key]

    def plan(self, choices: Choices) -> Plan:
        """The plan of a layout; parameters are stored as their first use asks."""
        chosen = [row[c] for row, c in zip(self.rows, choices, strict=True)]
        return plan_of(self.graph, chosen if self.tp > 1 else (), self.tp)

    def workloads(self, choices: Choices) -> WorkloadModel | None:
        """The work of a layout; None where its choices do not go together."""
        if choices not in self._works:
            self.lowered += 1
            try:
                found = next(iter(workloads_of(self.graph, self.plan(choices))[1].values()))
                found.at(1)
            except ShardwiseError:
                found = None
            self._works[choices] = found
        return self._works[choices]

    def layers(self, workloads: WorkloadModel, kind: Kind) -> list[Layers]:
        """What every class of ranks does for a micro-batch."""
        execution = ExecutionConfig(
            groups=kind.groups, cuts=(0,), placement=(0,), num_microbatches=kind.num_microbatches
        )
        evaluator = self.evaluator(workloads)
        found = [
            one for g in range(kind.pp) for one in evaluator.group_layers(workloads, execution, g)
        ]
        return list({id(one): one for one in found}.values())

    def crosses(self) -> np.ndarray:
        """For every place to cut whether anything would be sent that carries a gradient."""
        found = np.zeros(len(self.rows), dtype=bool)
        for name, maker in self.makers.items():
            if name in self.carries:
                found[maker + 1 : max(self.users.get(name, {maker})) + 1] = True
        return found

    def given(self, choices: np.ndarray) -> np.ndarray:
        """A number for how every node (row) leaves its results, in layouts (columns)."""
        found = np.zeros(choices.shape)
        for node, row in enumerate(self.rows):
            numbers: dict[object, int] = {}
            each = [numbers.setdefault(c.results, len(numbers)) for c in row]
            found[node] = np.array(each)[choices[node]]
        return found

    # ------------------------------------------------------------ neighbourhoods

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """All layouts, by the nodes that do the same work from parameters alone."""
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
        every = tuple(range(len(self.rows[at])))
        carrying = [name for name in self.graph.nodes[at].inputs if name in self.carries]
        made = {self.makers[name] for name in carrying if name in self.makers}
        if not carrying or not made <= same:
            yield from self._split((*domains, every), same)
            return
        assert isinstance(self.rows[at][0].choice, Same)
        yield from self._split((*domains, every[:1]), same | {at})
        if every[1:]:
            yield from self._split((*domains, every[1:]), same)

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
        found = {index}
        for name in self.graph.nodes[index].inputs:
            if name in self.makers:
                found |= {self.makers[name], *(i for i in self.users[name] if i < index)}
            elif name in self.parameters:
                found |= self.users[name]
        return found

    @cached_property
    def seen(self) -> dict[Key, list[Choices]]:
        """Lowered layouts in which every neighbourhood appears; none where it cannot be lowered."""
        found: dict[Key, list[Choices]] = {}
        rng = random.Random(0)
        for family in self.families:
            nodes = range(len(family.domains))
            open_ = [[key for key in family.keys(i) if key not in found] for i in nodes]
            tries: dict[Key, int] = {}
            while any(open_):
                choices, first = _covering(family, open_, rng)
                lowered = self.workloads(choices) is not None
                for i in nodes if lowered else ():
                    found.setdefault(family.key(i, choices), []).append(choices)
                tries[first] = tries.get(first, 0) + 1
                if tries[first] == TRIALS:
                    found.setdefault(first, [])
                open_ = [[key for key in keys if key not in found] for keys in open_]
        return found

    # ------------------------------------------------------------ figures

    def figures(self, choices: Choices, kind: Kind) -> np.ndarray:
        """The figures of a layout that is lowered: rows as those of `Figures`, columns nodes."""
        workloads = self.workloads(choices)
        assert workloads is not None
        return self._figures(workloads, workloads, kind)

    def _figures(self, workloads: WorkloadModel, asked: WorkloadModel, kind: Kind) -> np.ndarray:
        classes = self.layers(asked, kind)
        times = [np.diff(one.sums[name]) for one in classes for name in TIMES]
        if workloads not in self._stored:  # whatever the rows
            self._stored[workloads] = self._parameters(classes[0])
        return np.stack([*times, *self._stored[workloads], np.ones(len(self.rows))])

    def _parameters(self, layers: Layers) -> tuple[np.ndarray, np.ndarray]:
        """Elements that a node is the first to use, and a number for how they are held."""
        execution = ExecutionConfig(groups=(), cuts=(0,), placement=(0,))
        numel, held = np.zeros(len(self.rows)), [list[object]() for _ in self.rows]
        for (axes, _, itemsize), share in layers.parameters(execution).items():
            numel += np.diff(share.numel)
            columns = [np.diff(getattr(share, name)) for name in float_arrays(share)]
            for i, values in enumerate(zip(*columns, strict=True)):
                if any(values):
                    held[i].append((axes, itemsize, values))
        numbers = [self._held.setdefault(tuple(sorted(h)), len(self._held)) for h in held]
        return numel, np.array(numbers, dtype=np.float64)

    def _least_figures(self, choices: Choices, kind: Kind) -> np.ndarray:
        """The least that the simulator may take for a layout's nodes in another layout."""
        workloads = self.workloads(choices)
        assert workloads is not None
        if choices not in self._asked:
            self._asked[choices] = [
                workloads,
                *(_Asked(workloads, line) for line in (None, *LINES)),
            ]
        return np.min([self._figures(workloads, a, kind) for a in self._asked[choices]], axis=0)

    def parts(self, kind: Kind) -> dict[Key, np.ndarray]:
        """The figures of every neighbourhood."""
        if kind not in self._parts:
            found = self._collected(self.figures, kind)
            self.is_exact[kind] = all(
                np.allclose(rows.min(axis=0), rows.max(axis=0), rtol=EXACT, atol=TINY)
                for rows in found.values()
            )
            if not self.is_exact[kind]:
                found = self._collected(self._least_figures, kind)
            self._parts[kind] = {key: rows.min(axis=0) for key, rows in found.items()}
        return self._parts[kind]

    def _collected(
        self, figures: Callable[[Choices, Kind], np.ndarray], kind: Kind
    ) -> dict[Key, np.ndarray]:
        """Of every neighbourhood the figures in all layouts in which it was seen."""
        found = {c: figures(c, kind) for c in {c for cs in self.seen.values() for c in cs}}
        return {
            key: np.stack([found[c][:, key[0]] for c in layouts])
            for key, layouts in self.seen.items()
            if layouts
        }

    def tables(self, family: Family, kind: Kind) -> list[np.ndarray]:
        """For every node, its figures (rows) by the choices of its neighbourhood (columns)."""
        parts = self.parts(kind)
        unknown = np.zeros(len(next(iter(parts.values()))))
        return [
            np.stack([parts.get(key, unknown) for key in family.keys(i)], axis=1)
            for i in range(len(family.domains))
        ]


def _covering(
    family: Family, open_: Sequence[Sequence[Key]], rng: random.Random
) -> tuple[Choices, Key]:
    """A layout with neighbourhoods that were not seen, and the first of these."""
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
    """Layouts `first:end` of a family: choices, a row for every node, and their figures."""
    sizes = [len(d) for d in family.domains]
    places = np.unravel_index(np.arange(first, end), sizes)
    choices = np.stack([np.array(d)[p] for d, p in zip(family.domains, places, strict=True)])
    rows = []
    for table, mine in zip(tables, family.members, strict=True):
        at = np.ravel_multi_index([places[j] for j in mine], [sizes[j] for j in mine])
        rows.append(table[:, at])
    found = np.stack(rows, axis=1)
    return choices, Figures(times=found[:-3], numel=found[-3], held=found[-2], known=found[-1])
