"""Local search after the main search, on few ranks: simulate small changes.

The main search balances the work of stages and solves layouts once, for a typical micro-batch. In
the simulation the longest stage sets the pace, so other stage boundaries can be faster: all of them
are tried for a small model, and those with one boundary moved to the next place for a larger one.

Where memory limits a small graph, the best layouts depend on what just fits, so the cheapest
layouts for each micro-batch are enumerated as well. (Where memory suffices, they gained at most
1.5 % on graphs of up to 8 nodes, and are not tried.) They are tried in the order of their prices
until no lower bound is below the best step; a kind of configurations for which several layouts in a
row did not fit is postponed.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb, inf

from shardwise.planner.layout_cache import FASTEST, RankedLayouts
from shardwise.planner.search import Search, SearchOutcome
from shardwise.plans.search_result import LocalSearchSummary, ParallelConfig
from shardwise.schedules import schedule_kind

MAX_RANKS = 16
MAX_NODES = 16  # distinct nodes of a graph whose layouts are enumerated
MAX_BOUNDARIES = 64  # divisions of a model into stages, if all of them are tried
MAX_LAYOUTS = 256  # that are enumerated for a micro-batch
MAX_LOWERED_NODES = 1200  # in total, over the layouts that are tried
MAX_SIMULATED = 400
PATIENCE = 8  # layouts that do not fit, after which their kind of configurations is postponed
MIN_FORWARD = 0.25  # fraction of a node's forward and backward: that of matmuls is a third
MIN_GAIN = 1e-6  # fraction of the step below which a change is not an improvement


def improved(
    search: Search, outcome: SearchOutcome, configs: Sequence[ParallelConfig]
) -> SearchOutcome:
    """Return the outcome with a faster configuration first, or one that fits if none did."""
    ranks = len(search.evaluator.kind)
    if not configs or ranks > MAX_RANKS or ranks == 1:
        return outcome
    return _LocalSearch(search, outcome, configs).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Layouts for the micro-batches of some configurations, with a lower bound of their step."""

    likely: float
    layout: int
    kind: int  # of the configurations: those with one mesh and number of micro-batches
    seconds: float  # a lower bound
    configs: tuple[ParallelConfig, ...]

    @property
    def sort_key(self) -> tuple[float, int]:
        return self.likely, self.layout


