"""Local search after the main search, on few ranks: the simulator judges small changes.

The main search balances the work of stages and solves layouts once, for a typical micro-batch. In
the simulation the longest stage sets the pace, so other stage boundaries can be faster: of a small
model all are tried, of a larger one those with one boundary moved to the next place.

Where memory limits a small graph, the best layouts depend on what just fits, so the cheapest
layouts for each micro-batch are enumerated, too. (Elsewhere they gained at most 1.5 % on graphs of
up to 8 nodes, and are not tried.) They are tried in the order of their prices until no lower bound
is below the best step; kinds of configurations for which several in a row did not fit wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, inf

from shardwise.planner.layout_cache import FASTEST, RankedLayouts
from shardwise.planner.search import Search, SearchOutcome
from shardwise.plans.search_result import LocalSearchSummary, ParallelConfig
from shardwise.schedules import schedule_kind

MAX_RANKS = 16
MAX_NODES = 16  # distinct ones, up to which layouts are enumerated
MAX_BOUNDARIES = 64  # divisions of a model into stages up to which all are tried
MAX_LAYOUTS = 256  # that are enumerated for a micro-batch
MAX_LOWERED_NODES = 1200  # of the layouts that are tried, all nodes together
MAX_SIMULATED = 400
PATIENCE = 8  # layouts that do not fit, after which their configurations wait for others
MIN_FORWARD = 0.25  # fraction of a node's forward and backward: that of matmuls is a third
MIN_GAIN = 1e-6  # fraction of the step below which a change is not an improvement


def improved(
    search: Search, outcome: SearchOutcome, configs: Sequence[ParallelConfig]
) -> SearchOutcome:
    """Return the outcome with a faster configuration first, or one that fits, if there is one."""
    ranks = len(search.evaluator.kind)
    if not configs or ranks > MAX_RANKS or ranks == 1:
        return outcome
    return _LocalSearch(search, outcome, configs).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Layouts for the micro-batches of some configurations, with a lower bound of their step."""

    kind: int  # of the configurations: those of a mesh and a number of micro-batches
    seconds: float
    likely: float
    layout: int
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
        wanted = [config for config in configs if config.layout == FASTEST]
        if not outcome.limited_by_memory:  # recomputing only takes longer
            wanted = [config for config in wanted if config.recompute == wanted[0].recompute]
        self.configs = wanted
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
            spent = self.layouts >= MAX_LOWERED_NODES // nodes
            if spent or self.simulated >= MAX_SIMULATED:
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
        """Simulate those that may be faster; whether not all of them need too much memory."""
        room = max(0, MAX_SIMULATED - self.simulated)
        outcome = self.search.run(configs, below=self._goal, enough=0, max_simulated=room)
        self.simulated += len(outcome.feasible)
        self.complete &= outcome.next_bound_s >= self._goal
        if outcome.step_time_s < self._goal:
            self.best = outcome.best
        return bool(outcome.feasible) or not outcome.bounds

    # ------------------------------------------------------------ stage boundaries

    def _with_boundaries(self, configs: Iterable[ParallelConfig]) -> Iterator[ParallelConfig]:
        """Yield the configurations as they are, and with other stage boundaries."""
        known: dict[object, list[tuple[int, ...]]] = {}
        for config in configs:
            yield config
            if config.stages > 1 and self._lower_bound(config) < self._goal:
                v_shaped = schedule_kind(config.schedule).is_v_shaped
                key = (config.stages, config.pp, v_shaped, config.layout)
                if key not in known:
                    known[key] = self._boundaries(config)
                for cuts in known[key]:
                    yield replace(config, cuts=cuts)

    def _lower_bound(self, config: ParallelConfig) -> float:
        """Return a lower bound on the step time that holds for any stage boundaries."""
        core = self.search.bounds.core(replace(config, zero=0, outer=None, offload=()))
        if core is None or not self.equal_devices:
            return 0.0
        work = core.layers[0].sums
        return _num_passes(config) * float(work["forward"][-1] + work["backward"][-1])

    def _boundaries(self, config: ParallelConfig) -> list[tuple[int, ...]]:
        """Return other boundaries of stages: all, or those with one boundary moved by one place."""
        places, more = self.search.cutter.fit, config.stages - 1
        if comb(len(places), more) <= MAX_BOUNDARIES:
            return [(0, *later) for later in combinations(places, more)]
        core = self.search.bounds.core(config)
        if core is None:
            return []
        now = core.execution.cuts
        index_of = {node: at for at, node in enumerate(places)}
        boundaries = []
        for index in range(1, len(now)):
            for step in (-1, 1):
                at = index_of[now[index]] + step
                if 0 <= at < len(places):
                    moved = (*now[:index], places[at], *now[index + 1 :])
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
            times, group = min(map(_num_passes, members)), core.execution.groups[0]
            numel = self.search.cache.min_numel(tp) / (pp * dp)
            update = self.search.bounds.update_lower_bound(numel, group)
            below = min(self._goal / times, (self._goal - update) * pp / count)
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
                        seconds=max(seconds * times, seconds * count / pp + update),
                        likely=layouts.likely * (count + pp - 1) / pp,  # stages of equal length
                        layout=layouts.number,
                        configs=tuple(fitting),
                    )


def _min_bytes(layouts: RankedLayouts, config: ParallelConfig) -> float:
    """Return a lower bound on the fullest rank's memory: its part of state and saved tensors."""
    states = layouts.state_bytes / (config.dp * config.tp if config.zero else 1)
    saved = layouts.saved_bytes if config.recompute == "none" else 0.0
    return (states + saved) / config.pp


def _num_passes(config: ParallelConfig) -> float:
    """Return a lower bound on a step, in multiples of a micro-batch's time in all stages together.

    A group takes `num_microbatches` times its own stage, after those before it have begun: at least
    their forward, or forward and backward where each micro-batch has both at once. The end is
    earliest if all groups end at the same time; their stages then form a geometric series.
    """
    count, pp = config.num_microbatches, config.pp
    if pp == 1 or config.virtual > 1:
        return count / pp
    waits = MIN_FORWARD if schedule_kind(config.schedule).splits_backward else 1.0
    return waits / (1 - (1 - waits / count) ** pp)
