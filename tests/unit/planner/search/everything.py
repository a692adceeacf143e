"""All plans of a small graph on a few ranks, without what provably takes longer than a given step.

Enters: a graph of up to 8 nodes, a cluster, seconds. Leaves: the quickest plan below that, if any.

Nothing here is the planner's: layouts are all candidates of all nodes, settings all meshes, cuts,
micro-batches, schedules and zero levels, and each is judged by lowering and simulating it. Three
facts spare most of that work:

- What a node takes depends on its own choice and on those of its neighbours: who makes its
  operands, who else uses them, who uses its results, and, where values come from parameters by the
  same work on all ranks, on the nodes at the end of that work. `Tables` keeps
  what was seen of each such neighbourhood, and `check_locality` compares it with layouts drawn at
  random.
- A group of ranks runs its stages once for every micro-batch, and one of `pp` groups has at least
  its part of the work; and a micro-batch passes through all stages, and back. So nodes that are
  decided bound the step from below, whatever the others do.
- Layouts of which all figures that a simulation reads are equal are simulated once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf, prod

import numpy as np

from shardwise.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.sharding.candidates import Candidate, Pass, Same, candidates
from shardwise.sharding.factors import analyze
from shardwise.sharding.placements import Shard
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.fold import Fold
from shardwise.simulation.setting import Setting
from shardwise.simulation.simulate import works_of
from shardwise.simulation.step import pairs
from shardwise.simulation.times import Group
from shardwise.simulation.works import Works
from tests.unit.planner.search.tried import Kind, divisors, kinds, plan_of, quickest, settings

DIGITS = 10
SLACK = 0.02  # figures between two programs' are on a line, or from a third one: see `Works.at`
Choices = tuple[int, ...]  # of the first nodes of a graph, by number


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of every node for a micro-batch, talking included."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray


class Tables:
    """The times of nodes by their neighbourhoods, for one number of tensor-parallel ranks."""

    def __init__(self, graph: Graph, cluster: Cluster, tp: int) -> None:
        self.graph, self.cluster, self.tp = graph, cluster, tp
        facts = analyze(graph)
        self.rows = [
            self._useful(i, candidates(facts.rules[n.name], facts.structures[n.name]))
            for i, n in enumerate(graph.nodes)
        ]
        makers = {name: i for i, n in enumerate(graph.nodes) for name in n.outputs}
        users: dict[str, set[int]] = {}
        for i, node in enumerate(graph.nodes):
            for name in node.inputs:
                users.setdefault(name, set()).add(i)
        self.made_by = [{makers[n] for n in node.inputs if n in makers} for node in graph.nodes]
        self.graded = [  # by whom the operands are made that carry a gradient
            {makers[n] for n in node.inputs if n in makers and n in facts.carries_grad}
            for node in graph.nodes
        ]
        self.used_by = [
            set[int]().union(*(users.get(name, set()) for name in node.outputs))
            for node in graph.nodes
        ]
        self.near = [
            tuple(
                sorted(
                    {i}
                    | self.made_by[i]
                    | self.used_by[i]
                    | set[int]().union(*(users[name] for name in node.inputs))
                )
            )
            for i, node in enumerate(graph.nodes)
        ]
        self._works: dict[Choices, Works | None] = {}
        self._known: dict[object, tuple[float, float, float] | None] = {}
        self._evaluators: dict[object, Evaluator] = {}
        self._numels: dict[tuple[int, int], float] = {}
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

    def evaluator(self, works: Works) -> Evaluator:
        """For layouts that fold alike: layers that choose otherwise are not folded."""
        key = (works.fold.order, tuple(n.name for n in works.fold.graph.nodes))
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(works.fold, self.cluster)
        return self._evaluators[key]

    @cached_property
    def whole(self) -> Evaluator:
        """Of the cluster's figures: schedules, devices, messages."""
        return Evaluator(Fold.of(self.graph), self.cluster)

    def plan(self, choices: Choices) -> Plan:
        """The plan of a layout; parameters are stored as their first use asks."""
        chosen = [row[c] for row, c in zip(self.rows, choices, strict=True)]
        return plan_of(self.graph, chosen if self.tp > 1 else (), self.tp)

    def works(self, choices: Choices) -> Works | None:
        """The work of a layout; None where its choices do not go together."""
        if choices not in self._works:
            self.lowered += 1
            try:
                found = next(iter(works_of(self.graph, self.plan(choices))[1].values()))
                found.at(1)
            except ShardwiseError:
                found = None
            self._works[choices] = found
        return self._works[choices]

    def times(self, choices: Choices, kind: Kind) -> Times | None:
        """The times of all nodes of a layout, lowered."""
        works = self.works(choices)
        if works is None:
            return None
        setting = Setting(
            groups=kind.groups, cuts=(0,), placement=(0,), microbatches=kind.microbatches
        )
        evaluator = self.evaluator(works)
        rows = [evaluator.group_layers(works, setting, g) for g in range(kind.pp)]
        quickest = min((one for row in rows for one in row), key=lambda o: o.sums["backward"][-1])
        return Times(*(np.diff(quickest.sums[name]) for name in ("forward", "backward", "weight")))

    def key(self, index: int, choices: Choices) -> object | None:
        """What a node's times depend on; None where that is not decided."""
        same = self._same_from_parameters(choices)
        ends = {user for i in same for user in self.used_by[i]}
        around = set(self.near[index])
        if around & (same | ends):
            around |= same | ends
        if max(around) >= len(choices):
            return None
        return (index, tuple((i, choices[i]) for i in sorted(around)))

    def _same_from_parameters(self, choices: Choices) -> set[int]:
        """The nodes that do the same work on all ranks, from parameters alone."""
        found: set[int] = set()
        for i, choice in enumerate(choices):
            if isinstance(self.rows[i][choice].choice, Same) and self.graded[i] <= found:
                found.add(i)
        return found

    def part(self, index: int, choices: Choices, kind: Kind) -> tuple[float, float, float] | None:
        """Forward, backward and weight of a node, by its neighbourhood; None if undecided."""
        key = self.key(index, choices)
        if key is None:
            return None
        if (key, kind) not in self._known:
            rest = len(self.graph.nodes) - len(choices)
            times = self.times((*choices, *(0,) * rest), kind)
            self._known[key, kind] = times and (
                float(times.forward[index]) * (1 - SLACK),
                float(times.backward[index]) * (1 - SLACK),
                float(times.weight[index]),
            )
        return self._known[key, kind]

    def update(self, choices: Choices, kind: Kind, first: int, end: int, copies: int) -> float:
        """Seconds of the optimizer for the parameters of some nodes, at least.

        `copies` of `dp` ranks do the same: all of them without zero.
        """
        numel = sum(self._held(i, choices[i]) for i in range(first, end)) * copies / kind.dp
        found = []
        for device in self.whole.devices:
            calls = 12 * device.overhead_s if device.kind != "cpu" and numel else 0.0
            found.append(28.0 * numel / device.memory_rate(max(28.0 * numel, 1.0)) + calls)
        return min(found)

    def _held(self, index: int, choice: int) -> float:
        """The elements of parameters that a node is the first to use, on a rank."""
        if (index, choice) not in self._numels:
            node, total = self.graph.nodes[index], 0.0
            earlier = {n for other in self.graph.nodes[:index] for n in other.inputs}
            names = {p.value for p in self.graph.parameters} - earlier
            for name, need in zip(node.inputs, self.rows[index][choice].operands, strict=True):
                if name in names:
                    ranks = self.tp if isinstance(need, Shard) else 1
                    total += prod(self.graph.values[name].shape) // ranks
            self._numels[index, choice] = total
        return self._numels[index, choice]

    def send(self, here: Group, there: Group) -> float:
        """Seconds of the smallest message from a group to the next."""
        return self.whole.clock.collective("send", pairs(here.array, there.array)).seconds(1.0)


