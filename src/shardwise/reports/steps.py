"""The steps of a recording: which are whole, which one stands for all, and what it is made of.

A step begins where the rank that acts first enters it, and ends where the last rank has its new
parameters. What of an action's time a rank waits is no computing; what no span holds is "other".
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

__all__ = ["PASSES", "RankStep", "RecordedStep", "Spans", "recorded_step"]


ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
TAIL = ("optimizer", "clipping")
TICK_S = 2e-6  # a GPU's events are no more exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Some spans of one rank: names, starts and ends."""

    names: tuple[str, ...]
    start: Floats = field(repr=False)
    end: Floats = field(repr=False)

    @property
    def seconds(self) -> Floats:
        """How long each is."""
        return self.end - self.start

    def only(self, keep: Sequence[bool] | NDArray[np.bool_]) -> Spans:
        """Return some of them."""
        chosen = np.flatnonzero(np.asarray(keep, dtype=bool))
        names = tuple(self.names[i] for i in chosen)
        return Spans(names=names, start=self.start[chosen], end=self.end[chosen])

    def named(self, name: str) -> Spans:
        """Those of a name."""
        return self.only([mine == name for mine in self.names])


class _Cover:
    """What some spans cover together, whether they overlap or not."""

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
        """Seconds inside of windows that do not overlap."""
        covered = np.interp(end, self._points, self._values)
        return float(np.sum(covered - np.interp(start, self._points, self._values)))


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """What one rank did in a step, in seconds from the step's beginning."""

    rank: int
    start: float  # where it entered the step
    end: float
    actions: Spans = field(repr=False)
    tail: Spans = field(repr=False)  # clipping and the optimizer
    waiting: Spans = field(repr=False)
    communication: Spans = field(repr=False)
    again: Spans = field(repr=False)  # forwards inside of backwards
    in_stages: bool  # whether gaps between actions are those of a pipeline

    @cached_property
    def causes(self) -> dict[str, float]:
        """Seconds by cause; they add up to the rank's step."""
        actions, everything = self.actions, _Cover(self.waiting)
        waits = {
            cause: _Cover(self.waiting.named(cause))
            for cause in ("collectives", "parameters", "gradients", "update")
        }
        found = dict.fromkeys(("forward", "backward", "weight"), 0.0)
        for kind in found:
            mine = actions.only([_kind(name) == kind for name in actions.names])
            found[kind] = float(mine.seconds.sum()) - everything.within(mine.start, mine.end)
        found["recompute"] = self._recomputed(everything)
        found["backward"] -= found["recompute"]
        found["collectives"] = waits["collectives"].within(actions.start, actions.end)
        for cause in ("parameters", "gradients", "update"):
            found[cause] = waits[cause].within(0.0, self.end)
        steps = self.tail.named("optimizer")
        found["optimizer"] = float(steps.seconds.sum()) - everything.within(steps.start, steps.end)
        found["bubble"] = self._gaps(everything) if self.in_stages else 0.0
        found["other"] = self.end - sum(found.values())
        return {cause: max(0.0, seconds) for cause, seconds in found.items()}

    @property
    def work(self) -> float:
        """Seconds in which it did not wait for others."""
        causes = self.causes
        return sum(causes[c] for c in ("forward", "backward", "weight", "recompute", "optimizer"))

    @property
    def exposed(self) -> float:
        """Seconds in which it waited for communication."""
        causes = self.causes
        return sum(causes[c] for c in ("collectives", "parameters", "gradients", "update"))

    def by_stage(self, cause: str) -> dict[int, float]:
        """Seconds of a kind of pass by stage, without waits."""
        cover, found = _Cover(self.waiting), dict[int, float]()
        for name, start, end in zip(
            self.actions.names, self.actions.start, self.actions.end, strict=True
        ):
            if _kind(name) == cause:
                stage = int(name.split(_letter(name))[0])
                seconds = float(end - start) - cover.within(float(start), float(end))
                found[stage] = found.get(stage, 0.0) + seconds
        return found

    def _recomputed(self, waits: _Cover) -> float:
        backward = self.actions.only([_kind(name) == "backward" for name in self.actions.names])
        whole = _Cover(self.again).within(backward.start, backward.end)
        outermost = _outermost(self.again)
        return max(0.0, whole - waits.within(outermost.start, outermost.end))

    def _gaps(self, waits: _Cover) -> float:
        """Before and between actions: what is no wait for this rank's own group."""
        actions = self.actions
        last = float(actions.end.max(initial=0.0))
        inside = waits.within(actions.start, actions.end)
        return last - float(actions.seconds.sum()) - (waits.within(0.0, last) - inside)


def _letter(name: str) -> str:
    found = ACTION.fullmatch(name)
    return found.group(2) if found else ""


def _kind(name: str) -> str:
    return PASSES.get(_letter(name), "")


