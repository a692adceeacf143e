"""Memory over a step of few actions, unit by unit.

Enters: a simulated step. Leaves: moments for a plan's file, of groups whose lists are short: a step
without stages is one forward and one backward, and all that happens is inside of them. Each curve
has the simulated peak of its action; between, activations come and go with the units that keep
them, gradients come with the units whose parameters they are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.planner.search.details.subject import Subject
from shardwise.schedules.levels import levels_of
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.stages import StageCost

FEW = 8  # actions of a group; where there are more, a moment for each is enough
MOST = 64  # moments of an action
DIGITS = 8

Moments = list[tuple[float, float]]


def memory_curves(subject: Subject) -> list[dict[str, Any]]:
    """`memory` of a plan's details."""
    found = []
    actions = subject.estimate.timeline.schedule.actions
    for use in subject.estimate.memory:
        if 0 < len(actions[use.group]) <= FEW:
            moments = list(_Curve(subject, use).moments())
            found.append(
                {
                    "group": use.group,
                    "times": [_short(time) for time, _ in moments],
                    "bytes": [round(size) for _, size in moments],
                }
            )
    return found


class _Curve:
    """One group's memory while it runs its list."""

    def __init__(self, subject: Subject, use: MemoryUse) -> None:
        self.subject, self.use = subject, use
        self.timeline = subject.estimate.timeline
        self.stages = {s.index: s for s in subject.estimate.stages if s.group == use.group}
        self.kept, self.gradients = 0.0, 0.0
        self.done: set[int] = set()  # stages with gradients of parameters
        self.numel = {s: self._numel(stage) for s, stage in self.stages.items()}
        self.total = sum(float(n.sum()) for n in self.numel.values()) or 1.0

    def moments(self) -> Iterator[tuple[float, float]]:
        mine = np.flatnonzero(levels_of(self.timeline.schedule).group == self.use.group).tolist()
        peaks = [size for _, size in self.use.over_time]
        for at, action, peak in zip(
            mine, self.timeline.schedule.actions[self.use.group], peaks, strict=True
        ):
            start, end = float(self.timeline.starts[at]), float(self.timeline.ends[at])
            shape = list(self._shape(action.kind, self.stages[action.stage], start, end))
            above = peak - max(size for _, size in shape)
            yield from ((time, max(0.0, size + above)) for time, size in _fewer(shape))
        if self.use.when == "optimizer":
            yield float(self.timeline.ends[mine].max()), self.use.peak_bytes

    def _shape(self, kind: str, stage: StageCost, start: float, end: float) -> Iterator[Any]:
        """When each unit begins, and what is there then but for a constant."""
        units = [u for u in stage.units if u.end > u.first]
        saved = [float(self.subject.columns["saved"][u.first : u.end].sum()) for u in units]
        spent = [u.forward if kind == "F" else u.backward for u in units]
        order = list(range(len(units)))
        if kind != "F":
            order.reverse()
        scale = (end - start) / (sum(spent) or 1.0)
        now, whole = start, self.use.parts["gradients"]
        first = stage.index not in self.done
        for at in order:
            if kind == "F":
                self.kept += saved[at]
            elif kind in "BI":
                yield now, self.kept + self.gradients  # before the unit's own are free
                self.kept -= saved[at]
            if kind in "BW" and first:
                self.gradients += whole * self.numel[stage.index][at] / self.total
            yield now, self.kept + self.gradients
            now += spent[at] * scale
        if kind in "BW":
            self.done.add(stage.index)
        yield now, self.kept + self.gradients

    def _numel(self, stage: StageCost) -> Any:
        """Trained elements of every unit."""
        shares = self.subject.layers[stage.index].parameters(self.subject.setting).values()
        units = [u for u in stage.units if u.end > u.first]
        return np.array(
            [sum(float(s.numel[u.end] - s.numel[u.first]) for s in shares) for u in units]
        )


def _fewer(moments: Moments) -> Moments:
    """At most so many moments, the highest of those that are joined."""
    step = -(-len(moments) // MOST)
    parts = [moments[at : at + step] for at in range(0, len(moments), step)]
    return [(part[0][0], max(size for _, size in part)) for part in parts]


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
