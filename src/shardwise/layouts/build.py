"""Build the factor graph of a joint layout problem from its options and prices.

Values are stored, moved and shared as in `program.lower`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np

from shardwise.errors import InfeasiblePlan, ProgramError
from shardwise.ir import Graph, TensorType
from shardwise.layouts.factor_graph import INF, Model, MultiUse, Use, Variable, impossible_variable
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
    """Moves between placements and their prices, cached; placements are identified by numbers."""

    def __init__(self, graph: Graph, task: LayoutTask, prices: Prices) -> None:
        self.graph, self.prices = graph, prices
        self.names, self.sizes = task.names, task.sizes
        self.numbers: dict[Placements, int] = {}
        self.layouts: list[Layout] = []
        self._paths: dict[tuple[TensorType | None, int, int, bool], tuple[Step, ...] | None] = {}
        self._prices: dict[tuple[TensorType, int, int, bool], float] = {}

    def number(self, placements: Placements) -> int:
        """Return the number that identifies these placements."""
        number = self.numbers.get(placements)
        if number is None:
            number = self.numbers[placements] = len(self.layouts)
            self.layouts.append(Layout(tuple(zip(self.names, placements, strict=True))))
        return number

    def between(self, value: str, current: int, needed: int, grad: bool) -> tuple[Step, ...] | None:
        """Return each move as (placements before, after), or None if there is no path."""
        if current == needed:
            return ()
        kind = self.graph.values[value]
        ragged = kind if kind.ragged > 1 else None
        key = (ragged, current, needed, grad)
        if key not in self._paths:
            self._paths[key] = self._find(ragged, current, needed, grad)
        return self._paths[key]

    def _find(
        self, ragged: TensorType | None, current: int, needed: int, grad: bool
    ) -> tuple[Step, ...] | None:
        before, after = self.layouts[current], self.layouts[needed]
        try:
            moves = plan_moves(before, after, self.sizes, grad, ragged)
        except (ProgramError, KeyError):  # the table of redistributions has no such entry
            return None
        return tuple(
            (self.number(_placements(m.before)), self.number(_placements(m.layout))) for m in moves
        )

    def price(self, value: str, step: Step, grad: bool) -> float:
        """Return the price of one move of a value."""
        key = (self.graph.values[value], *step, grad)
        price = self._prices.get(key)
        if price is None:
            before, after = (_placements(self.layouts[i]) for i in step)
            price = self._prices[key] = self.prices.move(value, before, after, grad)
        return price


def _placements(layout: Layout) -> Placements:
    return tuple(p for _, p in layout.axes)


# The need of one state of a user: the value's placements per operand, whether a gradient flows
# back, and the mesh axes on which the value must be pure or not. `END` is the end of the graph.
Need = tuple[tuple[Placements, ...], bool, Demand]
END: Need = ((), False, ())
# How one state of the producer holds a value: its placements, and the axes on which it is pure.
Holding = tuple[Placements, frozenset[int]]


@dataclass(slots=True)
class Built:
    """A model, the variables of nodes and sources in it, and the meaning of their states."""

    model: Model
    nodes: dict[str, int] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    options: dict[str, tuple[Option, ...]] = field(default_factory=dict)
    storages: dict[str, tuple[Placements, ...]] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()


def build(
    options: Options, prices: Prices, joint: dict[str, tuple[Option, ...]] | None = None
) -> Built:
    """Return the model of all joint options, or of those given."""
    return _Builder(options, prices, options.of if joint is None else joint).run()


class _Builder:
    def __init__(
        self, options: Options, prices: Prices, joint: dict[str, tuple[Option, ...]]
    ) -> None:
        self.graph, self.facts, self.task = options.graph, options.facts, options.task
        self.options, self.prices, self.pure = options, prices, options.pure
        graph = self.graph
        parameters = options.pure.parameters
        self.built = Built(Model(), options=dict(joint), parameters=parameters)
        self.model = self.built.model
        self.paths = Paths(graph, self.task, prices)
        self.users: dict[str, list[str]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node.name)
        self.by_name = {node.name: node for node in graph.nodes}
        self.producers = graph.producers
        self.ends = graph.ends

    def run(self) -> Built:
        for names in families((n.name for n in self.graph.nodes), self.options.roots):
            self._nodes(names)
        for values in families((p.value for p in self.graph.parameters), self._parameter_roots()):
            self._parameters(values)
        for source in self.graph.inputs:
            if source.kind == "received" and source.value in self.users:  # as its first use needs
                first = self._needs(source.value, self.users[source.value][0])
                storages = dict.fromkeys(tuple(_stored(p) for p in need[0][0]) for need in first)
                self.built.storages[source.value] = tuple(storages)
                zeros = [0.0] * len(storages)
                self.built.sources[source.value] = self._add(zeros, zeros)
        for node in self.graph.nodes:
            for position, value in enumerate(node.outputs):
                holdings = [(o.gives[position], o.pure) for o in self.built.options[node.name]]
                self._value(value, self.built.nodes[node.name], holdings)
        for value, variable in self.built.sources.items():
            stored = [(p, frozenset[int]()) for p in self.built.storages[value]]
            self._value(value, variable, stored)
        return self.built

    def moves(self, value: str) -> int:
        """Return the multiplier for the costs of moving a value."""
        producer = self.producers.get(value)
        copies = self.task.copies.get(value if producer is None else producer.name, 1)
        return self.task.moves.get(value, copies)

    # ------------------------------------------------------------ variables
    def _add(self, unary: Sequence[float], weight: Sequence[float]) -> int:
        number = len(self.model.variables)
        self.model.variables[number] = Variable(
            np.asarray(unary, np.float64), np.asarray(weight, np.float64)
        )
        return number

    def _nodes(self, names: list[str]) -> None:
        """Add one variable for nodes that are tied together."""
        options = [self.built.options[n] for n in names]
        rows = agreeing(options, lambda o: "; ".join(str(c.choice) for c in o.choice))
        costs = [self._node(name, row) for name, row in zip(names, rows, strict=True)]
        number = self._add(
            [sum(c) for c in zip(*(c[0] for c in costs), strict=True)],
            [sum(w) for w in zip(*(c[1] for c in costs), strict=True)],
        )
        for name, row in zip(names, rows, strict=True):
            self.built.nodes[name], self.built.options[name] = number, row

    def _node(self, name: str, row: Sequence[Option]) -> tuple[list[float], list[float]]:
        """Return the cost and the bytes of each option of a node."""
        node, copies = self.by_name[name], self.task.copies.get(name, 1)
        # Variants of an option share the choice object: comparing identities avoids hashing it.
        by_choice: dict[int, tuple[float, float]] = {}
        for option in row:
            if id(option.choice) not in by_choice:
                weight = copies * self.prices.saved_bytes(node, option.choice)
                time = copies * self.prices.node(node, option.choice)
                by_choice[id(option.choice)] = time + self.task.memory_weight * weight, weight
        costs = [by_choice[id(option.choice)] for option in row]
        return [cost for cost, _ in costs], [weight for _, weight in costs]

    def _parameter_roots(self) -> dict[str, str]:
        """Tie the parameters that tied nodes use at the same position."""
        parameters = self.pure.parameters
        roots: dict[str, str] = {}
        for name, root in self.options.roots.items():
            pairs = zip(self.by_name[name].inputs, self.by_name[root].inputs, strict=False)
            for value, other in pairs:
                if value != other and value in parameters and other in parameters:
                    roots.setdefault(value, roots.get(other, other))
        return roots

    def _parameters(self, values: list[str]) -> None:
        storages = [self._storages(v) for v in values]
        rows = agreeing(storages, lambda stored: str(tuple(map(without_grad, stored))))
        unary, weights = [0.0] * len(rows[0]), [0.0] * len(rows[0])
        for value, row in zip(values, rows, strict=True):
            copies = self.task.copies.get(value, 1)
            for i, stored in enumerate(row):
                weight = copies * self.prices.stored_bytes(value, stored)
                unary[i] += copies * self.prices.store(value, stored)
                unary[i] += self.task.memory_weight * weight
                weights[i] += weight
        number = self._add(unary, weights)
        for value, row in zip(values, rows, strict=True):
            self.built.sources[value], self.built.storages[value] = number, row

    def _storages(self, value: str) -> tuple[Placements, ...]:
        """Return the storages of a parameter: replicated, or as a use needs it; with R and R~."""
        fixed = self.task.parameters.get(value, {})
        storages: dict[Placements, None] = {}
        needs = {need for user in self.users.get(value, ()) for need in self._needs(value, user)}
        replicated = tuple(REPLICATE for _ in self.task.axes)
        rows = [replicated, *sorted((p for need in needs for p in need[0]), key=str)]
        for row in dict.fromkeys(rows):
            stored = [
                fixed.get(axis.name, _stored(p, axis.follows_inputs))
                for axis, p in zip(self.task.axes, row, strict=True)
            ]
            if not _expressible(stored):
                continue
            kinds: list[tuple[Placement, ...]] = []
            for axis, p in zip(self.task.axes, stored, strict=True):
                differs = isinstance(p, Replicate) and axis.ranks != 1
                kinds.append((p, PARTIAL_GRAD) if differs and self.pure.may_differ(value) else (p,))
            storages |= dict.fromkeys(product(*kinds))
        return tuple(storages)

    # ------------------------------------------------------------ values
    def _needs(self, value: str, user: str) -> list[Need]:
        """Return the need of each option of a node for a value."""
        node = self.by_name[user]
        places = [i for i, name in enumerate(node.inputs) if name == value]
        flows = node.grad_enabled and value in self.pure.carries
        return [
            (tuple(dict.fromkeys(o.needs[i] for i in places)), flows, o.demands[places[0]])
            for o in self.built.options[user]
        ]

    def _value(self, value: str, producer: int, by_state: Sequence[Holding]) -> None:
        """Add the costs between a value's producer, given its holding by state, and its uses."""
        users = self.users.get(value, [])
        is_end = value in self.ends or value in self.graph.sends
        if not users and not is_end:
            return
        holdings = {h: i for i, h in enumerate(dict.fromkeys(by_state))}
        numbers: dict[Need, int] = {}
        uses = []
        for user in users:
            needs = [numbers.setdefault(n, len(numbers)) for n in self._needs(value, user)]
            uses.append(Use(self.built.nodes[user], np.asarray(needs, dtype=np.int64)))
        if is_end:
            uses.append(Use(None, np.asarray([numbers.setdefault(END, len(numbers))])))
        multi_use = MultiUse(
            value=value,
            producer=producer,
            holding=np.asarray([holdings[h] for h in by_state], dtype=np.int64),
            uses=uses,
            steps={},
            prices={},
            same_work={i: self._same_work(need) for need, i in numbers.items()},
            replicated={i: self._replicated(value, h) for h, i in holdings.items()},
        )
        self._fill(multi_use, list(holdings), list(numbers))
        self.model.multi_uses.append(once_each(multi_use))

    def _same_work(self, need: Need) -> frozenset[int]:
        """Return the mesh axes on which a use does the same work, so that its gradient is full."""
        rows, flows, _ = need
        return frozenset(
            i
            for row in rows
            for i, p in enumerate(row)
            if flows and not (p == PARTIAL_GRAD or isinstance(p, Shard))
        )

    def _replicated(self, value: str, holding: Holding) -> frozenset[int]:
        """Return the mesh axes on which a pure holding is R, which takes a use of the same work."""
        if not self.pure.may_differ(value):
            return frozenset()
        stored = value in self.pure.parameters
        return frozenset(
            i
            for i, p in enumerate(holding[0])
            if p == REPLICATE and self.task.axes[i].ranks != 1 and (stored or i in holding[1])
        )

    def _fill(self, multi_use: MultiUse, holdings: list[Holding], needs: list[Need]) -> None:
        """Fill in the moves from every holding to every need, and their prices."""
        value, grad = multi_use.value, multi_use.value in self.facts.carries_grad
        copies, paths = self.moves(value), self.paths
        unmoved: set[int] = set()  # needs that only a holding with the same layout serves
        if value in self.options.received:
            unmoved = set(multi_use.uses[0].need.tolist())
        elif value in self.pure.parameters:
            several = len(self.users.get(value, ())) > 1
            if not (several or self.task.move_parameters or self.task.parameters.get(value)):
                unmoved = set(range(len(needs)))
        rows = [[paths.number(row) for row in need[0]] for need in needs]
        for h, (placements, pure) in enumerate(holdings):
            number = paths.number(placements)
            end = [paths.number(self._end(value, placements))]
            for n, need in enumerate(needs):
                possible = _legal(placements, pure, need) and not (
                    n in unmoved and not _serves(placements, need)
                )
                steps: dict[int, None] = {}
                for row in (rows[n] or end) if possible else ():
                    path = paths.between(value, number, row, grad)
                    possible &= path is not None
                    for step in path or ():
                        if (h, step[1]) not in multi_use.prices:
                            multi_use.prices[h, step[1]] = copies * paths.price(value, step, grad)
                        possible &= multi_use.prices[h, step[1]] < INF
                        steps[step[1]] = None
                multi_use.steps[h, n] = tuple(steps) if possible else None

    def _end(self, value: str, placements: Placements) -> Placements:
        """Return how a value leaves the graph: replicated, or with its sums completed."""
        if value in self.ends:
            return tuple(REPLICATE for _ in placements)
        return tuple(REPLICATE if isinstance(p, Partial) else p for p in placements)


