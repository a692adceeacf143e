"""List the options of each node on all mesh axes together.

An `Option` is one candidate per mesh axis, with compatible shards. Some options are left out to
keep plans regular and problems small:

- On an axis whose shards follow inputs, a node is sharded only if one of its operands that depend
  on inputs can be sharded already; parameters are used in full.
- Partial sums pass through a node only if one of its operands can be partial.
- Nodes without operands (position tables) are not sharded; values computed from them alone are
  sharded only in ways that one of their uses can take. Heads are not split if there are enough.

Full values count as R~ by the rules of `program.lower`: on a mesh axis, a value is pure if every
rank computes it by the same work from parameters and values without a gradient alone. A pure value
whose uses all do different work on each rank is R~: its partial gradient is reduced at the
parameters. Purity is tracked for nodes with at most `PREFIX` ancestors (casts of weights, the first
norm), and in graphs that are not `SMALL` only up to the first product with an activation that
carries a gradient. Later values count as not pure; the prices may then include a move that lowering
saves.
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
from shardwise.layouts import problem
from shardwise.layouts.moves import may_exchange, same_placement
from shardwise.layouts.tie_layers import roots_of
from shardwise.sharding.candidates import Candidate, Pass, Same, ShardAxis
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
)

PREFIX = 16  # nodes: enough for an embedding and a decomposed norm, or for casts of weights
SMALL = 24  # nodes: graphs in which purity is tracked past the first product
Demand = tuple[bool | None, ...]  # per mesh axis: whether an operand must be pure; None: either


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate per mesh axis; `needs` and `gives` are placements per operand and result.

    They differ from the candidates' placements where no gradient flows (R and R~ are then the
    same) and where the same work counts as different (R~). `pure` lists the mesh axes on which the
    results are pure if the operands satisfy `demands`.
    """

    choice: tuple[Candidate, ...]
    needs: tuple[problem.Placements, ...]
    gives: tuple[problem.Placements, ...]
    pure: frozenset[int] = frozenset()
    demands: tuple[Demand, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the same work on one mesh axis counts; `demands` are by value name."""

    partial_grad: bool = False
    pure: bool = False
    demands: tuple[tuple[str, bool], ...] = ()


PLAIN = _Kind()


class Pure:
    """The values that may be pure, and those that may be R~."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.parameters = frozenset(p.value for p in graph.parameters)
        self.carries = facts.carries_grad
        self.ends = (
            frozenset[str]() if len(graph.nodes) <= SMALL else problem.products(graph, facts)
        )
        self.ancestors: dict[str, frozenset[str]] = {}  # value that may be pure -> nodes above it
        for node in graph.nodes:
            above = self._above(node)
            if above is not None:
                results = (n for n in node.outputs if n in self.carries)
                self.ancestors |= dict.fromkeys(results, above)
        self.visible = graph.visible
        self.used = frozenset(n for node in graph.nodes if node.grad_enabled for n in node.inputs)

    def _above(self, node: Node) -> frozenset[str] | None:
        """Return the nodes between this one and parameters, or None if purity is not tracked."""
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
        """Return whether a full value may be stored as R~."""
        pure = name in self.ancestors or (name in self.parameters and name in self.carries)
        return pure and name not in self.visible and name in self.used

    def kinds(self, node: Node) -> list[_Kind]:
        """Return how the same work of a node may count."""
        results = [n for n in node.outputs if n in self.carries]
        if not results or results[0] not in self.ancestors:
            return [PLAIN]
        inner = [n for n in dict.fromkeys(node.inputs) if n in self.ancestors]
        pure = tuple((n, True) for n in inner)
        kinds = [_Kind(pure=True, demands=pure)]
        if all(self.may_differ(n) for n in results):
            kinds.append(_Kind(partial_grad=True, pure=True, demands=pure))
        # One kind for each operand that is the first impure one, so that kinds exclude each other.
        impure = (_Kind(demands=(*pure[:i], (name, False))) for i, name in enumerate(inner))
        return [*kinds, *impure]


Narrow = Mapping[int, Mapping[str, tuple[Candidate, ...]]]  # mesh axis -> node -> open candidates


class Options:
    """The candidates of every node on each mesh axis, and its joint options."""

    def __init__(self, graph: Graph, facts: Facts, task: problem.LayoutTask) -> None:
        self.graph, self.facts, self.task = graph, facts, task
        self.pure = Pure(graph, facts)
        self.parameters = {p.value for p in graph.parameters}
        self.inputs = {i.value for i in graph.inputs if i.kind == "batch"}
        self.received = {i.value for i in graph.inputs if i.kind == "received"}
        self.varying = problem.input_values(graph)
        self.roots = roots_of(task.tied)
        self._results: list[dict[str, list[Placement]]] = [{} for _ in task.axes]
        _check_names(graph, task)
        axes = range(len(task.axes))
        self.rows = [{n.name: self._on_axis(index, n) for n in graph.nodes} for index in axes]
        for index, row in enumerate(self.rows):
            self._drop_tables(index, row)

    def weighing(self, memory_weight: float) -> Options:
        """Return the same options with another price of memory, in seconds per byte."""
        options = copy(self)
        options.task = replace(self.task, memory_weight=memory_weight)
        return options

    @cached_property
    def of(self) -> dict[str, tuple[Option, ...]]:
        """All joint options of every node."""
        return self.joint({})

    def num_joint(self) -> int:
        """Return an upper bound on the number of joint options, disregarding kinds."""
        own = [n.name for n in self.graph.nodes if n.name not in self.roots]
        return sum(prod(len(row[name]) for row in self.rows) for name in own)

    def joint(self, narrow: Narrow) -> dict[str, tuple[Option, ...]]:
        """Return the joint options of every node; `narrow` restricts candidates on some axes."""
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
        forced = self.task.nodes.get(node.name, {}).get(axis.name)
        if forced is not None:
            admitted = list(problem.forced_candidates(node, self.facts, axis.name, forced))
        else:
            options = self.facts.candidates(node.name)
            if axis.ranks == 1:
                admitted = [c for c in options if isinstance(c.choice, Same)]
            else:
                admitted = [c for c in options if self._admits(index, node, c)]
        for position, name in enumerate(node.outputs):
            placements = dict.fromkeys(c.results[position] for c in admitted)
            self._results[index][name] = list(placements)
        return admitted

    def _admits(self, index: int, node: Node, candidate: Candidate) -> bool:
        axis = self.task.axes[index]
        operands = tuple(zip(node.inputs, candidate.operands, strict=True))
        if not all(self._source_admits(axis, name, need) for name, need in operands):
            return False
        if isinstance(candidate.choice, Pass):
            return any(
                isinstance(p, Partial)
                for i in candidate.choice.operands
                for p in self._results[index].get(node.inputs[i], ())
            )
        if isinstance(candidate.choice, Same):
            return True
        if not node.inputs or problem.splits_heads(node, self.facts, candidate.choice, axis.ranks):
            return False
        return not axis.follows_inputs or self._follows(index, node, candidate)

    def _source_admits(self, axis: problem.LayoutAxis, name: str, need: Placement) -> bool:
        """Return whether a parameter or an input may be used with this placement."""
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
        """Return whether a candidate's shards follow from shards of inputs."""
        ranks = self.task.axes[index].ranks
        varying = [name for name in node.inputs if name in self.varying]
        follows = not varying or self.facts.begins(node.name, candidate)
        for name, need in zip(node.inputs, candidate.operands, strict=True):
            if not isinstance(need, Shard) or name not in self.varying:
                continue
            possible = self._results[index].get(name)
            kind = self.graph.values[name]
            if possible is not None and not any(
                same_placement(p, need, ranks) or (kind.ragged > 1 and may_exchange(kind, p, need))
                for p in possible
            ):
                return False
            follows = True
        return follows

    def _drop_tables(self, index: int, row: dict[str, list[Candidate]]) -> None:
        """Drop shards of tables, which depend on no input or parameter, that no use can take."""
        axis = self.task.axes[index]
        tables = problem.constant_values(self.graph)
        needed: dict[str, set[Placement]] = {}
        for node in reversed(self.graph.nodes):
            if node.outputs[0] in tables and axis.name not in self.task.nodes.get(node.name, {}):
                row[node.name] = [
                    c
                    for c in row[node.name]
                    if not isinstance(c.choice, ShardAxis)
                    or any(
                        same_placement(placement, need, axis.ranks)
                        for name, placement in zip(node.outputs, c.results, strict=True)
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
        for index, row_candidates in enumerate(per_axis):
            ranks = axes[index].ranks
            rows = [
                (*row, c)
                for row in rows
                for c in row_candidates
                if all(
                    problem.nest(node, self.facts, c, ranks, row[i], axes[i].ranks)
                    for i in range(index)
                )
            ]
        options = tuple(option for row in rows for option in self._variants(node, row))
        if not options:
            raise InfeasiblePlan(
                f"no sharding of {node.op} on the mesh axes {', '.join(self.task.names)} satisfies "
                "the constraints",
                where=node.origin,
                hint="loosen the entries for this node",
            )
        return options

    def _variants(self, node: Node, row: tuple[Candidate, ...]) -> list[Option]:
        """Return an option for each combination of kinds."""
        same = self.pure.kinds(node)
        kinds = [
            same if isinstance(c.choice, Same) and axis.ranks != 1 else [PLAIN]
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
                    differs = flows and (p.partial_grad or kind.partial_grad)
                    p = PARTIAL_GRAD if differs else REPLICATE
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


def _check_names(graph: Graph, task: problem.LayoutTask) -> None:
    names_by_kind: Mapping[str, set[str]] = {
        "node": {n.name for n in graph.nodes},
        "parameter": {p.value for p in graph.parameters},
    }
    tied = [name for pair in task.tied.items() for name in pair]
    for kind, names in (("node", task.nodes), ("node", tied), ("parameter", task.parameters)):
        for name in names:
            if name not in names_by_kind[kind]:
                raise PlanError(f"the task constrains {kind} {name!r}, which the graph lacks")
