"""The search: compute a lower bound for every configuration, simulate the promising ones.

A bound is the time of the busiest group of ranks, with all that must come before and after it; the
simulator only adds to it. So once the best simulated step is no longer than the next bound, no
other configuration is faster in simulation. `simplest` then prefers a simpler configuration that
takes nearly as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from shardwise.ir import Graph
from shardwise.planner.bounds import Bound, Bounds
from shardwise.planner.device_groups import Grouping
from shardwise.planner.layout_cache import LayoutCache, Layouts
from shardwise.planner.search_space import RECOMPUTES
from shardwise.planner.stage_balance import Costs, Cutter
from shardwise.plans import Precision
from shardwise.plans.search_result import LocalSearchSummary, ParallelConfig
from shardwise.schedules import DEFAULT_SCHEDULE, Schedule, schedule_kind
from shardwise.simulation.costs import ExecutionConfig, Group, cached
from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.memory import peak_of

MAX_SIMULATED = 400
MAX_CHECKED = 4_000  # configurations whose memory is computed, once one of them fits
RUNNERS_UP = 5
REFINED = 2  # configurations whose parameters outside of blocks are tried at other zero levels
MIN_REFINED_GAIN = 0.005  # fraction of the step that a second zero level must gain
SIMPLER_SLACK = 0.01  # fraction of the step that a simpler plan may take longer
MAX_SIMPLER = 24  # simpler configurations whose memory and step are computed


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A simulated configuration."""

    config: ParallelConfig
    execution: ExecutionConfig
    estimate: Estimate
    layouts: Layouts

    @property
    def sort_key(self) -> tuple[float, str]:
        return self.estimate.step_time_s, str(self.config)


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """The candidates of a search that fit in memory, best first, and the bounds of all others."""

    feasible: tuple[Candidate, ...]
    bounds: tuple[Bound, ...]  # of all configurations that were checked
    next_bound_s: float  # of the first configuration that was not simulated
    num_configs: int
    local_search: LocalSearchSummary | None = None

    @property
    def best(self) -> Candidate:
        return self.feasible[0]

    @property
    def step_time_s(self) -> float:
        """The step time of the best configuration, infinite where none fits."""
        return self.best.estimate.step_time_s if self.feasible else float("inf")

    @property
    def limited_by_memory(self) -> bool:
        """Whether a configuration that does not fit might be faster than the best one."""
        return any(b.memory > 1 and b.seconds < self.step_time_s for b in self.bounds)

    @property
    def gap(self) -> float:
        """The fraction of the step by which an unsimulated configuration could be faster."""
        return max(0.0, 1 - self.next_bound_s / self.step_time_s)


