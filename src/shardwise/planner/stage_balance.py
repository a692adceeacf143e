"""Divide a model into pipeline stages that take equally long and send each other little.

The longest stage sets a pipeline's pace, so the minimal work of the longest stage is computed
first. Then stages may exceed it by each of `SLACKS` in turn: the answer for a slack is the division
within that bound whose boundaries the fewest bytes cross, or of several such the closest to even
shares. The best answer minimizes the work of its longest stage plus `PER_BOUNDARY_BYTE`
multiply-adds per byte at its widest boundary. Finally, single boundaries are moved where that
shortens the longer of two neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import before
from shardwise.errors import InfeasiblePlan, PlanError, did_you_mean
from shardwise.ir import Graph, Node, node_keys
from shardwise.ir.operators import is_random
from shardwise.ir.ragged import row_counts
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.layouts.moves import work
from shardwise.sharding.factors import Facts

SLACKS = (0.03, 0.1, 0.2, 0.3)
PER_BOUNDARY_BYTE = 100.0  # between about 20 of a CPU with gloo and some 1000 of GPUs
HALVINGS = 30  # of the interval in which the minimal bound is searched
LARGE = 600  # places; of at least this many, only narrow ones are considered if these suffice
MIN_GAIN = 1e-3  # relative, of moving a boundary

Array = NDArray[Any]


@dataclass(frozen=True)
class Costs:
    """The work of every node, and the bytes that cross a boundary before it at `per_byte` each."""

    work: Array
    crossing: Array
    per_byte: float

    @staticmethod
    def relative(graph: Graph, facts: Facts) -> Costs:
        """Return costs in multiply-adds, for an unknown cluster."""
        crossing = np.array(crossing_bytes(graph, facts), dtype=np.float64)
        return Costs(np.array(node_work(graph, facts)), crossing, PER_BOUNDARY_BYTE)


def balance(
    graph: Graph, facts: Facts, ranks: Sequence[float], costs: Costs | None = None
) -> tuple[int, ...]:
    """Return the first node of every stage, where stage s has `ranks[s]` ranks for its work.

    Every stage gets a node that uses parameters if the model has enough of them.
    """
    if len(ranks) == 1:
        return (0,)
    return Cutter(graph).cut(costs or Costs.relative(graph, facts), ranks)


class Cutter:
    """Divide one graph into stages, for several numbers of stages and costs."""

    def __init__(self, graph: Graph) -> None:
        reasons = unfit(graph)
        self.graph = graph
        self.fit = [index for index in range(len(graph.nodes)) if index not in reasons]
        parameters = {p.value for p in graph.parameters}
        self.owners = [any(name in parameters for name in node.inputs) for node in graph.nodes]

    def cut(self, costs: Costs, ranks: Sequence[float]) -> tuple[int, ...]:
        """Return the first node of every stage."""
        if len(ranks) == 1:
            return (0,)
        for fit, owning in ((self._narrow(costs), True), (self.fit, True), (self.fit, False)):
            if len(fit) < len(ranks) and fit is not self.fit:
                continue
            chain = _Chain(self.owners, costs, fit, ranks, owning=owning)
            bound = chain.min_bound()
            if bound is not None:
                return chain.choose(bound)
        graph, fit = self.graph, self.fit
        raise InfeasiblePlan(
            f"{len(ranks)} stages of {graph.name}: {len(fit)} of its {len(graph.nodes)} nodes can "
            f"begin one, which gives at most {len(fit) + 1}",
            hint=f"{len(fit) + 1} stages or fewer",
        )

    def _narrow(self, costs: Costs) -> list[int]:
        """Return the places of a large graph that few bytes cross: those between its blocks."""
        if len(self.fit) < LARGE:
            return self.fit
        crossing = costs.crossing[self.fit]
        bound = 1.2 * float(np.quantile(crossing, 0.1))
        return [index for index, size in zip(self.fit, crossing, strict=True) if size <= bound]


class _Chain:
    """The places where a stage can begin, with the work before each; the model's end is last."""

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
        self.work = before(costs.work)[self.places]
        self.crossing = np.append(costs.crossing, 0.0)[self.places]
        self.speeds = np.array(ranks) / np.mean(ranks)
        # A stage that ends before place j begins at the latest at last[j].
        count = len(self.places)
        owned = before(owners)[self.places]
        self.last = np.searchsorted(owned, owned) - 1 if owning else np.arange(count) - 1

    def min_bound(self) -> float | None:
        """Return the minimal duration of the longest stage, or None if there are too few places."""
        low, high = 0.0, float(self.work[-1] / self.speeds.min())
        if not self._reaches(high):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._reaches(middle) else (middle, high)
        return high

    def choose(self, bound: float) -> tuple[int, ...]:
        """Return the first node of every stage."""
        answers = self._narrowest([bound * (1 + slack) for slack in SLACKS])
        best = self._level(min(answers, key=self._objective))
        return tuple(self.places[at] for at in best)

    def _objective(self, begins: list[int]) -> float:
        ends = np.array([*begins[1:], len(self.places) - 1])
        longest = ((self.work[ends] - self.work[begins]) / self.speeds).max()
        return float(longest + self.per_byte * self.crossing[begins].max())

    def _first(self, bound: float, speed: float) -> Array:
        """Return the earliest start of a stage of at most `bound` that ends before each place."""
        return np.searchsorted(self.work, self.work - bound * speed)

    def _reaches(self, bound: float) -> bool:
        """Return whether stages of at most `bound` reach the model's end."""
        after = self.last + 1
        starts = {s: np.minimum(self._first(bound, s), after) for s in set(self.speeds.tolist())}
        reached = np.arange(len(after)) == 0
        before = np.zeros(len(after) + 1, dtype=np.int64)
        for speed in self.speeds.tolist():
            np.cumsum(reached, out=before[1:])
            reached = before[after] > before[starts[speed]]
        return bool(reached[-1])

    def _narrowest(self, bounds: Sequence[float]) -> list[list[int]]:
        """Return where stages of at most each of `bounds` begin so that the fewest bytes cross."""
        count, speeds = len(self.places), self.speeds.tolist()
        share, even = self.work / self.work[-1], np.cumsum(self.speeds) / self.speeds.sum()
        answers = []
        for bound in bounds:
            first = {speed: self._first(bound, speed) for speed in set(speeds)}
            best, rows = np.where(np.arange(count) == 0, 0.0, np.inf), []
            for stage, speed in enumerate(speeds):
                rows.append((first[speed], best))
                # The distance from even shares is below 1: it decides only between equal bytes.
                uneven = (share - even[stage]) ** 2 / len(speeds)
                best = _minima(best, first[speed], self.last) + self.crossing + uneven
            begins = [count - 1]
            for earliest, costs in reversed(rows):
                low, high = int(earliest[begins[-1]]), int(self.last[begins[-1]])
                begins.append(low + int(costs[low : high + 1].argmin()))
            answers.append(begins[:0:-1])
        return answers

    def _level(self, begins: list[int]) -> list[int]:
        """Move single boundaries, not to wider places, while the longer neighbour gets shorter."""
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
                if longer.min() < longer[between == at][0] * (1 - MIN_GAIN):
                    ends[stage] = int(between[longer.argmin()])
                    moved = True
        return ends[:-1]


