"""Choose layouts for one mesh axis by dynamic programming with a beam.

A state of the dynamic program is the placement of every live value; among states with equal
placements the cheapest survives. A value has the placement that its producer gives it. Placements
that it is converted to for a use stay available, so that a conversion is paid once. With a beam as
wide as the number of states the answer is optimal among the candidates that `Allowed` admits, for
the costs of `moves`.

This search resolves plans: it needs no cluster, no seconds and no solver, and gives the same
answer on every rank. `solve` answers the joint question over all mesh axes for the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph, Node, TensorType
from shardwise.layouts import moves
from shardwise.layouts.problem import Allowed, Assignment, Task, constant_values, nest
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
from shardwise.shares import AxisSize, num_ranks

FULL_INPUT = 1e7  # a batch axis uses the shard of an input that it loads, wherever it can
RIVALS = 6  # the number of cheaper states with which a state is compared
MAX_STORAGES = 128  # combinations of storages of the parameters that later nodes use
SHARDED_VECTOR = (
    10 * moves.PER_TRANSFER
)  # a norm's weight is sharded only if the nodes around it ask
MOVED_PARAMETER = 20.0  # prefer storing parameters as they are used to moving them in every step

UNBORN = -1  # in place of the placements of a value that has none yet
Available = tuple[Placement, ...]  # the stored placement, then those that uses converted it to


@dataclass(slots=True)
class State:
    """Choices for the nodes so far; `available` are numbers of placements, by live value."""

    cost: float
    available: tuple[int, ...]
    chosen: Candidate | None = None
    stored: tuple[tuple[str, Placement], ...] = ()
    previous: State | None = None


class Search:
    """One run of the dynamic program: the live values, and the transition at each node."""

    def __init__(
        self, graph: Graph, facts: Facts, task: Task, earlier: tuple[Assignment, ...]
    ) -> None:
        self.graph, self.facts, self.task, self.earlier = graph, facts, task, earlier
        self.parameters = {p.value for p in graph.parameters}
        self.inputs = {i.value for i in graph.inputs if i.kind == "batch"}
        self.received = {i.value for i in graph.inputs if i.kind == "received"}
        self.free = self.inputs | {c.value for c in graph.constants}
        self.free |= {i.value for i in graph.inputs if i.kind == "precomputed"}
        self.free |= {b.value for b in graph.buffers}
        names = enumerate((*node.inputs, *node.outputs) for node in graph.nodes)
        self.last = {name: index for index, used in names for name in used}
        self.ends = graph.ends
        self.sends = set(graph.sends)
        self.live: list[str] = []
        self.allowed = Allowed(graph, facts, task, earlier)
        made = self.parameters.union(*(node.outputs for node in graph.nodes))
        self.made = frozenset() if task.shard_parameters else frozenset(made - self.allowed.varying)
        self.pure = parameter_values(graph, facts) | self.made
        self.conversions: dict[tuple[str, int, int], float] = {}
        # Placements are identified by numbers, so that states hash quickly.
        self.placements: list[Available] = []
        self.numbers: dict[Available, int] = {}

    def number(self, placements: Available) -> int:
        """Return the number that identifies the available placements of a value."""
        number = self.numbers.get(placements)
        if number is None:
            number = self.numbers[placements] = len(self.placements)
            self.placements.append(placements)
        return number

    def step(self, index: int, node: Node, states: list[State]) -> list[State]:
        """Return all states after `node`."""
        options = self.allowed.options(node)
        operands = list(dict.fromkeys(node.inputs))
        new = [name for name in operands if name not in self.live]
        self.live += new
        where = [self.live.index(name) for name in operands]
        produced = [n for n in node.outputs if self.last[n] > index]
        keep = [i for i, name in enumerate(self.live) if self.last[name] > index]
        unborn = (UNBORN,) * len(new)
        groups: dict[tuple[int, ...], list[State]] = {}
        for state in states:
            numbers = (*state.available, *unborn)
            groups.setdefault(tuple(numbers[i] for i in where), []).append(state)
        best: dict[tuple[int, ...], State] = {}
        for numbers, members in groups.items():
            present = {
                name: None if number == UNBORN else self.placements[number]
                for name, number in zip(operands, numbers, strict=True)
            }
            for candidate in options:
                move = self._move(node, candidate, present)
                if move is None:
                    continue
                cost, after, stored = move
                operand_numbers = [
                    (i, self.number(after[n])) for i, n in zip(where, operands, strict=True)
                ]
                results = dict(zip(node.outputs, candidate.results, strict=True))
                tail = tuple(self.number((results[n],)) for n in produced)
                for state in members:
                    available = [*state.available, *unborn]
                    for i, number in operand_numbers:
                        available[i] = number
                    key = (*(available[i] for i in keep), *tail)
                    total = state.cost + cost
                    rival = best.get(key)
                    if rival is None or total < rival.cost:
                        best[key] = State(total, key, candidate, stored, state)
        self.live = [self.live[i] for i in keep] + produced
        if not best:
            raise InfeasiblePlan(
                f"no sharding of {node.op} on mesh axis {self.task.axis} satisfies the plan",
                where=node.origin,
                hint="loosen the entries for its parameters or for this node",
            )
        return self._prune(list(best.values()))

    def _prune(self, states: list[State]) -> list[State]:
        """Return the states worth keeping.

        A state is dropped if a cheaper one could be converted to it for the difference in cost. The
        beam is shared equally between the storages of parameters that are still used, and each
        keeps its cheapest states. Storages multiply if a block is called twice, so only the
        cheapest of them stay.
        """
        tied = [i for i, name in enumerate(self.live) if name in self.parameters]
        groups: dict[tuple[Placement, ...], list[State]] = {}
        for state in sorted(states, key=lambda s: s.cost):
            storage = tuple(self.placements[state.available[i]][0] for i in tied)
            if storage not in groups and len(groups) == MAX_STORAGES:
                continue
            group = groups.setdefault(storage, [])
            if not any(self._reaches(other, state) for other in group[:RIVALS]):
                group.append(state)
        share = max(8, self.task.beam // len(groups))
        return [state for group in groups.values() for state in group[:share]]

    def _reaches(self, rival: State, state: State) -> bool:
        """Return whether the difference in cost pays for converting the rival to this state."""
        budget = state.cost - rival.cost
        for name, old, new in zip(self.live, rival.available, state.available, strict=True):
            if old != new:
                budget -= self._conversion(name, old, new)
                if budget < 0:
                    return False
        return True

    def _conversion(self, name: str, old: int, new: int) -> float:
        """Return the cost of making the placements `new` of a value available from `old`."""
        key = (name, old, new)
        cost = self.conversions.get(key)
        if cost is None:
            available = self.placements[old]
            cost = sum(self._price(name, available, need) for need in self.placements[new])
            self.conversions[key] = cost
        return cost

    def _move(
        self, node: Node, candidate: Candidate, present: Mapping[str, Available | None]
    ) -> tuple[float, dict[str, Available], tuple[tuple[str, Placement], ...]] | None:
        """Return a candidate's cost with that of its operands, then available placements, storages.

        Return None if the candidate cannot get one of its operands.
        """
        task = self.task
        rule = self.facts.rules[node.name]
        made = all(name in self.made for name in node.outputs)
        effort = (moves.multiply_adds if made else moves.work)(self.facts.calls[node.name], rule)
        cost = effort
        if isinstance(candidate.choice, ShardAxis):
            cost = (
                effort / num_ranks(task.ranks)
                + rule.axes[candidate.choice.axis].num_collectives * moves.PER_TRANSFER
            )
            cost += self._irregular(node) if task.shard_parameters else 0.0
        elif isinstance(candidate.choice, Pass) and len(node.inputs) > 1:
            cost += moves.PER_SLICE  # at a tie, complete sums before adding them to other values
        after = dict(present)
        stored: list[tuple[str, Placement]] = []
        for name, needed in zip(node.inputs, candidate.operands, strict=True):
            available = after[name]
            if available is None:
                first = self._store(name, needed, made)
                if first is None:
                    return None
                available = (first,)
                if name in self.parameters:
                    cost += self._storing(name, first)
                if name in self.parameters or name in self.received:
                    stored.append((name, first))
            price = self._price(name, available, needed)
            if price == moves.IMPOSSIBLE:
                return None
            free = price == 0 or node.name in task.choices  # a plan may begin to shard anywhere
            if not (free or self.allowed.may_begin(node, name, available[0], needed)):
                return None
            if price > 0 and not any(
                moves.same_placement(h, needed, task.ranks) for h in available
            ):
                available = (*available, needed)
            cost += price
            after[name] = available
        for name, placement in zip(node.outputs, candidate.results, strict=True):
            if name in self.ends or (name in self.sends and isinstance(placement, Partial)):
                value = self.graph.values[name]
                cost += moves.move_cost(value, placement, REPLICATE, task.ranks, False)
        return cost, {k: v for k, v in after.items() if v is not None}, tuple(stored)

    def _irregular(self, node: Node) -> float:
        """Return the price of sharding a norm's weight: the residual stream stays full at a tie."""
        shapes = [self.graph.values[n].shape for n in node.inputs if n in self.parameters]
        if not shapes or any(sum(size > 1 for size in shape) > 1 for shape in shapes):
            return 0.0
        if node.op.split(".")[1] in ("add", "sub"):  # a bias follows the product before it
            return 0.0
        return SHARDED_VECTOR + 2 * moves.PER_BYTE * self.graph.values[node.outputs[0]].num_bytes

    def _store(self, name: str, needed: Placement, made: bool) -> Placement | None:
        """Return the storage of a value at its first use, or None if that use is impossible.

        Inputs are replicated, parameters stored as the task says; a value from an earlier stage
        arrives as needed. Values that every rank can compute may use shards of replicated
        parameters.
        """
        if name in self.received:
            return needed if isinstance(needed, Shard) else REPLICATE
        if name not in self.parameters:
            return REPLICATE
        fixed = self.task.parameters.get(name)
        if fixed is not None:
            return fixed
        if isinstance(needed, Shard):
            return needed if self.task.shard_parameters else REPLICATE if made else None
        return REPLICATE

    def _storing(self, name: str, placement: Placement) -> float:
        value = self.graph.values[name]
        share = 1 / num_ranks(self.task.ranks) if isinstance(placement, Shard) else 1.0
        matrix = sum(size > 1 for size in value.shape) > 1
        weight = self.task.weight if matrix and self.task.shard_parameters else 1.0
        return value.numel * share * weight

    def _price(self, name: str, available: Available, needed: Placement) -> float:
        """Return the lowest cost of the needed placement from any available one."""
        if name in self.free:
            return self._free_price(name, needed)
        price = min(self._convert(name, current, needed) for current in available)
        return price * MOVED_PARAMETER if name in self.parameters else price

    def _convert(self, name: str, current: Placement, needed: Placement) -> float:
        """Return the cost of turning one placement of a value into another."""
        value, ranks = self.graph.values[name], self.task.ranks
        grad = name in self.facts.carries_grad
        if name in self.made:
            return _made_price(value, current, needed, ranks, grad)
        if name in self.pure and needed == PARTIAL_GRAD and isinstance(current, Replicate):
            grad = False  # a parameter's partial gradient is reduced with the others, in buckets
        return moves.move_cost(value, current, needed, ranks, grad)

    def _free_price(self, name: str, needed: Placement) -> float:
        """Return the cost of a replicated input, buffer or constant: sharding it is free."""
        if name not in self.inputs or self.task.inputs is None:
            return 0.0
        allowed = self.task.inputs.get(name)
        if not isinstance(needed, Shard):
            return 0.0 if allowed is None else FULL_INPUT
        fits = allowed is not None and moves.same_placement(allowed, needed, self.task.ranks)
        return 0.0 if fits else moves.IMPOSSIBLE


