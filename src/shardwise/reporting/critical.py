"""The critical path: the chain of work that makes the step as long as it is.

Enters: an `Estimate`. Leaves: `Chain`: which actions, messages and later spans are on it, and its
seconds. From the last end backwards: an action began when the one before it in its group ended, or
when a result of another group arrived; whichever came later is what it waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.formatting import seconds
from shardwise.schedules.levels import Levels, levels_of
from shardwise.simulation import Estimate
from shardwise.simulation.times import Span

CLOSE = 1e-9  # of the step: what ends so near to a start is what it waited for


@dataclass(slots=True, kw_only=True)
class Chain:
    """What is on the path, and what it is made of."""

    actions: set[int] = field(default_factory=set)
    messages: set[tuple[int, int]] = field(default_factory=set)  # sender's and receiver's action
    after: set[int] = field(default_factory=set)  # of the timeline's `after`
    groups: set[int] = field(default_factory=set)
    compute_s: float = 0.0
    communication_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """By what it is spent on; together the step's."""
        rest = self.step_time_s - self.compute_s - self.communication_s
        return {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "waiting": max(0.0, rest) if rest > CLOSE * self.step_time_s else 0.0,
        }

    @property
    def text(self) -> str:
        """The path in a sentence."""
        found = self.seconds
        across = f" of {len(self.groups)} groups of ranks" if len(self.groups) > 1 else ""
        sent = f", {len(self.messages):,} messages between stages" if self.messages else ""
        told = [f"{seconds(found['compute'])} computing"]
        told.append(f"{seconds(found['communication'])} communicating that nothing hides")
        if found["waiting"]:
            told.append(f"{seconds(found['waiting'])} waiting")
        return f"{len(self.actions):,} actions{across}{sent}: {', '.join(told)}"


def critical_chain(estimate: Estimate) -> Chain:
    """Return the critical path of a step."""
    return _Walk(estimate).chain()


class _Walk:
    def __init__(self, estimate: Estimate) -> None:
        self.timeline = estimate.timeline
        self.levels: Levels = levels_of(self.timeline.schedule)
        self.starts, self.ends = self.timeline.starts.tolist(), self.timeline.ends.tolist()
        self.near = CLOSE * self.timeline.step_time_s
        self.found = Chain(step_time_s=self.timeline.step_time_s)

    def chain(self) -> Chain:
        at, group = self._tail()
        action = self._action_at(group, at)
        while action is not None:
            self._take(action)
            action = self._before(action)
        return self.found

    def _tail(self) -> tuple[float, int]:
        """Return the spans after the last action of the group that ends last; when they began."""
        after = self.timeline.after
        ends = [(span.end, -span.group) for span in after]
        last = max(range(len(after)), key=lambda i: ends[i], default=None)
        if last is None:
            latest = max(range(len(self.ends)), key=lambda i: self.ends[i])
            return self.ends[latest], int(self.levels.group[latest])
        group, now = after[last].group, after[last].end
        mine = sorted(
            (i for i, span in enumerate(after) if span.group == group),
            key=lambda i: -after[i].end,
        )
        for i in mine:
            if abs(after[i].end - now) <= self.near:
                self.found.after.add(i)
                self._spend(after[i])
                now = after[i].start
        self.found.groups.add(group)
        return now, group

    def _spend(self, span: Span) -> None:
        if span.lane == "compute":
            self.found.compute_s += span.end - span.start
        else:
            self.found.communication_s += span.end - span.start

    def _action_at(self, group: int, now: float) -> int | None:
        """Return the action of a group that ends then, or the last before it."""
        mine = [i for i in range(len(self.ends)) if self.levels.group[i] == group]
        before = [i for i in mine if self.ends[i] <= now + self.near]
        return max(before, key=lambda i: self.ends[i], default=None)

    def _take(self, action: int) -> None:
        """Count an action: waiting for collectives and parameters is communication."""
        talk = float(self.timeline.collectives[action] + self.timeline.waits[action])
        spent = self.ends[action] - self.starts[action]
        talk = min(talk, spent)
        self.found.actions.add(action)
        self.found.groups.add(int(self.levels.group[action]))
        self.found.communication_s += talk
        self.found.compute_s += spent - talk

    def _before(self, action: int) -> int | None:
        """What an action waited for."""
        start = self.starts[action]
        previous = int(self.levels.before[action])
        if previous >= 0 and self.ends[previous] >= start - self.near:
            return previous
        group = self.levels.group
        needs = [int(n) for n in self.levels.needs[action] if n >= 0]
        needs = [n for n in needs if group[n] != group[action]]
        latest = max(needs, key=lambda n: self.ends[n], default=None)
        if latest is None:  # parameters that the group gathers before its first action
            self.found.communication_s += max(0.0, start)
            return None
        self.found.messages.add((latest, action))
        self.found.communication_s += max(0.0, start - self.ends[latest])
        return latest
