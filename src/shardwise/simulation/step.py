"""One training step of all groups of ranks, played on the cluster.

Enters: the costs of all stages and a `Setting`. Leaves: `Timeline`: every action of the schedule
with its start and end, what travels meanwhile, and the optimizer's step.

Groups of equal ranks are played once. A result reaches another group after the time of its message;
a group's last backward starts the sums of its gradients, and what of them is left when it ends
is waited for. All groups begin with the gathering of parameters outside of blocks (zero 3), and end
with the optimizer, then with the gathering of new parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Device
from shardwise.cost import adamw
from shardwise.schedules import Schedule, default_schedule, make
from shardwise.schedules.levels import KINDS as ORDER
from shardwise.schedules.levels import levels_of
from shardwise.simulation.play import Pass, play_backward, play_forward, play_weight
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import StageCost, UnitCost
from shardwise.simulation.times import Clock, Span
from shardwise.simulation.trace import trace_events
from shardwise.simulation.work import Floats

if TYPE_CHECKING:
    from shardwise.simulation.memory import MemoryUse

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
CAUSES = (
    "compute", "recompute", "collectives", "parameters", "bubble", "gradients", "optimizer",
    "update",
)  # fmt: skip
EXPOSED = ("collectives", "parameters", "gradients", "update")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What every group of ranks does when: the actions of its list, and what follows them."""

    step_time_s: float
    causes: Mapping[str, float]  # seconds of the group that ends last, by cause
    by_group: tuple[Mapping[str, float], ...] = field(repr=False)  # the same of every group
    busy: tuple[float, ...]  # seconds in which each group computes
    bubble_fraction: float
    schedule: Schedule = field(repr=False)
    starts: Floats = field(repr=False, compare=False)  # of all actions, group by group
    ends: Floats = field(repr=False, compare=False)
    after: tuple[Span, ...] = field(repr=False, default=())  # sums of gradients, the optimizer, …
    waits: Floats = field(repr=False, compare=False)  # of all actions, for parameters
    talks: Floats = field(repr=False, compare=False)  # of all actions, in collectives
    messages: Messages = field(repr=False, compare=False)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything that takes time, in the order in which it starts."""
        actions = [(g, a) for g, mine in enumerate(self.schedule.actions) for a in mine]
        found = [
            Span(
                group=group,
                lane="compute",
                name=str(action),
                start=float(start),
                end=float(end),
                kind=KINDS[action.kind],
                detail={"waiting_s": float(wait), "collectives_s": float(talk)},
            )
            for (group, action), start, end, wait, talk in zip(
                actions, self.starts, self.ends, self.waits, self.talks, strict=True
            )
        ]
        return tuple(sorted((*found, *self.after), key=lambda s: (s.start, s.group)))

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that nothing hides, of the group that ends last."""
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
        """Events in the form that chrome://tracing and Perfetto read, with groups' memory."""
        return {"traceEvents": trace_events(self, memory), "displayTimeUnit": "ms"}


