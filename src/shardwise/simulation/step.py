"""One simulated training step: durations of all actions, laid out in the order of a schedule.

`step_times` computes the durations from the costs of all stages; plans store them. `lay_out` makes
the `Timeline` of them: when every action starts and ends, and the communication and the optimizer
step that follow.

A result reaches another group after the time of its message. A group's last backward starts its
gradient reductions, and the group waits for those that outlast it. All groups begin by gathering
parameters outside of blocks (zero 3), and end with the optimizer and the gathering of updated
parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardwise.arrays import Floats, Ints
from shardwise.cluster import Device
from shardwise.cost import adamw
from shardwise.plans.search_result import (
    CAUSES,
    GroupTimes,
    PassTimes,
    StageTimes,
    StepTimes,
    TiedTransfer,
)
from shardwise.schedules import Action, Schedule
from shardwise.schedules.levels import KINDS as ORDER
from shardwise.schedules.levels import levels_of
from shardwise.simulation.costs import ClusterCosts, ExecutionConfig
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.stages import StageCost, UnitCost


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that takes time on one lane of one group of ranks."""

    group: int
    lane: str  # "compute" or "communication"
    name: str
    start: float
    end: float
    kind: str  # "forward", "backward", "weight", "sync", "gather", "optimizer"
    detail: Mapping[str, float] = field(default_factory=dict)


# ------------------------------------------------------------ one pass
#
# A pass has two lanes. A unit's parameters are gathered while the unit before it computes; a unit's
# gradients are reduced as soon as they are complete, one message after the other.


class PassTime(NamedTuple):
    """Seconds of a pass, of its waits for parameters, and of the reductions that outlast it."""

    seconds: float
    waiting: float = 0.0
    left: float = 0.0


def simulate_pass(
    units: Sequence[UnitCost], kind: str, *, last: bool, loss: float = 0.0, shared: bool = False
) -> PassTime:
    """Return the time of a forward (F), a backward (B), or its input (I) or weight (W) half.

    The `last` backward of a step reduces gradients. Computing is slowed by the fraction `loss` of
    the time in which messages are sent. Where the same cores do both (`shared`), messages are
    slowed by as much.
    """
    if kind == "F":
        return _overlap([(u.forward, u.gather, 0.0) for u in units], loss, shared)
    rows = []
    for unit in reversed(units):
        compute = unit.weight if kind == "W" else unit.backward
        compute -= unit.weight if kind == "I" else 0.0
        gather = 0.0 if kind == "W" else unit.gather
        rows.append((compute, gather, unit.reduce if last else 0.0))
    return _overlap(rows, loss, shared)


def _overlap(rows: Sequence[tuple[float, float, float]], loss: float, shared: bool) -> PassTime:
    """Overlap units with their communication, given seconds of compute, gather and reduction."""
    if not any(gather or reduce for _, gather, reduce in rows):
        return PassTime(sum(compute for compute, _, _ in rows))
    now = waiting = 0.0  # when computing is free
    link = gathered = rows[0][1]  # when the link is free, and the next unit's parameters are there
    for index, (compute, _, reduce) in enumerate(rows):
        start = max(now, gathered)
        waiting += start - now
        gather = rows[index + 1][1] if index + 1 < len(rows) else 0.0
        if gather:
            link = max(link, start) + gather
        lost = loss * min(compute, max(0.0, link - start))
        now = start + compute + lost
        link += lost if shared else 0.0
        if gather:
            gathered = link
        if reduce:
            link = max(link, now) + reduce
    return PassTime(now, waiting, max(0.0, link - now))


KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
EXPOSED = ("collectives", "parameters", "gradients", "update")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every group of ranks runs the actions of its schedule, and what follows them."""

    step_time_s: float
    causes: Mapping[str, float]  # seconds of the group that ends last, by cause
    by_group: tuple[Mapping[str, float], ...] = field(repr=False)  # the causes of every group
    busy: tuple[float, ...]  # seconds in which each group computes
    bubble_fraction: float
    schedule: Schedule = field(repr=False)
    starts: Floats = field(repr=False, compare=False)  # of all actions, group by group
    ends: Floats = field(repr=False, compare=False)
    after: tuple[Span, ...] = field(repr=False, default=())  # gradient reductions, the optimizer, …
    waits: Floats = field(repr=False, compare=False)  # seconds of all actions for parameters
    collectives: Floats = field(repr=False, compare=False)  # seconds of all actions in collectives
    recompute: Floats = field(repr=False, compare=False)  # seconds of all actions in recomputation
    times: StepTimes = field(repr=False, compare=False)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything that takes time, in the order in which it starts."""
        actions = [(g, a) for g, own in enumerate(self.schedule.actions) for a in own]
        spans = [
            Span(
                group=group,
                lane="compute",
                name=str(action),
                start=float(start),
                end=float(end),
                kind=KINDS[action.kind],
                detail={"waiting_s": float(wait), "collectives_s": float(collective)},
            )
            for (group, action), start, end, wait, collective in zip(
                actions, self.starts, self.ends, self.waits, self.collectives, strict=True
            )
        ]
        return tuple(sorted((*spans, *self.after), key=lambda s: (s.start, s.group)))

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that nothing hides, in the group that ends last."""
        return sum(self.causes[name] for name in EXPOSED)

    def to_json(self) -> dict[str, object]:
        return {
            "step_time_s": self.step_time_s,
            "causes": dict(self.causes),
            "busy_s": list(self.busy),
            "bubble_fraction": self.bubble_fraction,
            "exposed_communication_s": self.exposed_s,
        }

    def trace(self, memory: Sequence[MemoryUse] = ()) -> dict[str, object]:
        """Return events for chrome://tracing and Perfetto, with the memory of groups."""
        return {"traceEvents": trace_events(self, memory), "displayTimeUnit": "ms"}


def step_times(
    stages: Sequence[StageCost],
    execution: ExecutionConfig,
    schedule: Schedule,
    devices: Sequence[Device],
    costs: ClusterCosts,
    tied: Mapping[tuple[int, int], float],
) -> StepTimes:
    """Return the durations of a step; `devices` has the slowest rank's device of each group.

    `tied` has the bytes of parameters that two groups share: once a step, gradients are sent to the
    owner and new values back.
    """
    sends = _sends(stages, execution, costs)
    transfers = []
    for (owner, replica), num_bytes in tied.items():
        rows = pairs(execution.groups[owner].array, execution.groups[replica].array)
        seconds = costs.collective("send", rows).seconds(num_bytes)
        transfers.append(TiedTransfer(owner=owner, replica=replica, send_s=seconds))
    return StepTimes(
        passes=tuple(_passes(stages, schedule, devices)),
        stages=tuple(
            StageTimes(
                group=stage.group,
                forward_s=stage.forward,
                backward_s=stage.backward,
                send_s=seconds,
                send_link_s=on_link,
                send_bytes=stage.send_bytes,
                numel=stage.numel,
            )
            for stage, (seconds, on_link) in zip(stages, sends, strict=True)
        ),
        groups=tuple(
            _group_times([s for s in stages if s.group == number], execution, device)
            for number, device in enumerate(devices)
        ),
        tied=tuple(transfers),
    )


def _sends(
    stages: Sequence[StageCost], execution: ExecutionConfig, costs: ClusterCosts
) -> list[tuple[float, float]]:
    """Return the seconds of each stage's message to the next: in total, and on the link alone."""
    sends = [(0.0, 0.0)] * len(stages)
    for stage, following in pairwise(stages):
        here, there = execution.groups[stage.group], execution.groups[following.group]
        if here is not there and stage.send_bytes:
            model = costs.collective("send", pairs(here.array, there.array))
            seconds = model.seconds(stage.send_bytes)
            sends[stage.index] = seconds, seconds - model.seconds(0.0)
    return sends