@dataclass(eq=False)
class Search:
    """Bounds and simulations of one model on one cluster.

    `replace` returns the same search with other layouts, or on another cluster.
    """

    graph: Graph
    cache: LayoutCache
    evaluator: Evaluator
    groupings: Callable[[int], Sequence[Grouping]]
    precision: Precision
    report: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.fold, self.cutter = self.evaluator.fold, Cutter(self.graph)
        self.outside, self.count = self._outside(self.graph), len(self.graph.parameters)
        self.bounds = Bounds(self.cache, self.evaluator, self.execution)
        self._cuts: dict[object, tuple[int, ...]] = {}
        self._simulated: dict[ParallelConfig, Candidate] = {}
        self._fullness: dict[ParallelConfig, float] = {}
        self._grouped: dict[object, tuple[Group, ...]] = {}

    def run(
        self,
        configs: Iterable[ParallelConfig],
        *,
        below: float = float("inf"),
        enough: int = RUNNERS_UP,
        max_simulated: int = MAX_SIMULATED,
    ) -> SearchOutcome:
        """Simulate configurations in the order of their bounds until no bound is below the best.

        Configurations that differ only in zero level and offload share a bound on time; their own
        bounds, on time and memory, are computed when their turn comes. A configuration is simulated
        only if it fits in memory. A step of `below` seconds is already known; at least `enough` and
        at most `max_simulated` configurations are simulated.
        """
        families: dict[ParallelConfig, list[ParallelConfig]] = {}
        for config in configs:
            for grouping in range(len(self.groupings(config.pp))):
                grouped = replace(config, grouping=grouping)
                families.setdefault(replace(grouped, zero=0, offload=()), []).append(grouped)
        heap: list[tuple[float, str, ParallelConfig | Bound]] = []
        for family in families:
            core = self.bounds.core(family)
            if core is not None:
                heap.append((core.seconds, f"{family}", family))
        heapify(heap)
        self.report(f"{sum(map(len, families.values()))} configurations")
        return self._explore(heap, families, below, enough, max_simulated)

    def _explore(
        self,
        heap: list[tuple[float, str, ParallelConfig | Bound]],
        families: Mapping[ParallelConfig, list[ParallelConfig]],
        best: float,
        enough: int,
        max_simulated: int,
    ) -> SearchOutcome:
        feasible: list[Candidate] = []
        bounds: list[Bound] = []
        next_bound, num_checked = float("inf"), 0
        while heap:
            seconds, _, item = heappop(heap)
            is_done = seconds >= best and len(feasible) >= enough
            is_spent = len(feasible) >= max_simulated or (feasible and num_checked >= MAX_CHECKED)
            if is_done or is_spent:
                next_bound = seconds
                break
            if isinstance(item, ParallelConfig):
                shared = self.bounds.shares(item)
                for config in families[item]:
                    if not shared and config.zero != families[item][0].zero:
                        continue  # no parameter is replicated, so zero levels make no difference
                    bound = self.bounds.bound(config)
                    heappush(heap, (bound.seconds, f" {config}", bound))
                continue
            if item.memory <= 1.0:
                num_checked += 1
                item = replace(item, memory=self.fullness(item.config))
            bounds.append(item)
            if item.memory > 1.0:
                continue
            feasible.append(self.simulate(item.config))
            best = min(best, feasible[-1].estimate.step_time_s)
            if len(feasible) % 20 == 0:
                self.report(f"simulated {len(feasible)} configurations")
        feasible.sort(key=lambda c: c.sort_key)
        while feasible:  # the memory of every group is checked only for the best candidate
            feasible[0] = self.simulate(feasible[0].config, all_groups=True)
            estimate = feasible[0].estimate
            if estimate.fits:
                break
            config, seconds = feasible.pop(0).config, estimate.step_time_s
            bounds.append(Bound(config=config, seconds=seconds, memory=estimate.peak.fullness))
        return SearchOutcome(
            feasible=tuple(feasible),
            bounds=tuple(bounds),
            next_bound_s=next_bound,
            num_configs=sum(map(len, families.values())),
        )

    def knows(self, config: ParallelConfig) -> bool:
        """Return whether a configuration has been simulated."""
        return config in self._simulated

    def may_beat(self, config: ParallelConfig, seconds: float) -> bool:
        """Return whether the bound of a configuration is below `seconds`, whatever its memory."""
        core = self.bounds.core(replace(config, zero=0, outer=None, offload=()))
        return core is not None and core.seconds < seconds

    def may_fit(self, config: ParallelConfig, seconds: float) -> bool:
        """Return whether a configuration may take less than `seconds` and fit, by its bounds."""
        return self.may_beat(config, seconds) and self.bounds.bound(config).memory <= 1.0

    def _outside(self, graph: Graph) -> tuple[str, ...]:
        """Return the parameters that no block uses, such as those of embeddings and a head."""
        inside = {
            name
            for node, block in zip(graph.nodes, self.fold.blocks, strict=True)
            if block
            for name in node.inputs
        }
        return tuple(p.name for p in graph.parameters if p.value not in inside)

    def refined(self, outcome: SearchOutcome, levels: Sequence[int]) -> SearchOutcome:
        """Try the best configurations with another zero level outside of blocks."""
        trials = []
        for candidate in outcome.feasible[:REFINED]:
            config = candidate.config
            if config.dp * config.tp > 1 and 0 < len(self.outside) < self.count:
                trials += [replace(config, outer=z) for z in levels if z != config.zero]
        better = [self.simulate(config, all_groups=True) for config in trials]
        best = outcome.step_time_s * (1 - MIN_REFINED_GAIN) if outcome.feasible else 0.0
        better = [c for c in better if c.estimate.fits and c.estimate.step_time_s < best]
        if not better:
            return outcome
        ranked = sorted((*better, *outcome.feasible), key=lambda c: c.sort_key)
        return replace(outcome, feasible=tuple(ranked))

    def simulate(self, config: ParallelConfig, *, all_groups: bool = False) -> Candidate:
        """Simulate a step; `all_groups` computes the memory of all groups of ranks."""
        if all_groups or config not in self._simulated:
            layouts, execution = self._scheduled(config)
            watched = None if all_groups else self._fullest_groups(config)
            estimate = self.evaluator.estimate(layouts.workloads, execution, watched)
            self._simulated[config] = Candidate(
                config=config, execution=execution, estimate=estimate, layouts=layouts
            )
        return self._simulated[config]

    def fullness(self, config: ParallelConfig) -> float:
        """Return the memory of the fullest rank, as a fraction of what it has."""
        if config not in self._fullness:
            layouts, execution = self._scheduled(config)
            uses = self.evaluator.memory(layouts.workloads, execution, self._fullest_groups(config))
            self._fullness[config] = peak_of(uses).fullness
        return self._fullness[config]

    def execution(self, config: ParallelConfig, layouts: Layouts) -> ExecutionConfig:
        """Return how a step runs, without its schedule: most are never simulated."""
        groups = self._groups(config, layouts)
        first, costs, parts = groups[0], self.evaluator.costs, config.tp * config.pp
        bucket_mib = cached(
            first.cache,
            ("bucket", costs, parts),
            lambda: costs.bucket_mib(self.graph, self.precision, first, ("dp",), parts),
        )
        return ExecutionConfig(
            groups=groups,
            cuts=self._stage_cuts(config, layouts, groups),
            placement=self._placement(config),
            num_microbatches=config.num_microbatches,
            zero=config.zero,
            zeros={} if config.outer is None else dict.fromkeys(self.outside, config.outer),
            recompute=config.recompute,
            offload=config.offload,
            precision=self.precision,
            bucket_bytes=bucket_mib << 20,
        )

    def _fullest_groups(self, config: ParallelConfig) -> set[int] | None:
        """Return the groups that may be the fullest, or None for all."""
        return {0, 1, config.pp - 1} if len(self.evaluator.devices) == 1 else None

    # ------------------------------------------------------------ parts of an execution config
    def _groups(self, config: ParallelConfig, layouts: Layouts) -> tuple[Group, ...]:
        key = (config.pp, config.grouping, layouts.axes)
        grouping = self.groupings(config.pp)[config.grouping]
        return cached(self._grouped, key, lambda: grouping.groups(config.tp, layouts.axes))

    def _stage_cuts(
        self, config: ParallelConfig, layouts: Layouts, groups: tuple[Group, ...]
    ) -> tuple[int, ...]:
        """Return the first nodes of stages: the config's own, or those that balance the groups."""
        if config.stages == 1 or config.cuts:
            return config.cuts or (0,)
        v_shaped = schedule_kind(config.schedule).is_v_shaped
        key = (id(layouts), config.stages, config.pp, config.grouping, v_shaped)
        if key not in self._cuts:
            speeds = self.groupings(config.pp)[config.grouping].speeds
            execution = ExecutionConfig(
                groups=groups, cuts=(0,), placement=(0,), num_microbatches=config.num_microbatches
            )
            layers = self.bounds.layers(layouts, execution, 0)
            work = np.diff(layers.sums["forward"]) + np.diff(layers.sums["backward"])
            crossing = self.fold.spread(layers.work.crossing)
            costs = Costs(work, crossing, self._seconds_per_byte(groups))
            speed_of = [speeds[group] for group in self._placement(config)]
            self._cuts[key] = self.cutter.cut(costs, speed_of)
        return self._cuts[key]

    def _scheduled(self, config: ParallelConfig) -> tuple[Layouts, ExecutionConfig]:
        """Return a config's layouts, and its execution with the order of actions."""
        layouts = self.cache.get(config.tp, config.layout)
        execution, count = self.execution(config, layouts), config.num_microbatches
        if config.pp > 1 or count > 1:  # otherwise a step is one forward and one backward
            execution = replace(execution, schedule=self._schedule(config, count))
        return layouts, execution

    def _placement(self, config: ParallelConfig) -> tuple[int, ...]:
        """Return the group of every stage, which is the same for any number of micro-batches."""
        return self._schedule(config, 1).placement

    def _schedule(self, config: ParallelConfig, num_microbatches: int) -> Schedule:
        name = config.schedule or DEFAULT_SCHEDULE
        return self.evaluator.schedule(name, config.pp, num_microbatches, config.stages)

    def _seconds_per_byte(self, groups: Sequence[Group]) -> float:
        """Return the time per byte of messages to the next stage."""
        if len(groups) < 2:
            return 0.0
        pairs = np.array([[groups[0].ranks[0], groups[1].ranks[0]]])
        model = self.evaluator.costs.collective("send", pairs)
        return (model.seconds(2.0e6) - model.seconds(1.0e6)) / 1.0e6


