"""Compute when each action of a schedule runs, given the durations of all actions."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.schedules.schedule import Action, Links, Schedule, ScheduleError, Span, run_in_order

Durations = (
    Mapping[tuple[str, int], float]
    | Mapping[tuple[str, int, int], float]
    | Callable[[Action], float]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A replayed schedule; `spans[group]` has the start and end of its actions, in list order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_time(self) -> float:
        """The seconds from the first start to the last end."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all groups' time in which they wait."""
        groups = range(len(self.spans))
        return sum(self.group_bubble(group) for group in groups) / len(self.spans)

    def busy(self, group: int) -> float:
        """Return the seconds in which a group computes."""
        return sum(span.end - span.start for span in self.spans[group])

    def group_bubble(self, group: int) -> float:
        """Return the fraction of the step in which a group waits."""
        return 1 - self.busy(group) / self.step_time if self.step_time else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.name}: step {self.step_time:.6g} s, bubble {self.bubble_fraction:.1%}"
        ]
        for group in range(len(self.spans)):
            busy, bubble = self.busy(group), self.group_bubble(group)
            lines.append(f"group {group}: busy {busy:.6g} s, bubble {bubble:.1%}")
        return "\n".join(lines)


def replay(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer: float = 0.0,
    edges: Iterable[tuple[int, int]] | None = None,
) -> Timeline:
    """Run every group's list in order, each action waiting for its inputs.

    `durations` maps `(kind, stage)` to seconds, and `(kind, stage, number)` for one micro-batch, or
    is a function of the action. A result arrives at another group `transfer` seconds after it is
    computed; both groups continue meanwhile. Use `check` to prove that the schedule is complete.
    """
    seconds = durations if callable(durations) else _lookup(durations)
    if not (math.isfinite(transfer) and transfer >= 0):
        raise ScheduleError(f"transfer is {transfer!r} seconds, must be finite and at least 0")

    def duration(action: Action) -> float:
        value = seconds(action)
        if not (math.isfinite(value) and value >= 0):
            raise ScheduleError(f"{action} takes {value!r} seconds, must be finite and at least 0")
        return value

    links = Links.of(schedule.num_stages, edges)
    spans = run_in_order(schedule.actions, links, duration, transfer)
    return Timeline(schedule=schedule, spans=spans)


def _lookup(durations: Mapping[Any, float]) -> Callable[[Action], float]:
    def seconds(action: Action) -> float:
        key = (action.kind, action.stage, action.microbatch)
        for lookup in (key, key[:2]):
            if lookup in durations:
                return durations[lookup]
        raise ScheduleError(
            f"there is no duration for {action}",
            hint=f"durations[{action.kind!r}, {action.stage}] = seconds",
        )

    return seconds
