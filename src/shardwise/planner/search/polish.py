"""After the search: other places to cut stages and other layouts, with the simulator as judge.

Enters: what the search came to, and its points. Leaves: `Found`, the best of it perhaps better,
and `Polish`: what was tried.

The search solves layouts once for a typical micro-batch, by prices that add up, and cuts stages
into equal work. The simulator ranks them otherwise: gradients travel while a rank computes, and the
longest stage sets the pace. So for few ranks and few distinct nodes,

- every way to cut a small model into stages is a point of its own; of a larger one, those with one
  cut moved to the next place;
- for the micro-batch of every point the cheapest layouts are listed, without those whose work alone
  takes as long as the best step.

Layouts are tried in the order of their prices, points of each in that of their bounds, until no
bound is below the best step; where the memory of several layouts in a row is too much for all of
some points, other points come first. If that was within the budgets, which count simulations and
nodes, nothing among them is quicker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, inf

from shardwise.planner.search.bank import QUICKEST, Nearby
from shardwise.planner.search.found import Found, Polish
from shardwise.planner.search.search import Search
from shardwise.planner.search.space import Point
from shardwise.schedules import schedule_kind
from shardwise.simulation.times import Group

MOST_RANKS = 16
MOST_NODES = 16  # distinct ones, up to which layouts are listed
MOST_CUTS = 64  # ways to cut a model up to which all are tried
NEAR = 256  # layouts that are listed for a micro-batch
LOWERED_NODES = 1200  # of the layouts that are tried, all nodes together
SIMULATED = 400  # points
PATIENCE = 8  # layouts that do not fit, after which their points wait for others
LEAST_FORWARD = 0.25  # of a node's forward and backward: that of products is a third
GAIN = 1e-6  # of the step: less is no improvement


def polished(search: Search, found: Found, points: Sequence[Point]) -> Found:
    """The best point, or a better one with other cuts and layouts; one that fits, if none did."""
    ranks = len(search.evaluator.kind)
    if not points or ranks > MOST_RANKS or ranks == 1:
        return found
    return _Polisher(search, found, points).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Layouts for the micro-batches of some points, which take so long at least."""

    kind: int  # of the points: those of a mesh and a number of micro-batches
    seconds: float
    likely: float  # seconds
    layout: int
    points: tuple[Point, ...]


