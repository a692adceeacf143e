"""Find the complete steps of a recording, select one, and measure its time by cause.

A step begins when the first rank to act enters it, and ends when the last rank has its new
parameters. Waits within an action do not count as computing; time outside all spans is "other".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Floats
from shardwise.errors import TraceError
from shardwise.reports.recorded import Recording

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
COMPUTING = ("forward", "backward", "weight", "recompute", "optimizer")  # causes
COMMUNICATING = ("collectives", "parameters", "gradients", "update")
TAIL = ("optimizer", "clipping")
TICK_S = 2e-6  # resolution of a GPU's events
RECORDED_PLAN = "the plan of the recorded run, which a trainer writes to its folder as plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Names, starts and ends of some spans of one rank."""

    names: tuple[str, ...]
    start: Floats = field(repr=False)
    end: Floats = field(repr=False)

    @property
    def seconds(self) -> Floats:
        """The length of each span."""
        return self.end - self.start

    def only(self, keep: Sequence[bool] | NDArray[np.bool_]) -> Spans:
        """Return the selected spans."""
        chosen = np.flatnonzero(np.asarray(keep, dtype=bool))
        names = tuple(self.names[i] for i in chosen)
        return Spans(names=names, start=self.start[chosen], end=self.end[chosen])

    def named(self, name: str) -> Spans:
        """Return the spans with a name."""
        return self.only([other == name for other in self.names])

    def of_pass(self, kind: str) -> Spans:
        """Return the actions of a pass, such as "backward"."""
        return self.only([PASSES.get(_letter(name)) == kind for name in self.names])


class _Cover:
    """The union of spans that may overlap."""

    def __init__(self, spans: Spans) -> None:
        points, values, total, reached = [0.0], [0.0], 0.0, -np.inf
        order = np.argsort(spans.start, kind="stable")
        for start, end in zip(spans.start[order], spans.end[order], strict=True):
            start = max(float(start), reached)
            if end <= start:
                continue
            points += [start, float(end)]
            values += [total, total + float(end) - start]
            total, reached = values[-1], float(end)
        self._points, self._values = np.array(points[1:] or [0.0]), np.array(values[1:] or [0.0])

    def within(self, start: Floats | float, end: Floats | float) -> float:
        """Return the covered seconds within disjoint windows."""
        covered = np.interp(end, self._points, self._values)
        return float(np.sum(covered - np.interp(start, self._points, self._values)))


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The spans of one rank in a step, in seconds from the start of the step."""

    rank: int
    start: float  # when it entered the step
    end: float
    actions: Spans = field(repr=False)
    tail: Spans = field(repr=False)  # clipping and the optimizer
    waiting: Spans = field(repr=False)
    communication: Spans = field(repr=False)
    recomputed: Spans = field(repr=False)  # forward passes within backward passes
    in_stages: bool  # whether gaps between actions are pipeline bubbles

    @cached_property
    def causes(self) -> dict[str, float]:
        """Seconds by cause, which sum to the step of the rank."""
        actions, waiting = self.actions, _Cover(self.waiting)
        waits = {cause: _Cover(self.waiting.named(cause)) for cause in COMMUNICATING}
        causes = dict.fromkeys(("forward", "backward", "weight"), 0.0)
        for kind in causes:
            passes = actions.of_pass(kind)
            causes[kind] = float(passes.seconds.sum()) - waiting.within(passes.start, passes.end)
        causes["recompute"] = self._recompute_s(waiting)
        causes["backward"] -= causes["recompute"]
        causes["collectives"] = waits["collectives"].within(actions.start, actions.end)
        for cause in ("parameters", "gradients", "update"):
            causes[cause] = waits[cause].within(0.0, self.end)
        steps = self.tail.named("optimizer")
        causes["optimizer"] = float(steps.seconds.sum()) - waiting.within(steps.start, steps.end)
        causes["bubble"] = self._bubble_s(waiting) if self.in_stages else 0.0
        causes["other"] = self.end - sum(causes.values())
        return {cause: max(0.0, seconds) for cause, seconds in causes.items()}

    @property
    def work(self) -> float:
        """Seconds in which the rank did not wait for others."""
        return sum(self.causes[cause] for cause in COMPUTING)

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waited for communication."""
        return sum(self.causes[cause] for cause in COMMUNICATING)

    def by_stage(self, cause: str) -> dict[int, float]:
        """Return the seconds of a pass by stage, without waits."""
        waiting, by_stage = _Cover(self.waiting), dict[int, float]()
        passes = self.actions.of_pass(cause)
        for name, start, end in zip(passes.names, passes.start, passes.end, strict=True):
            stage = int(name.split(_letter(name))[0])
            seconds = float(end - start) - waiting.within(float(start), float(end))
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds
        return by_stage

    def _recompute_s(self, waits: _Cover) -> float:
        backward = self.actions.of_pass("backward")
        covered = _Cover(self.recomputed).within(backward.start, backward.end)
        outermost = _outermost(self.recomputed)
        return max(0.0, covered - waits.within(outermost.start, outermost.end))

    def _bubble_s(self, waits: _Cover) -> float:
        """Return the time before and between actions, without waits within the rank's group."""
        actions = self.actions
        last = float(actions.end.max(initial=0.0))
        inside = waits.within(actions.start, actions.end)
        return last - float(actions.seconds.sum()) - (waits.within(0.0, last) - inside)


