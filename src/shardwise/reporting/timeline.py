"""The step as lanes of spans, and the pipeline's schedule as a grid; of long steps both ends.

Enters: an `Estimate`, its plan's figures, and the classes that are shown. Leaves: `TimelineChart`
and `ScheduleGrid`. Of a step with many actions the first and the last are kept, the rest is one
span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.plans import Plan
from shardwise.reporting.critical import Chain, critical_chain
from shardwise.reporting.document import RankClass, ScheduleGrid, TimelineChart, TimelineRow
from shardwise.schedules.levels import KINDS as LETTERS
from shardwise.schedules.levels import levels_of
from shardwise.simulation import Estimate
from shardwise.simulation.step import KINDS

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
