"""The step as lanes of spans, and the pipeline's schedule as a grid; of long steps both ends.

Of a step with many actions the first and the last are kept, the rest is one
span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.formatting import seconds
from shardwise.messages.program import format_ranks
from shardwise.plans import Plan
from shardwise.reports.document import (
    RankClass,
    RankGroup,
    ScheduleGrid,
    TimelineChart,
    TimelineRow,
)
from shardwise.schedules.levels import KINDS as LETTERS
from shardwise.schedules.levels import Levels, levels_of
from shardwise.simulation import Estimate
from shardwise.simulation.costs import Span
from shardwise.simulation.step import KINDS

# Ranks that are shown once: groups that run the same stages, and what of them is joined.
#
# All ranks of a group run the same program in the same time, so a group is a class; where there are
# more groups, first and last ones, the slowest and the fullest stay, and the slowest of the rest
# stands for them.


MOST_CLASSES = 32
EDGES = 8  # groups at either end that are always shown


def classes_of(plan: Plan, estimate: Estimate) -> tuple[RankClass, ...]:
    """Return the classes of a plan's ranks."""
    groups = plan.groups
    if len(groups) <= MOST_CLASSES:
        return tuple(_class(number, (number,), number, plan) for number in range(len(groups)))
    kept = _kept(estimate, len(groups))
    rest = tuple(number for number in range(len(groups)) if number not in kept)
    busy = estimate.timeline.busy
    slowest = max(rest, key=lambda number: busy[number])
    found = [_class(at, (number,), number, plan) for at, number in enumerate(sorted(kept))]
    return (*found, _class(len(found), rest, slowest, plan))


def _kept(estimate: Estimate, count: int) -> set[int]:
    """Return the groups that are classes of their own: all but one of those that may be."""
    busy, memory = estimate.timeline.busy, estimate.memory
    order = [*range(EDGES), *range(count - EDGES, count)]
    slow = sorted(range(count), key=lambda number: -busy[number])
    full = sorted(range(count), key=lambda number: -memory[number].fullness)
    order += [number for pair in zip(slow, full, strict=True) for number in pair]
    return set(list(dict.fromkeys(order))[: MOST_CLASSES - 1])


def _class(at: int, groups: tuple[int, ...], shown: int, plan: Plan) -> RankClass:
    ranks = tuple(sorted(rank for number in groups for rank in plan.groups[number]))
    more = len(groups) - 1
    label = ranks_label(plan.groups[shown])
    return RankClass(
        id=at,
        label=f"{label}, the slowest of {more + 1} groups" if more else label,
        groups=groups,
        num_ranks=len(ranks),
        shown=shown,
        more=more,
    )


