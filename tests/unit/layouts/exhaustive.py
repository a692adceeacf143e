"""Oracles for layout searches: the cost of a lowered program, and an exhaustive search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from shardwise.cluster import Mesh
from shardwise.errors import ProgramError
from shardwise.ir import Graph, Node
from shardwise.layouts.moves import Move, plan_moves
from shardwise.layouts.options import Option, Options
from shardwise.layouts.problem import Assignment, LayoutTask, Placements, Prices
from shardwise.plans import Plan, Resolved
from shardwise.plans.plan import model_fingerprint
from shardwise.program import lower
from shardwise.sharding.candidates import Same
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Partial,
    Replicate,
    Shard,
    compatible,
)


def plan_for(graph: Graph, task: LayoutTask, **changes: object) -> Plan:
    """Return a plan on the task's mesh; to a plan, a sequence axis is one for parameters."""
    roles = {a.name: "batch" if a.role == "batch" else "parameters" for a in task.axes}
    fields = {"name": "layouts", "model": graph.name, "fingerprint": model_fingerprint(graph)}
    mesh = Mesh(axes=tuple((a.name, a.ranks) for a in task.axes))
    return Plan(mesh=mesh, roles=roles, **{**fields, **changes})  # type: ignore[arg-type]


def lowered_cost(resolved: Resolved, task: LayoutTask, prices: Prices) -> float:
    """Return the total price of the first rank's lowered program."""
    graph = resolved.graph
    program = lower(resolved).rank_programs[0]
    nodes = {node.name: node for node in graph.nodes}
    free = {i.value for i in graph.inputs if i.kind != "received"}
    free |= {b.value for b in graph.buffers} | {c.value for c in graph.constants}
    total = 0.0
    for step in program.steps:
        if not step.is_move:
            choice = tuple(a.nodes[step.node] for a in resolved.assignments)
            total += prices.node(nodes[step.node], choice)
            continue
        source, target = program.values[step.inputs[0]], program.values[step.outputs[0]]
        if source.value not in free:
            before, after = (tuple(p for _, p in v.layout.axes) for v in (source, target))
            grad = source.value in program.carries_grad
            total += prices.move(source.value, before, after, grad)
    for storage in program.parameters:
        stored = tuple(PARTIAL_GRAD if a in storage.sync else p for a, p in storage.layout.axes)
        total += prices.store(storage.value, stored)
    return total


def storages(graph: Graph, task: LayoutTask, options: Options) -> dict[str, list[Placements]]:
    """Return the possible storages of each parameter, disregarding R~."""
    result: dict[str, list[Placements]] = {}
    for parameter in graph.parameters:
        rows = [tuple(REPLICATE for _ in task.axes)]
        for node in graph.nodes:
            for i, name in enumerate(node.inputs):
                if name == parameter.value:
                    rows += [
                        tuple(
                            p if isinstance(p, Shard) and not a.follows_inputs else REPLICATE
                            for p, a in zip(option.needs[i], task.axes, strict=True)
                        )
                        for option in options.of[node.name]
                    ]
        result[parameter.value] = [r for r in dict.fromkeys(rows) if _expressible(r)]
    return result


def _expressible(row: Placements) -> bool:
    shards = [p for p in row if isinstance(p, Shard)]
    return all(a is b or a.dim != b.dim or compatible(a.of, b.of) for a in shards for b in shards)


def resolutions(graph: Graph, facts: Facts, task: LayoutTask) -> Iterator[Resolved]:
    """Yield every combination of choices of nodes and storages of parameters."""
    options = Options(graph, facts, task)
    rows = [list(dict.fromkeys(o.choice for o in options.of[n.name])) for n in graph.nodes]
    stored = storages(graph, task, options)
    plan = plan_for(graph, task)
    for choice in product(*rows):
        for layouts in product(*stored.values()):
            assignments = tuple(
                Assignment(
                    axis=axis.name,
                    ranks=axis.ranks,
                    nodes={n.name: c[i] for n, c in zip(graph.nodes, choice, strict=True)},
                    parameters={v: p[i] for v, p in zip(stored, layouts, strict=True)},
                    cost=0.0,
                )
                for i, axis in enumerate(task.axes)
            )
            yield Resolved(graph=graph, plan=plan, facts=facts, assignments=assignments)