def _minima(values: Array, first: Array, last: Array) -> Array:
    """Return the minimum of `values[first[i] : last[i] + 1]` for every i, inf if that is empty."""
    ends = np.stack([first, last + 1], axis=1).ravel()
    minima = np.minimum.reduceat(np.append(values, np.inf), ends)[::2]
    return np.where(first <= last, minima, np.inf)


def unfit(graph: Graph) -> dict[int, str]:
    """Return the nodes at which no stage may begin, with the reason."""
    free = values_of_inputs(graph)
    reasons = {0: "it is the first node of the model"}
    for index, node in enumerate(graph.nodes):
        if all(name in free for name in node.outputs):
            reasons.setdefault(index, "it depends on the batch alone")
        elif is_random(node):
            reasons.setdefault(index, "it draws random numbers")
    buffers = {
        name: f"all uses of the buffer {buffer.name} belong to one stage"
        for buffer in graph.buffers
        if buffer.mutation
        for name in (buffer.value, buffer.mutation)
    }
    counts = row_counts(graph).items()
    rows = {name: f"the rows that %{count} counts belong to one stage" for name, count in counts}
    for reason_of in (buffers, rows):
        uses: dict[str, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for name in (*node.inputs, *node.outputs):
                if name in reason_of:
                    uses.setdefault(reason_of[name], []).append(index)
        for reason, places in uses.items():
            for index in range(places[0] + 1, places[-1] + 1):
                reasons.setdefault(index, reason)
    return reasons


def find_places(graph: Graph, cuts: Sequence[str]) -> tuple[int, ...]:
    """Return the first node of every stage, given where all but the first begin.

    A cut is a node's place, or a module path, for the module's first node that can begin a stage.
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


# ------------------------------------------------------------ costs without a cluster
PER_MEMORY_BYTE = 2.0  # between about 1 of a CPU and 100 of a GPU: matmuls dominate


def node_work(graph: Graph, facts: Facts) -> list[float]:
    """Return the cost of each node, forward and backward.

    Forward costs the node's multiply-adds, but at least `PER_MEMORY_BYTE` for each byte that it
    reads and writes; backward as much again for each of up to two operands that need a gradient.
    """
    parameters = frozenset(p.value for p in graph.parameters)
    costs = []
    for node in graph.nodes:
        backward = 0
        if any(name in facts.carries_grad for name in node.outputs):
            backward = min(2, sum(name in facts.carries_grad for name in set(node.inputs)))
        costs.append((1 + backward) * _forward(node, graph, facts, parameters))
    return costs


def _forward(node: Node, graph: Graph, facts: Facts, parameters: frozenset[str]) -> float:
    types = graph.values
    read = dict.fromkeys(node.inputs)
    lookup = any(
        dtype.itemsize > 1 and not (dtype.is_floating_point or dtype.is_complex)
        for dtype in (types[name].dtype for name in read)
    )
    # A lookup multiplies nothing, and reads the rows that it returns rather than its entire table.
    moved = [*node.outputs, *(name for name in read if not (lookup and name in parameters))]
    by_bytes = PER_MEMORY_BYTE * sum(types[name].num_bytes for name in moved)
    return by_bytes if lookup else max(by_bytes, _multiply_adds(node, facts))


def _multiply_adds(node: Node, facts: Facts) -> float:
    """Return the size of the iteration space, without axes that exist only for sharding."""
    call = facts.calls[node.name]
    total = work(call, facts.rules[node.name])
    name = node.op.removeprefix("aten.")
    if name.startswith("scaled_dot_product_attention"):
        # Its iteration space has both head sizes, of queries and of values; a product has one.
        queries, _, values = call.operands[:3]
        total *= 1 / queries[-1] + 1 / values[-1]
    elif name.startswith("conv"):
        # Its iteration space has positions of input, kernel and output; two determine the third.
        other = call.results[0] if "transpose" in name else call.operands[0]
        total /= prod(other[2 - len(call.operands[1]) :])
    return total


def crossing_bytes(graph: Graph, facts: Facts) -> list[int]:
    """Return the bytes computed before each node that it or a later node uses.

    Values with a gradient count twice, because the gradient comes back. Values that depend on the
    batch alone are not counted: a later stage can compute them from the batch.
    """
    free = values_of_inputs(graph)
    makers = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last |= {name: index for name in node.inputs if name in makers and name not in free}
    changes = [0] * (len(graph.nodes) + 1)
    for name, index in last.items():
        size = graph.values[name].num_bytes * (2 if name in facts.carries_grad else 1)
        changes[makers[name] + 1] += size
        changes[index + 1] -= size
    return list(accumulate(changes[:-1]))
