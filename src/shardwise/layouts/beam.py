"""Choose layouts for one mesh axis by dynamic programming with a beam.

A state of the dynamic program is the placement of every live value; among states that agree on
these the cheapest survives. A value is stored as its producer gives it. Placements that it was
turned into for a use stay available, so that a conversion is paid once. With a beam as wide as the
number of states the answer is optimal for `costs` among what `allowed` admits.

This search resolves plans: it needs no cluster, no seconds and no solver, and gives the same
answer on every rank. `solve` answers the joint question over all mesh axes for the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph, Node, Ref, TensorType
from shardwise.layouts.moves import (
    IMPOSSIBLE,
    PER_BYTE,
    PER_MADE_BYTE,
    PER_MADE_TRANSFER,
    PER_SLICE,
    PER_TRANSFER,
    move_cost,
    multiply_adds,
    same_placement,
    work,
)
from shardwise.layouts.problem import Allowed, Assignment, Task, constant_values, leaves_room
from shardwise.sharding.candidates import Candidate, Pass, Same, ShardAxis, candidates
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
)

WHOLE_INPUT = 1e7  # a batch axis uses the part of an input that it loads, wherever it can
RIVALS = 6  # how many cheaper states a state is compared with
MAX_STORAGES = 128  # ways to store the parameters that later nodes use
CUT_VECTOR = 10 * PER_TRANSFER  # a norm's weight is cut only where the work around it asks for it
MOVED_PARAMETER = 20.0  # parameters are stored as they are used, rather than moved in every step

UNBORN = -1  # the number of a value that is not held yet
Held = tuple[Placement, ...]  # the stored placement first, then what uses turned it into


@dataclass(slots=True)
class State:
    """One way to run the nodes so far; `held` follows the live values, as numbers of `seen`."""

    cost: float
    held: tuple[int, ...]
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
        self.last: dict[str, int] = {}
        for index, node in enumerate(graph.nodes):
            for name in (*node.inputs, *node.outputs):
                self.last[name] = max(index, self.last.get(name, -1))
        self.ends = {graph.loss} if graph.loss else set()
        self.ends |= {b.mutation for b in graph.buffers if b.mutation}
        self.sends = set(graph.sends)
        self.live: list[str] = []
        self.allowed = Allowed(graph, facts, task, earlier)
        made = self.parameters.union(*(node.outputs for node in graph.nodes))
        self.made = frozenset() if task.split else frozenset(made - self.allowed.varying)
        self.pure = parameter_values(graph, facts) | self.made
        self.turned: dict[tuple[str, int, int], float] = {}
        self.seen: list[Held] = []  # every `Held` has a number, so that states hash quickly
        self.numbers: dict[Held, int] = {}

    def number(self, placements: Held) -> int:
        """Return the number of the placements of a value."""
        found = self.numbers.get(placements)
        if found is None:
            found = self.numbers[placements] = len(self.seen)
            self.seen.append(placements)
        return found

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
            numbers = (*state.held, *unborn)
            groups.setdefault(tuple(numbers[i] for i in where), []).append(state)
        best: dict[tuple[int, ...], State] = {}
        for numbers, members in groups.items():
            present = {n: self._known(i) for n, i in zip(operands, numbers, strict=True)}
            for candidate in options:
                moved = self._move(node, candidate, present)
                if moved is None:
                    continue
                cost, after, stored = moved
                fed = [(i, self.number(after[n])) for i, n in zip(where, operands, strict=True)]
                results = dict(zip(node.outputs, candidate.results, strict=True))
                tail = tuple(self.number((results[n],)) for n in produced)
                for state in members:
                    held_list = [*state.held, *unborn]
                    for i, number in fed:
                        held_list[i] = number
                    key = (*(held_list[i] for i in keep), *tail)
                    total = state.cost + cost
                    known = best.get(key)
                    if known is None or total < known.cost:
                        best[key] = State(total, key, candidate, stored, state)
        self.live = [self.live[i] for i in keep] + produced
        if not best:
            raise InfeasiblePlan(
                f"no way to run {node.op} on mesh axis {self.task.axis} satisfies the plan",
                where=node.origin,
                hint="loosen the entries for its parameters or for this node",
            )
        return self._prune(list(best.values()))

    def _prune(self, states: list[State]) -> list[State]:
        """Return the states worth keeping.

        A state is dropped when a cheaper one could be turned into it for the difference. Of the
        rest the cheapest stay; each way to store parameters that are still used keeps a share.
        These ways multiply when a block is called twice, so only the cheapest of them stay.
        """
        tied = [i for i, name in enumerate(self.live) if name in self.parameters]
        groups: dict[tuple[Placement, ...], list[State]] = {}
        for state in sorted(states, key=lambda s: s.cost):
            storage = tuple(self.seen[state.held[i]][0] for i in tied)
            if storage not in groups and len(groups) == MAX_STORAGES:
                continue
            group = groups.setdefault(storage, [])
            if not any(self._reaches(other, state) for other in group[:RIVALS]):
                group.append(state)
        share = max(8, self.task.beam // len(groups))
        return [state for group in groups.values() for state in group[:share]]

    def _reaches(self, rival: State, state: State) -> bool:
        """Whether the cheaper rival becomes this state by moves that cost no more than the rest."""
        room = state.cost - rival.cost
        for name, mine, theirs in zip(self.live, rival.held, state.held, strict=True):
            if mine != theirs:
                room -= self._turning(name, mine, theirs)
                if room < 0:
                    return False
        return True

    def _turning(self, name: str, mine: int, theirs: int) -> float:
        """Return what turning one number's placements of a value into another's costs."""
        key = (name, mine, theirs)
        found = self.turned.get(key)
        if found is None:
            found = sum(self._price(name, self.seen[mine], need) for need in self.seen[theirs])
            self.turned[key] = found
        return found

    def _known(self, number: int) -> Held | None:
        return None if number == UNBORN else self.seen[number]

    def _move(
        self, node: Node, candidate: Candidate, present: Mapping[str, Held | None]
    ) -> tuple[float, dict[str, Held], tuple[tuple[str, Placement], ...]] | None:
        """Cost of feeding a candidate from what is held; the placements then at hand."""
        task = self.task
        rule = self.facts.rules[node.name]
        made = all(name in self.made for name in node.outputs)
        effort = (multiply_adds if made else work)(self.facts.calls[node.name], rule)
        cost = effort
        if isinstance(candidate.choice, ShardAxis):
            cost = (
                effort / task.ranks
                + rule.axes[candidate.choice.axis].num_collectives * PER_TRANSFER
            )
            cost += self._irregular(node) if task.split else 0.0
        elif isinstance(candidate.choice, Pass) and len(node.inputs) > 1:
            cost += PER_SLICE  # at a tie, sums are completed before they are added to others
        after = dict(present)
        stored: list[tuple[str, Placement]] = []
        for name, needed in zip(node.inputs, candidate.operands, strict=True):
            held = after[name]
            if held is None:
                first = self._store(name, needed, made)
                if first is None:
                    return None
                held = (first,)
                if name in self.parameters:
                    cost += self._holding(name, first)
                if name in self.parameters or name in self.received:
                    stored.append((name, first))
            price = self._price(name, held, needed)
            if price == IMPOSSIBLE:
                return None
            free = price == 0 or node.name in task.choices  # a plan says where cuts begin
            if not (free or self.allowed.may_begin(node, name, held[0], needed)):
                return None
            if price > 0 and not any(same_placement(h, needed, task.ranks) for h in held):
                held = (*held, needed)
            cost += price
            after[name] = held
        for name, given in zip(node.outputs, candidate.results, strict=True):
            if name in self.ends or (name in self.sends and isinstance(given, Partial)):
                value = self.graph.values[name]
                cost += move_cost(value, given, REPLICATE, task.ranks, False)
        return cost, {k: v for k, v in after.items() if v is not None}, tuple(stored)

    def _irregular(self, node: Node) -> float:
        """The price of cutting a norm's weight: the stream between blocks stays whole at a tie."""
        mine = [self.graph.values[n].shape for n in node.inputs if n in self.parameters]
        if not mine or any(sum(size > 1 for size in shape) > 1 for shape in mine):
            return 0.0
        if node.op.split(".")[1] in ("add", "sub"):  # a bias follows the product before it
            return 0.0
        return CUT_VECTOR + 2 * PER_BYTE * self.graph.values[node.outputs[0]].num_bytes

    def _store(self, name: str, needed: Placement, made: bool) -> Placement | None:
        """Return the storage of a value at its first use.

        Inputs are whole, parameters as decided; a value from an earlier stage comes as needed. What
        is made of parameters alone may take parts of them.
        """
        if name in self.received:
            return needed if isinstance(needed, Shard) else REPLICATE
        if name not in self.parameters:
            return REPLICATE
        fixed = self.task.parameters.get(name)
        if fixed is not None:
            return fixed
        if isinstance(needed, Shard):
            return needed if self.task.split else REPLICATE if made else None
        return REPLICATE

    def _holding(self, name: str, placement: Placement) -> float:
        value = self.graph.values[name]
        share = 1 / self.task.ranks if isinstance(placement, Shard) else 1.0
        matrix = sum(size > 1 for size in value.shape) > 1
        return value.numel * share * (self.task.weight if matrix and self.task.split else 1.0)

    def _price(self, name: str, held: Held, needed: Placement) -> float:
        """Return the cheapest way to the needed placement from any at hand."""
        if name in self.free:
            return self._free_price(name, needed)
        price = min(self._turn(name, h, needed) for h in held)
        return price * MOVED_PARAMETER if name in self.parameters else price

    def _turn(self, name: str, held: Placement, needed: Placement) -> float:
        """Return what turning one placement of a value into another costs."""
        value, ranks = self.graph.values[name], self.task.ranks
        grad = name in self.facts.carries_grad
        if name in self.made:
            return _made_price(value, held, needed, ranks, grad)
        if name in self.pure and needed == PARTIAL_GRAD and isinstance(held, Replicate):
            grad = False  # a parameter's partial gradient is reduced with the others, in buckets
        return move_cost(value, held, needed, ranks, grad)

    def _free_price(self, name: str, needed: Placement) -> float:
        """Inputs, buffers and constants are whole everywhere: cutting them costs nothing."""
        if name not in self.inputs or self.task.inputs is None:
            return 0.0
        allowed = self.task.inputs.get(name)
        if not isinstance(needed, Shard):
            return 0.0 if allowed is None else WHOLE_INPUT
        fits = allowed is not None and same_placement(allowed, needed, self.task.ranks)
        return 0.0 if fits else IMPOSSIBLE