@dataclass(slots=True)
class Exhaustive:
    """Depth-first search over nodes and storages; prunes branches costlier than the best."""

    graph: Graph
    facts: Facts
    task: LayoutTask
    prices: Prices
    best: float = float("inf")
    options: Options = field(init=False)
    placements: dict[str, Placements] = field(default_factory=dict)
    moved: set[tuple[str, Placements]] = field(default_factory=set)
    uses: dict[str, list[Placements]] = field(default_factory=dict)
    remaining: list[float] = field(default_factory=list)
    kinds: dict[str, list[Placements]] = field(default_factory=dict)
    pure: dict[str, frozenset[int]] = field(default_factory=dict)
    paths: dict[tuple[Placements, Placements, bool], tuple[Move, ...] | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.options = Options(self.graph, self.facts, self.task)

    def run(self) -> float:
        graph, prices = self.graph, self.prices
        stored = storages(graph, self.task, self.options)
        used = {name for node in graph.nodes for name in node.inputs}
        self.kinds = {
            v: [k for row in rows for k in self._kinds(v, row)] if v in used else rows
            for v, rows in stored.items()
        }
        cheapest = [
            min(prices.node(n, o.choice) for o in self.options.of[n.name]) for n in graph.nodes
        ]
        self.remaining = [sum(cheapest[i:]) for i in range(len(cheapest) + 1)]
        unused = sum(prices.store(v, k[0]) for v, k in self.kinds.items() if v not in used)
        self._node(0, unused)
        return self.best

    def _kinds(self, value: str, row: Placements) -> list[Placements]:
        carries_grad = value in self.facts.carries_grad
        sides = [
            (p, PARTIAL_GRAD) if carries_grad and isinstance(p, Replicate) and a.ranks > 1 else (p,)
            for p, a in zip(row, self.task.axes, strict=True)
        ]
        return list(product(*sides))

    def _node(self, index: int, cost: float) -> None:
        if cost + self.remaining[index] >= self.best:
            return
        if index == len(self.graph.nodes):
            if self._settled():
                self.best = min(self.best, cost + self._ends())
            return
        node = self.graph.nodes[index]
        new = [
            n for n in dict.fromkeys(node.inputs) if n in self.kinds and n not in self.placements
        ]
        for placements in product(*(self.kinds[n] for n in new)):
            self.placements |= dict(zip(new, placements, strict=True))
            stored = sum(self.prices.store(n, self.placements[n]) for n in new)
            for option in self.options.of[node.name]:
                self._option(index, node, option, cost + stored)
        for name in new:
            self.placements.pop(name, None)

    def _option(self, index: int, node: Node, option: Option, cost: float) -> None:
        before = set(self.moved)
        paid = self._feed(node, option) if self._counts(node, option) else None
        if paid is not None:
            self.placements |= dict(zip(node.outputs, option.gives, strict=True))
            self.pure |= dict.fromkeys(node.outputs, option.pure)
            for name, need in zip(node.inputs, option.needs, strict=True):
                self.uses.setdefault(name, []).append(need)
            self._node(index + 1, cost + paid + self.prices.node(node, option.choice))
            for name in node.inputs:
                self.uses[name].pop()
            for name in node.outputs:
                del self.placements[name]
        self.moved = before

    def _counts(self, node: Node, option: Option) -> bool:
        """Return whether the option's claim of purity is right on every axis."""
        flowing = [n for n in node.inputs if n in self.facts.carries_grad]
        for i, candidate in enumerate(option.choice):
            pure = isinstance(candidate.choice, Same) and bool(flowing) and node.grad_enabled
            pure = pure and all(n in self.kinds or i in self.pure[n] for n in flowing)
            pure = pure and any(n in self.facts.carries_grad for n in node.outputs)
            if self.task.axes[i].ranks > 1 and pure != (i in option.pure):
                return False
        return True

    def _feed(self, node: Node, option: Option) -> float | None:
        total = 0.0
        parameters = {p.value for p in self.graph.parameters}
        for name, need in zip(node.inputs, option.needs, strict=True):
            if name not in self.placements:
                continue  # inputs and constants are free
            placements = self.placements[name]
            for p, n in zip(placements, need, strict=True):
                if p == PARTIAL_GRAD and not (n == PARTIAL_GRAD or isinstance(n, Shard)):
                    return None
            if name in parameters and node.inputs.count(name) == self._count(name):
                current = [REPLICATE if p == PARTIAL_GRAD else p for p in placements]
                stored = [n if isinstance(n, Shard) else REPLICATE for n in need]
                if current != stored and node.inputs.count(name) == 1:
                    return None  # a parameter with a single use is stored in its layout
            price = self._move(name, placements, need)
            if price is None:
                return None
            total += price
        return total

    def _count(self, name: str) -> int:
        return sum(node.inputs.count(name) for node in self.graph.nodes)

    def _move(self, name: str, placements: Placements, need: Placements) -> float | None:
        grad = name in self.facts.carries_grad
        moves = self._path(placements, need, grad)
        if moves is None:
            return None
        total = 0.0
        for move in moves:
            after = tuple(p for _, p in move.layout.axes)
            if (name, after) not in self.moved:
                self.moved.add((name, after))
                before = tuple(p for _, p in move.before.axes)
                total += self.prices.move(name, before, after, grad)
        return None if total == float("inf") else total

    def _path(
        self, placements: Placements, need: Placements, grad: bool
    ) -> tuple[Move, ...] | None:
        key = (placements, need, grad)
        if key not in self.paths:
            names, sizes = self.task.names, self.task.sizes
            layouts = [Layout(tuple(zip(names, p, strict=True))) for p in (placements, need)]
            try:
                self.paths[key] = plan_moves(layouts[0], layouts[1], sizes, grad)
            except (ProgramError, KeyError):
                self.paths[key] = None
        return self.paths[key]

    def _settled(self) -> bool:
        """Return whether every R value has a use of the same work: it would be R~ otherwise."""
        pure = self.options.pure
        for name, placements in self.placements.items():
            if not pure.may_differ(name) or not self.uses.get(name):
                continue
            for i, (p, axis) in enumerate(zip(placements, self.task.axes, strict=True)):
                inner = name not in self.kinds and i not in self.pure[name]
                if p != REPLICATE or axis.ranks == 1 or inner:
                    continue
                rows = self.uses[name]
                if all(r[i] == PARTIAL_GRAD or isinstance(r[i], Shard) for r in rows):
                    return False
        return True

    def _ends(self) -> float:
        before = set(self.moved)
        total = 0.0
        ends = [self.graph.loss, *(b.mutation for b in self.graph.buffers)]
        for name in (n for n in ends if n is not None):
            replicated = tuple(REPLICATE for _ in self.task.axes)
            price = self._move(name, self.placements[name], replicated)
            total += float("inf") if price is None else price
        for name in self.graph.sends:
            placements = self.placements[name]
            completed = tuple(REPLICATE if isinstance(p, Partial) else p for p in placements)
            price = self._move(name, placements, completed)
            total += float("inf") if price is None else price
        self.moved = before
        return total
