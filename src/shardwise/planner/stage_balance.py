"""Where pipeline stages begin, so that they take equally long and send each other little.

Enters: a graph with its `Facts`, and the ranks of each stage. Leaves: the index of every stage's
first node.

The longest stage sets a pipeline's pace. First the least possible work of the longest stage is
found. Then stages may exceed it by each of `SLACKS` in turn, and of all cuts within that bound
those are taken which the fewest bytes cross; of equal ones those nearest to even shares. Of these
answers the best has the least work of its longest stage, plus `PER_CUT_BYTE` multiply-adds for each
byte at its widest cut. Last, where one stage is longest for want of places, the others are made
level. This takes O(stages * nodes * log nodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import InfeasiblePlan, PlanError, did_you_mean
from shardwise.ir import Graph, Node, TensorType, node_keys
from shardwise.ir.interpret import is_random
from shardwise.layouts.costs import work
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.sharding.factors import Facts

SLACKS = (0.03, 0.1, 0.2, 0.3)
PER_CUT_BYTE = 100.0  # between about 20 of a CPU with gloo and some 1000 of GPUs
HALVINGS = 30  # of the interval in which the least possible bound is searched
ROUNDING = 1e-12  # of sums of work, relative
LARGE = 600  # places from which on only narrow ones are considered, if there are enough
LEAST_GAIN = 1e-3  # for which a cut is moved

Array = NDArray[Any]


@dataclass(frozen=True)
class Costs:
    """The work of every node, and what a cut before it costs: `per_byte` of what crosses there."""

    work: Array
    crossing: Array
    per_byte: float

    @staticmethod
    def relative(graph: Graph, facts: Facts) -> Costs:
        """In multiply-adds, where nothing is known of the machines."""
        crossing = np.array(crossing_bytes(graph, facts), dtype=np.float64)
        return Costs(np.array(node_work(graph, facts)), crossing, PER_CUT_BYTE)


def balance(
    graph: Graph, facts: Facts, ranks: Sequence[float], costs: Costs | None = None
) -> tuple[int, ...]:
    """The first node of every stage, where stage s has `ranks[s]` ranks for its work.

    Every stage gets a node that uses parameters, where the model has enough of them.
    """
    if len(ranks) == 1:
        return (0,)
    return Cutter(graph).cut(costs or Costs.relative(graph, facts), ranks)


class Cutter:
    """Cuts one graph for several numbers of stages and costs."""

    def __init__(self, graph: Graph) -> None:
        reasons = unfit(graph)
        self.graph = graph
        self.fit = [index for index in range(len(graph.nodes)) if index not in reasons]
        parameters = {p.value for p in graph.parameters}
        self.owners = [any(name in parameters for name in node.inputs) for node in graph.nodes]

    def cut(self, costs: Costs, ranks: Sequence[float]) -> tuple[int, ...]:
        """The first node of every stage."""
        if len(ranks) == 1:
            return (0,)
        narrow = self._narrow(costs)
        for fit, owning in ((narrow, True), (self.fit, True), (self.fit, False)):
            if len(fit) < len(ranks) and fit is not self.fit:
                continue
            chain = _Chain(self.owners, costs, fit, ranks, owning=owning)
            least = chain.least_bound()
            if least is not None:
                return chain.choose(least)
        graph, fit = self.graph, self.fit
        raise InfeasiblePlan(
            f"{len(ranks)} stages of {graph.name}: {len(fit)} of its {len(graph.nodes)} nodes can "
            f"begin one, which gives at most {len(fit) + 1}",
            hint=f"{len(fit) + 1} stages or fewer",
        )

    def _narrow(self, costs: Costs) -> list[int]:
        """Places of a large graph which about the fewest bytes cross: between its blocks."""
        if len(self.fit) < LARGE:
            return self.fit
        crossing = costs.crossing[self.fit]
        bound = 1.2 * float(np.quantile(crossing, 0.1))
        return [index for index, size in zip(self.fit, crossing, strict=True) if size <= bound]


class _Chain:
    """The places where a stage can begin, with what lies before each; the model's end is last."""

    def __init__(
        self,
        owners: Sequence[bool],
        costs: Costs,
        fit: list[int],
        ranks: Sequence[float],
        *,
        owning: bool,
    ) -> None:
        self.places = [0, *fit, len(owners)]
        self.per_byte = costs.per_byte
        self.work = _before(costs.work)[self.places]
        self.crossing = np.append(costs.crossing, 0.0)[self.places]
        self.speeds = np.array(ranks) / np.mean(ranks)
        # A stage that ends before place j begins at the latest at last[j].
        count = len(self.places)
        owned = _before(owners)[self.places]
        self.last = np.searchsorted(owned, owned) - 1 if owning else np.arange(count) - 1

    def least_bound(self) -> float | None:
        """The least duration of the longest stage; None: there are too few places.

        It lies between `least` and `enough`. What is outside is known; within a `margin` of them
        the sums of work are rounded, and it is tried.
        """
        low, high = 0.0, float(self.work[-1] / self.speeds.min())
        if not self._reaches(high):
            return None
        least, enough = float(self.work[-1] / self.speeds.sum()), high
        margin = ROUNDING * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            reaches = middle > least
            if least - margin <= middle <= enough + margin:
                reaches = self._reaches(middle)
                shorter, longer = self._next_to(middle)
                least, enough = (least, shorter) if reaches else (longer, enough)
            low, high = (low, middle) if reaches else (middle, high)
        return high

    def _next_to(self, bound: float) -> tuple[float, float]:
        """The longest duration of a stage that is at most `bound`, and the shortest of others."""
        shorter, longer = 0.0, np.inf
        for speed in set(self.speeds.tolist()):
            first = self._first(bound, speed)
            shorter = max(shorter, float((self.work - self.work[first]).max()) / speed)
            beyond = first > 0
            lengths = self.work[beyond] - self.work[first[beyond] - 1]
            longer = min(longer, float(lengths.min(initial=np.inf)) / speed)
        return shorter, longer

    def choose(self, least: float) -> tuple[int, ...]:
        """The first node of every stage."""
        answers = self._narrowest([least * (1 + slack) for slack in SLACKS])
        best = self._level(min(answers, key=self._objective))
        return tuple(self.places[at] for at in best)

    def _objective(self, begins: list[int]) -> float:
        ends = np.array([*begins[1:], len(self.places) - 1])
        longest = ((self.work[ends] - self.work[begins]) / self.speeds).max()
        return float(longest + self.per_byte * self.crossing[begins].max())

    def _first(self, bound: float, speed: float) -> Array:
        """The earliest beginning of a stage of at most `bound` that ends before each place."""
        return np.searchsorted(self.work, self.work - bound * speed)

    def _reaches(self, bound: float) -> bool:
        """Whether all stages together, each of at most `bound`, come to the model's end."""
        after = self.last + 1
        starts = {s: np.minimum(self._first(bound, s), after) for s in set(self.speeds.tolist())}
        reached = np.arange(len(after)) == 0
        before = np.zeros(len(after) + 1, dtype=np.int64)
        for speed in self.speeds.tolist():
            np.cumsum(reached, out=before[1:])
            reached = before[after] > before[starts[speed]]
        return bool(reached[-1])

    def _narrowest(self, bounds: Sequence[float]) -> list[list[int]]:
        """Where stages of at most each of `bounds` begin so that the fewest bytes cross."""
        count, speeds = len(self.places), self.speeds.tolist()
        best = np.where(np.arange(count) == 0, 0.0, np.inf) + np.zeros((len(bounds), 1))
        share, even = self.work / self.work[-1], np.cumsum(self.speeds) / self.speeds.sum()
        ranges = {
            speed: _Ranges(np.stack([self._first(b, speed) for b in bounds]), self.last)
            for speed in set(speeds)
        }
        choices = []
        for stage, speed in enumerate(speeds):
            begin, least = ranges[speed].find(best)
            choices.append(begin)
            # How far a cut is from even shares decides between equal numbers of bytes: below 1.
            uneven = (share - even[stage]) ** 2 / len(speeds)
            best = least + self.crossing + uneven
        answers = []
        for row in range(len(bounds)):
            begins = [count - 1]
            for choice in reversed(choices):
                begins.append(int(choice[row, begins[-1]]))
            answers.append(begins[:0:-1])
        return answers

    def _level(self, begins: list[int]) -> list[int]:
        """Move single cuts to as narrow places while the longer of two neighbours gets shorter."""
        ends = [*begins, len(self.places) - 1]
        moved = True
        while moved:
            moved = False
            for stage in range(1, len(begins)):
                left, at, right = ends[stage - 1 : stage + 2]
                between = np.arange(left + 1, right)
                fits = (self.last[between] >= left) & (between <= self.last[right])
                between = between[fits & (self.crossing[between] <= self.crossing[at])]
                before = (self.work[between] - self.work[left]) / self.speeds[stage - 1]
                after = (self.work[right] - self.work[between]) / self.speeds[stage]
                longer = np.maximum(before, after)
                if longer.min() < longer[between == at][0] * (1 - LEAST_GAIN):
                    ends[stage] = int(between[longer.argmin()])
                    moved = True
        return ends[:-1]


