"""Local search after the main search: other stage boundaries, with the simulator as judge.

The main search balances the work of stages. In the simulation the longest stage sets the pace, and
messages between stages differ in size, so that other boundaries can be faster. On few ranks every
way to divide a small model is tried; of a larger one, those with one boundary moved to the next
place where stages may begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

from shardwise.planner.layout_cache import FASTEST
from shardwise.planner.search import Search, SearchOutcome
from shardwise.plans.search_result import LocalSearchSummary, ParallelConfig
from shardwise.schedules import schedule_kind

MAX_RANKS = 16
MAX_BOUNDARIES = 64  # ways to divide a model up to which all are tried
MAX_SIMULATED = 400
MIN_GAIN = 1e-6  # fraction of the step: less is no improvement
MIN_FORWARD = 0.25  # fraction of a node's forward and backward: that of matmuls is a third


def improved(
    search: Search, outcome: SearchOutcome, configs: Sequence[ParallelConfig]
) -> SearchOutcome:
    """Return the outcome with a faster configuration first, where other boundaries give one."""
    ranks = len(search.evaluator.kind)
    if not configs or ranks > MAX_RANKS or ranks == 1:
        return outcome
    wanted = [config for config in configs if config.layout == FASTEST]
    if not outcome.limited_by_memory:  # recomputing only takes longer
        wanted = [config for config in wanted if config.recompute == wanted[0].recompute]
    goal = outcome.step_time_s * (1 - MIN_GAIN)
    moved = [c for c in _with_boundaries(search, wanted, goal) if c.cuts]
    tried = search.run(moved, below=goal, enough=0, max_simulated=MAX_SIMULATED)
    better = tried.feasible[:1] if tried.step_time_s < goal else ()
    gain = 1 - tried.step_time_s / outcome.step_time_s if better and outcome.feasible else 0.0
    summary = LocalSearchSummary(
        simulated=len(tried.feasible), gain=gain, complete=tried.next_bound_s >= goal
    )
    return replace(outcome, feasible=(*better, *outcome.feasible), local_search=summary)


def _with_boundaries(
    search: Search, configs: Iterable[ParallelConfig], goal: float
) -> Iterator[ParallelConfig]:
    """The configurations with other stage boundaries, where these can beat `goal` seconds."""
    known: dict[object, list[tuple[int, ...]]] = {}
    for config in configs:
        if config.stages > 1 and _lower_bound(search, config) < goal:
            key = (config.stages, config.pp, schedule_kind(config.schedule).is_v_shaped)
            if key not in known:
                known[key] = _boundaries(search, config)
            for cuts in known[key]:
                yield replace(config, cuts=cuts)


def _lower_bound(search: Search, config: ParallelConfig) -> float:
    """Seconds that a step takes at least, whatever its stage boundaries."""
    core = search.bounds.core(replace(config, zero=0, outer=None, offload=()))
    if core is None or len(search.evaluator.devices) > 1:
        return 0.0
    work = core.layers[0].sums
    return _num_passes(config) * float(work["forward"][-1] + work["backward"][-1])


def _num_passes(config: ParallelConfig) -> float:
    """Times that a step takes, at least, the seconds of a micro-batch in all stages together.

    A group takes `num_microbatches` times its own stage, after those before it have begun: their
    forward, at least, or forward and backward where each micro-batch has both at once. Stages that
    all end at the same time by that rule are a geometric row; no others end sooner.
    """
    count, pp = config.num_microbatches, config.pp
    if pp == 1 or config.virtual > 1:
        return count / pp
    waits = MIN_FORWARD if schedule_kind(config.schedule).splits_backward else 1.0
    return waits / (1 - (1 - waits / count) ** pp)


def _boundaries(search: Search, config: ParallelConfig) -> list[tuple[int, ...]]:
    """Other first nodes of stages: all, or those with one boundary moved to the next place."""
    places, more = search.cutter.fit, config.stages - 1
    if comb(len(places), more) <= MAX_BOUNDARIES:
        return [(0, *later) for later in combinations(places, more)]
    core = search.bounds.core(config)
    if core is None:
        return []
    now = core.setting.cuts
    index_of = {node: at for at, node in enumerate(places)}
    found = []
    for index in range(1, len(now)):
        for step in (-1, 1):
            at = index_of[now[index]] + step
            if 0 <= at < len(places):
                moved = (*now[:index], places[at], *now[index + 1 :])
                if len(set(moved)) == len(moved):
                    found.append(moved)
    return found