def _made_price(
    value: TensorType, current: Placement, needed: Placement, ranks: AxisSize, grad: bool
) -> float:
    """Return the cost of converting a value that every rank can compute.

    Of a replicated value, ranks use the part they need, and its partial gradient is reduced at the
    parameters. Shards are gathered sooner or later for work that differs between ranks.
    """
    if isinstance(current, Replicate):
        return moves.move_cost(value, current, needed, ranks, False)
    return moves.move_cost(
        value,
        current,
        PARTIAL_GRAD if needed == REPLICATE else needed,
        ranks,
        grad,
        per_byte=moves.PER_MADE_BYTE,
        per_transfer=moves.PER_MADE_TRANSFER,
    )


def parameter_values(graph: Graph, facts: Facts) -> frozenset[str]:
    """Return the values whose gradients reach parameters only: parameters, casts of them, …"""
    inputs = {i.value for i in graph.inputs}
    pure = {p.value for p in graph.parameters}
    for node in graph.nodes:
        carrying = [n for n in node.inputs if n in facts.carries_grad]
        # A lookup with an input has a result for the batch, larger than the parameter.
        looks_up = any(n in inputs for n in node.inputs)
        if carrying and all(n in pure for n in carrying) and not looks_up:
            pure |= set(node.outputs)
    return frozenset(pure)