class _Ranges:
    """Answers where the least of `values[first : last + 1]` is, for many ranges at once.

    `first` has a row of ranges for each row of values, `last` is the same for all. A range is two
    overlapping ones whose lengths are a power of two, its level.
    """

    def __init__(self, first: Array, last: Array) -> None:
        length = last - first + 1
        self.empty = length < 1
        level = np.frexp(np.maximum(length, 1))[1] - 1
        self.least = np.empty((int(level.max()) + 1, *first.shape))  # of 2**level from each place
        self.places = np.empty(self.least.shape, dtype=np.int64)
        self.places[0] = np.arange(first.shape[1])
        table = (level * len(first) + np.arange(len(first))[:, None]) * first.shape[1]
        self.left = table + np.where(self.empty, 0, first)
        self.right = table + np.where(self.empty, 0, last + 1 - 2**level)

    def find(self, values: Array) -> tuple[Array, Array]:
        """The leftmost place of each range's least value, and that; infinite where it is empty."""
        least, places, count = self.least, self.places, values.shape[1]
        least[0] = values
        for level in range(1, len(least)):
            step, end = 2 ** (level - 1), count - 2**level + 1
            below, other = least[level - 1, :, :end], least[level - 1, :, step : step + end]
            np.minimum(below, other, out=least[level, :, :end])
            moved = places[level - 1, :, step : step + end]
            places[level, :, :end] = np.where(other < below, moved, places[level - 1, :, :end])
        left, right = least.take(self.left), least.take(self.right)
        found = places.take(np.where(right < left, self.right, self.left))
        return found, np.where(self.empty, np.inf, np.minimum(left, right))