def play_step(
    stages: Sequence[StageCost],
    setting: Setting,
    messages: Messages,
    devices: Sequence[Device],
) -> Timeline:
    """Play a step; `devices` are those of the slowest rank of each group."""
    schedule = setting.schedule or make(
        default_schedule(len(stages), len(setting.groups)),
        num_groups=len(setting.groups),
        num_microbatches=setting.num_microbatches,
        num_stages=len(stages),
    )
    return _Play(stages, setting, devices, schedule).run(messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Of a message from each stage to the next: its seconds, and those in which no other leaves.

    Parameters that groups share are sent once a step: gradients home, new values back (`tied`).
    """

    seconds: Floats
    occupied: Floats
    tied: Mapping[tuple[int, int], float] = field(default_factory=dict)  # home, other: seconds

    @staticmethod
    def of(
        stages: Sequence[StageCost],
        setting: Setting,
        clock: Clock,
        tied: Mapping[tuple[int, int], float],
    ) -> Messages:
        """On the links between the stages' groups; `tied` are bytes."""
        found = np.zeros((2, len(stages)))
        for stage, following in pairwise(stages):
            here, there = setting.groups[stage.group], setting.groups[following.group]
            if here is not there and stage.send_bytes:
                model = clock.collective("send", pairs(here.array, there.array))
                seconds = model.seconds(stage.send_bytes)
                found[:, stage.index] = seconds, seconds - model.seconds(0.0)
        shared = {}
        for (home, other), num_bytes in tied.items():
            rows = pairs(setting.groups[home].array, setting.groups[other].array)
            shared[home, other] = clock.collective("send", rows).seconds(num_bytes)
        return Messages(seconds=found[0], occupied=found[1], tied=shared)


class _Play:
    """The passes of all stages, the order of actions, and what follows them."""

    def __init__(
        self,
        stages: Sequence[StageCost],
        setting: Setting,
        devices: Sequence[Device],
        schedule: Schedule,
    ) -> None:
        self.stages, self.setting, self.devices = stages, setting, devices
        self.levels = levels_of(schedule)
        self.after: list[Span] = []

    def run(self, messages: Messages) -> Timeline:
        levels, count = self.levels, len(self.stages)
        passes = self._passes()
        key = (levels.kind * count + levels.stage) * 2 + levels.last
        seconds = _column(passes, "seconds", count)[key]
        waits = _column(passes, "waiting", count)[key]
        roots = self._roots()
        starts, ends = levels.play(seconds, messages.seconds, roots, messages.occupied)
        groups = len(self.setting.groups)
        busy = np.bincount(levels.group, weights=seconds, minlength=groups)
        summed, computed_by, causes = [], [], []
        for group in range(groups):
            mine = levels.group == group
            spent = self._causes(key[mine], passes)
            computed = float(ends[mine].max(initial=0.0))
            root = min(float(roots[group]), float(starts[mine].min(initial=computed)))
            spent["parameters"] += root
            spent["bubble"] = computed - float(busy[group]) - root
            left = self._sums(group, np.flatnonzero(mine & levels.last), ends, passes, computed)
            summed.append(max(left, computed))
            computed_by.append(computed)
            causes.append(spent)
        finished = self._ends(messages, summed, computed_by, causes)
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
            waits=waits,
            talks=self._talks(),
            messages=messages,
        )

    def _talks(self) -> Floats:
        """Seconds of collectives in every action."""
        forward = np.array([stage.forward_talk for stage in self.stages])
        backward = np.array([stage.backward_talk for stage in self.stages])
        by_kind = np.stack([{"F": forward, "W": 0.0 * forward}.get(k, backward) for k in ORDER])
        found: Floats = by_kind[self.levels.kind, self.levels.stage]
        return found

    def _roots(self) -> Floats:
        """When every group has what it gathers before its first action."""
        found = np.zeros(len(self.setting.groups))
        for stage in self.stages:
            found[stage.group] += stage.root_gather
        return found

    def _passes(self) -> dict[int, tuple[str, Pass]]:
        """By kind, stage and whether gradients become complete: what such an action takes."""
        levels, count = self.levels, len(self.stages)
        found: dict[int, tuple[str, Pass]] = {}
        same: dict[object, Pass] = {}
        for key in np.unique((levels.kind * count + levels.stage) * 2 + levels.last).tolist():
            kind, stage, last = ORDER[key // 2 // count], key // 2 % count, bool(key % 2)
            cost = self.stages[stage]
            units, device = cost.units, self.devices[cost.group]
            alike = (kind, last, id(device), tuple(map(_figures, units)))
            if alike not in same:
                lost = {"loss": device.overlap_loss, "shared": device.kind == "cpu"}
                if kind == "F":
                    same[alike] = play_forward(units, **lost)
                elif kind == "W":
                    same[alike] = play_weight(units, reduce=last, **lost)
                else:
                    same[alike] = play_backward(units, reduce=last, weight=kind == "B", **lost)
            found[key] = (kind, same[alike])
        return found

    def _causes(
        self, keys: NDArray[np.int64], passes: Mapping[int, tuple[str, Pass]]
    ) -> dict[str, float]:
        """What a group's actions are made of."""
        mine: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        numbers, counts = np.unique(keys, return_counts=True)
        for key, times in zip(numbers.tolist(), counts.tolist(), strict=True):
            kind, spent = passes[key]
            stage = self.stages[key // 2 % len(self.stages)]
            rest = spent.seconds - spent.waiting
            mine["parameters"] += times * spent.waiting
            if kind != "W":
                talk = stage.forward_talk if kind == "F" else stage.backward_talk
                again = 0.0 if kind == "F" else stage.again
                mine["collectives"] += times * talk
                mine["recompute"] += times * again
                rest -= talk + again
            mine["compute"] += times * max(0.0, rest)
        return mine

    def _sums(
        self,
        group: int,
        actions: NDArray[np.int64],
        ends: Floats,
        passes: Mapping[int, tuple[str, Pass]],
        computed: float,
    ) -> float:
        """When the sums of gradients that backward leaves are done."""
        left, count = computed, len(self.stages)
        for at in actions.tolist():
            key = int((self.levels.kind[at] * count + self.levels.stage[at]) * 2 + 1)
            spent = passes[key][1]
            if spent.left:
                left = max(left, float(ends[at])) + spent.left
                name = f"gradients of stage {int(self.levels.stage[at])}"
                self._add(group, "communication", name, left - spent.left, left, "sync")
        return left

    def _ends(
        self,
        messages: Messages,
        summed: Sequence[float],
        computed: Sequence[float],
        causes: Sequence[dict[str, float]],
    ) -> list[float]:
        """When every group is done: shared gradients, the optimizer, shared values."""
        ready = self._exchanged(messages, summed, "gradients of shared parameters", "sync")
        updated = []
        for group, (start, spent) in enumerate(zip(ready, causes, strict=True)):
            spent["gradients"] = start - computed[group]
            updated.append(self._finish(group, start, spent))
        found = self._exchanged(messages, updated, "new values of shared parameters", "gather")
        for before, after, spent in zip(updated, found, causes, strict=True):
            spent["update"] += after - before
        return found

    def _exchanged(
        self, messages: Messages, times: Sequence[float], name: str, kind: str
    ) -> list[float]:
        """When groups have sent each other what they share, from when each of them can."""
        found = list(times)
        for (home, other), seconds in messages.tied.items():
            start = max(found[home], found[other])
            for group in (home, other):
                found[group] = start + seconds
                self._add(group, "communication", name, start, start + seconds, kind)
        return found

    def _finish(self, group: int, start: float, mine: dict[str, float]) -> float:
        """The optimizer's step, and the new parameters; when all is done."""
        stages = [s for s in self.stages if s.group == group]
        seconds = sum(update_seconds(s, self.setting, self.devices[group]) for s in stages)
        gather = sum(stage.update_gather for stage in stages)
        if self.setting.prefetch:  # hidden behind the next forward, as far as that lasts
            gather = max(0.0, gather - sum(stage.forward for stage in stages))
        mine["optimizer"], mine["update"] = seconds, gather
        end = start + seconds
        self._add(group, "compute", "optimizer", start, end, "optimizer")
        if gather:
            self._add(group, "communication", "new parameters", end, end + gather, "gather")
        return end + gather

    def _add(self, group: int, lane: str, name: str, start: float, end: float, kind: str) -> None:
        self.after.append(Span(group=group, lane=lane, name=name, start=start, end=end, kind=kind))


def _figures(unit: UnitCost) -> tuple[float, ...]:
    return (unit.forward, unit.backward, unit.weight, unit.gather, unit.reduce)


def _column(passes: Mapping[int, tuple[str, Pass]], name: str, stages: int) -> Floats:
    found = np.zeros(len(ORDER) * stages * 2)
    for key, (_, spent) in passes.items():
        found[key] = getattr(spent, name)
    return found


def update_seconds(stage: StageCost, setting: Setting, device: Device) -> float:
    """Return the time of the optimizer's step.

    Where its state is in host memory, it travels to the device and back.
    """
    size = 8 if setting.precision.master == "float64" else adamw.WORD_BYTES
    if stage.update_s is not None:
        seconds = stage.update_s
    else:
        per_tensor = 1 if device.kind != "cpu" else stage.tensors
        calls = adamw.FUSED_CALLS * (per_tensor if stage.numel else 0)
        seconds = adamw.fused_seconds(stage.numel, device, calls=calls, word_bytes=size)
    if "optimizer" in setting.offload or "parameters" in setting.offload:
        seconds += 2.0 * size * stage.numel / device.host_bytes_per_s
    return seconds


def pairs(here: NDArray[np.int64], there: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who sends to whom, where one group has more ranks than the other."""
    numbers = np.arange(max(len(here), len(there)))
    left = here[numbers * len(here) // len(numbers)]
    right = there[numbers * len(there) // len(numbers)]
    return np.stack([left, right], axis=1)
