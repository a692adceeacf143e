"""Try all plans of a graph of up to 8 nodes, except those that provably exceed a given step time.

This shares nothing with the planner: layouts are all candidates of all nodes; configs are all
meshes, stage boundaries, micro-batches, schedules and zero levels; and each combination is lowered
and simulated. Three facts save most of that work:

- The times of a layout's nodes follow from their neighbourhoods (`neighbours`), for all layouts at
  once; `check_locality` compares this with lowered layouts drawn at random.
- The times of the nodes give a lower bound of the step (`LowerBounds`), before a layout is lowered.
- Layouts with equal figures take the same time, so only one of them that fits is simulated;
  `check_equal` simulates two of some groups.
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
from tests.unit.planner.search.execution_space import (
    Kind,
    divisors,
    execution_configs,
    fastest_recompute,
    kinds,
)
from tests.unit.planner.search.neighbours import (
    EXACT,
    TINY,
    Choices,
    Figures,
    Neighbours,
    figures_of,
)

DIGITS = 10
CHUNK = 50_000  # layouts that are processed together
CHECKED = 5  # groups of equal layouts that are checked in each chunk


def fastest_below(
    graph: Graph, cluster: Cluster, seconds: float, memory_bytes: float = inf
) -> tuple[float, str]:
    """Return the step time and a description of the fastest plan below `seconds`, or inf.

    No rank uses more than `memory_bytes`, nor more than its device has.
    """
    best, description = inf, ""
    by_tp = {tp: Neighbours(graph, cluster, tp) for tp in divisors(cluster.num_ranks)}
    for kind in kinds(graph, cluster.num_ranks):
        layouts = by_tp[kind.tp]
        configs = tuple(execution_configs(graph, kind, layouts.unsharded))
        if not configs:  # fewer places for boundaries than stages need
            continue
        check_locality(layouts, kind, 3 if kind.tp > 1 else 1)
        for choices, figures in _chunks(layouts, kind, seconds):
            groups = _groups(layouts, kind, configs, choices, figures, seconds, memory_bytes)
            promising = [(equal, configs[int(b.argmin())]) for equal, b in groups[:CHECKED]]
            check_equal(layouts, promising)
            for equal, bounds in groups:
                for execution, bound in zip(configs, bounds, strict=True):
                    if bound >= min(seconds, best):
                        continue
                    time, chosen = _fastest_of_equal(layouts, equal, execution, memory_bytes)
                    if time < min(seconds, best):
                        best = time
                        name = execution.schedule.name if execution.schedule else ""
                        options = f"{execution.cuts} {name} zero={execution.zero}"
                        description = f"{kind} {options} {chosen}"
    return best, description


def _fastest_of_equal(
    layouts: Neighbours, equal: Sequence[Choices], execution: ExecutionConfig, memory_bytes: float
) -> tuple[float, str]:
    """Return the step time and a description of the fastest of layouts that differ in memory."""
    best, description = inf, ""
    for choices in equal:
        workloads = layouts.workloads(choices)
        if workloads is None:
            continue
        evaluator = layouts.evaluator(workloads)
        time, recompute = fastest_recompute(evaluator, workloads, execution, memory_bytes)
        if time < best:
            best, description = time, f"recompute={recompute} {layouts.plan(choices).nodes}"
        if recompute == "none":
            break
    return best, description


def check_equal(
    layouts: Neighbours, groups: Sequence[tuple[list[Choices], ExecutionConfig]]
) -> None:
    """Check that the first and the last layout of every group take the same time."""
    for equal, execution in groups:
        times = {
            layouts.evaluator(workloads).estimate(workloads, execution).step_time_s
            for workloads in map(layouts.workloads, {equal[0], equal[-1]})
            if workloads is not None
        }
        assert not times or max(times) <= min(times) * (1 + EXACT), (equal[0], equal[-1])


def check_locality(layouts: Neighbours, kind: Kind, count: int) -> None:
    """Check figures that are put together from neighbourhoods, for layouts drawn at random."""
    rng = random.Random(1)
    for _ in range(count):
        family = rng.choices(layouts.families, [family.size for family in layouts.families])[0]
        choices = tuple(rng.choice(domain) for domain in family.domains)
        workloads = layouts.workloads(choices)
        if workloads is None:
            continue
        layers = layouts.layers(workloads, kind)[0]
        sent = layers.fold.spread(layers.work.crossing)
        assert np.array_equal(layouts.crosses(), sent > 0), (choices, kind)
        parts, figures = layouts.parts(kind), layouts.figures(choices, kind)
        for i in range(len(choices)):
            key = family.key(i, choices)
            if key in parts:
                predicted, actual = parts[key], figures[:, i]
                if layouts.is_exact[kind]:
                    assert np.allclose(predicted, actual, rtol=EXACT, atol=TINY), (key, kind)
                assert np.all(predicted <= actual * (1 + EXACT) + TINY), (key, kind)


def _chunks(
    layouts: Neighbours, kind: Kind, seconds: float
) -> Iterator[tuple[np.ndarray, Figures]]:
    """Yield layouts and their figures, without those that take longer in any execution."""
    for family in layouts.families:
        tables = layouts.tables(family, kind)
        for first in range(0, family.size, CHUNK):
            choices, figures = figures_of(family, tables, first, min(family.size, first + CHUNK))
            bounds = LowerBounds(layouts, kind, figures).any_execution()
            selected = np.flatnonzero(bounds < seconds)
            if len(selected):
                yield choices[:, selected], figures.select(selected)


def _groups(
    layouts: Neighbours,
    kind: Kind,
    configs: Sequence[ExecutionConfig],
    choices: np.ndarray,
    figures: Figures,
    seconds: float,
    memory_bytes: float,
) -> list[tuple[list[Choices], np.ndarray]]:
    """Return groups of layouts that take the same time in any execution, with their bounds.

    The most promising groups come first; those that take longer than `seconds` are left out.
    """
    lower = LowerBounds(layouts, kind, figures)
    bounds = np.stack(
        [np.where(lower.memory(e) <= memory_bytes, lower.step(e), inf) for e in configs]
    )
    selected = np.flatnonzero(bounds.min(axis=0) < seconds)
    sent = layouts.result_layouts(choices) if kind.pp > 1 else np.zeros((0, choices.shape[1]))
    rows = np.concatenate([figures.rows, sent])[:, selected]
    if not layouts.is_exact[kind]:  # equal bounds do not imply equal times
        rows = choices[:, selected].astype(np.float64)
    rows = rows / np.maximum(np.abs(rows).max(axis=1, initial=0.0, keepdims=True), 1e-30)
    _, number = np.unique(np.round(rows, DIGITS), axis=1, return_inverse=True)
    members: dict[int, list[int]] = {}
    for layout, group in zip(selected.tolist(), number.ravel().tolist(), strict=True):
        members.setdefault(group, []).append(layout)
    groups = []
    for equal in members.values():
        times = bounds[:, equal[0]]
        for i in np.flatnonzero(times < seconds).tolist():
            times[i] = max(times[i], lower.scheduled(configs[i], equal[0]))
        if times.min() < seconds:
            groups.append(([tuple(choices[:, i].tolist()) for i in equal], times))
    return sorted(groups, key=lambda group: float(group[1].min()))


class LowerBounds:
    """Lower bounds on the seconds of the steps of layouts.

    A group of ranks runs each of its stages once for every micro-batch, and not before the stages
    ahead of its first one have run one forward; then its optimizer reads and writes its state. If
    groups have one stage and backward is not split, earlier groups run a backward after its last.
    One micro-batch passes through all stages and back to each of them, whose group then computes
    and updates its weights; the weights of later stages may wait if backward is split. Gradients
    are reduced over `dp` ranks in the last backward, or after it; if ranks have only shards of the
    optimizer state, new parameters are sent at the end. Times of messages are concave in their
    bytes: many messages take no less than one with all their bytes.
    """

    def __init__(self, layouts: Neighbours, kind: Kind, figures: Figures) -> None:
        self.layouts, self.kind = layouts, kind
        forward, backward, weight = (_before(figures.fastest(i)) for i in range(3))
        self.forward, self.backward, self.weight = forward, backward, weight
        self.numel = _before(figures.numel)
        self.crosses = layouts.crosses()
        parameters = [layouts.graph.values[p.value] for p in layouts.graph.parameters]
        self.itemsize = min(p.dtype.itemsize for p in parameters)

    def any_execution(self) -> np.ndarray:
        """Return the bound for any execution: some group has at least its share of the work."""
        kind = self.kind
        work = kind.num_microbatches * (self.forward[-1] + self.backward[-1])
        update = self._update(self.numel[-1] / (kind.dp * kind.tp))
        path = self.forward[-1] + self.backward[-1] - self.weight[-1]
        return np.maximum((work + update) / kind.pp, path)

    def step(self, execution: ExecutionConfig) -> np.ndarray:
        """Return the bound for one execution."""
        bounds = [*execution.cuts, len(self.forward) - 1]
        places = execution.placement
        sends = [0.0, *accumulate(self._sends(execution))]
        name = execution.schedule.name if execution.schedule is not None else "1f1b"
        numels = [self._sum(self.numel, bounds, places, g) for g in range(len(execution.groups))]
        tails = [self._tail(execution, numel) for numel in numels]
        bound = np.zeros(self.forward.shape[1])
        waits = self.weight if name.startswith("zb") else np.zeros(self.weight.shape)
        for stage, group in enumerate(places):
            there = self.forward[-1] + sends[-1]
            back = self.backward[-1] - self.backward[bounds[stage]] + sends[-1] - sends[stage]
            back = back - (waits[-1] - waits[bounds[stage + 1]])
            bound = np.maximum(bound, there + back + tails[group])
        for group, (numel, tail) in enumerate(zip(numels, tails, strict=True)):
            first = places.index(group)
            forward = self._sum(self.forward, bounds, places, group)
            backward = self._sum(self.backward, bounds, places, group)
            end = self.forward[bounds[first]] + sends[first]
            end = end + execution.num_microbatches * (forward + backward)
            if name == "1f1b":
                after = self.backward[bounds[first]] + sends[first]
                bound = np.maximum(bound, end + after + tails[0])
                end = np.maximum(end, end - backward + self._reductions(execution, numel))
            bound = np.maximum(bound, end + tail)
        return bound

    def scheduled(self, execution: ExecutionConfig, layout: int) -> float:
        """Return the time of one layout's actions in order, without waiting for parameters."""
        if execution.schedule is None:
            return 0.0
        levels, bounds = levels_of(execution.schedule), [*execution.cuts, len(self.forward) - 1]
        forward, backward, weight = (
            np.diff(sums[bounds, layout]) for sums in (self.forward, self.backward, self.weight)
        )
        kinds = np.stack([forward, backward, backward - weight, weight])  # as levels.KINDS
        sends = np.array([*self._sends(execution), 0.0])
        _, ends = levels.simulate(kinds[levels.kind, levels.stage], sends)
        bound = 0.0
        for group in range(len(execution.groups)):
            numel = self._sum(self.numel[:, layout, None], bounds, execution.placement, group)
            end = float(ends[levels.group == group].max())
            bound = max(bound, end + float(self._tail(execution, numel)[0]))
        return bound

    def memory(self, execution: ExecutionConfig) -> np.ndarray:
        """Return the bytes of parameters, gradients and optimizer state on the fullest rank."""
        bounds, places = [*execution.cuts, len(self.forward) - 1], execution.placement
        replicated = {0: 4, 1: 2, 2: 1, 3: 0}[execution.zero]  # of the four tensors per parameter
        tensors = replicated + (4 - replicated) / (self.kind.dp * self.kind.tp)
        groups = range(len(execution.groups))
        numel = np.max([self._sum(self.numel, bounds, places, g) for g in groups], axis=0)
        num_bytes: np.ndarray = numel * tensors * self.itemsize
        return num_bytes

    @staticmethod
    def _sum(
        sums: np.ndarray, bounds: Sequence[int], places: Sequence[int], group: int
    ) -> np.ndarray:
        """Return the total of a group's stages."""
        stages = [stage for stage, place in enumerate(places) if place == group]
        return np.sum([sums[bounds[s + 1]] - sums[bounds[s]] for s in stages], axis=0)

    def _tail(self, execution: ExecutionConfig, numel: np.ndarray) -> np.ndarray:
        """Return the seconds of the optimizer and of gathering new parameters."""
        num_shards = self.kind.dp if execution.zero else 1
        seconds = self._update(numel / num_shards)
        if execution.zero in (1, 2):
            seconds = seconds + self._collective("all_gather", numel * self.itemsize)
        return seconds

    def _reductions(self, execution: ExecutionConfig, numel: np.ndarray) -> np.ndarray:
        op = "all_reduce" if execution.zero < 2 else "reduce_scatter"
        return self._collective(op, numel * execution.reduced_item_bytes(self.itemsize))

    def _collective(self, op: str, num_bytes: np.ndarray) -> np.ndarray:
        """Return the seconds of all bytes in one message, over `dp` or over `dp` and `tp` ranks."""
        group, costs = self.kind.groups[0], self.layouts.unsharded.costs
        if self.kind.dp == 1:
            return np.zeros(num_bytes.shape)
        models = [costs.collective(op, group.along(axes)) for axes in (("dp",), ("dp", "tp"))]
        return _map(num_bytes, lambda b: min(model.seconds(b) for model in models) if b else 0.0)

    def _update(self, numel: np.ndarray) -> np.ndarray:
        """Return the seconds of the optimizer's memory traffic and of its minimal calls.

        A GPU updates all parameters at once; a CPU reads each of them several times, which is
        fastest if they are a single one.
        """

        def seconds(count: float, device: Device) -> float:
            if device.kind != "cpu":
                spent = 28.0 * count / device.memory_rate(28.0 * count)
                return spent + 12 * device.overhead_s
            update = self.layouts.unsharded.costs.update(device, count, count, 1)
            assert update is not None
            return update

        devices = self.layouts.unsharded.devices
        return _map(numel, lambda n: min(seconds(n, d) for d in devices) if n else 0.0)

    def _sends(self, execution: ExecutionConfig) -> list[float]:
        """Return the seconds of the smallest message from every stage to the next."""
        sends = []
        for cut, (here, there) in zip(
            execution.cuts[1:], pairwise(execution.placement), strict=True
        ):
            a, b = execution.groups[here].array, execution.groups[there].array
            is_sent = here != there and self.crosses[cut]
            model = self.layouts.unsharded.costs.collective("send", pairs(a, b))
            sends.append(model.seconds(1) if is_sent else 0.0)
        return sends


def _before(values: np.ndarray) -> np.ndarray:
    """Return the sums over the nodes before each node."""
    return np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])


def _map(values: np.ndarray, function: Callable[[float], float]) -> np.ndarray:
    """Apply a function to every value, once for equal ones."""
    distinct, number = np.unique(values, return_inverse=True)
    return np.array([function(v) for v in distinct.tolist()])[number.ravel()]