def _made_price(
    value: TensorType, held: Placement, needed: Placement, ranks: int, grad: bool
) -> float:
    """Return what turning a value that every rank can make costs.

    Of a whole one, ranks use what they need, and its partial gradient is reduced at parameters. The
    parts of another are gathered for work that differs, sooner or later.
    """
    if isinstance(held, Replicate):
        return move_cost(value, held, needed, ranks, False)
    return move_cost(
        value,
        held,
        PARTIAL_GRAD if needed == REPLICATE else needed,
        ranks,
        grad,
        per_byte=PER_MADE_BYTE,
        per_transfer=PER_MADE_TRANSFER,
    )


def parameter_values(graph: Graph, facts: Facts) -> frozenset[str]:
    """Values through which gradients reach parameters alone: parameters, casts of them, …"""
    pure = {p.value for p in graph.parameters}
    for node in graph.nodes:
        carrying = [n for n in node.inputs if n in facts.carries_grad]
        fed = any(n not in facts.carries_grad for n in node.inputs)
        if carrying and all(n in pure for n in carrying) and (not fed or _small(graph, node)):
            pure |= set(node.outputs)
    return frozenset(pure)


def _small(graph: Graph, node: Node) -> bool:
    """Whether other operands leave the result no larger than what is looked up: no batch in it."""
    inputs = {i.value for i in graph.inputs}
    return not any(name in inputs for name in node.inputs)


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
    ordered = {node.name: nodes[node.name] for node in graph.nodes}
    return Assignment(
        axis=task.axis, ranks=task.ranks, nodes=ordered, parameters=parameters, cost=best.cost
    )


