"""One training step of all groups of ranks, played on the cluster.

Enters: the costs of all stages and a `Setting`. Leaves: `Timeline`: every action of the schedule
with its start and end, what travels meanwhile, and the optimizer's step.

Groups of equal ranks are played once. A result reaches another group after the time of its message;
a group's last backward starts the sums of its gradients, and what of them is left when it ends
is waited for. All groups end with the optimizer, then with the gathering of new parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.cluster import Device
from shardwise.schedules import Action, Schedule, make
from shardwise.schedules.order import Links, run_in_order
from shardwise.simulation.play import Pass, play_backward, play_forward, play_weight
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import StageCost
from shardwise.simulation.times import Clock, Span

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
CAUSES = (
    "compute", "recompute", "collectives", "parameters", "bubble", "gradients", "optimizer",
    "update",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What every group of ranks does when; `spans` in the order in which they start."""

    spans: tuple[Span, ...]
    step_time_s: float
    causes: Mapping[str, float]  # seconds of the group that ends last, by cause
    busy: tuple[float, ...]  # seconds in which each group computes
    bubble_fraction: float

    def to_json(self) -> dict[str, object]:
        return {
            "step_time_s": self.step_time_s,
            "causes": dict(self.causes),
            "busy_s": list(self.busy),
            "bubble_fraction": self.bubble_fraction,
        }

    def trace(self) -> dict[str, object]:
        """Events in the form that chrome://tracing and Perfetto read."""
        lanes = {"compute": 0, "communication": 1}
        events: list[dict[str, object]] = []
        for group in range(len(self.busy)):
            events.append(
                {
                    "ph": "M",
                    "name": "process_name",
                    "pid": group,
                    "args": {"name": f"group {group}"},
                }
            )
            events += [
                {"ph": "M", "name": "thread_name", "pid": group, "tid": t, "args": {"name": lane}}
                for lane, t in lanes.items()
            ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": span.group,
                "tid": lanes[span.lane],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": dict(span.detail),
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def play_step(
    stages: Sequence[StageCost], setting: Setting, clock: Clock, devices: Sequence[Device]
) -> Timeline:
    """Play a step; `devices` are those of the slowest rank of each group."""
    schedule = setting.schedule or make(
        "1f1b" if len(stages) == len(setting.groups) else "interleaved",
        groups=len(setting.groups),
        microbatches=setting.microbatches,
        stages=len(stages),
    )
    return _Play(stages, setting, clock, devices, schedule).run()


class _Play:
    """The passes of all stages, the order of actions, and what follows them."""

    def __init__(
        self,
        stages: Sequence[StageCost],
        setting: Setting,
        clock: Clock,
        devices: Sequence[Device],
        schedule: Schedule,
    ) -> None:
        self.stages, self.setting, self.clock = stages, setting, clock
        self.devices, self.schedule = devices, schedule
        self.last = _last_backwards(schedule)
        self.passes: dict[tuple[str, int, bool], Pass] = {}
        self.sends = [self._send(stage) for stage in stages]

    def run(self) -> Timeline:
        links = Links.of(len(self.stages))
        rows = run_in_order(
            self.schedule.actions, links, lambda a: self._pass(a).seconds, self._transfer
        )
        spans: list[Span] = []
        ends, causes = [], []
        for group, row in enumerate(rows):
            mine: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
            computed = row[-1].end if row else 0.0
            left = computed
            for span in row:
                spent = self._pass(span.action)
                self._account(span.action, spent, mine)
                spans.append(_span(group, span.action, span.start, span.end, spent))
                if spent.left:
                    left = max(left, span.end) + spent.left
                    spans.append(
                        Span(
                            group=group,
                            lane="communication",
                            name=f"gradients of {span.action}",
                            start=left - spent.left,
                            end=left,
                            kind="sync",
                        )  # fmt: skip
                    )
            mine["bubble"] = computed - sum(span.end - span.start for span in row)
            mine["gradients"] = max(0.0, left - computed)
            end = self._finish(group, max(left, computed), mine, spans)
            ends.append(end)
            causes.append(mine)
        step = max(ends)
        slowest = ends.index(step)
        busy = tuple(sum(s.end - s.start for s in row) for row in rows)
        return Timeline(
            spans=tuple(sorted(spans, key=lambda s: (s.start, s.group))),
            step_time_s=step,
            causes=causes[slowest],
            busy=busy,
            bubble_fraction=sum(1 - b / step for b in busy) / len(busy) if step else 0.0,
        )

    def _pass(self, action: Action) -> Pass:
        last = self.last.get(action.stage) == action
        key = (action.kind, action.stage, last)
        if key not in self.passes:
            units = self.stages[action.stage].units
            device = self.devices[self.stages[action.stage].group]
            lost: dict[str, Any] = {"loss": device.overlap_loss, "shared": device.kind == "cpu"}
            if action.kind == "F":
                found = play_forward(units, **lost)
            elif action.kind == "W":
                found = play_weight(units, reduce=last, **lost)
            else:
                found = play_backward(units, reduce=last, weight=action.kind == "B", **lost)
            self.passes[key] = found
        return self.passes[key]

    def _send(self, stage: StageCost) -> float:
        """Seconds of the message to the next stage."""
        if stage.index + 1 == len(self.stages) or not stage.send_bytes:
            return 0.0
        here = self.setting.groups[stage.group]
        there = self.setting.groups[self.stages[stage.index + 1].group]
        if here is there:
            return 0.0
        pairs = _pairs(here.ranks, there.ranks)
        return self.clock.collective("send", pairs).seconds(stage.send_bytes)

    def _transfer(self, need: Action, action: Action) -> float:
        first, second = sorted((need.stage, action.stage))
        return sum(self.sends[first:second])

    def _account(self, action: Action, spent: Pass, mine: dict[str, float]) -> None:
        stage = self.stages[action.stage]
        mine["parameters"] += spent.waiting
        rest = spent.seconds - spent.waiting
        if action.kind != "W":
            talk = sum(unit.talk for unit in stage.units) / 2
            again = sum(u.again for u in stage.units) if action.kind in "BI" else 0.0
            mine["collectives"] += talk
            mine["recompute"] += again
            rest -= talk + again
        mine["compute"] += max(0.0, rest)

    def _finish(self, group: int, start: float, mine: dict[str, float], spans: list[Span]) -> float:
        """The optimizer's step, and the new parameters; when all is done."""
        stages = [s for s in self.stages if s.group == group]
        seconds = sum(update_seconds(s, self.setting, self.devices[group]) for s in stages)
        gather = sum(stage.update_gather for stage in stages)
        if self.setting.prefetch:  # hidden behind the next forward, as far as that lasts
            gather = max(0.0, gather - sum(stage.forward for stage in stages))
        mine["optimizer"], mine["update"] = seconds, gather
        spans.append(
            Span(
                group=group,
                lane="compute",
                name="optimizer",
                start=start,
                end=start + seconds,
                kind="optimizer",
            )  # fmt: skip
        )
        if gather:
            spans.append(
                Span(
                    group=group,
                    lane="communication",
                    name="new parameters",
                    start=start + seconds,
                    end=start + seconds + gather,
                    kind="gather",
                )  # fmt: skip
            )
        return start + seconds + gather


def update_seconds(stage: StageCost, setting: Setting, device: Device) -> float:
    """AdamW: reads the parameter, its gradient and two states, writes all but the gradient.

    Where the optimizer's state is in host memory, it travels to the device and back.
    """
    size = 8 if setting.precision.master == "float64" else 4
    num_bytes = 7.0 * size * stage.numel
    per_tensor = 1 if device.kind != "cpu" else stage.tensors
    seconds = num_bytes / device.memory_rate(max(num_bytes, 1.0)) + 12 * device.overhead_s * (
        per_tensor if stage.numel else 0
    )
    if "optimizer" in setting.offload or "parameters" in setting.offload:
        seconds += 2.0 * size * stage.numel / device.host_bytes_per_s
    return seconds


def _span(group: int, action: Action, start: float, end: float, spent: Pass) -> Span:
    return Span(
        group=group,
        lane="compute",
        name=str(action),
        start=start,
        end=end,
        kind=KINDS[action.kind],
        detail={"waiting_s": spent.waiting, "talking_s": spent.talking},
    )


def _last_backwards(schedule: Schedule) -> dict[int, Action]:
    """The action of every stage in which its gradients become complete."""
    found: dict[int, Action] = {}
    for mine in schedule.actions:
        for action in mine:
            if action.kind in "BW":
                found[action.stage] = action
    return found


def _pairs(here: Sequence[int], there: Sequence[int]) -> object:
    import numpy as np

    count = max(len(here), len(there))
    left = [here[i * len(here) // count] for i in range(count)]
    right = [there[i * len(there) // count] for i in range(count)]
    return np.array([left, right], dtype=np.int64).T