def assign(
    graph: Graph, facts: Facts, task: Task, earlier: tuple[Assignment, ...] = ()
) -> Assignment:
    """Return the cheapest choices for one mesh axis, given those of earlier axes."""
    search = Search(graph, facts, task, earlier)
    states = [State(0.0, ())]
    for index, node in enumerate(graph.nodes):
        states = search.step(index, node, states)
    best = min(states, key=lambda s: s.cost)
    nodes: dict[str, Candidate] = {}
    parameters: dict[str, Placement] = {}
    state: State | None = best
    for node in reversed(graph.nodes):
        assert state is not None
        assert state.chosen is not None
        nodes[node.name] = state.chosen
        parameters.update(state.stored)
        state = state.previous
    for parameter in graph.parameters:
        parameters.setdefault(parameter.value, task.parameters.get(parameter.value, REPLICATE))
    return Assignment(
        axis=task.axis,
        ranks=task.ranks,
        nodes=dict(reversed(nodes.items())),
        parameters=parameters,
        cost=best.cost,
    )


def shard_tables(
    graph: Graph,
    facts: Facts,
    assignments: tuple[Assignment, ...],
    named: Mapping[str, Collection[str]],
) -> tuple[Assignment, ...]:
    """Return the assignments with tables sharded where all their uses take the same shard.

    `named` maps a node to the mesh axes on which a plan fixes its choice.
    """
    tables = constant_values(graph) - graph.visible
    producers = [node for node in reversed(graph.nodes) if tables.issuperset(node.outputs)]
    if not producers:
        return assignments
    result = list(assignments)
    users: dict[str, list[tuple[str, int]]] = {}  # value -> nodes and operand positions
    for node in graph.nodes:
        for position, name in enumerate(node.inputs):
            users.setdefault(name, []).append((node.name, position))
    for index, assignment in enumerate(assignments):
        others = tuple(other for other in result if other.axis != assignment.axis)
        nodes = dict(assignment.nodes)
        for node in producers:
            if assignment.axis not in named.get(node.name, ()):
                nodes[node.name] = _as_used(node, facts, nodes, users, assignment, others)
        result[index] = replace(assignment, nodes=nodes)
    return tuple(result)


def _as_used(
    node: Node,
    facts: Facts,
    nodes: Mapping[str, Candidate],
    users: Mapping[str, list[tuple[str, int]]],
    assignment: Assignment,
    others: tuple[Assignment, ...],
) -> Candidate:
    """Return the choice of a table's node that computes just the shard that all uses take."""
    current, ranks = nodes[node.name], assignment.ranks
    if not isinstance(current.choice, Same) or len(node.outputs) != 1:
        return current
    needs = [nodes[user].operands[position] for user, position in users.get(node.outputs[0], ())]
    shard = needs[0] if needs else None
    if not isinstance(shard, Shard) or not all(
        moves.same_placement(shard, n, ranks) for n in needs
    ):
        return current
    for candidate in facts.candidates(node.name):
        fits = isinstance(candidate.choice, ShardAxis) and moves.same_placement(
            candidate.results[0], shard, ranks
        )
        summed = any(isinstance(p, Partial) for p in candidate.operands)
        if (
            fits
            and not summed
            and all(
                nest(node, facts, candidate, ranks, other.nodes[node.name], other.ranks)
                for other in others
            )
        ):
            return candidate
    return current
