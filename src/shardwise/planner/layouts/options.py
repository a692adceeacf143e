"""What a node may do on all mesh axes together, and how sources may be stored.

Enters: a graph's `Facts` and a `LayoutTask`. Leaves: joint `Option`s of every node: one candidate
per mesh axis, whose cuts fit together as `sharding.allowed` asks.

What is left out, by rule, so that plans stay regular and the program small:

- On an axis whose cuts follow inputs, a node is cut only where an operand that depends on inputs
  already can be; parameters are used whole.
- Partial sums pass through a node only where one of its operands can be partial.
- Nodes without operands (position tables) are not cut; heads are not cut inside where there are
  enough of them.
- A value computed from parameters alone is not gathered for the same work on parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from shardwise.errors import InfeasiblePlan, PlanError
from shardwise.ir import Graph, Node
from shardwise.planner.layouts.task import LayoutAxis, LayoutTask, Placements
from shardwise.sharding.allowed import Allowed
from shardwise.sharding.candidates import Candidate, Cut, Pass, Same, candidates
from shardwise.sharding.costs import same_placement
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import FANOUT, REPLICATE, Partial, Placement, Replicate, Shard
from shardwise.sharding.search import parameter_values
from shardwise.sharding.task import Assignment, Task


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate per mesh axis; `needs` and `gives` are placements per operand and result.

    They differ from the candidates' where no gradient flows (both kinds of whole are one), and
    where the same work of parameters alone counts as different (R≠, see `program.sources`).
    """

    choice: tuple[Candidate, ...]
    needs: tuple[Placements, ...]
    gives: tuple[Placements, ...]