def ranks_label(ranks: tuple[int, ...]) -> str:
    """`ranks 0-7`, or `rank 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def groups_of(plan: Plan, classes: tuple[RankClass, ...]) -> tuple[RankGroup, ...]:
    """Return the groups with their stages and meshes."""
    home = {number: found.id for found in classes for number in found.groups}
    stages = plan.all_stages
    found = []
    for number, ranks in enumerate(plan.groups):
        mine = tuple(at for at, stage in enumerate(stages) if stage.ranks == ranks)
        mesh = stages[mine[0]].mesh
        found.append(
            RankGroup(
                id=number,
                ranks=format_ranks(ranks),
                num_ranks=len(ranks),
                stages=mine,
                mesh=", ".join(f"{axis}={int(size)}" for axis, size in mesh.axes),
                class_=home[number],
            )
        )
    return tuple(found)


# The critical path: the chain of work that makes the step as long as it is.
#
# From the last end backwards: an action began when the one before it in its group ended, or when a
# result of another group arrived; whichever came later is what it waited for.


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


MOST_SPANS = 16_000  # of actions, in all rows together
SPAN_KINDS = (
    "forward", "backward", "weight", "optimizer", "sync", "gather", "send", "more",
)  # fmt: skip
DIGITS = 9
COLUMNS = ("start", "end", "kind", "name", "critical")


class Step:
    """The actions of a step as arrays, and which of them are shown."""

    def __init__(self, plan: Plan, estimate: Estimate, classes: Sequence[RankClass]) -> None:
        self.plan, self.estimate, self.classes = plan, estimate, classes
        self.timeline = estimate.timeline
        self.levels = levels_of(self.timeline.schedule)
        self.actions = [a for mine in self.timeline.schedule.actions for a in mine]
        self.chain: Chain = critical_chain(estimate)
        self.senders = {sender for sender, _ in self.chain.messages}
        self.names: dict[str, int] = {}
        self.shown, self.folded = self._shown()

    def _shown(self) -> tuple[NDArray[np.bool_], str | None]:
        """Which actions are kept: all, or those that end early or begin late."""
        groups = [found.shown for found in self.classes]
        mine = np.isin(self.levels.group, groups)
        count = int(mine.sum())
        if count <= MOST_SPANS:
            return np.ones(len(self.actions), dtype=bool), None
        half = MOST_SPANS // 2
        ends, starts = np.sort(self.timeline.ends[mine]), np.sort(self.timeline.starts[mine])
        kept = (self.timeline.ends <= ends[half - 1]) | (self.timeline.starts >= starts[-half])
        return kept, (
            f"of {count:,} actions, the first and the last {int((kept & mine).sum()):,} are shown; "
            "shardwise simulate --perfetto writes all"
        )

    def name(self, text: str) -> int:
        """Return a text's number."""
        return self.names.setdefault(text, len(self.names))

    # ------------------------------------------------------------ the timeline

    def chart(self) -> TimelineChart:
        """Return the lanes of every class."""
        rows = tuple(self._row(found) for found in self.classes)
        return TimelineChart(
            step_time_s=self.timeline.step_time_s,
            kinds=SPAN_KINDS,
            names=tuple(self.names),
            rows=rows,
            critical={"text": self.chain.text, "seconds": self.chain.seconds},
            folded=self.folded,
        )

    def _row(self, found: RankClass) -> TimelineRow:
        group = found.shown
        mine = np.flatnonzero(self.levels.group == group).tolist()
        compute, talk = _Spans(), _Spans()
        starts, ends = self.timeline.starts, self.timeline.ends
        for at in self._with_gaps(mine):
            if isinstance(at, list):
                text = f"… {len(at):,} actions"
                compute.add(starts[at[0]], ends[at[-1]], "more", self.name(text), False)
                continue
            action = self.actions[at]
            critical = at in self.chain.actions
            name = self.name(str(action))
            compute.add(starts[at], ends[at], KINDS[action.kind], name, critical)
            self._sends(at, talk)
        for number, span in enumerate(self.timeline.after):
            if span.group == group:
                lane = compute if span.lane == "compute" else talk
                critical = number in self.chain.after
                lane.add(span.start, span.end, span.kind, self.name(span.name), critical)
        busy = self.timeline.busy[group]
        return TimelineRow(
            class_=found.id,
            group=group,
            label=found.label,
            lanes={"compute": compute.columns(), "communication": talk.columns()},
            busy_s=busy,
            idle_s=self.timeline.step_time_s - busy,
            exposed_s=self._exposed(mine, group),
        )

    def _with_gaps(self, mine: Sequence[int]) -> list[int | list[int]]:
        """Return the shown actions of a group; those between them as one list."""
        found: list[int | list[int]] = []
        for at in mine:
            if self.shown[at]:
                found.append(at)
            elif found and isinstance(found[-1], list):
                found[-1].append(at)
            else:
                found.append([at])
        return found

    def _sends(self, at: int, lane: _Spans) -> None:
        """The message that an action's result is, to the group that waits for it."""
        action, group = self.actions[at], self.levels.group[at]
        if action.kind == "W":
            return
        stage = action.stage if action.kind == "F" else action.stage - 1
        there = action.stage + 1 if action.kind == "F" else action.stage - 1
        placement = self.timeline.schedule.placement
        if not 0 <= there < len(placement) or placement[there] == group:
            return
        seconds = self.timeline.times.stages[stage].send_s
        if seconds:
            end = float(self.timeline.ends[at])
            critical = at in self.senders
            lane.add(end, end + seconds, "send", self.name(f"{action} to stage {there}"), critical)

    def _exposed(self, mine: Sequence[int], group: int) -> float:
        """Seconds of communication that nothing hides, in a group's list and after it."""
        total = sum(float(self.timeline.collectives[at] + self.timeline.waits[at]) for at in mine)
        computed = max((float(self.timeline.ends[at]) for at in mine), default=0.0)
        spans = [s for s in self.timeline.after if s.group == group and s.lane != "compute"]
        return total + sum(max(0.0, s.end - max(s.start, computed)) for s in spans)

    # ------------------------------------------------------------ the schedule

    def grid(self) -> ScheduleGrid | None:
        """Return the grid of a plan with stages or micro-batches."""
        if not self.plan.is_scheduled:
            return None
        schedule = self.timeline.schedule
        name = self.plan.schedule if isinstance(self.plan.schedule, str) else "own lists"
        return ScheduleGrid(
            name=name or schedule.name,
            stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            bubble_fraction=self.timeline.bubble_fraction,
            rows=tuple(self._grid_row(found) for found in self.classes),
            folded=self.folded,
        )

    def _grid_row(self, found: RankClass) -> Mapping[str, Any]:
        mine = np.flatnonzero((self.levels.group == found.shown) & self.shown)
        return {
            "label": found.label,
            "start": [short(v) for v in self.timeline.starts[mine].tolist()],
            "end": [short(v) for v in self.timeline.ends[mine].tolist()],
            "kind": [LETTERS[kind] for kind in self.levels.kind[mine].tolist()],
            "stage": self.levels.stage[mine].tolist(),
            "microbatch": self.levels.microbatch[mine].tolist(),
        }


class _Spans:
    """Columns of one lane."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int, int, int]] = []

    def add(self, start: float, end: float, kind: str, name: int, critical: bool) -> None:
        row = (short(start), short(end), SPAN_KINDS.index(kind), name, int(critical))
        self.rows.append(row)

    def columns(self) -> dict[str, list[Any]]:
        rows = sorted(self.rows)
        return {name: [row[at] for row in rows] for at, name in enumerate(COLUMNS)}


def short(value: float) -> float:
    """Return a moment with as many digits as a page can show."""
    return float(f"{value:.{DIGITS}g}")