def _letter(name: str) -> str:
    match = ACTION.fullmatch(name)
    return match[2] if match else ""


def _outermost(spans: Spans) -> Spans:
    """Return the spans that are not inside others."""
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], spans.end]))
    return spans.only(spans.start >= reached[:-1])


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The selected step of a recording."""

    number: int
    steps: int  # number of complete steps in the recording
    chosen: str  # why this step was selected
    seconds: float
    origin: float  # its start on the recording's clock
    ranks: tuple[RankStep, ...] = field(repr=False)
    has_optimizer: bool

    def median(self, ranks: Sequence[int]) -> RankStep:
        """Return the rank with the median work."""
        by_work = sorted((self.ranks[rank] for rank in ranks), key=lambda rank: rank.work)
        return by_work[len(by_work) // 2]


def recorded_step(
    recording: Recording, actions: Sequence[Sequence[str]], *, in_stages: bool
) -> RecordedStep:
    """Return the complete step of median length, or the later one of two.

    `actions` are the expected actions of every rank.
    """
    ranks = [_Rank(recording, rank, actions[rank]) for rank in range(recording.num_ranks)]
    numbers = set(ranks[0].steps).intersection(*(rank.steps for rank in ranks[1:]))
    if not numbers:
        raise TraceError(
            "no step is complete on all ranks",
            where=recording.file,
            hint="call pm.trace() after a complete step, on all ranks",
        )
    with_optimizer = {n for n in numbers if all(r.has_optimizer(n) for r in ranks)}
    complete = sorted(with_optimizer or numbers)
    spans = {number: _extent(ranks, number) for number in complete}
    by_length = sorted(complete, key=lambda n: spans[n][1] - spans[n][0])
    chosen = by_length[(len(complete) - 1) // 2] if len(complete) > 2 else complete[-1]
    reasons = {1: "the only complete step", 2: "the later of two steps"}
    begin, end = spans[chosen]
    return RecordedStep(
        number=chosen,
        steps=len(complete),
        chosen=reasons.get(len(complete), f"the median of {len(complete)} steps")
        + f": step {chosen}",
        seconds=end - begin,
        origin=begin,
        ranks=tuple(r.step(chosen, begin, in_stages=in_stages) for r in ranks),
        has_optimizer=bool(with_optimizer),
    )


def _extent(ranks: Sequence[_Rank], number: int) -> tuple[float, float]:
    """Return when the first rank to act enters the step, and when the last rank leaves it."""
    first = min(ranks, key=lambda rank: rank.first_action(number))
    return first.steps[number][0], max(rank.end(number) for rank in ranks)


class _Rank:
    """The recording of one rank, split into steps."""

    def __init__(self, recording: Recording, rank: int, expected: Sequence[str]) -> None:
        self.recording, self.rank = recording, rank
        self._lanes: dict[str, Spans] = {}
        events = recording.of(rank, "step")
        columns = (recording.step, recording.start, recording.end)
        steps: Mapping[int, tuple[float, float]] = {
            number: (start, end)
            for number, start, end in zip(*(c[events].tolist() for c in columns), strict=True)
        }
        starts = sorted(start for start, _ in steps.values())
        self._next = dict.fromkeys(starts, math.inf) | dict(pairwise(starts))
        self.steps = {n: times for n, times in steps.items() if self._is_complete(*times, expected)}

    def lane(self, name: str) -> Spans:
        """Return all spans of a lane."""
        if name not in self._lanes:
            events = self.recording.of(self.rank, name)
            names = tuple(self.recording.names[i] for i in self.recording.name[events])
            start, end = self.recording.start[events], self.recording.end[events]
            self._lanes[name] = Spans(names=names, start=start, end=end)
        return self._lanes[name]

    def _is_complete(self, start: float, end: float, expected: Sequence[str]) -> bool:
        """Return whether the step has all actions of the plan; raise if it has others."""
        inside = _between(self.lane("compute"), start, end)
        actions = [name for name in inside.names if ACTION.fullmatch(name)]
        unknown = sorted(set(actions) - set(expected))
        if unknown:
            raise TraceError(
                f"rank {self.rank} ran {unknown[0]}, which is not an action of this plan",
                where=self.recording.file,
                hint=RECORDED_PLAN,
            )
        return sorted(actions) == sorted(expected)

    def first_action(self, number: int) -> float:
        """Return when the rank started to compute."""
        inside = _between(self.lane("compute"), *self.steps[number])
        return float(inside.start.min(initial=self.steps[number][1]))

    def has_optimizer(self, number: int) -> bool:
        """Return whether an optimizer step followed."""
        return "optimizer" in self._tail(number).names

    def _tail(self, number: int) -> Spans:
        start, _ = self.steps[number]
        after = _between(self.lane("compute"), start, self._next[start])
        return after.only([name in TAIL for name in after.names])

    def end(self, number: int) -> float:
        """Return when the rank had its new parameters."""
        start, end = self.steps[number]
        update = _between(self.lane("waiting").named("update"), end, self._next[start])
        return float(max([end, *self._tail(number).end.tolist(), *update.end.tolist()]))

    def step(self, number: int, origin: float, *, in_stages: bool) -> RankStep:
        """Return the spans of a step, relative to `origin`."""
        start, end = self.steps[number]
        stop = self.end(number)
        compute = _between(self.lane("compute"), start, end)
        blocks = _between(self.lane("groups"), start, end)
        actions = compute.only([ACTION.fullmatch(name) is not None for name in compute.names])
        backward = actions.of_pass("backward")
        forwards = blocks.only([name.startswith("forward ") for name in blocks.names])
        cover = _Cover(backward)
        inside = [
            cover.within(float(s), float(e)) > 0.5 * (e - s)
            for s, e in zip(forwards.start, forwards.end, strict=True)
        ]
        return RankStep(
            rank=self.rank,
            start=start - origin,
            end=stop - origin,
            actions=_shifted(actions, origin),
            tail=_shifted(self._tail(number), origin),
            waiting=_shifted(_between(self.lane("waiting"), start, stop), origin),
            communication=_shifted(_between(self.lane("communication"), start, stop), origin),
            recomputed=_shifted(forwards.only(inside), origin),
            in_stages=in_stages,
        )


def _between(spans: Spans, start: float, end: float) -> Spans:
    """Return the spans that begin in a window, up to the resolution of the clock."""
    first, last = np.searchsorted(spans.start, (start - TICK_S, end - TICK_S))
    return Spans(
        names=spans.names[first:last], start=spans.start[first:last], end=spans.end[first:last]
    )


def _shifted(spans: Spans, origin: float) -> Spans:
    """Return the spans relative to `origin`, without their parts before it."""
    start = np.maximum(spans.start - origin, 0.0)
    return Spans(names=spans.names, start=start, end=np.maximum(spans.end - origin, start))