class Pure:
    """Values computed from parameters alone, whose partial gradients are reduced at parameters."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.parameters = frozenset(p.value for p in graph.parameters)
        self.carries = facts.carries_grad
        silent = {n for node in graph.nodes if not node.grad_enabled for n in node.outputs}
        self.values = (parameter_values(graph, facts) & facts.carries_grad) - silent
        kept = {graph.loss, *(b.mutation for b in graph.buffers), *graph.sends}
        kept |= {getattr(leaf, "name", None) for leaf in graph.outputs}
        self.kept = frozenset(name for name in kept if name is not None)

    def may_differ(self, name: str) -> bool:
        """Whether a whole value may be held as R≠."""
        return name in self.values and name not in self.kept

    def is_node(self, node: Node) -> bool:
        """Whether a node computes such values."""
        return any(name in self.values for name in node.outputs)


class _Fit(Allowed):
    """The tests of `Allowed` for a pair of mesh axes, one candidate against another."""

    def fits(self, node: Node, mine: Candidate, theirs: Candidate, ranks: int) -> bool:
        self.earlier = (
            Assignment(axis="", ranks=ranks, nodes={node.name: theirs}, parameters={}, cost=0.0),
        )
        return self._fits(node, mine)

    def splinters(self, node: Node, choice: Cut) -> bool:
        return self._splinters(node, choice)


class Options:
    """The joint options of every node, found in graph order."""

    def __init__(self, graph: Graph, facts: Facts, task: LayoutTask) -> None:
        self.graph, self.facts, self.task = graph, facts, task
        self.pure = Pure(graph, facts)
        self.parameters = {p.value for p in graph.parameters}
        self.inputs = {i.value for i in graph.inputs if i.kind == "batch"}
        self.received = {i.value for i in graph.inputs if i.kind == "received"}
        self.varying = input_values(graph)
        self._fit = [
            _Fit(graph, facts, Task(axis=a.name, ranks=a.ranks, split=True), ()) for a in task.axes
        ]
        self._given: list[dict[str, list[Placement]]] = [{} for _ in task.axes]
        _check_names(graph, task)
        self.of: dict[str, tuple[Option, ...]] = {n.name: self._joint(n) for n in graph.nodes}

    # ------------------------------------------------------------ one axis

    def _on_axis(self, index: int, node: Node) -> list[Candidate]:
        """The candidates of a node on one mesh axis."""
        axis = self.task.axes[index]
        found = candidates(self.facts.rules[node.name], self.facts.structures[node.name])
        forced = self.task.nodes.get(node.name, {}).get(axis.name)
        if forced is not None:
            chosen = [c for c in found if str(c.choice) == forced]
            if not chosen:
                known = ", ".join(f"'{c.choice}'" for c in found)
                raise PlanError(
                    f"node {node.name} ({node.op}) cannot '{forced}' on mesh axis {axis.name}",
                    where=node.origin,
                    hint=f"one of {known}",
                )
        elif axis.ranks == 1:
            chosen = [c for c in found if isinstance(c.choice, Same)]
        else:
            chosen = [c for c in found if self._admits(index, node, c)]
        given = self._given[index]
        for position, name in enumerate(node.outputs):
            given[name] = list(dict.fromkeys(c.results[position] for c in chosen))
        return chosen

    def _admits(self, index: int, node: Node, candidate: Candidate) -> bool:
        axis = self.task.axes[index]
        operands = tuple(zip(node.inputs, candidate.operands, strict=True))
        if not all(self._source_admits(axis, name, need) for name, need in operands):
            return False
        if isinstance(candidate.choice, Pass):
            return any(
                isinstance(p, Partial)
                for i in candidate.choice.operands
                for p in self._given[index].get(node.inputs[i], ())
            )
        if isinstance(candidate.choice, Same):
            return True
        if not node.inputs or self._fit[index].splinters(node, candidate.choice):
            return False
        if self._loses_whole(node, candidate):
            return False
        return not axis.follows_inputs or self._follows(index, node, candidate)

    def _source_admits(self, axis: LayoutAxis, name: str, need: Placement) -> bool:
        """Whether a source may be used so."""
        if not isinstance(need, Shard):
            return True
        if name in self.parameters:
            fixed = self.task.parameters.get(name, {}).get(axis.name)
            return not axis.follows_inputs or isinstance(fixed, Shard)
        if name not in self.inputs or axis.inputs is None:
            return True
        allowed = axis.inputs.get(name)
        return allowed is not None and same_placement(allowed, need, axis.ranks)

    def _loses_whole(self, node: Node, candidate: Candidate) -> bool:
        """Whether a cut of parameters alone gives a whole value: it would count as different."""
        return self.pure.is_node(node) and any(isinstance(p, Replicate) for p in candidate.results)

    def _follows(self, index: int, node: Node, candidate: Candidate) -> bool:
        """Whether a cut follows from a cut of inputs."""
        ranks = self.task.axes[index].ranks
        varying = [name for name in node.inputs if name in self.varying]
        begun = not varying
        for name, need in zip(node.inputs, candidate.operands, strict=True):
            if not isinstance(need, Shard) or name not in self.varying:
                continue
            known = self._given[index].get(name)
            if known is not None and not any(same_placement(g, need, ranks) for g in known):
                return False
            begun = True
        return begun

    # ------------------------------------------------------------ all axes

    def _joint(self, node: Node) -> tuple[Option, ...]:
        axes = self.task.axes
        rows: list[tuple[Candidate, ...]] = [()]
        for index in range(len(axes)):
            mine = self._on_axis(index, node)
            fit = self._fit[index]
            rows = [
                (*row, c)
                for row in rows
                for c in mine
                if all(fit.fits(node, c, row[i], axes[i].ranks) for i in range(index))
            ]
        found = tuple(option for row in rows for option in self._variants(node, row))
        if not found:
            raise InfeasiblePlan(
                f"no way to run {node.op} on {self.task.names} satisfies what is fixed",
                where=node.origin,
                hint="loosen the entries for this node",
            )
        return found

    def _variants(self, node: Node, row: tuple[Candidate, ...]) -> list[Option]:
        """The option; for the same work on parameters alone, also with R≠ on every set of axes."""
        free = [
            i
            for i, c in enumerate(row)
            if isinstance(c.choice, Same)
            and self.task.axes[i].ranks > 1
            and node.grad_enabled
            and all(self.pure.may_differ(n) for n in node.outputs if n in self.pure.carries)
            and any(n in self.pure.carries for n in node.outputs)
        ]
        return [
            Option(row, self._needs(node, row, differing), self._gives(node, row, differing))
            for flags in product((False, True), repeat=len(free))
            for differing in [frozenset(i for i, f in zip(free, flags, strict=True) if f)]
        ]

    def _needs(
        self, node: Node, row: tuple[Candidate, ...], differing: frozenset[int]
    ) -> tuple[Placements, ...]:
        needs = []
        for position, name in enumerate(node.inputs):
            flows = name in self.pure.carries and node.grad_enabled
            placements = []
            for i, candidate in enumerate(row):
                p = candidate.operands[position]
                if isinstance(p, Replicate):
                    p = FANOUT if flows and (p.differs or i in differing) else REPLICATE
                placements.append(p)
            needs.append(tuple(placements))
        return tuple(needs)

    def _gives(
        self, node: Node, row: tuple[Candidate, ...], differing: frozenset[int]
    ) -> tuple[Placements, ...]:
        return tuple(
            tuple(
                FANOUT if i in differing and name in self.pure.values else c.results[position]
                for i, c in enumerate(row)
            )
            for position, name in enumerate(node.outputs)
        )


def input_values(graph: Graph) -> frozenset[str]:
    """Values that depend on inputs."""
    varying = {i.value for i in graph.inputs}
    for node in graph.nodes:
        if any(name in varying for name in node.inputs):
            varying |= set(node.outputs)
    return frozenset(varying)


def _check_names(graph: Graph, task: LayoutTask) -> None:
    known: Mapping[str, set[str]] = {
        "node": {n.name for n in graph.nodes},
        "parameter": {p.value for p in graph.parameters},
    }
    for what, names in (("node", task.nodes), ("parameter", task.parameters)):
        for name in names:
            if name not in known[what]:
                raise PlanError(f"the task fixes {what} {name!r}, the graph has none")
