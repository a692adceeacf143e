"""List what a node may do on all mesh axes together, and how sources may be stored.

An `Option` is one candidate per mesh axis whose shards are compatible as `allowed` asks. Left out
by rule, so that plans stay regular and problems small:

- On an axis whose shards follow inputs, a node is sharded only where an operand that depends on
  inputs already can be; parameters are used in full.
- Partial sums pass through a node only where one of its operands can be partial.
- Nodes without operands (position tables) are not sharded; what is computed from them alone is
  sharded only as one of its uses can be. Heads are not sharded inside if there are enough of them.

Whether a full value counts as R~ follows `program.lower`: on a mesh axis a value is pure when
every rank computes it by the same work from parameters (and values without a gradient) alone. If
all uses of a pure value differ, it is R~: its partial gradient is reduced at the parameters. This
is tracked for nodes with few ancestors (`PREFIX`: weights that are cast, the first norm), and in
graphs that are not `SMALL` up to the first product with an activation that carries a gradient;
later values count as not pure, at the price of a move that lowering may spare.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from shardwise.errors import InfeasiblePlan, PlanError
from shardwise.ir import Graph, Node
from shardwise.layouts.moves import same_placement
from shardwise.layouts.problem import (
    Allowed,
    Assignment,
    LayoutAxis,
    LayoutTask,
    Placements,
    Task,
    constant_values,
    input_values,
    products,
)
from shardwise.layouts.tie_layers import roots_of
from shardwise.sharding.candidates import Candidate, Pass, Same, ShardAxis, candidates, match_choice
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
)

PREFIX = 16  # nodes: an embedding and a norm in any notation, or casts of weights
SMALL = 24  # nodes: here all that `PREFIX` admits is followed
Demand = tuple[bool | None, ...]  # per mesh axis: whether an operand is pure, None: either


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate per mesh axis; `needs` and `gives` are placements per operand and result.

    They differ from the candidates' where no gradient flows (both kinds of whole are one), and
    where the same work counts as different (R~). `pure` are the mesh axes on which the results are
    pure, which follows from what `demands` say of the operands.
    """

    choice: tuple[Candidate, ...]
    needs: tuple[Placements, ...]
    gives: tuple[Placements, ...]
    pure: frozenset[int] = frozenset()
    demands: tuple[Demand, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one mesh axis of an option counts; `demands` by value name."""

    partial_grad: bool = False
    pure: bool = False
    demands: tuple[tuple[str, bool], ...] = ()


PLAIN = _Kind()


class Pure:
    """Which values may be pure, and of these which may be R~."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.parameters = frozenset(p.value for p in graph.parameters)
        self.carries = facts.carries_grad
        self.ends = frozenset[str]() if len(graph.nodes) <= SMALL else products(graph, facts)
        self.ancestors: dict[str, frozenset[str]] = {}  # of values that may be pure: nodes
        for node in graph.nodes:
            above = self._above(node)
            if above is not None:
                mine = (n for n in node.outputs if n in self.carries)
                self.ancestors |= dict.fromkeys(mine, above)
        kept = {graph.loss, *(b.mutation for b in graph.buffers), *graph.sends}
        kept |= {getattr(leaf, "name", None) for leaf in graph.outputs}
        self.kept = frozenset(name for name in kept if name is not None)
        self.used = frozenset(n for node in graph.nodes if node.grad_enabled for n in node.inputs)

    def _above(self, node: Node) -> frozenset[str] | None:
        """Return the nodes through which a gradient passes from here, where they are few."""
        flowing = [n for n in node.inputs if n in self.carries]
        if not node.grad_enabled or not flowing:
            return None
        above = frozenset([node.name])
        for name in flowing:
            if name in self.ancestors and node.name not in self.ends:
                above |= self.ancestors[name]
            elif name not in self.parameters:
                return None
        return above if len(above) <= PREFIX else None

    def may_differ(self, name: str) -> bool:
        """Return whether a whole value may be held as R~."""
        known = name in self.ancestors or (name in self.parameters and name in self.carries)
        return known and name not in self.kept and name in self.used

    def kinds(self, node: Node) -> list[_Kind]:
        """Return the ways in which the same work of a node may count."""
        results = [n for n in node.outputs if n in self.carries]
        if not results or results[0] not in self.ancestors:
            return [PLAIN]
        inner = [n for n in dict.fromkeys(node.inputs) if n in self.ancestors]
        pure = tuple((n, True) for n in inner)
        found = [_Kind(pure=True, demands=pure)]
        if all(self.may_differ(n) for n in results):
            found.append(_Kind(partial_grad=True, pure=True, demands=pure))
        for i, name in enumerate(inner):  # the first operand that is not pure
            found.append(_Kind(demands=(*pure[:i], (name, False))))
        return found


class _Fit(Allowed):
    """The tests of `Allowed` for a pair of mesh axes, one candidate against another."""

    def fits(self, node: Node, mine: Candidate, theirs: Candidate, ranks: int) -> bool:
        self.earlier = (
            Assignment(axis="", ranks=ranks, nodes={node.name: theirs}, parameters={}, cost=0.0),
        )
        return self._fits(node, mine)

    def splinters(self, node: Node, choice: ShardAxis) -> bool:
        return self._splinters(node, choice)


Narrow = Mapping[int, Mapping[str, tuple[Candidate, ...]]]  # mesh axis -> node -> what to choose of


class Options:
    """The candidates of every node on each mesh axis, and its joint options."""

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
        self.roots = roots_of(task.alike)
        self._given: list[dict[str, list[Placement]]] = [{} for _ in task.axes]
        _check_names(graph, task)
        rows = [
            {n.name: self._on_axis(index, n) for n in graph.nodes}
            for index in range(len(task.axes))
        ]
        for index, row in enumerate(rows):
            self._drop_tables(index, row)
        self.rows = rows

    def weighing(self, memory_weight: float) -> Options:
        """Return the same options where memory counts so many seconds per byte."""
        found = copy(self)
        found.task = replace(self.task, memory_weight=memory_weight)
        return found

    @cached_property
    def of(self) -> dict[str, tuple[Option, ...]]:
        """All joint options of every node."""
        return self.joint({})

    def num_joint(self) -> int:
        """Return how many joint options there are at most, before how they count."""
        own = [n.name for n in self.graph.nodes if n.name not in self.roots]
        return sum(prod(len(row[name]) for row in self.rows) for name in own)

    def joint(self, narrow: Narrow) -> dict[str, tuple[Option, ...]]:
        """Return the joint options of every node, where `narrow` says what is open on some axes."""
        return {
            n.name: self._joint(
                n,
                [
                    list(narrow[i][n.name]) if i in narrow else row[n.name]
                    for i, row in enumerate(self.rows)
                ],
            )
            for n in self.graph.nodes
        }

    # ------------------------------------------------------------ one axis

    def _on_axis(self, index: int, node: Node) -> list[Candidate]:
        """Return the candidates of a node on one mesh axis."""
        axis = self.task.axes[index]
        rule = self.facts.rules[node.name]
        found = candidates(rule, self.facts.structures[node.name])
        forced = self.task.nodes.get(node.name, {}).get(axis.name)
        if forced is not None:
            chosen = list(match_choice(rule, found, forced))
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
        return not axis.follows_inputs or self._follows(index, node, candidate)

    def _source_admits(self, axis: LayoutAxis, name: str, need: Placement) -> bool:
        """Return whether a source may be used so."""
        if not isinstance(need, Shard):
            return True
        if name in self.parameters:
            fixed = self.task.parameters.get(name, {}).get(axis.name)
            return not axis.follows_inputs or isinstance(fixed, Shard)
        if name not in self.inputs or axis.inputs is None:
            return True
        allowed = axis.inputs.get(name)
        return allowed is not None and same_placement(allowed, need, axis.ranks)

    def _follows(self, index: int, node: Node, candidate: Candidate) -> bool:
        """Return whether a cut follows from a cut of inputs."""
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

    def _drop_tables(self, index: int, row: dict[str, list[Candidate]]) -> None:
        """Drop cuts of tables (values of no input and no parameter) that no use can take."""
        axis = self.task.axes[index]
        tables = constant_values(self.graph)
        needed: dict[str, set[Placement]] = {}
        for node in reversed(self.graph.nodes):
            if node.outputs[0] in tables and axis.name not in self.task.nodes.get(node.name, {}):
                row[node.name] = [
                    c
                    for c in row[node.name]
                    if not isinstance(c.choice, ShardAxis)
                    or any(
                        same_placement(given, need, axis.ranks)
                        for name, given in zip(node.outputs, c.results, strict=True)
                        for need in needed.get(name, ())
                    )
                ]
            for c in row[node.name]:
                for name, need in zip(node.inputs, c.operands, strict=True):
                    needed.setdefault(name, set()).add(need)

    # ------------------------------------------------------------ all axes

    def _joint(self, node: Node, per_axis: list[list[Candidate]]) -> tuple[Option, ...]:
        axes = self.task.axes
        rows: list[tuple[Candidate, ...]] = [()]
        for index, mine in enumerate(per_axis):
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
        """Return the option in every way that its same work may count."""
        same = self.pure.kinds(node)
        kinds = [
            same if isinstance(c.choice, Same) and axis.ranks > 1 else [PLAIN]
            for c, axis in zip(row, self.task.axes, strict=True)
        ]
        return [self._option(node, row, chosen) for chosen in product(*kinds)]

    def _option(self, node: Node, row: tuple[Candidate, ...], kinds: tuple[_Kind, ...]) -> Option:
        needs, demands = [], []
        for position, name in enumerate(node.inputs):
            flows = name in self.pure.carries and node.grad_enabled
            placements: list[Placement] = []
            for candidate, kind in zip(row, kinds, strict=True):
                p = candidate.operands[position]
                if isinstance(p, Replicate):
                    p = (
                        PARTIAL_GRAD
                        if flows and (p.partial_grad or kind.partial_grad)
                        else REPLICATE
                    )
                placements.append(p)
            needs.append(tuple(placements))
            demands.append(tuple(dict(kind.demands).get(name) for kind in kinds))
        gives = tuple(
            tuple(
                PARTIAL_GRAD
                if kind.partial_grad and name in self.pure.carries
                else c.results[position]
                for c, kind in zip(row, kinds, strict=True)
            )
            for position, name in enumerate(node.outputs)
        )
        pure = frozenset(i for i, kind in enumerate(kinds) if kind.pure)
        return Option(row, tuple(needs), gives, pure, tuple(demands))


def _check_names(graph: Graph, task: LayoutTask) -> None:
    known: Mapping[str, set[str]] = {
        "node": {n.name for n in graph.nodes},
        "parameter": {p.value for p in graph.parameters},
    }
    alike = [name for pair in task.alike.items() for name in pair]
    fixed = (("node", task.nodes), ("node", alike), ("parameter", task.parameters))
    for what, names in fixed:
        for name in names:
            if name not in known[what]:
                raise PlanError(f"the task fixes {what} {name!r}, the graph has none")