class _Polisher:
    def __init__(self, search: Search, found: Found, points: Iterable[Point]) -> None:
        self.search, self.found = search, found
        self.best = found.best if found.feasible else None
        wanted = [p for p in points if p.layout == QUICKEST]
        if not found.limited_by_memory:  # computing again only takes longer
            least = wanted[0].recompute
            wanted = [p for p in wanted if p.recompute == least]
        self.points = wanted
        self.simulated = self.layouts = 0
        self.full: Counter[int] = Counter()  # layouts with which no point of a kind fits
        self.complete, self.alike = True, len(search.evaluator.devices) == 1

    def run(self) -> Found:
        """Try cuts with the layouts that are known, then layouts with all cuts."""
        before = self._seconds
        self._try([p for p in self._with_cuts(self.points) if p.cuts])
        room = LOWERED_NODES // len(self.search.fold.graph.nodes)
        for trial in self._in_turn():
            if self.layouts >= room or self.simulated >= SIMULATED:
                self.complete = False
                break
            self.layouts += 1
            mine = [replace(p, layout=trial.layout) for p in trial.points]
            self.full[trial.kind] += not self._try(list(self._with_cuts(mine)))
        told = Polish(
            layouts=self.layouts,
            simulated=self.simulated,
            gain=1 - self._seconds / before if before < inf else 0.0,
            complete=self.complete,
        )
        better = () if self.best is None or self._seconds == before else (self.best,)
        return replace(self.found, feasible=(*better, *self.found.feasible), polish=told)

    @property
    def _seconds(self) -> float:
        """Of the best step."""
        return inf if self.best is None else self.best.estimate.step_time_s

    @property
    def _goal(self) -> float:
        """Seconds that a step must be below."""
        return self._seconds * (1 - GAIN)

    def _try(self, points: Sequence[Point]) -> bool:
        """Simulate those that may be quicker; whether not all of them need too much memory."""
        room = max(0, SIMULATED - self.simulated)
        found = self.search.run(points, below=self._goal, enough=0, most=room)
        self.simulated += len(found.feasible)
        self.complete &= found.next_bound_s >= self._goal
        if found.feasible and found.best.estimate.step_time_s < self._goal:
            self.best = found.best
        return bool(found.feasible) or not found.bounds

    # ------------------------------------------------------------ cuts

    def _with_cuts(self, points: Iterable[Point]) -> Iterator[Point]:
        """The points as they are, and with other cuts."""
        known: dict[object, list[tuple[int, ...]]] = {}
        for point in points:
            yield point
            if point.stages > 1 and self._least(point) < self._goal:
                key = (
                    point.stages,
                    point.pp,
                    schedule_kind(point.schedule).is_v_shaped,
                    point.layout,
                )
                if key not in known:
                    known[key] = self._cuts(point)
                for cuts in known[key]:
                    yield replace(point, cuts=cuts)

    def _least(self, point: Point) -> float:
        """Seconds of a step, at least, wherever its stages are cut."""
        core = self.search.bounds.core(replace(point, zero=0, outer=None, offload=()))
        if core is None or not self.alike:
            return 0.0
        work = core.layers[0].sums
        return _times(point) * float(work["forward"][-1] + work["backward"][-1])

    def _cuts(self, point: Point) -> list[tuple[int, ...]]:
        """Other first nodes of stages: all, or those with one cut at the next place."""
        fit, more = self.search.cutter.fit, point.stages - 1
        if comb(len(fit), more) <= MOST_CUTS:
            return [(0, *later) for later in combinations(fit, more)]
        core = self.search.bounds.core(point)
        if core is None:
            return []
        now = core.setting.cuts
        place = {node: at for at, node in enumerate(fit)}
        found = []
        for index in range(1, len(now)):
            for step in (-1, 1):
                at = place[now[index]] + step
                if 0 <= at < len(fit):
                    moved = (*now[:index], fit[at], *now[index + 1 :])
                    if len(set(moved)) == len(moved):
                        found.append(moved)
        return found

    # ------------------------------------------------------------ layouts

    def _in_turn(self) -> Iterator[_Trial]:
        """What may be quicker, the likely quickest first; kinds of points that do not fit wait."""
        queues: dict[int, deque[_Trial]] = {}
        for trial in sorted(self._trials(), key=_likely):
            queues.setdefault(trial.kind, deque()).append(trial)
        while queues:
            kind = min(queues, key=lambda k: (self.full[k] // PATIENCE, *_likely(queues[k][0])))
            trial = queues[kind].popleft()
            if not queues[kind]:
                del queues[kind]
            if trial.seconds < self._goal:
                yield trial

    def _trials(self) -> Iterator[_Trial]:
        """Layouts near the cheapest, for the micro-batches of all points."""
        if len(self.search.fold.graph.nodes) > MOST_NODES:
            self.complete = False
            return
        kinds: dict[tuple[int, int, int, int], list[Point]] = {}
        for point in self.points:
            if point.tp > 1:
                key = (point.tp, point.dp, point.pp, point.num_microbatches)
                kinds.setdefault(key, []).append(point)
        for kind, ((tp, dp, pp, count), points) in enumerate(kinds.items()):
            core = self.search.bounds.core(points[0])
            if core is None:
                continue
            times, group = min(map(_times, points)), core.setting.groups[0]
            spent = self._update(self.search.bank.least_numel(tp) / (pp * dp), group)
            below = min(self._goal / times, (self._goal - spent) * pp / count)
            found, complete = self.search.bank.near(
                tp,
                dp,
                count,
                group,
                NEAR,
                below if self.alike else inf,
                lean=self.found.limited_by_memory,
            )
            self.complete &= complete
            limit = self.search.bounds.limit(group)
            for near in found:
                mine = [p for p in points if _least_bytes(near, p) <= limit]
                if not mine:
                    continue
                yield _Trial(
                    kind=kind,
                    seconds=max(near.seconds * times, near.seconds * count / pp + spent),
                    likely=near.likely * (count + pp - 1) / pp,  # stages of equal length
                    layout=near.number,
                    points=tuple(mine),
                )

    def _update(self, numel: float, group: Group) -> float:
        return self.search.bounds.least_update(numel, group)


def _likely(trial: _Trial) -> tuple[float, int]:
    return trial.likely, trial.layout


def _least_bytes(near: Nearby, point: Point) -> float:
    """What the fullest rank has, at least: its part of all states, and a micro-batch's values."""
    states = near.state_bytes / (point.dp * point.tp if point.zero else 1)
    return (states + (near.saved_bytes if point.recompute == "none" else 0.0)) / point.pp


def _times(point: Point) -> float:
    """How often a step takes, at least, the seconds of a micro-batch in all stages together.

    A group takes `num_microbatches` times its own stage, after those before it have begun: their
    forward, at least, or forward and backward where each micro-batch has both at once. Stages which
    all end at the same time by that rule are a geometric row; no others end sooner.
    """
    count, pp = point.num_microbatches, point.pp
    if pp == 1 or point.virtual > 1:
        return count / pp
    waits = LEAST_FORWARD if schedule_kind(point.schedule).splits_backward else 1.0
    return waits / (1 - (1 - waits / count) ** pp)