def check_locality(tables: Tables, kind: Kind, count: int = 20) -> None:
    """Nodes of layouts drawn at random take what their neighbourhoods took in other layouts."""
    rng = random.Random(0)
    for _ in range(count):
        choices = tuple(rng.randrange(len(row)) for row in tables.rows)
        times = tables.times(choices, kind)
        if times is None:
            continue
        for i in range(len(choices)):
            other = list(choices)
            for j in set(range(len(choices))) - {at for at, _ in tables.key(i, choices)[1]}:
                other[j] = rng.randrange(len(tables.rows[j]))
            if tables.key(i, tuple(other)) != tables.key(i, choices):
                continue  # a longer run of the same work: another neighbourhood
            theirs = tables.times(tuple(other), kind)
            if theirs is not None:
                for name in ("forward", "backward", "weight"):
                    mine, its = getattr(times, name)[i], getattr(theirs, name)[i]
                    assert np.isclose(mine, its, rtol=SLACK), (i, name, choices, other)


def quicker(
    graph: Graph, cluster: Cluster, seconds: float, memory_bytes: float = inf
) -> tuple[float, str]:
    """The quickest plan that takes less than `seconds`, and what it is; inf if there is none.

    No rank has more than `memory_bytes`, nor than its device.
    """
    best, what = inf, ""
    tables = {tp: Tables(graph, cluster, tp) for tp in divisors(cluster.num_ranks)}
    for kind in kinds(graph, cluster.num_ranks):
        mine = tables[kind.tp]
        if kind.tp > 1 and kind.microbatches == 1:
            check_locality(mine, kind, 3)
        seen: set[object] = set()
        every = list(settings(graph, kind, mine.whole))
        for choices, times in _layouts(mine, kind, seconds):
            bounds = [(_least(mine, choices, times, s, kind), s) for s in every]
            if all(bound >= min(seconds, best) for bound, _ in bounds):
                continue
            works = mine.works(choices)
            if works is None or (known := _figures(mine, works, kind)) in seen:
                continue
            seen.add(known)
            for bound, setting in bounds:
                if bound < min(seconds, best):
                    time = quickest(mine.evaluator(works), works, setting, memory_bytes)
                    if time < min(seconds, best):
                        best, chosen = time, mine.plan(choices).nodes
                        what = f"{kind} {setting.cuts} zero={setting.zero} {chosen}"
    return best, what