def _passes(
    stages: Sequence[StageCost], schedule: Schedule, devices: Sequence[Device]
) -> Iterator[PassTimes]:
    """Yield the times of every kind of action of every stage; equal stages are simulated once."""
    levels, count = levels_of(schedule), len(stages)
    simulated: dict[object, PassTime] = {}
    for key in np.unique((levels.kind * count + levels.stage) * 2 + levels.last).tolist():
        kind, number, last = ORDER[key // 2 // count], key // 2 % count, bool(key % 2)
        stage = stages[number]
        units, device = stage.units, devices[stage.group]
        figures = tuple((u.forward, u.backward, u.weight, u.gather, u.reduce) for u in units)
        equal_key = (kind, last, id(device), figures)
        if equal_key not in simulated:
            loss, shared = device.overlap_loss, device.kind == "cpu"
            simulated[equal_key] = simulate_pass(units, kind, last=last, loss=loss, shared=shared)
        spent = simulated[equal_key]
        yield PassTimes(
            kind=kind,
            stage=number,
            last=last,
            **spent._asdict(),
            collectives={"F": stage.forward_comm, "W": 0.0}.get(kind, stage.backward_comm),
            recompute=stage.recompute if kind in "BI" else 0.0,
        )


def _group_times(
    stages: Sequence[StageCost], execution: ExecutionConfig, device: Device
) -> GroupTimes:
    gather = sum(stage.update_gather for stage in stages)
    if execution.prefetch:  # hidden behind the next forward, as far as that lasts
        gather = max(0.0, gather - sum(stage.forward for stage in stages))
    return GroupTimes(
        root_gather_s=sum(stage.root_gather for stage in stages),
        optimizer_s=sum(update_seconds(stage, execution, device) for stage in stages),
        update_gather_s=gather,
    )


def lay_out(times: StepTimes, schedule: Schedule) -> Timeline:
    """Return the timeline of a step: its durations in the order of the schedule."""
    return _Layout(times, schedule).timeline()


class _Layout:
    """Place the actions of all groups in time, and what follows them."""

    def __init__(self, times: StepTimes, schedule: Schedule) -> None:
        self.times, self.levels = times, levels_of(schedule)
        self.after: list[Span] = []
        count = len(times.stages)
        self.passes = {
            (ORDER.index(p.kind) * count + p.stage) * 2 + p.last: p for p in times.passes
        }
        self.key = (self.levels.kind * count + self.levels.stage) * 2 + self.levels.last

    def timeline(self) -> Timeline:
        levels, stages = self.levels, self.times.stages
        seconds = self._column("seconds")
        roots = np.array([group.root_gather_s for group in self.times.groups])
        sends, on_link = np.array([(s.send_s, s.send_link_s) for s in stages]).T
        starts, ends = levels.simulate(seconds, sends, roots, on_link)
        groups = len(self.times.groups)
        busy = np.bincount(levels.group, weights=seconds, minlength=groups)
        reduced, computed_by, causes = [], [], []
        for group in range(groups):
            actions = levels.group == group
            spent = self._causes(self.key[actions])
            computed = float(ends[actions].max(initial=0.0))
            root = min(float(roots[group]), float(starts[actions].min(initial=computed)))
            spent["parameters"] += root
            spent["bubble"] = computed - float(busy[group]) - root
            last = np.flatnonzero(actions & levels.last)
            reduced.append(max(self._reductions(group, last, ends, computed), computed))
            computed_by.append(computed)
            causes.append(spent)
        finished = self._ends(reduced, computed_by, causes)
        step = max(finished)
        return Timeline(
            step_time_s=step,
            causes=causes[finished.index(step)],
            by_group=tuple(causes),
            busy=tuple(float(b) for b in busy),
            bubble_fraction=float(np.mean(1 - busy / step)) if step else 0.0,
            schedule=levels.schedule,
            starts=starts,
            ends=ends,
            after=tuple(self.after),
            waits=self._column("waiting"),
            collectives=self._column("collectives"),
            recompute=self._column("recompute"),
            times=self.times,
        )

    def _column(self, name: str) -> Floats:
        """Return a field of `PassTimes` for every action."""
        by_key = np.zeros(len(ORDER) * len(self.times.stages) * 2)
        for key, spent in self.passes.items():
            by_key[key] = getattr(spent, name)
        column: Floats = by_key[self.key]
        return column

    def _causes(self, keys: Ints) -> dict[str, float]:
        """Return the seconds of a group's actions by cause."""
        causes: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        numbers, counts = np.unique(keys, return_counts=True)
        for key, times in zip(numbers.tolist(), counts.tolist(), strict=True):
            spent = self.passes[key]
            compute = spent.seconds - spent.waiting
            causes["parameters"] += times * spent.waiting
            if spent.kind != "W":
                causes["collectives"] += times * spent.collectives
                causes["recompute"] += times * spent.recompute
                compute -= spent.collectives + spent.recompute
            causes["compute"] += times * max(0.0, compute)
        return causes

    def _reductions(self, group: int, actions: Ints, ends: Floats, computed: float) -> float:
        """Return when the gradient reductions that outlast backward end."""
        left = computed
        for at in actions.tolist():
            spent = self.passes[int(self.key[at])]
            if spent.left:
                left = max(left, float(ends[at])) + spent.left
                name = f"gradients of stage {spent.stage}"
                self._add(group, "communication", name, left - spent.left, left, "sync")
        return left

    def _ends(
        self,
        reduced: Sequence[float],
        computed: Sequence[float],
        causes: Sequence[dict[str, float]],
    ) -> list[float]:
        """Return when every group ends: after tied gradients, the optimizer and new values."""
        ready = self._exchanged(reduced, "gradients of shared parameters", "sync")
        updated = []
        for group, (start, spent) in enumerate(zip(ready, causes, strict=True)):
            spent["gradients"] = start - computed[group]
            updated.append(self._update(group, start, spent))
        finished = self._exchanged(updated, "new values of shared parameters", "gather")
        for before, after, spent in zip(updated, finished, causes, strict=True):
            spent["update"] += after - before
        return finished

    def _exchanged(self, times: Sequence[float], name: str, kind: str) -> list[float]:
        """Return when groups have exchanged tied parameters, given when each of them is ready."""
        ends = list(times)
        for tied in self.times.tied:
            start = max(ends[tied.owner], ends[tied.replica])
            for group in (tied.owner, tied.replica):
                ends[group] = start + tied.send_s
                self._add(group, "communication", name, start, start + tied.send_s, kind)
        return ends

    def _update(self, group: int, start: float, causes: dict[str, float]) -> float:
        """Add the optimizer step and the gathering of new parameters, and return their end."""
        times = self.times.groups[group]
        causes["optimizer"], causes["update"] = times.optimizer_s, times.update_gather_s
        end = start + times.optimizer_s
        self._add(group, "compute", "optimizer", start, end, "optimizer")
        done = end + times.update_gather_s
        if times.update_gather_s:
            self._add(group, "communication", "new parameters", end, done, "gather")
        return done

    def _add(self, group: int, lane: str, name: str, start: float, end: float, kind: str) -> None:
        self.after.append(Span(group=group, lane=lane, name=name, start=start, end=end, kind=kind))


def update_seconds(stage: StageCost, execution: ExecutionConfig, device: Device) -> float:
    """Return the time of the optimizer step, and of moving its state if that is in host memory."""
    size = 8 if execution.precision.master == "float64" else adamw.WORD_BYTES
    if stage.update_s is not None:
        seconds = stage.update_s
    else:
        per_tensor = 1 if device.kind != "cpu" else stage.tensors
        calls = adamw.FUSED_CALLS * (per_tensor if stage.numel else 0)
        seconds = adamw.fused_seconds(stage.numel, device, calls=calls, word_bytes=size)
        seconds *= device.update_factor
    if "optimizer" in execution.offload or "parameters" in execution.offload:
        seconds += 2.0 * size * stage.numel / device.host_bytes_per_s
    return seconds


def pairs(here: Ints, there: Ints) -> Ints:
    """Return pairs of sender and receiver; groups may have different sizes."""
    numbers = np.arange(max(len(here), len(there)))
    senders = here[numbers * len(here) // len(numbers)]
    receivers = there[numbers * len(there) // len(numbers)]
    return np.stack([senders, receivers], axis=1)


# ------------------------------------------------------------ traces
LANES = ("compute", "communication", "communication in actions", "messages")
COMPUTE, AFTER, INSIDE, MESSAGES = range(len(LANES))
MICRO = 1e6  # the format's unit is a microsecond

Event = dict[str, Any]


def trace_events(timeline: Timeline, memory: Sequence[MemoryUse] = ()) -> list[Event]:
    """Return all events: names, then spans, then memory."""
    lanes = {"compute": COMPUTE, "communication": AFTER}
    return [
        *(event for group in range(len(timeline.busy)) for event in _names(group)),
        *(
            _span(s.name, s.kind, s.group, lanes[s.lane], s.start, s.end, s.detail)
            for s in timeline.spans
        ),
        *_collectives(timeline),
        *(event for use in memory for event in _memory(timeline, use)),
    ]


def _names(group: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": group, "args": {"name": f"group {group}"}}
    for lane, name in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": group, "tid": lane, "args": {"name": name}}


def _span(
    name: str, kind: str, group: int, lane: int, start: float, end: float, detail: Any = None
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": group,
        "tid": lane,
        "ts": start * MICRO,
        "dur": (end - start) * MICRO,
        "args": dict(detail or {}),
    }


def _collectives(timeline: Timeline) -> Iterator[Event]:
    """Yield the communication in every action, drawn at its start, and the message it sends."""
    at = 0
    for group, actions in enumerate(timeline.schedule.actions):
        for action in actions:
            start, end = float(timeline.starts[at]), float(timeline.ends[at])
            wait, collective = float(timeline.waits[at]), float(timeline.collectives[at])
            if wait > 0:
                name = f"parameters of {action}"
                yield _span(name, "gather", group, INSIDE, start, start + wait)
            if collective > 0:
                name, first = f"collectives of {action}", start + wait
                yield _span(name, "collectives", group, INSIDE, first, first + collective)
            there, seconds = _message(timeline, action, group)
            if seconds > 0:
                name = f"{action} to stage {there}"
                yield _span(name, "send", group, MESSAGES, end, end + seconds)
            at += 1


def _message(timeline: Timeline, action: Action, group: int) -> tuple[int, float]:
    """Return the stage that receives an action's result, and the seconds to another group."""
    placement = timeline.schedule.placement
    there = action.stage + (1 if action.kind == "F" else -1)
    if action.kind == "W" or not 0 <= there < len(placement) or placement[there] == group:
        return there, 0.0
    return there, timeline.times.stages[min(action.stage, there)].send_s


def _memory(timeline: Timeline, use: MemoryUse) -> Iterator[Event]:
    """Yield the bytes of a group's rank at every action, or the maximum of several."""
    before = sum(len(actions) for actions in timeline.schedule.actions[: use.group])
    count = len(timeline.schedule.actions[use.group])
    moments = [size for _, size in use.over_time]
    about = {"ph": "C", "name": "memory", "pid": use.group}
    for index, size in enumerate(moments):
        start = float(timeline.starts[before + index * count // len(moments)])
        yield {**about, "ts": start * MICRO, "args": {"bytes": size}}
    if use.when == "optimizer":
        for span in timeline.after:
            if span.group == use.group and span.kind == "optimizer":
                yield {**about, "ts": span.start * MICRO, "args": {"bytes": use.peak_bytes}}
