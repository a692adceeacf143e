"""Build the factor graph of a joint layout problem from its options and prices.

How values are stored, moved and shared follows `program.lower`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from shardwise.errors import InfeasiblePlan, ProgramError
from shardwise.ir import Graph, Node, TensorType
from shardwise.layouts.factor_graph import INF, Model, MultiUse, Use, Variable
from shardwise.layouts.moves import plan_moves
from shardwise.layouts.options import Demand, Option, Options
from shardwise.layouts.problem import LayoutTask, Placements, Prices
from shardwise.layouts.tie_layers import agreeing, families, once_each
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    compatible,
)

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
        """Return the number of placements."""
        found = self.numbers.get(placements)
        if found is None:
            found = self.numbers[placements] = len(self.layouts)
            self.layouts.append(Layout(tuple(zip(self.names, placements, strict=True))))
        return found

    def between(self, held: int, needed: int, grad: bool) -> tuple[Step, ...] | None:
        """Return each move as (placements before, after); None where there is no way."""
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
        """Return what a move of a value costs."""
        key = (self.graph.values[value], *step, grad)
        found = self._prices.get(key)
        if found is None:
            before, after = (_placements(self.layouts[i]) for i in step)
            found = self._prices[key] = self.prices.move(value, before, after, grad)
        return found


def _placements(layout: Layout) -> Placements:
    return tuple(p for _, p in layout.axes)


# What one state of a user needs of a value: its placements per operand, whether its gradient
# counts, and on which mesh axes it is to be pure. A holding: its placements, and where it is pure.
Need = tuple[tuple[Placements, ...], bool, Demand]
Holding = tuple[Placements, frozenset[int]]
END: Need = ((), False, ())


@dataclass(slots=True)
class Built:
    """A model; `nodes` and `sources` say which variable stands for what, with its states."""

    model: Model
    nodes: dict[str, int] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    options: dict[str, tuple[Option, ...]] = field(default_factory=dict)
    storages: dict[str, tuple[Placements, ...]] = field(default_factory=dict)
    by_name: dict[str, Node] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()


def build(
    options: Options,
    prices: Prices,
    *,
    joint: dict[str, tuple[Option, ...]] | None = None,
    limit: float | None = None,
) -> Built:
    """Return the whole model, of all joint options or of these; `limit` bounds the bytes."""
    return _Builder(options, prices, options.of if joint is None else joint, limit).run()


class _Builder:
    def __init__(
        self,
        options: Options,
        prices: Prices,
        joint: dict[str, tuple[Option, ...]],
        limit: float | None,
    ) -> None:
        self.graph, self.facts, self.task = options.graph, options.facts, options.task
        self.options, self.prices, self.pure = options, prices, options.pure
        graph, task = self.graph, self.task
        self.built = Built(Model(limit=limit), options=dict(joint))
        self.model = self.built.model
        self.paths = Paths(graph, task, prices)
        self.users: dict[str, list[str]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node.name)
        self.by_name = {node.name: node for node in graph.nodes}
        self.built.by_name = self.by_name
        self.built.parameters = self.pure.parameters
        self.producers = graph.producers
        ends = {graph.loss, *(b.mutation for b in graph.buffers)}
        self.ends = frozenset(name for name in ends if name is not None)

    def run(self) -> Built:
        for names in families((n.name for n in self.graph.nodes), self.options.roots):
            self._nodes(names)
        for values in families((p.value for p in self.graph.parameters), self._parameter_roots()):
            self._parameters(values)
        for source in self.graph.inputs:
            if source.kind == "received" and source.value in self.users:
                self._received(source.value)
        for node in self.graph.nodes:
            for position, value in enumerate(node.outputs):
                held = [(o.gives[position], o.pure) for o in self.built.options[node.name]]
                self._value(value, self.built.nodes[node.name], held)
        for value, variable in self.built.sources.items():
            stored = [(p, frozenset[int]()) for p in self.built.storages[value]]
            self._value(value, variable, stored)
        return self.built

    def moves(self, value: str) -> int:
        """Return how often what moves a value counts."""
        found = self.task.moves.get(value)
        if found is None:
            producer = self.producers.get(value)
            found = self.task.copies.get(value if producer is None else producer.name, 1)
        return found

    # ------------------------------------------------------------ variables

    def _add(self, unary: Sequence[float], weight: Sequence[float]) -> int:
        number = len(self.model.variables)
        self.model.variables[number] = Variable.of(unary, weight)
        return number

    def _nodes(self, names: list[str]) -> None:
        """One variable for nodes that choose alike."""
        rows = agreeing([self.built.options[n] for n in names], _choice_text)
        costs = [self._node(name, row) for name, row in zip(names, rows, strict=True)]
        number = self._add(
            [sum(c) for c in zip(*(c[0] for c in costs), strict=True)],
            [sum(w) for w in zip(*(c[1] for c in costs), strict=True)],
        )
        for name, row in zip(names, rows, strict=True):
            self.built.nodes[name], self.built.options[name] = number, row

    def _node(self, name: str, row: Sequence[Option]) -> tuple[list[float], list[float]]:
        """Return what each option of a node costs, and its bytes."""
        node, copies = self.by_name[name], self.task.copies.get(name, 1)
        known: dict[int, tuple[float, float]] = {}
        unary, weights = [], []
        for option in row:
            key = id(option.choice)
            if key not in known:
                time = copies * self.prices.node(node, option.choice)
                weight = 0.0
                if self._weighs:
                    weight = copies * self.prices.saved_bytes(node, option.choice)
                known[key] = (time + self.task.memory_weight * weight, weight)
            unary.append(known[key][0])
            weights.append(known[key][1])
        return unary, weights

    @property
    def _weighs(self) -> bool:
        return self.task.memory_weight > 0 or self.model.limit is not None

    def _parameter_roots(self) -> dict[str, str]:
        """Parameters of nodes that choose alike are stored alike."""
        known = {p.value for p in self.graph.parameters}
        found: dict[str, str] = {}
        for name, root in self.options.roots.items():
            mine, theirs = self.by_name[name].inputs, self.by_name[root].inputs
            for value, other in zip(mine, theirs, strict=False):
                if value != other and value in known and other in known:
                    found.setdefault(value, found.get(other, other))
        return found

    def _parameters(self, values: list[str]) -> None:
        rows = agreeing([self._storages(v) for v in values], _storage_text)
        unary, weights = [0.0] * len(rows[0]), [0.0] * len(rows[0])
        for value, row in zip(values, rows, strict=True):
            copies = self.task.copies.get(value, 1)
            for i, stored in enumerate(row):
                weight = copies * self.prices.stored_bytes(value, stored) if self._weighs else 0.0
                unary[i] += copies * self.prices.hold(value, stored)
                unary[i] += self.task.memory_weight * weight
                weights[i] += weight
        number = self._add(unary, weights)
        for value, row in zip(values, rows, strict=True):
            self.built.sources[value], self.built.storages[value] = number, row

    def _storages(self, value: str) -> tuple[Placements, ...]:
        """Return the ways to store a parameter: as a use needs it, or whole; with R and R~."""
        fixed = self.task.parameters.get(value, {})
        found: dict[Placements, None] = {}
        needs = {need for user in self.users.get(value, ()) for need in self._needs(value, user)}
        whole = tuple(REPLICATE for _ in self.task.axes)
        rows = [whole, *sorted((p for need in needs for p in need[0]), key=str)]
        for row in dict.fromkeys(rows):
            stored = [
                fixed.get(axis.name, _stored(p, axis.follows_inputs))
                for axis, p in zip(self.task.axes, row, strict=True)
            ]
            if not _expressible(stored):
                continue
            kinds: list[tuple[Placement, ...]] = []
            for axis, p in zip(self.task.axes, stored, strict=True):
                differs = isinstance(p, Replicate) and axis.ranks > 1
                kinds.append((p, PARTIAL_GRAD) if differs and self.pure.may_differ(value) else (p,))
            found |= dict.fromkeys(product(*kinds))
        return tuple(found)

    def _received(self, value: str) -> None:
        """Return a value from an earlier stage comes as its first use takes it."""
        first = self._needs(value, self.users[value][0])
        storages = dict.fromkeys(tuple(_stored(p) for p in need[0][0]) for need in first)
        self.built.storages[value] = tuple(storages)
        self.built.sources[value] = self._add([0.0] * len(storages), [0.0] * len(storages))

    # ------------------------------------------------------------ values

    def _needs(self, value: str, user: str) -> list[Need]:
        """Return what each option of a node needs of a value."""
        node = self.by_name[user]
        places = [i for i, name in enumerate(node.inputs) if name == value]
        flows = node.grad_enabled and value in self.pure.carries
        return [
            (
                tuple(dict.fromkeys(option.needs[i] for i in places)),
                flows,
                option.demands[places[0]],
            )
            for option in self.built.options[user]
        ]

    def _value(self, value: str, producer: int, held: Sequence[Holding]) -> None:
        users = self.users.get(value, [])
        is_end = value in self.ends or value in self.graph.sends
        if not users and not is_end:
            return
        holdings = list(dict.fromkeys(held))
        numbers: dict[Need, int] = {}
        uses = []
        for user in users:
            mine = [numbers.setdefault(n, len(numbers)) for n in self._needs(value, user)]
            uses.append(Use(self.built.nodes[user], np.asarray(mine, dtype=np.int64)))
        if is_end:
            uses.append(Use(None, np.asarray([numbers.setdefault(END, len(numbers))])))
        where = {h: i for i, h in enumerate(holdings)}
        star = MultiUse(
            value=value,
            producer=producer,
            held=np.asarray([where[h] for h in held], dtype=np.int64),
            uses=uses,
            steps={},
            prices={},
            same={i: self._same(need) for need, i in numbers.items()},
            whole={i: self._whole(value, h) for i, h in enumerate(holdings)},
        )
        self._fill(star, holdings, list(numbers), self._first(value))
        if star.uses:
            self.model.stars.append(once_each(star))

    def _first(self, value: str) -> str | None:
        return self.users[value][0] if value in self.options.received else None

    def _same(self, need: Need) -> frozenset[int]:
        """Return the mesh axes on which a use does the same work, so that its gradient is whole."""
        rows, flows, _ = need
        return frozenset(
            i
            for row in rows
            for i, p in enumerate(row)
            if flows and not (p == PARTIAL_GRAD or isinstance(p, Shard))
        )

    def _whole(self, value: str, held: Holding) -> frozenset[int]:
        """The mesh axes on which a pure holding is R, which asks for a use of the same work."""
        if not self.pure.may_differ(value):
            return frozenset()
        stored = value in self.pure.parameters
        return frozenset(
            i
            for i, p in enumerate(held[0])
            if p == REPLICATE and self.task.axes[i].ranks > 1 and (stored or i in held[1])
        )

    def _fill(
        self, star: MultiUse, holdings: list[Holding], needs: list[Need], first: str | None
    ) -> None:
        """Return the moves from every holding to every need, and their prices."""
        value, grad = star.value, star.value in self.facts.carries_grad
        copies, paths = self.moves(value), self.paths
        initial = {n for use in star.uses[:1] for n in use.need.tolist()} if first else set()
        if value in self.pure.parameters and not self._moves(value):
            initial = set(range(len(needs)))
        rows = [[paths.number(row) for row in need[0]] for need in needs]
        for h, (held, pure) in enumerate(holdings):
            number = paths.number(held)
            end = [paths.number(self._end(value, held))]
            for n, need in enumerate(needs):
                possible = _legal(held, pure, need) and not (
                    n in initial and not _serves(held, need)
                )
                taken: dict[int, None] = {}
                for row in (rows[n] or end) if possible else ():
                    path = paths.between(number, row, grad)
                    possible &= path is not None
                    for step in path or ():
                        if (h, step[1]) not in star.prices:
                            star.prices[h, step[1]] = copies * paths.price(value, step, grad)
                        possible &= star.prices[h, step[1]] < INF
                        taken[step[1]] = None
                star.steps[h, n] = tuple(taken) if possible else None

    def _moves(self, value: str) -> bool:
        """Return whether a parameter may be moved for a use."""
        several = len(self.users.get(value, ())) > 1
        return several or self.task.move_parameters or bool(self.task.parameters.get(value))

    def _end(self, value: str, held: Placements) -> Placements:
        """Return how a value leaves the graph: replicated, or with its sums completed."""
        if value in self.ends:
            return tuple(REPLICATE for _ in held)
        return tuple(REPLICATE if isinstance(p, Partial) else p for p in held)


def _choice_text(option: Option) -> str:
    return "; ".join(str(c.choice) for c in option.choice)


def _storage_text(stored: Placements) -> str:
    return str(tuple(REPLICATE if isinstance(p, Replicate) else p for p in stored))


def _stored(need: Placement, whole: bool = False) -> Placement:
    """Return the storage that serves a need."""
    return need if isinstance(need, Shard) and not whole else REPLICATE


def _serves(held: Placements, need: Need) -> bool:
    """Return whether a value is held as its use takes it."""
    return any(
        all(
            _stored(wants) == (REPLICATE if has == PARTIAL_GRAD else has)
            for has, wants in zip(held, row, strict=True)
        )
        for row in need[0]
    )


def _expressible(stored: Iterable[Placement]) -> bool:
    """Return whether the cuts of all mesh axes go together."""
    shards = [p for p in stored if isinstance(p, Shard)]
    return all(
        a.dim != b.dim or compatible(a.of, b.of)
        for i, a in enumerate(shards)
        for b in shards[i + 1 :]
    )


def _legal(held: Placements, pure: frozenset[int], need: Need) -> bool:
    """Return whether lowering would take a value so held for this use (see `program.lower`)."""
    rows, flows, demand = need
    if any(asked is not None and asked != (i in pure) for i, asked in enumerate(demand)):
        return False
    return not any(
        flows and has == PARTIAL_GRAD and not (wants == PARTIAL_GRAD or isinstance(wants, Shard))
        for row in rows
        for has, wants in zip(held, row, strict=True)
    )


def check_feasible(model: Model, built: Built) -> None:
    """Raise where a variable has no state left."""
    names = {v: k for k, v in (*built.nodes.items(), *built.sources.items())}
    for number, variable in model.variables.items():
        if len(variable) == 0:
            raise InfeasiblePlan(
                f"no sharding of {names[number]} is compatible with the constraints on its "
                "neighbours",
                hint="loosen the entries for this parameter or node and its neighbours",
            )
