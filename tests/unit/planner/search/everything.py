"""All plans of a small graph on a few ranks, without what provably takes longer than a given step.

Enters: a graph of up to 8 nodes, a cluster, seconds. Leaves: the quickest plan below that, if any.

Nothing here is the planner's: layouts are all candidates of all nodes, settings all meshes, cuts,
micro-batches, schedules and zero levels, and each is judged by lowering and simulating it. Three
facts spare most of that work:

- What the nodes of a layout take is put together from neighbourhoods (`neighbours`), for all
  layouts at once; with layouts drawn at random that is compared (`check_locality`).
- Nodes' times bound the step from below (`Least`), before a layout is lowered.
- Layouts of which all figures that a simulation of time reads are equal take the same time: one of
  them that fits is simulated, and some with another one (`check_alike`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from shardwise.cluster import Cluster, Device
from shardwise.ir import Graph
from shardwise.schedules.levels import levels_of
from shardwise.simulation.costs import ExecutionConfig
from shardwise.simulation.step import pairs
from tests.unit.planner.search.neighbours import (
    EXACT,
    TINY,
    Choices,
    Figures,
    Neighbours,
    figures_of,
)
from tests.unit.planner.search.tried import Kind, divisors, kinds, quickest, settings

DIGITS = 10
CHUNK = 50_000  # layouts that are looked at together
CHECKED = 5  # groups of layouts that are alike, of each chunk


def quicker(
    graph: Graph, cluster: Cluster, seconds: float, memory_bytes: float = inf
) -> tuple[float, str]:
    """The quickest plan that takes less than `seconds`, and what it is; inf if there is none.

    No rank has more than `memory_bytes`, nor than its device.
    """
    best, what = inf, ""
    known = {tp: Neighbours(graph, cluster, tp) for tp in divisors(cluster.num_ranks)}
    for kind in kinds(graph, cluster.num_ranks):
        mine = known[kind.tp]
        every = tuple(settings(graph, kind, mine.whole))
        if not every:  # fewer places to cut than stages
            continue
        check_locality(mine, kind, 3 if kind.tp > 1 else 1)
        for choices, figures in _chunks(mine, kind, seconds):
            groups = _groups(mine, kind, every, choices, figures, seconds, memory_bytes)
            check_alike(mine, [(alike, every[int(b.argmin())]) for alike, b in groups[:CHECKED]])
            for alike, bounds in groups:
                for execution, bound in zip(every, bounds, strict=True):
                    if bound >= min(seconds, best):
                        continue
                    time, chosen = _quickest(mine, alike, execution, memory_bytes)
                    if time < min(seconds, best):
                        best = time
                        name = execution.schedule.name if execution.schedule else ""
                        what = f"{kind} {execution.cuts} {name} zero={execution.zero} {chosen}"
    return best, what


def _quickest(
    mine: Neighbours, alike: Sequence[Choices], execution: ExecutionConfig, memory_bytes: float
) -> tuple[float, str]:
    """The quickest of layouts that only differ in memory, and what it is."""
    best, what = inf, ""
    for choices in alike:
        workloads = mine.workloads(choices)
        if workloads is None:
            continue
        time, recompute = quickest(mine.evaluator(workloads), workloads, execution, memory_bytes)
        if time < best:
            best, what = time, f"recompute={recompute} {mine.plan(choices).nodes}"
        if recompute == "none":
            break
    return best, what


def check_alike(mine: Neighbours, groups: Sequence[tuple[list[Choices], ExecutionConfig]]) -> None:
    """Two layouts that are said to take the same time do."""
    for alike, execution in groups:
        found = [
            workloads
            for workloads in map(mine.workloads, {alike[0], alike[-1]})
            if workloads is not None
        ]
        times = {
            mine.evaluator(workloads).estimate(workloads, execution).step_time_s
            for workloads in found
        }
        assert not times or max(times) <= min(times) * (1 + EXACT), (alike[0], alike[-1])


def check_locality(mine: Neighbours, kind: Kind, count: int) -> None:
    """Layouts drawn at random take what is put together from their neighbourhoods."""
    rng = random.Random(1)
    for _ in range(count):
        family = rng.choices(mine.families, [family.size for family in mine.families])[0]
        choices = tuple(rng.choice(domain) for domain in family.domains)
        workloads = mine.workloads(choices)
        if workloads is None:
            continue
        layers = mine.layers(workloads, kind)[0]
        sent = layers.fold.spread(layers.work.crossing)
        assert np.array_equal(mine.crosses(), sent > 0), (choices, kind)
        parts, figures = mine.parts(kind), mine.figures(choices, kind)
        for i in range(len(choices)):
            key = family.key(i, choices)
            if key in parts:
                least, actual = parts[key], figures[:, i]
                if mine.is_exact[kind]:
                    assert np.allclose(least, actual, rtol=EXACT, atol=TINY), (key, kind)
                assert np.all(least <= actual * (1 + EXACT) + TINY), (key, kind)


def _chunks(mine: Neighbours, kind: Kind, seconds: float) -> Iterator[tuple[np.ndarray, Figures]]:
    """Layouts and their figures, without those that take longer however they are run."""
    for family in mine.families:
        tables = mine.tables(family, kind)
        for first in range(0, family.size, CHUNK):
            choices, found = figures_of(family, tables, first, min(family.size, first + CHUNK))
            kept = np.flatnonzero(Least(mine, kind, found).anyhow() < seconds)
            if len(kept):
                yield choices[:, kept], found.only(kept)


def _groups(
    mine: Neighbours,
    kind: Kind,
    every: Sequence[ExecutionConfig],
    choices: np.ndarray,
    figures: Figures,
    seconds: float,
    memory_bytes: float,
) -> list[tuple[list[Choices], np.ndarray]]:
    """Layouts that take the same time however they are run, with bounds for every execution.

    The most promising ones come first, without those that take longer.
    """
    least = Least(mine, kind, figures)
    bounds = np.stack([_bound(least, execution, memory_bytes) for execution in every])
    kept = np.flatnonzero(bounds.min(axis=0) < seconds)
    sent = mine.given(choices) if kind.pp > 1 else np.zeros((0, choices.shape[1]))
    rows = np.concatenate([figures.rows, sent])[:, kept]
    if not mine.is_exact[kind]:  # equal bounds are not equal times
        rows = choices[:, kept].astype(np.float64)
    rows = rows / np.maximum(np.abs(rows).max(axis=1, initial=0.0, keepdims=True), 1e-30)
    _, number = np.unique(np.round(rows, DIGITS), axis=1, return_inverse=True)
    found: dict[int, list[int]] = {}
    for at, group in zip(kept.tolist(), number.ravel().tolist(), strict=True):
        found.setdefault(group, []).append(at)
    groups = []
    for at in found.values():
        times = bounds[:, at[0]]
        for i in np.flatnonzero(times < seconds).tolist():
            times[i] = max(times[i], least.played(every[i], at[0]))
        if times.min() < seconds:
            groups.append(([tuple(choices[:, i].tolist()) for i in at], times))
    return sorted(groups, key=lambda group: float(group[1].min()))


def _bound(least: Least, execution: ExecutionConfig, memory_bytes: float) -> np.ndarray:
    """Seconds of layouts under an execution, inf where they do not fit."""
    return np.where(least.memory(execution) <= memory_bytes, least.step(execution), inf)


class Least:
    """Seconds that the steps of layouts take at least.

    A group of ranks runs each of its stages once for every micro-batch, and not before the stages
    ahead of its first one had their forward of a micro-batch; then its optimizer reads and writes
    what it holds. Where groups have one stage and backward is not split, the groups before it have
    theirs after its last one. One micro-batch passes through all stages, and back to each of them,
    whose group then has its weights to compute and to update; the weights of later stages may wait
    where backward is split. Gradients are summed over `dp` ranks in the last backward, or after it;
    where ranks hold only parts of the optimizer's state, new parameters travel at the end. Times
    of messages are concave in their bytes: many take no less than one of all their bytes.
    """

    def __init__(self, mine: Neighbours, kind: Kind, figures: Figures) -> None:
        self.mine, self.kind = mine, kind
        forward, backward, weight = (_before(figures.least(i)) for i in range(3))
        self.forward, self.backward, self.weight = forward, backward, weight
        self.numel = _before(figures.numel)
        self.crosses = mine.crosses()
        parameters = [mine.graph.values[p.value] for p in mine.graph.parameters]
        self.itemsize = min(p.dtype.itemsize for p in parameters)

    def anyhow(self) -> np.ndarray:
        """Of the quickest execution: one of `pp` groups has at least its part of all work."""
        kind = self.kind
        work = kind.num_microbatches * (self.forward[-1] + self.backward[-1])
        update = self._update(self.numel[-1] / (kind.dp * kind.tp))
        path = self.forward[-1] + self.backward[-1] - self.weight[-1]
        return np.maximum((work + update) / kind.pp, path)

    def step(self, execution: ExecutionConfig) -> np.ndarray:
        """Of one execution."""
        bounds = [*execution.cuts, len(self.forward) - 1]
        places = execution.placement
        sends = [0.0, *accumulate(self._sends(execution))]
        name = execution.schedule.name if execution.schedule is not None else "1f1b"
        numels = [self._sum(self.numel, bounds, places, g) for g in range(len(execution.groups))]
        tails = [self._tail(execution, numel) for numel in numels]
        found = np.zeros(self.forward.shape[1])
        waits = self.weight if name.startswith("zb") else np.zeros(self.weight.shape)
        for stage, group in enumerate(places):
            there = self.forward[-1] + sends[-1]
            back = self.backward[-1] - self.backward[bounds[stage]] + sends[-1] - sends[stage]
            back = back - (waits[-1] - waits[bounds[stage + 1]])
            found = np.maximum(found, there + back + tails[group])
        for group, (numel, tail) in enumerate(zip(numels, tails, strict=True)):
            first = places.index(group)
            forward = self._sum(self.forward, bounds, places, group)
            backward = self._sum(self.backward, bounds, places, group)
            end = self.forward[bounds[first]] + sends[first]
            end = end + execution.num_microbatches * (forward + backward)
            if name == "1f1b":
                after = self.backward[bounds[first]] + sends[first]
                found = np.maximum(found, end + after + tails[0])
                end = np.maximum(end, end - backward + self._sums(execution, numel))
            found = np.maximum(found, end + tail)
        return found

    def played(self, execution: ExecutionConfig, layout: int) -> float:
        """Of one layout: the schedule's actions in their order, without waiting for parameters."""
        if execution.schedule is None:
            return 0.0
        levels, bounds = levels_of(execution.schedule), [*execution.cuts, len(self.forward) - 1]
        forward, backward, weight = (
            np.diff(sums[bounds, layout]) for sums in (self.forward, self.backward, self.weight)
        )
        kinds = np.stack([forward, backward, backward - weight, weight])  # as levels.KINDS
        sends = np.array([*self._sends(execution), 0.0])
        _, ends = levels.simulate(kinds[levels.kind, levels.stage], sends)
        found = 0.0
        for group in range(len(execution.groups)):
            numel = self._sum(self.numel[:, layout, None], bounds, execution.placement, group)
            end = float(ends[levels.group == group].max())
            found = max(found, end + float(self._tail(execution, numel)[0]))
        return found

    def memory(self, execution: ExecutionConfig) -> np.ndarray:
        """Bytes of the fullest rank: parameters, gradients and two states while it updates them."""
        bounds, places = [*execution.cuts, len(self.forward) - 1], execution.placement
        whole = {0: 4, 1: 2, 2: 1, 3: 0}[execution.zero]
        each = whole + (4 - whole) / (self.kind.dp * self.kind.tp)
        groups = range(len(execution.groups))
        numel = np.max([self._sum(self.numel, bounds, places, g) for g in groups], axis=0)
        found: np.ndarray = numel * each * self.itemsize
        return found

    @staticmethod
    def _sum(
        sums: np.ndarray, bounds: Sequence[int], places: Sequence[int], group: int
    ) -> np.ndarray:
        """Of a group's stages."""
        mine = [stage for stage, place in enumerate(places) if place == group]
        return np.sum([sums[bounds[s + 1]] - sums[bounds[s]] for s in mine], axis=0)

    def _tail(self, execution: ExecutionConfig, numel: np.ndarray) -> np.ndarray:
        """The optimizer, and the way of new parameters."""
        shared = self.kind.dp if execution.zero else 1
        found = self._update(numel / shared)
        if execution.zero in (1, 2):
            found = found + self._talk("all_gather", numel * self.itemsize)
        return found

    def _sums(self, execution: ExecutionConfig, numel: np.ndarray) -> np.ndarray:
        op = "all_reduce" if execution.zero < 2 else "reduce_scatter"
        return self._talk(op, numel * execution.reduced_item_bytes(self.itemsize))

    def _talk(self, op: str, num_bytes: np.ndarray) -> np.ndarray:
        """Of all bytes in one message, over `dp` ranks or over these and others."""
        group, costs = self.kind.groups[0], self.mine.whole.costs
        if self.kind.dp == 1:
            return np.zeros(num_bytes.shape)
        ways = [costs.collective(op, group.along(axes)) for axes in (("dp",), ("dp", "tp"))]
        return _each(num_bytes, lambda b: min(way.seconds(b) for way in ways) if b else 0.0)

    def _update(self, numel: np.ndarray) -> np.ndarray:
        """The optimizer's reading and writing, and the fewest of its calls.

        A GPU takes all parameters at once; a CPU goes through each of them several times, which is
        quickest if they are one.
        """

        def seconds(count: float, device: Device) -> float:
            if device.kind != "cpu":
                spent = 28.0 * count / device.memory_rate(28.0 * count)
                return spent + 12 * device.overhead_s
            found = self.mine.whole.costs.update(device, count, count, 1)
            assert found is not None
            return found

        devices = self.mine.whole.devices
        return _each(numel, lambda n: min(seconds(n, d) for d in devices) if n else 0.0)

    def _sends(self, execution: ExecutionConfig) -> list[float]:
        """Of the smallest message from every stage to the next, if there is one."""
        found = []
        for cut, (here, there) in zip(
            execution.cuts[1:], pairwise(execution.placement), strict=True
        ):
            a, b = execution.groups[here].array, execution.groups[there].array
            sent = here != there and self.crosses[cut]
            model = self.mine.whole.costs.collective("send", pairs(a, b))
            found.append(model.seconds(1) if sent else 0.0)
        return found


def _before(values: np.ndarray) -> np.ndarray:
    """Sums over the nodes before each."""
    return np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])


def _each(values: np.ndarray, function: Callable[[float], float]) -> np.ndarray:
    """A function of every value, of which there are few."""
    few, number = np.unique(values, return_inverse=True)
    return np.array([function(v) for v in few.tolist()])[number.ravel()]