def _before(numbers: Sequence[Any] | Array) -> Array:
    """The sum of what is before each position, and of everything."""
    return np.concatenate([[0], np.cumsum(np.asarray(numbers))])


def unfit(graph: Graph) -> dict[int, str]:
    """The nodes at which no stage may begin, and why."""
    free = values_of_inputs(graph)
    reasons = {0: "it is the first node of the model"}
    for index, node in enumerate(graph.nodes):
        if all(name in free for name in node.outputs):
            reasons.setdefault(index, "it depends on the batch alone")
        elif is_random(node):
            reasons.setdefault(index, "it draws random numbers")
    changed = {b.value: b for b in graph.buffers if b.mutation}
    changed |= {b.mutation: b for b in graph.buffers if b.mutation}
    uses: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for name in (*node.inputs, *node.outputs):
            if name in changed:
                uses.setdefault(changed[name].name, []).append(index)
    for buffer, places in uses.items():
        for index in range(places[0] + 1, places[-1] + 1):
            reasons.setdefault(index, f"all uses of the buffer {buffer} belong to one stage")
    return reasons


def find_places(graph: Graph, cuts: Sequence[str]) -> tuple[int, ...]:
    """The first node of every stage, given where all but the first begin.

    A cut is a node's place, or a module path: the first node of that module which can be.
    """
    places = {place: index for index, place in enumerate(node_keys(graph).values())}
    reasons = unfit(graph)
    starts = (0, *(_find(graph, cut, places, reasons) for cut in cuts))
    for (a, b), cut in zip(pairwise(starts), cuts, strict=True):
        if b <= a:
            raise PlanError(
                f"cut {cut!r} is node {b}, the stage before it begins at node {a}",
                where="cuts",
                hint="give cuts in the order of the model, each once",
            )
    return starts