def _layouts(tables: Tables, kind: Kind, seconds: float) -> Iterator[tuple[Choices, Times]]:
    """The layouts whose work alone takes less than that, and what their nodes take."""
    size = len(tables.rows)
    if kind.tp == 1:
        times = tables.times((0,) * size, kind)
        assert times is not None
        yield (0,) * size, times
        return
    open_: list[tuple[Choices, dict[int, tuple[float, float, float]]]] = [((), {})]
    while open_:
        choices, known = open_.pop()
        if len(choices) == size:
            rows = np.array([known[i] for i in range(size)])
            yield choices, Times(rows[:, 0], rows[:, 1], rows[:, 2])
            continue
        for choice in range(len(tables.rows[len(choices)])):
            longer, now = (*choices, choice), dict(known)
            for i in range(len(longer)):
                if i not in now and tables.key(i, longer) is not None:
                    now[i] = tables.part(i, longer, kind) or (0.0, 0.0, 0.0)
            work = sum(forward + backward for forward, backward, _ in now.values())
            path = work - sum(weight for _, _, weight in now.values())
            update = tables.update(longer, kind, 0, len(longer), 1) / kind.pp
            if max(work * kind.microbatches / kind.pp + update, path) < seconds:
                open_.append((longer, now))


def _least(tables: Tables, choices: Choices, times: Times, setting: Setting, kind: Kind) -> float:
    """A bound of the step: the busiest group, or one micro-batch's way there and back.

    A group begins after the forward of those before it, and ends with its optimizer. Where backward
    is not split, those before it have theirs after its last one.
    """
    bounds = [*setting.cuts, len(times.forward)]
    sends = [tables.send(a, b) for a, b in pairwise(setting.groups)]
    whole = setting.schedule is None or setting.schedule.name == "1f1b"
    found, before, after, first_update = 0.0, 0.0, 0.0, 0.0
    for g, (first, end) in enumerate(pairwise(bounds)):
        forward, backward = times.forward[first:end].sum(), times.backward[first:end].sum()
        update = tables.update(choices, kind, first, end, kind.dp if not setting.zero else 1)
        first_update = update if g == 0 else first_update
        alone = setting.microbatches * (forward + backward)
        found = max(found, before + alone + update, before + alone + after + first_update)
        send = sends[g] if g < len(sends) else 0.0
        before += forward + send
        after += backward + send if whole else 0.0
    path = float((times.forward + times.backward - times.weight).sum()) + 2 * sum(sends)
    return max(float(found), path + first_update)


def _figures(tables: Tables, works: Works, kind: Kind) -> object:
    """All that a simulation reads of a layout, to some digits."""
    setting = Setting(groups=kind.groups, cuts=(0,), placement=(0,), microbatches=kind.microbatches)
    found: list[object] = []
    for layers in tables.evaluator(works).group_layers(works, setting, 0):
        arrays = [*layers.sums.values(), *(getattr(layers.work, n) for n in layers.work.ARRAYS)]
        found += [tuple(f"{v:.{DIGITS}g}" for v in array) for array in arrays]
        found.append(layers.work.parameters)
    return tuple(found)
