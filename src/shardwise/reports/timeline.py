"""The predicted step as lanes of spans, its critical path, and the pipeline schedule as a grid.

Of a step with many actions, only the first and last are shown; the others become one span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.collectives.messages.program import format_ranks
from shardwise.formatting import seconds
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
from shardwise.shares import num_ranks
from shardwise.simulation import Estimate, MemoryUse
from shardwise.simulation.step import KINDS

MAX_CLASSES = 32
EDGES = 8  # groups at either end that are always shown
NEAR = 1e-9  # of the step; an action that starts this soon after another waited for it
MAX_SPANS = 16_000  # actions of all rows
SPAN_KINDS = ("forward", "backward", "weight", "optimizer", "sync", "gather", "send", "more")
DIGITS = 9
COLUMNS = ("start", "end", "kind", "name", "critical")


# ------------------------------------------------------------ classes of ranks
# All ranks of a group run the same program in the same time, so a group is a class. Of many groups,
# the first, the last, the slowest and those with the least free memory are classes; the slowest of
# the others represents them.


def classes_of(plan: Plan, estimate: Estimate) -> tuple[RankClass, ...]:
    """Return the classes of a plan's ranks."""
    groups = plan.groups
    if len(groups) <= MAX_CLASSES:
        return tuple(_class(number, (number,), number, plan) for number in range(len(groups)))
    shown = _separate_groups(estimate, len(groups))
    merged = tuple(number for number in range(len(groups)) if number not in shown)
    busy = estimate.timeline.busy
    slowest = max(merged, key=lambda number: busy[number])
    classes = [_class(at, (number,), number, plan) for at, number in enumerate(sorted(shown))]
    return (*classes, _class(len(classes), merged, slowest, plan))


def _separate_groups(estimate: Estimate, count: int) -> set[int]:
    """Return the groups that are separate classes."""
    busy, memory = estimate.timeline.busy, estimate.memory
    order = [*range(EDGES), *range(count - EDGES, count)]
    slow = sorted(range(count), key=lambda number: -busy[number])
    full = sorted(range(count), key=lambda number: -memory[number].fullness)
    order += [number for pair in zip(slow, full, strict=True) for number in pair]
    return set(list(dict.fromkeys(order))[: MAX_CLASSES - 1])


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
    """Return `ranks 0-7`, or `rank 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def named_events(
    plan: Plan,
    estimate: Estimate,
    prefix: str = "",
    *,
    first: int = 0,
    memory: Sequence[MemoryUse] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the events of the predicted step, with the ranks of groups, numbered from `first`."""
    for event in estimate.timeline.trace(memory)["traceEvents"]:  # type: ignore[attr-defined]
        named = {**event, "pid": first + event["pid"]}
        if event["name"] == "process_name":
            named["args"] = {"name": f"{prefix}{ranks_label(plan.groups[event['pid']])}"}
        yield named


def groups_of(plan: Plan, classes: tuple[RankClass, ...]) -> tuple[RankGroup, ...]:
    """Return the groups with their stages and meshes."""
    class_of = {number: c.id for c in classes for number in c.groups}
    stages = plan.all_stages
    groups = []
    for number, ranks in enumerate(plan.groups):
        own = tuple(at for at, stage in enumerate(stages) if stage.ranks == ranks)
        mesh = stages[own[0]].mesh
        groups.append(
            RankGroup(
                id=number,
                ranks=format_ranks(ranks),
                num_ranks=len(ranks),
                stages=own,
                mesh=", ".join(f"{axis}={num_ranks(size)}" for axis, size in mesh.axes),
                class_=class_of[number],
            )
        )
    return tuple(groups)


# ------------------------------------------------------------ the critical path
# The path is followed backward from the end of the step: an action starts when its predecessor in
# the group ends or when a result of another group arrives, whichever is later.