def _find(graph: Graph, cut: str, places: dict[str, int], reasons: dict[int, str]) -> int:
    if cut in places:
        index = places[cut]
        if index in reasons:
            later = [place for place, i in places.items() if i > index and i not in reasons]
            raise PlanError(
                f"no stage can begin at {cut!r}: {reasons[index]}",
                where=graph.nodes[index].origin,
                hint=f"the next place is {later[0]!r}" if later else None,
            )
        return index
    inside = [
        i for i, n in enumerate(graph.nodes) if n.module == cut or n.module.startswith(f"{cut}.")
    ]
    fit = [i for i in inside if i not in reasons]
    if fit:
        return fit[0]
    if inside:
        why = f"none of its {len(inside)} nodes can be the first ({reasons[inside[0]]})"
    else:
        modules = dict.fromkeys(node.module for node in graph.nodes)
        why = f"{graph.name} has no such node or module{did_you_mean(cut, [*modules, *places])}"
    raise PlanError(
        f"no stage can begin at {cut!r}: {why}",
        where="cuts",
        hint="a place that shardwise explain lists, or a module path",
    )


PER_MEMORY_BYTE = 2.0  # between a CPU's about 1 and a GPU's about 100: matmuls dominate


def node_work(graph: Graph, facts: Facts) -> list[float]:
    """What each node costs, forward and backward.

    Forward is its multiply-adds, at least `PER_MEMORY_BYTE` for each byte it reads and writes;
    backward as much again for each of up to two operands that need a gradient.
    """
    parameters = frozenset(p.value for p in graph.parameters)
    found = []
    for node in graph.nodes:
        backward = 0
        if any(name in facts.carries_grad for name in node.outputs):
            backward = min(2, sum(name in facts.carries_grad for name in set(node.inputs)))
        found.append((1 + backward) * _forward(node, graph, facts, parameters))
    return found


def stage_work(graph: Graph, facts: Facts, starts: Sequence[int]) -> list[float]:
    """The work of every stage, from the first node of each."""
    each = node_work(graph, facts)
    return [sum(each[a:b]) for a, b in pairwise((*starts, len(each)))]


def _forward(node: Node, graph: Graph, facts: Facts, parameters: frozenset[str]) -> float:
    types = graph.values
    read = dict.fromkeys(node.inputs)
    lookup = any(_is_whole_number(types[name]) for name in read)
    # A lookup multiplies nothing, and reads the rows that it gives rather than its whole table.
    moved = [*node.outputs, *(name for name in read if not (lookup and name in parameters))]
    by_bytes = PER_MEMORY_BYTE * sum(types[name].num_bytes for name in moved)
    return by_bytes if lookup else max(by_bytes, _multiply_adds(node, facts))


def _multiply_adds(node: Node, facts: Facts) -> float:
    """Those of the iteration space, without axes that are there for the sake of cutting only."""
    call = facts.calls[node.name]
    total = work(call, facts.rules[node.name])
    name = node.op.removeprefix("aten.")
    if name.startswith("scaled_dot_product_attention"):
        # It has the head sizes of queries and of values; each of the two products has one.
        queries, _, values = call.operands[:3]
        total *= 1 / queries[-1] + 1 / values[-1]
    elif name.startswith("conv"):
        # It has positions of input, kernel and output; two of them give the third.
        other = call.results[0] if "transpose" in name else call.operands[0]
        total /= prod(other[2 - len(call.operands[1]) :])
    return total


def _is_whole_number(value: TensorType) -> bool:
    return (
        not (value.dtype.is_floating_point or value.dtype.is_complex) and value.dtype.itemsize > 1
    )


def crossing_bytes(graph: Graph, facts: Facts) -> list[int]:
    """For each node, the bytes computed before it that it or a later node uses.

    A gradient that comes back counts as much again. What depends on the batch alone is not
    counted: a later stage can compute it from the batch.
    """
    free = values_of_inputs(graph)
    made = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last |= {name: index for name in node.inputs if name in made and name not in free}
    changes = [0] * (len(graph.nodes) + 1)
    for name, index in last.items():
        size = graph.values[name].num_bytes * (2 if name in facts.carries_grad else 1)
        changes[made[name] + 1] += size
        changes[index + 1] -= size
    return list(accumulate(changes[:-1]))
