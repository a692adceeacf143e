"""The search: every point has a lower bound; the promising ones are simulated, best first.

Enters: a folded model on a cluster, what is fixed, a memory limit. Leaves: `Found`: the simulated
points in the order of their step times, and what the bounds say of the rest.

A point's bound is the work of its busiest group of ranks and what must come before and after it;
nothing that the simulator adds can make a step shorter. So when the best simulated step is at most
the next bound, no other point is better, in simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from shardwise.ir import Graph
from shardwise.planner.balance import Costs, Cutter
from shardwise.planner.search.bank import Bank, Layouts
from shardwise.planner.search.bounds import Bounds
from shardwise.planner.search.found import Bound, Candidate, Found
from shardwise.planner.search.grouping import Grouping
from shardwise.planner.search.space import Point
from shardwise.plans import Precision
from shardwise.schedules import DEFAULT_SCHEDULE, Schedule, schedule_kind
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.memory import MemoryUse, peak_of
from shardwise.simulation.setting import Setting
from shardwise.simulation.times import Group

MOST_SIMULATED = 400
MOST_CHECKED = 4_000  # points whose memory is worked out, once there is one that fits
RUNNERS_UP = 5
REFINED = 2  # points whose parameters outside of blocks are tried at other zero levels
WORTHWHILE = 0.005  # gain for which a plan gets a second zero level


class Search:
    """Bounds and simulations of one model on one cluster."""

    def __init__(
        self,
        graph: Graph,
        bank: Bank,
        evaluator: Evaluator,
        groupings: Callable[[int], Sequence[Grouping]],
        precision: Precision,
        memory_limit: float | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.graph, self.bank, self.evaluator = graph, bank, evaluator
        self.groupings, self.precision, self.report = groupings, precision, report
        self.memory_limit = memory_limit
        self.fold = evaluator.fold
        self.cutter = Cutter(graph)
        self.outside, self.count = self._outside(graph), len(graph.parameters)
        self._cuts: dict[object, tuple[int, ...]] = {}
        self.bounds = Bounds(bank, evaluator, self.setting, memory_limit)
        self._simulated: dict[Point, Candidate] = {}
        self._full: dict[Point, float] = {}
        self._grouped: dict[object, tuple[Group, ...]] = {}

    def run(
        self,
        points: Iterable[Point],
        *,
        below: float = float("inf"),
        enough: int = RUNNERS_UP,
        most: int = MOST_SIMULATED,
    ) -> Found:
        """Simulate points in the order of their bounds until none is below the best.

        Points that differ only in what they keep where share a bound on time, and get their own,
        with that on memory, when their turn comes. Memory is worked out first: what does not fit
        is not simulated. Steps of `below` seconds are known already; `enough` are simulated in any
        case, at most `most` in all.
        """
        families: dict[Point, list[Point]] = {}
        for point in points:
            for grouping in range(len(self.groupings(point.pp))):
                chosen = replace(point, grouping=grouping)
                families.setdefault(replace(chosen, zero=0, offload=()), []).append(chosen)
        heap: list[tuple[float, str, Point | Bound]] = []
        for family in families:
            core = self.bounds.core(family)
            if core is not None:
                heap.append((core.seconds, f"{family}", family))
        heapify(heap)
        self.report(f"{sum(map(len, families.values()))} points")
        return self._explore(heap, families, below, enough, most)

    def _explore(
        self,
        heap: list[tuple[float, str, Point | Bound]],
        families: Mapping[Point, list[Point]],
        best: float,
        wanted: int,
        most: int,
    ) -> Found:
        feasible: list[Candidate] = []
        bounds: list[Bound] = []
        left, checked = float("inf"), 0
        while heap:
            seconds, _, item = heappop(heap)
            enough = len(feasible) >= wanted
            spent = len(feasible) >= most or (feasible and checked >= MOST_CHECKED)
            if (seconds >= best and enough) or spent:
                left = seconds
                break
            if isinstance(item, Point):
                shared = self.bounds.shares(item)
                for point in families[item]:
                    if not shared and point.zero != families[item][0].zero:  # all zero levels alike
                        continue
                    bound = self.bounds.bound(point)
                    heappush(heap, (bound.seconds, f" {point}", bound))
                continue
            if item.memory <= 1.0:
                checked += 1
                item = replace(item, memory=self.fullness(item.point))
            bounds.append(item)
            if item.memory > 1.0:
                continue
            feasible.append(self.simulate(item.point))
            best = min(best, feasible[-1].estimate.step_time_s)
            if len(feasible) % 20 == 0:
                self.report(f"simulated {len(feasible)} points")
        feasible.sort(key=lambda c: (c.estimate.step_time_s, str(c.point)))
        while feasible:  # the first of them with the memory of every group
            feasible[0] = self.simulate(feasible[0].point, whole=True)
            if feasible[0].estimate.fits:
                break
            full = feasible.pop(0)
            bounds.append(
                Bound(
                    point=full.point,
                    seconds=full.estimate.step_time_s,
                    memory=full.estimate.peak.fullness,
                )
            )
        return Found(
            feasible=tuple(feasible),
            bounds=tuple(bounds),
            next_bound_s=left,
            points=sum(map(len, families.values())),
        )

    def knows(self, point: Point) -> bool:
        """Whether a point has been simulated."""
        return point in self._simulated

    def may_beat(self, point: Point, seconds: float) -> bool:
        """Whether a point's work, which no other layouts do in less time, takes less than that."""
        core = self.bounds.core(replace(point, zero=0, outer=None, offload=()))
        return core is not None and core.seconds < seconds

    def may_fit(self, point: Point, seconds: float) -> bool:
        """Whether a point may beat so many seconds, and its memory is not known to be too small."""
        return self.may_beat(point, seconds) and self.bounds.bound(point).memory <= 1.0

    def _outside(self, graph: Graph) -> tuple[str, ...]:
        """The parameters that no block uses: embeddings, a head."""
        inside = {
            name
            for node, block in zip(graph.nodes, self.fold.blocks, strict=True)
            if block
            for name in node.inputs
        }
        return tuple(p.name for p in graph.parameters if p.value not in inside)

    def refined(self, found: Found, levels: Sequence[int]) -> Found:
        """The best points with another zero level for parameters outside of blocks."""
        trials = []
        for candidate in found.feasible[:REFINED]:
            point = candidate.point
            if point.dp * point.tp > 1 and 0 < len(self.outside) < self.count:
                trials += [replace(point, outer=z) for z in levels if z != point.zero]
        better = [self.simulate(point, whole=True) for point in trials]
        best = found.best.estimate.step_time_s * (1 - WORTHWHILE) if found.feasible else 0.0
        better = [c for c in better if c.estimate.fits and c.estimate.step_time_s < best]
        if not better:
            return found
        ranked = sorted(
            (*better, *found.feasible), key=lambda c: (c.estimate.step_time_s, str(c.point))
        )
        return replace(found, feasible=tuple(ranked))

    def simulate(self, point: Point, *, whole: bool = False) -> Candidate:
        """The simulated step of a point; with `whole` the memory of all groups of ranks."""
        if whole or point not in self._simulated:
            layouts = self.bank.get(point.tp, point.layout)
            setting = replace(self.setting(point, layouts), schedule=self._schedule(point))
            watched = None if whole else self._watched(point)
            estimate = self.evaluator.estimate(layouts.works, setting, watched)
            self._simulated[point] = Candidate(
                point=point,
                setting=setting,
                estimate=replace(estimate, memory=self._limited(estimate.memory)),
                layouts=layouts,
            )
        return self._simulated[point]

    def fullness(self, point: Point) -> float:
        """What the fullest rank needs, as a part of what it has."""
        if point not in self._full:
            layouts = self.bank.get(point.tp, point.layout)
            setting = replace(self.setting(point, layouts), schedule=self._schedule(point))
            uses = self.evaluator.memory(layouts.works, setting, self._watched(point))
            self._full[point] = peak_of(self._limited(uses)).fullness
        return self._full[point]

    def setting(self, point: Point, layouts: Layouts) -> Setting:
        """How a point's step runs, but for its schedule: most points are never simulated."""
        groups = self._groups(point, layouts)
        return Setting(
            groups=groups,
            cuts=self._cut(point, layouts, groups),
            placement=self._placement(point),
            num_microbatches=point.num_microbatches,
            zero=point.zero,
            zeros={} if point.outer is None else dict.fromkeys(self.outside, point.outer),
            recompute=point.recompute,
            offload=point.offload,
            precision=self.precision,
        )

    def _watched(self, point: Point) -> set[int] | None:
        """The groups that may be the fullest: mostly the first or the last."""
        return {0, 1, point.pp - 1} if len(self.evaluator.devices) == 1 else None

    def _limited(self, uses: tuple[MemoryUse, ...]) -> tuple[MemoryUse, ...]:
        limit = self.memory_limit
        if limit is None:
            return uses
        return tuple(replace(use, limit_bytes=min(use.limit_bytes, limit)) for use in uses)

    # ------------------------------------------------------------ parts

    def _groups(self, point: Point, layouts: Layouts) -> tuple[Group, ...]:
        key = (point.pp, point.grouping, layouts.axes)
        if key not in self._grouped:
            grouping = self.groupings(point.pp)[point.grouping]
            self._grouped[key] = grouping.groups(point.tp, layouts.axes)
        return self._grouped[key]

    def _cut(self, point: Point, layouts: Layouts, groups: tuple[Group, ...]) -> tuple[int, ...]:
        if point.stages == 1 or point.cuts:
            return point.cuts or (0,)
        key = (
            id(layouts),
            point.stages,
            point.pp,
            point.grouping,
            schedule_kind(point.schedule).is_v_shaped,
        )
        if key not in self._cuts:
            speeds = self.groupings(point.pp)[point.grouping].speeds
            placement = self._placement(point)
            setting = Setting(
                groups=groups, cuts=(0,), placement=(0,), num_microbatches=point.num_microbatches
            )
            layers = self.bounds.layers(layouts, setting, 0)
            work = np.diff(layers.sums["forward"]) + np.diff(layers.sums["backward"])
            crossing = self.fold.spread(layers.work.crossing)
            costs = Costs(work, crossing, self._per_byte(groups))
            self._cuts[key] = self.cutter.cut(costs, [speeds[g] for g in placement])
        return self._cuts[key]

    def _schedule(self, point: Point) -> Schedule | None:
        """The order of a point's actions, where there is more than one."""
        if point.pp == point.num_microbatches == 1:
            return None
        return self._named(point, point.num_microbatches)

    def _placement(self, point: Point) -> tuple[int, ...]:
        """The group of every stage, which is the same for any number of micro-batches."""
        return self._named(point, 1).placement

    def _named(self, point: Point, num_microbatches: int) -> Schedule:
        name = point.schedule or DEFAULT_SCHEDULE
        return self.evaluator.schedule(name, point.pp, num_microbatches, point.stages)

    def _per_byte(self, groups: Sequence[Group]) -> float:
        """Seconds that a byte takes to the next stage."""
        if len(groups) < 2:
            return 0.0
        pairs = np.array([[groups[0].ranks[0], groups[1].ranks[0]]])
        model = self.evaluator.clock.collective("send", pairs)
        return (model.seconds(2.0e6) - model.seconds(1.0e6)) / 1.0e6