class _LocalSearch:
    def __init__(
        self, search: Search, outcome: SearchOutcome, configs: Iterable[ParallelConfig]
    ) -> None:
        self.search, self.outcome = search, outcome
        self.best = outcome.best if outcome.feasible else None
        self.configs = [config for config in configs if config.layout == FASTEST]
        if not outcome.limited_by_memory:  # recomputing only takes longer
            simplest = self.configs[0].recompute
            self.configs = [config for config in self.configs if config.recompute == simplest]
        self.simulated = self.layouts = 0
        self.rejected: Counter[int] = Counter()  # layouts with which no configuration fits, by kind
        self.complete, self.equal_devices = True, len(search.evaluator.devices) == 1

    def run(self) -> SearchOutcome:
        """Try other boundaries with known layouts, then other layouts with all boundaries."""
        before = self._seconds
        self._try([config for config in self._with_boundaries(self.configs) if config.cuts])
        nodes = len(self.search.fold.graph.nodes)
        enumerated = self.outcome.limited_by_memory and nodes <= MAX_NODES
        for trial in self._in_turn() if enumerated else ():
            if self.layouts >= MAX_LOWERED_NODES // nodes or self.simulated >= MAX_SIMULATED:
                self.complete = False
                break
            self.layouts += 1
            members = [replace(config, layout=trial.layout) for config in trial.configs]
            self.rejected[trial.kind] += not self._try(list(self._with_boundaries(members)))
        summary = LocalSearchSummary(
            layouts=self.layouts,
            simulated=self.simulated,
            gain=1 - self._seconds / before if before < inf else 0.0,
            complete=self.complete and enumerated,
        )
        better = () if self.best is None or self._seconds == before else (self.best,)
        feasible = (*better, *self.outcome.feasible)
        return replace(self.outcome, feasible=feasible, local_search=summary)

    @property
    def _seconds(self) -> float:
        """The best step time."""
        return inf if self.best is None else self.best.estimate.step_time_s

    @property
    def _goal(self) -> float:
        """The step time that must be beaten."""
        return self._seconds * (1 - MIN_GAIN)

    def _try(self, configs: Sequence[ParallelConfig]) -> bool:
        """Simulate configurations that may be faster; return False if none of them fits."""
        budget = max(0, MAX_SIMULATED - self.simulated)
        outcome = self.search.run(configs, below=self._goal, enough=0, max_simulated=budget)
        self.simulated += len(outcome.feasible)
        self.complete &= outcome.next_bound_s >= self._goal
        if outcome.step_time_s < self._goal:
            self.best = outcome.best
        return bool(outcome.feasible) or not outcome.bounds

    # ------------------------------------------------------------ stage boundaries
    def _with_boundaries(self, configs: Iterable[ParallelConfig]) -> Iterator[ParallelConfig]:
        """Yield the configurations as they are, and with other stage boundaries."""
        boundaries: dict[object, list[tuple[int, ...]]] = {}
        for config in configs:
            yield config
            if config.stages > 1 and self._lower_bound(config) < self._goal:
                v_shaped = schedule_kind(config.schedule).is_v_shaped
                key = (config.stages, config.pp, v_shaped, config.layout)
                if key not in boundaries:
                    boundaries[key] = self._boundaries(config)
                for cuts in boundaries[key]:
                    yield replace(config, cuts=cuts)

    def _lower_bound(self, config: ParallelConfig) -> float:
        """Return a lower bound on the step time with any stage boundaries."""
        core = self.search.bounds.core(replace(config, zero=0, outer=None, offload=()))
        if core is None or not self.equal_devices:
            return 0.0
        work = core.layers[0].sums
        return _num_passes(config) * float(work["forward"][-1] + work["backward"][-1])

    def _boundaries(self, config: ParallelConfig) -> list[tuple[int, ...]]:
        """Return other stage boundaries: all, or those with one boundary moved by one place."""
        places, count = self.search.cutter.fit, config.stages - 1
        if comb(len(places), count) <= MAX_BOUNDARIES:
            return [(0, *cuts) for cuts in combinations(places, count)]
        core = self.search.bounds.core(config)
        if core is None:
            return []
        cuts = core.execution.cuts
        boundaries = []
        for stage, step in product(range(1, len(cuts)), (-1, 1)):
            place = places.index(cuts[stage]) + step
            if 0 <= place < len(places):
                moved = (*cuts[:stage], places[place], *cuts[stage + 1 :])
                if len(set(moved)) == len(moved):
                    boundaries.append(moved)
        return boundaries

    # ------------------------------------------------------------ layouts
    def _in_turn(self) -> Iterator[_Trial]:
        """Yield trials that may be faster, likely fastest first; postpone kinds that do not fit."""
        queues: dict[int, deque[_Trial]] = {}
        for trial in sorted(self._trials(), key=lambda trial: trial.sort_key):
            queues.setdefault(trial.kind, deque()).append(trial)
        while queues:
            kind = min(queues, key=lambda k: (self.rejected[k] // PATIENCE, *queues[k][0].sort_key))
            trial = queues[kind].popleft()
            if not queues[kind]:
                del queues[kind]
            if trial.seconds < self._goal:
                yield trial

    def _trials(self) -> Iterator[_Trial]:
        """Yield the cheapest layouts for the micro-batches of all configurations."""
        kinds: dict[tuple[int, int, int, int], list[ParallelConfig]] = {}
        for config in self.configs:
            if config.tp > 1:
                key = (config.tp, config.dp, config.pp, config.num_microbatches)
                kinds.setdefault(key, []).append(config)
        for kind, ((tp, dp, pp, count), members) in enumerate(kinds.items()):
            core = self.search.bounds.core(members[0])
            if core is None:
                continue
            passes, group = min(map(_num_passes, members)), core.execution.groups[0]
            numel = self.search.cache.min_numel(tp) / (pp * dp)
            update = self.search.bounds.update_lower_bound(numel, group)
            below = min(self._goal / passes, (self._goal - update) * pp / count)
            ranked, complete = self.search.cache.k_best(
                tp, dp, count, group, MAX_LAYOUTS, below if self.equal_devices else inf
            )
            self.complete &= complete
            limit = self.search.bounds.limit(group)
            for layouts in ranked:
                fitting = [c for c in members if _min_bytes(layouts, c) <= limit]
                if fitting:
                    seconds = layouts.seconds
                    yield _Trial(
                        kind=kind,
                        seconds=max(seconds * passes, seconds * count / pp + update),
                        likely=layouts.likely * (count + pp - 1) / pp,  # stages of equal length
                        layout=layouts.number,
                        configs=tuple(fitting),
                    )


def _min_bytes(layouts: RankedLayouts, config: ParallelConfig) -> float:
    """Return a lower bound on the fullest rank's memory: its state and its saved tensors."""
    states = layouts.state_bytes / (config.dp * config.tp if config.zero else 1)
    saved = layouts.saved_bytes if config.recompute == "none" else 0.0
    return (states + saved) / config.pp


def _num_passes(config: ParallelConfig) -> float:
    """Return a lower bound on a step, in multiples of a micro-batch's time in all stages together.

    A group runs its stage `num_microbatches` times, after the stages before it have run once: their
    forward, or forward and backward if the schedule does not split backward. The step is shortest
    if all groups end at the same time; the times of their stages then form a geometric series.
    """
    count, pp = config.num_microbatches, config.pp
    if pp == 1 or config.virtual > 1:
        return count / pp
    waits = MIN_FORWARD if schedule_kind(config.schedule).splits_backward else 1.0
    return waits / (1 - (1 - waits / count) ** pp)