class CriticalPath:
    """The critical path: actions, messages and final spans, and the time spent on them."""

    def __init__(self, estimate: Estimate) -> None:
        self.timeline = estimate.timeline
        self.levels: Levels = levels_of(self.timeline.schedule)
        self.starts, self.ends = self.timeline.starts.tolist(), self.timeline.ends.tolist()
        self.near = NEAR * self.timeline.step_time_s
        self.actions: set[int] = set()
        self.messages: set[tuple[int, int]] = set()  # sender's and receiver's action
        self.after: set[int] = set()  # of the timeline's `after`
        self.groups: set[int] = set()
        self.compute_s = self.communication_s = 0.0
        at, group = self._tail()
        action = self._action_at(group, at)
        while action is not None:
            self._take(action)
            action = self._before(action)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the step by what they are spent on."""
        remaining = self.timeline.step_time_s - self.compute_s - self.communication_s
        return {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "waiting": max(0.0, remaining) if remaining > self.near else 0.0,
        }

    @property
    def text(self) -> str:
        """The path as a sentence."""
        spent = self.seconds
        groups = f" of {len(self.groups)} groups of ranks" if len(self.groups) > 1 else ""
        messages = f", {len(self.messages):,} messages between stages" if self.messages else ""
        parts = [f"{seconds(spent['compute'])} computing"]
        parts.append(f"{seconds(spent['communication'])} of exposed communication")
        if spent["waiting"]:
            parts.append(f"{seconds(spent['waiting'])} waiting")
        return f"{len(self.actions):,} actions{groups}{messages}: {', '.join(parts)}"

    def _tail(self) -> tuple[float, int]:
        """Add the final spans of the last group; return their start and the group."""
        after = self.timeline.after
        ends = [(span.end, -span.group) for span in after]
        last = max(range(len(after)), key=lambda i: ends[i], default=None)
        if last is None:
            latest = max(range(len(self.ends)), key=lambda i: self.ends[i])
            return self.ends[latest], int(self.levels.group[latest])
        group, now = after[last].group, after[last].end
        own = sorted(
            (i for i, span in enumerate(after) if span.group == group), key=lambda i: -after[i].end
        )
        for i in own:
            if abs(after[i].end - now) <= self.near:
                self.after.add(i)
                seconds = after[i].end - after[i].start
                if after[i].lane == "compute":
                    self.compute_s += seconds
                else:
                    self.communication_s += seconds
                now = after[i].start
        self.groups.add(group)
        return now, group

    def _action_at(self, group: int, now: float) -> int | None:
        """Return the last action of a group that has ended at a time."""
        own = [i for i in range(len(self.ends)) if self.levels.group[i] == group]
        before = [i for i in own if self.ends[i] <= now + self.near]
        return max(before, key=lambda i: self.ends[i], default=None)

    def _take(self, action: int) -> None:
        """Add an action; waiting for collectives and parameters counts as communication."""
        exposed = float(self.timeline.collectives[action] + self.timeline.waits[action])
        spent = self.ends[action] - self.starts[action]
        exposed = min(exposed, spent)
        self.actions.add(action)
        self.groups.add(int(self.levels.group[action]))
        self.communication_s += exposed
        self.compute_s += spent - exposed

    def _before(self, action: int) -> int | None:
        """Return the action that an action waited for."""
        start = self.starts[action]
        previous = int(self.levels.before[action])
        if previous >= 0 and self.ends[previous] >= start - self.near:
            return previous
        group = self.levels.group
        needs = [int(n) for n in self.levels.needs[action] if n >= 0]
        needs = [n for n in needs if group[n] != group[action]]
        latest = max(needs, key=lambda n: self.ends[n], default=None)
        if latest is None:  # the group gathers parameters before its first action
            self.communication_s += max(0.0, start)
            return None
        self.messages.add((latest, action))
        self.communication_s += max(0.0, start - self.ends[latest])
        return latest


# ------------------------------------------------------------ lanes and grid
class Step:
    """The actions of a step as arrays, and a mask of the displayed ones."""

    def __init__(self, plan: Plan, estimate: Estimate, classes: Sequence[RankClass]) -> None:
        self.plan, self.estimate, self.classes = plan, estimate, classes
        self.timeline = estimate.timeline
        self.levels = levels_of(self.timeline.schedule)
        self.actions = [action for row in self.timeline.schedule.actions for action in row]
        self.chain = CriticalPath(estimate)
        self.senders = {sender for sender, _ in self.chain.messages}
        self.names: dict[str, int] = {}
        self.shown, self.folded = self._shown()

    def _shown(self) -> tuple[NDArray[np.bool_], str | None]:
        """Return a mask of the displayed actions: all, or those that end early or begin late."""
        in_row = np.isin(self.levels.group, [rank_class.shown for rank_class in self.classes])
        count = int(in_row.sum())
        if count <= MAX_SPANS:
            return np.ones(len(self.actions), dtype=bool), None
        half, starts, ends = MAX_SPANS // 2, self.timeline.starts, self.timeline.ends
        is_shown = (ends <= np.sort(ends[in_row])[half - 1]) | (
            starts >= np.sort(starts[in_row])[-half]
        )
        return is_shown, (
            f"the first and last {int((is_shown & in_row).sum()):,} of {count:,} actions; "
            "shardwise simulate --perfetto writes all of them"
        )

    def name(self, text: str) -> int:
        """Return the index of a text."""
        return self.names.setdefault(text, len(self.names))

    # ------------------------------------------------------------ the timeline
    def chart(self) -> TimelineChart:
        """Return the lanes of every class."""
        rows = tuple(self._row(rank_class) for rank_class in self.classes)
        return TimelineChart(
            step_time_s=self.timeline.step_time_s,
            kinds=SPAN_KINDS,
            names=tuple(self.names),
            rows=rows,
            critical={"text": self.chain.text, "seconds": self.chain.seconds},
            folded=self.folded,
        )

    def _row(self, rank_class: RankClass) -> TimelineRow:
        group = rank_class.shown
        actions = np.flatnonzero(self.levels.group == group).tolist()
        compute, communication = _Spans(), _Spans()
        starts, ends = self.timeline.starts, self.timeline.ends
        for at in self._with_gaps(actions):
            if isinstance(at, list):
                text = f"… {len(at):,} actions"
                compute.add(starts[at[0]], ends[at[-1]], "more", self.name(text), False)
                continue
            action = self.actions[at]
            critical = at in self.chain.actions
            name = self.name(str(action))
            compute.add(starts[at], ends[at], KINDS[action.kind], name, critical)
            self._add_send(at, communication)
        for number, span in enumerate(self.timeline.after):
            if span.group == group:
                lane = compute if span.lane == "compute" else communication
                critical = number in self.chain.after
                lane.add(span.start, span.end, span.kind, self.name(span.name), critical)
        busy = self.timeline.busy[group]
        return TimelineRow(
            class_=rank_class.id,
            group=group,
            label=rank_class.label,
            lanes={"compute": compute.columns(), "communication": communication.columns()},
            busy_s=busy,
            idle_s=self.timeline.step_time_s - busy,
            exposed_s=self._exposed(actions, group),
        )

    def _with_gaps(self, actions: Sequence[int]) -> list[int | list[int]]:
        """Return the displayed actions of a group, with lists of the others between them."""
        parts: list[int | list[int]] = []
        for is_shown, group in groupby(actions, key=self.shown.__getitem__):
            run = list(group)
            parts += run if is_shown else [run]
        return parts

    def _add_send(self, at: int, lane: _Spans) -> None:
        """Add the message that sends the result of an action to another group."""
        action, group = self.actions[at], self.levels.group[at]
        if action.kind == "W":
            return
        stage = action.stage if action.kind == "F" else action.stage - 1
        target = action.stage + 1 if action.kind == "F" else action.stage - 1
        placement = self.timeline.schedule.placement
        if not 0 <= target < len(placement) or placement[target] == group:
            return
        seconds = self.timeline.times.stages[stage].send_s
        if seconds:
            end = float(self.timeline.ends[at])
            critical = at in self.senders
            lane.add(end, end + seconds, "send", self.name(f"{action} to stage {target}"), critical)

    def _exposed(self, actions: Sequence[int], group: int) -> float:
        """Return the exposed communication of a group, during its actions and after them."""
        total = sum(
            float(self.timeline.collectives[at] + self.timeline.waits[at]) for at in actions
        )
        computed = max((float(self.timeline.ends[at]) for at in actions), default=0.0)
        spans = [s for s in self.timeline.after if s.group == group and s.lane != "compute"]
        return total + sum(max(0.0, s.end - max(s.start, computed)) for s in spans)

    # ------------------------------------------------------------ the schedule
    def grid(self) -> ScheduleGrid | None:
        """Return the grid of a plan with stages or micro-batches."""
        if not self.plan.is_scheduled:
            return None
        schedule = self.timeline.schedule
        name = self.plan.schedule if isinstance(self.plan.schedule, str) else "custom"
        return ScheduleGrid(
            name=name or schedule.name,
            stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            bubble_fraction=self.timeline.bubble_fraction,
            rows=tuple(self._grid_row(rank_class) for rank_class in self.classes),
            folded=self.folded,
        )

    def _grid_row(self, rank_class: RankClass) -> Mapping[str, Any]:
        actions = np.flatnonzero((self.levels.group == rank_class.shown) & self.shown)
        return {
            "label": rank_class.label,
            "start": [short(v) for v in self.timeline.starts[actions].tolist()],
            "end": [short(v) for v in self.timeline.ends[actions].tolist()],
            "kind": [LETTERS[kind] for kind in self.levels.kind[actions].tolist()],
            "stage": self.levels.stage[actions].tolist(),
            "microbatch": self.levels.microbatch[actions].tolist(),
        }


class _Spans:
    """The spans of one lane."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int, int, int]] = []

    def add(self, start: float, end: float, kind: str, name: int, critical: bool) -> None:
        """Add a span."""
        row = (short(start), short(end), SPAN_KINDS.index(kind), name, int(critical))
        self.rows.append(row)

    def columns(self) -> dict[str, list[Any]]:
        """Return all spans as sorted columns."""
        rows = sorted(self.rows)
        return {name: [row[at] for row in rows] for at, name in enumerate(COLUMNS)}


def short(value: float) -> float:
    """Round a time to the digits that a page can show."""
    return float(f"{value:.{DIGITS}g}")