# ------------------------------------------------------------ simplicity
def simplicity(config: ParallelConfig) -> tuple[object, ...]:
    """Return a key by which simpler configurations sort first."""
    recompute = RECOMPUTES.index(config.recompute) if config.recompute in RECOMPUTES else 3
    return (
        len(config.offload),
        config.pp > 1,
        sum(size > 1 for size in (config.dp, config.tp, config.pp)),
        config.tp > 1,
        config.virtual > 1,
        config.schedule not in ("", DEFAULT_SCHEDULE),
        config.num_microbatches > 1,
        recompute,
        config.outer is not None,
        config.layout > 0,
        bool(config.cuts),
        config.zero,
        config.num_microbatches,
        config.pp,
        config.tp,
        config.grouping,
    )


def simplest(
    search: Search, outcome: SearchOutcome, configs: Iterable[ParallelConfig]
) -> SearchOutcome:
    """Put the simplest configuration that takes at most `SIMPLER_SLACK` longer first.

    Predictions are not accurate to a percent, and a simpler plan is easier to read and to debug.
    """
    if not outcome.feasible:
        return outcome
    best = outcome.best
    limit = best.estimate.step_time_s * (1 + SIMPLER_SLACK)
    feasible = {candidate.config for candidate in outcome.feasible}
    grouped = {
        replace(config, grouping=grouping)
        for config in configs
        for grouping in range(len(search.groupings(config.pp)))
    }
    simpler = [c for c in feasible | grouped if simplicity(c) < simplicity(best.config)]
    num_tried = 0
    for config in sorted(simpler, key=lambda c: (simplicity(c), str(c))):
        if num_tried == MAX_SIMPLER:
            break
        if config not in feasible:
            if not search.may_fit(config, limit):
                continue
            num_tried += 1
            if search.fullness(config) > 1.0:
                continue
        if search.simulate(config).estimate.step_time_s > limit:
            continue
        chosen = search.simulate(config, all_groups=True)
        if chosen.estimate.fits:
            others = (c for c in outcome.feasible if c.config != config)
            return replace(outcome, feasible=(chosen, *others))
    return outcome