def _outermost(spans: Spans) -> Spans:
    """Without those that lie inside of others."""
    keep, reached = [], -np.inf
    for start, end in zip(spans.start, spans.end, strict=True):
        keep.append(bool(start >= reached))
        reached = max(reached, float(end))
    return spans.only(keep)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The step that stands for a recording."""

    number: int
    steps: int  # whole ones in the recording
    chosen: str  # how it was chosen, in words
    seconds: float
    origin: float  # of the recording's clock
    ranks: tuple[RankStep, ...] = field(repr=False)
    has_optimizer: bool

    def median(self, ranks: Sequence[int]) -> RankStep:
        """Return the rank that works as long as half of these."""
        by_work = sorted((self.ranks[rank] for rank in ranks), key=lambda rank: rank.work)
        return by_work[len(by_work) // 2]


def recorded_step(
    recording: Recording, actions: Sequence[Sequence[str]], *, in_stages: bool
) -> RecordedStep:
    """Return the median of the whole steps; of two the later one. `actions` are those of every
    rank.
    """
    ranks = [_Rank(recording, rank, actions[rank]) for rank in range(recording.num_ranks)]
    numbers = set(ranks[0].steps).intersection(*(rank.steps for rank in ranks[1:]))
    if not numbers:
        raise TraceError(
            "no step is whole on all ranks",
            where=recording.file,
            hint="pm.trace() after a whole step, on all ranks",
        )
    with_optimizer = {n for n in numbers if all(r.has_optimizer(n) for r in ranks)}
    whole = sorted(with_optimizer or numbers)
    spans = {number: _extent(ranks, number) for number in whole}
    by_length = sorted(whole, key=lambda n: spans[n][1] - spans[n][0])
    chosen = by_length[(len(whole) - 1) // 2] if len(whole) > 2 else whole[-1]
    words = {1: "the only whole step", 2: "the later of two steps"}
    begin, end = spans[chosen]
    return RecordedStep(
        number=chosen,
        steps=len(whole),
        chosen=words.get(len(whole), f"the median of {len(whole)} steps") + f": step {chosen}",
        seconds=end - begin,
        origin=begin,
        ranks=tuple(r.step(chosen, begin, in_stages=in_stages) for r in ranks),
        has_optimizer=bool(with_optimizer),
    )


def _extent(ranks: Sequence[_Rank], number: int) -> tuple[float, float]:
    """From where the rank that acts first enters the step, to where the last one leaves it."""
    first = min(ranks, key=lambda rank: rank.first_action(number))
    return first.steps[number][0], max(rank.end(number) for rank in ranks)


class _Rank:
    """One rank's recording, cut into steps."""

    def __init__(self, recording: Recording, rank: int, expected: Sequence[str]) -> None:
        self.recording, self.rank = recording, rank
        self._lanes: dict[str, Spans] = {}
        mine = recording.of(rank, "step")
        found = zip(
            recording.step[mine].tolist(),
            recording.start[mine].tolist(),
            recording.end[mine].tolist(),
            strict=True,
        )
        every: Mapping[int, tuple[float, float]] = {n: (start, end) for n, start, end in found}
        starts = sorted(start for start, _ in every.values())
        self._next = dict.fromkeys(starts, math.inf) | dict(pairwise(starts))
        self.steps = {n: times for n, times in every.items() if self._is_whole(*times, expected)}

    def lane(self, name: str) -> Spans:
        """All spans of a lane."""
        if name not in self._lanes:
            mine = self.recording.of(self.rank, name)
            names = tuple(self.recording.names[i] for i in self.recording.name[mine])
            start, end = self.recording.start[mine], self.recording.end[mine]
            self._lanes[name] = Spans(names=names, start=start, end=end)
        return self._lanes[name]

    def _is_whole(self, start: float, end: float, expected: Sequence[str]) -> bool:
        """Whether all actions of the plan are there; others are those of another plan."""
        inside = _between(self.lane("compute"), start, end)
        found = [name for name in inside.names if ACTION.fullmatch(name)]
        strange = sorted(set(found) - set(expected))
        if strange:
            raise TraceError(
                f"rank {self.rank} did {strange[0]}, which is no action of this plan",
                where=self.recording.file,
                hint="the plan that was recorded: of a trainer it is plan.json in its folder",
            )
        return sorted(found) == sorted(expected)

    def first_action(self, number: int) -> float:
        """When it began to compute."""
        inside = _between(self.lane("compute"), *self.steps[number])
        return float(inside.start.min(initial=self.steps[number][1]))

    def has_optimizer(self, number: int) -> bool:
        """Whether an optimizer's step followed."""
        return "optimizer" in self._tail(number).names

    def _tail(self, number: int) -> Spans:
        start, _ = self.steps[number]
        after = _between(self.lane("compute"), start, self._next[start])
        return after.only([name in TAIL for name in after.names])

    def end(self, number: int) -> float:
        """When it was done, with its new parameters."""
        start, end = self.steps[number]
        update = _between(self.lane("waiting").named("update"), end, self._next[start])
        return float(max([end, *self._tail(number).end.tolist(), *update.end.tolist()]))

    def step(self, number: int, origin: float, *, in_stages: bool) -> RankStep:
        """All that belongs to a step, on the step's clock."""
        start, end = self.steps[number]
        stop = self.end(number)
        compute = _between(self.lane("compute"), start, end)
        blocks = _between(self.lane("groups"), start, end)
        actions = compute.only([ACTION.fullmatch(name) is not None for name in compute.names])
        backward = actions.only([_kind(name) == "backward" for name in actions.names])
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
            again=_shifted(forwards.only(inside), origin),
            in_stages=in_stages,
        )


def _between(spans: Spans, start: float, end: float) -> Spans:
    """Those that begin in a window, as far as a clock can tell."""
    first, last = np.searchsorted(spans.start, (start - TICK_S, end - TICK_S))
    return Spans(
        names=spans.names[first:last], start=spans.start[first:last], end=spans.end[first:last]
    )


def _shifted(spans: Spans, origin: float) -> Spans:
    """On the step's clock; what began before it is cut."""
    start = np.maximum(spans.start - origin, 0.0)
    return Spans(names=spans.names, start=start, end=np.maximum(spans.end - origin, start))