def shard_tables(
    graph: Graph,
    facts: Facts,
    assignments: tuple[Assignment, ...],
    named: Mapping[str, Collection[str]],
) -> tuple[Assignment, ...]:
    """The assignments with tables in parts; `named` are nodes of which a plan says an axis."""
    tables = constant_values(graph) - _shown(graph)
    made = [node for node in reversed(graph.nodes) if tables.issuperset(node.outputs)]
    if not made:
        return assignments
    found = list(assignments)
    users = _users(graph)
    for index, assignment in enumerate(assignments):
        others = tuple(other for other in found if other.axis != assignment.axis)
        nodes = dict(assignment.nodes)
        for node in made:
            if assignment.axis not in named.get(node.name, ()):
                nodes[node.name] = _as_used(node, facts, nodes, users, assignment, others)
        found[index] = replace(assignment, nodes=nodes)
    return tuple(found)


def _shown(graph: Graph) -> frozenset[str]:
    """Values that somebody outside of the graph sees."""
    found = {leaf.name for leaf in graph.outputs if isinstance(leaf, Ref)}
    found |= {b.mutation for b in graph.buffers if b.mutation} | set(graph.sends)
    return frozenset(found | ({graph.loss} if graph.loss else set()))


def _users(graph: Graph) -> dict[str, list[tuple[str, int]]]:
    """Return where every value is used: nodes, and the operand's place there."""
    found: dict[str, list[tuple[str, int]]] = {}
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            found.setdefault(name, []).append((node.name, place))
    return found


def _as_used(
    node: Node,
    facts: Facts,
    nodes: Mapping[str, Candidate],
    users: Mapping[str, list[tuple[str, int]]],
    assignment: Assignment,
    others: tuple[Assignment, ...],
) -> Candidate:
    """Return the choice of a table's node: the part that all uses take, where it can make that."""
    known = nodes[node.name]
    if not isinstance(known.choice, Same) or len(node.outputs) != 1:
        return known
    needs = [nodes[user].operands[place] for user, place in users.get(node.outputs[0], ())]
    part = _agreed(needs, assignment.ranks)
    if part is None:
        return known
    for candidate in candidates(facts.rules[node.name], facts.structures[node.name]):
        fits = isinstance(candidate.choice, ShardAxis) and same_placement(
            candidate.results[0], part, assignment.ranks
        )
        summed = any(isinstance(p, Partial) for p in candidate.operands)
        if fits and not summed and leaves_room(node, candidate, assignment.ranks, facts, others):
            return candidate
    return known


def _agreed(needs: list[Placement], ranks: int) -> Shard | None:
    """Return the one part that is needed; None if there is more than that."""
    first = needs[0] if needs else None
    if isinstance(first, Shard) and all(same_placement(first, need, ranks) for need in needs):
        return first
    return None