def without_grad(placement: Placement) -> Placement:
    """Return a placement without the kind of its gradient: storage does not depend on it."""
    return REPLICATE if isinstance(placement, Replicate) else placement


def _stored(need: Placement, replicated: bool = False) -> Placement:
    """Return the storage that serves a need."""
    return need if isinstance(need, Shard) and not replicated else REPLICATE


def _serves(placements: Placements, need: Need) -> bool:
    """Return whether a value needs no move for its use."""
    return any(
        all(
            _stored(needed) == (REPLICATE if current == PARTIAL_GRAD else current)
            for current, needed in zip(placements, row, strict=True)
        )
        for row in need[0]
    )


def _expressible(stored: Iterable[Placement]) -> bool:
    """Return whether the shards of all mesh axes are compatible."""
    shards = [p for p in stored if isinstance(p, Shard)]
    return all(a.dim != b.dim or compatible(a.of, b.of) for a, b in combinations(shards, 2))


def _legal(placements: Placements, pure: frozenset[int], need: Need) -> bool:
    """Return whether `program.lower` accepts a value with these placements for this use."""
    rows, flows, demand = need
    if any(must is not None and must != (i in pure) for i, must in enumerate(demand)):
        return False
    return not any(
        flows
        and current == PARTIAL_GRAD
        and not (needed == PARTIAL_GRAD or isinstance(needed, Shard))
        for row in rows
        for current, needed in zip(placements, row, strict=True)
    )


def check_feasible(built: Built) -> None:
    """Raise if a variable has no possible state."""
    number = impossible_variable(built.model)
    if number is not None:
        names = {v: k for k, v in (*built.nodes.items(), *built.sources.items())}
        raise InfeasiblePlan(
            f"no sharding of {names[number]} is compatible with the constraints on its neighbours",
            hint="loosen the entries for this parameter or node and its neighbours",
        )
