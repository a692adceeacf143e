"""The peak memory of a rank of every group over a step, and the memory that its device has.

A micro-batch's forward saves tensors for its backward, which frees them node by node while
gradients of values come and go (`liveness`) and gradients of parameters appear (`pass_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from shardwise.cluster import Device
from shardwise.schedules import Action, Schedule
from shardwise.simulation.pass_memory import PARTS, PassPeak, StageMemory

# ------------------------------------------------------------ budget
#
# Not all memory of a device is for tensors: the driver and the process take some (`reserved_gib` of
# the cluster file, with one communicator), as do workspaces of libraries, buffers of further
# communicators, and the gaps that torch's allocator leaves between tensors. A plan fits if its
# predicted peak is within `limit_bytes`.

# NCCL's buffers on each device for every further communicator: 24 channels, each with three
# connections of 4 MiB (NCCL_BUFFSIZE) + 4.7 MiB (LL128) + 0.5 MiB (LL). Others measured on A100:
# 544 MB for two devices, 688 MB for more (github.com/NVIDIA/nccl/issues/964).
COMMUNICATOR_BYTES = 24 * 3 * int(9.2 * 2**20)

# Workspaces of cuBLAS and cuBLASLt, as torch sets them on Hopper, where they are largest; 62 MiB
# were measured.
WORKSPACE_BYTES = 2 * (32 << 20)

# Memory that the allocator needs beyond its tensors with expandable segments (`runtime.memory`):
# a fraction of the tensors, and a constant. Of 15 ranks on one H200 that were given 3% more than
# the predicted peak, 13 ran through (`benchmarks.memory`); of the others, one was predicted 2.7%
# too low, one needed a little more. The constant is there because the gaps do not shrink with the
# plan: two ranks of 5.5 and 5.8 GiB did not run in 5% more than their predicted peak, but do with
# another half GiB; with room to spare they took 0.61 and 0.75 GiB more.
ALLOCATOR_FRACTION, ALLOCATOR_BYTES = 0.05, 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of one device, and the parts of it that are not for tensors."""

    memory_bytes: float
    reserved_bytes: float
    communicators_bytes: float = 0.0
    allocator_fraction: float = 0.0  # of the tensors' bytes, for gaps between them
    allocator_bytes: float = 0.0  # for gaps, in addition

    @classmethod
    def of(cls, device: Device, communicators: int = 1) -> Budget:
        """Return the budget of a rank on `device` with this many communicators."""
        if device.kind != "cuda":  # gloo's buffers are small, and the system allocates memory
            return cls(memory_bytes=device.memory_bytes, reserved_bytes=device.reserved_bytes)
        return cls(
            memory_bytes=device.memory_bytes,
            reserved_bytes=device.reserved_bytes + WORKSPACE_BYTES,
            communicators_bytes=float(max(0, communicators - 1) * COMMUNICATOR_BYTES),
            allocator_fraction=ALLOCATOR_FRACTION,
            allocator_bytes=ALLOCATOR_BYTES,
        )

    @property
    def limit_bytes(self) -> float:
        """The maximum bytes of tensors."""
        free = self.memory_bytes - self.reserved_bytes - self.communicators_bytes
        return max(free - self.allocator_bytes, 1.0) / (1 + self.allocator_fraction)

    def taken(self, peak_bytes: float) -> float:
        """Return the bytes that the allocator reserves for this many bytes of tensors."""
        return peak_bytes * (1 + self.allocator_fraction) + self.allocator_bytes

    def others(self) -> dict[str, float]:
        """Return the bytes of the device that are not for tensors, by their owner."""
        return {
            "process": self.reserved_bytes,
            "communicators": self.communicators_bytes,
            "allocator": self.limit_bytes * self.allocator_fraction + self.allocator_bytes,
        }


STORED = ("group", "peak_bytes", "limit_bytes", "parts", "when", "others", "host_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The bytes of one rank's tensors at their peak, by purpose, and the limit of its device.

    `simulate(...).memory` estimates the fullest rank of every group of ranks; a compiled program's
    `memory(rank)` runs that rank without data. `parts` are parameters, gradients, optimizer,
    activations and temporary. `activations_peak_bytes` is the maximum that is saved for backward at
    any time, which need not be when the total is highest. `others` is memory of the device that is
    not for tensors (`Budget`).
    """

    group: int
    rank: int | None = None  # None: the fullest of the group
    peak_bytes: float
    limit_bytes: float = math.inf
    parts: Mapping[str, float]
    activations_peak_bytes: float = 0.0
    when: str  # an action of the schedule, such as "0B3", or "optimizer"
    over_time: tuple[tuple[str, float], ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    host_bytes: float = 0.0  # of host memory, with offload
    host_parts: Mapping[str, float] = field(default_factory=dict)
    host_limit_bytes: float = math.inf

    @property
    def fits(self) -> bool:
        return self.fullness <= 1

    @property
    def fullness(self) -> float:
        """Required over available bytes of the scarcer memory, device or host."""
        return max(self.peak_bytes / self.limit_bytes, self.host_bytes / self.host_limit_bytes)

    @property
    def is_host_bound(self) -> bool:
        """Whether host memory is scarcer than device memory."""
        return self.host_bytes / self.host_limit_bytes > self.peak_bytes / self.limit_bytes

    @property
    def headroom_bytes(self) -> float:
        return self.limit_bytes - self.peak_bytes

    def __str__(self) -> str:
        whose = f"group {self.group}" if self.rank is None else f"rank {self.rank}"
        names = {"optimizer": "optimizer state"}
        rows = [(names.get(part, part), size) for part, size in self.parts.items()]
        rows += [("peak", self.peak_bytes), ("activations at most", self.activations_peak_bytes)]
        lines = [f"memory of {whose}, highest in {self.when}"]
        return "\n".join([*lines, *(f"  {n:20} {s / 2**20:>8,.1f} MiB" for n, s in rows)])

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without limits for a rank that was run without data."""
        of_rank = ("rank", "peak_bytes", "parts", "activations_peak_bytes", "when")
        names = STORED if self.rank is None else of_rank
        return {name: getattr(self, name) for name in names}


def group_memory(
    number: int, stages: Mapping[int, StageMemory], schedule: Schedule, device: Device
) -> MemoryUse:
    """Return the peak of a group's rank over its actions and the optimizer step."""
    actions = schedule.actions[number]
    memory = _RankMemory(stages, actions)
    peak: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    when = ""
    over_time: list[tuple[str, float]] = []
    host: dict[str, float] = {}
    activations_peak = 0.0
    for action, following in zip_longest(actions, actions[1:]):
        parts = memory.at(action, following)
        memory.after(action)
        if memory.uses_host:
            host = max(host, memory.on_host(), key=lambda parts: sum(parts.values()))
        activations_peak = max(activations_peak, parts["activations"])
        total = sum(parts.values())
        over_time.append((str(action), total))
        if total > sum(peak.values()):
            peak, when = parts, str(action)
    parts = memory.updating(device)
    if sum(parts.values()) > sum(peak.values()):
        peak, when = parts, "optimizer"
    budget = Budget.of(device, num_communicators(stages.values(), schedule, number))
    return MemoryUse(
        group=number,
        peak_bytes=sum(peak.values()),
        limit_bytes=budget.limit_bytes,
        parts=peak,
        activations_peak_bytes=activations_peak,
        when=when,
        over_time=tuple(over_time),
        others=budget.others(),
        host_bytes=sum(host.values()),
        host_parts=host,
        host_limit_bytes=float(device.host_memory_bytes) or math.inf,  # 0 means unknown
    )


def num_communicators(stages: Iterable[StageMemory], schedule: Schedule, number: int) -> int:
    """Count a rank's communicators: of mesh axes, of all ranks, and with neighbouring groups."""
    axes = {axes for stage in stages for axes in stage.communicating_axes}
    neighbours = {
        schedule.placement[at + step]
        for at, group in enumerate(schedule.placement)
        for step in (-1, 1)
        if group == number and 0 <= at + step < len(schedule.placement)
    }
    return 1 + len(axes) + len(neighbours - {number})


class _RankMemory:
    """The memory of a rank while it runs its actions."""

    def __init__(self, stages: Mapping[int, StageMemory], actions: Sequence[Action]) -> None:
        self.stages = stages
        self.flying = dict.fromkeys(stages, 0)  # micro-batches between forward and backward
        self.waiting = dict.fromkeys(stages, 0)  # between the halves of backward
        self.begun: set[int] = set()  # stages with gradients of parameters
        self.done: set[int] = set()  # stages whose gradients are reduced
        self.split = any(a.kind == "I" for a in actions)
        self.last = {a.stage: a for a in actions if a.kind in "BW"}
        self.sent = 0.0
        self.always = {
            "parameters": sum(s.static.parameters for s in stages.values()),
            "optimizer": sum(s.static.optimizer for s in stages.values()),
        }
        self.between = max((s.batch for s in stages.values()), default=0.0)
        self.fixed = self.between + sum(s.root for s in stages.values())
        self.uses_host = any(s.static.host or s.offloaded for s in stages.values())
        self._known: dict[object, dict[str, float]] = {}

    def at(self, action: Action, following: Action | None) -> dict[str, float]:
        """Return the parts of memory at the peak of an action; equal states are computed once."""
        passing = self.sent
        if following is not None:  # its input is received ahead of it
            stage = self.stages[following.stage]
            arriving = {"F": stage.received, "B": stage.sends, "I": stage.sends}
            passing += arriving.get(following.kind, 0.0)
        key = (action.kind, action.stage, self._is_last(action), passing, len(self.begun),
               len(self.done), *self.flying.values(), *self.waiting.values())  # fmt: skip
        if key not in self._known:
            self._known[key] = self._parts(action, passing)
        return self._known[key]

    def _parts(self, action: Action, passing: float) -> dict[str, float]:
        stage = self.stages[action.stage]
        saved = sum(n * self.stages[s].saved for s, n in self.flying.items())
        saved += sum(n * self.stages[s].waiting for s, n in self.waiting.items())
        gradients = sum(self._gradients(s) for s in self.stages if s != action.stage)
        if action.kind != "F":
            saved -= stage.waiting if action.kind == "W" else stage.saved
        if action.kind in "FI":
            peak, gradients = stage.peak(action.kind), gradients + self._gradients(action.stage)
        else:
            peak = self._backward(action, stage)
        return {
            **self.always,
            "gradients": gradients + peak.gradients,
            "activations": saved + peak.saved,
            "temporary": self.fixed + peak.rest + passing,
        }

    def _backward(self, action: Action, stage: StageMemory) -> PassPeak:
        """Return the peak of a backward: gradients may exist before it, and be reduced in it."""
        is_last = self._is_last(action)
        begun = action.stage in self.begun
        kind = ("last" if is_last else "middle") if begun else ("only" if is_last else "first")
        if action.kind == "B" and self.split:
            return max(stage.peak("I"), stage.peak("W", kind), key=lambda peak: peak.total)
        return stage.peak(action.kind, kind)

    def _is_last(self, action: Action) -> bool:
        """Return whether an action completes the gradients of its stage."""
        return self.last.get(action.stage) is action

    def _gradients(self, stage: int) -> float:
        static = self.stages[stage].static
        if stage in self.done:
            return static.reduced
        return static.gradients if stage in self.begun else 0.0

    def after(self, action: Action) -> None:
        """Update the state after an action."""
        stage = self.stages[action.stage]
        self.sent = {"F": stage.sends, "B": stage.received, "I": stage.received}.get(action.kind, 0)
        if action.kind == "F":
            self.flying[action.stage] += 1
        elif action.kind in "BI":
            self.flying[action.stage] -= 1
            self.waiting[action.stage] += action.kind == "I"
        else:
            self.waiting[action.stage] -= 1
        if action.kind in "BW":
            self.begun.add(action.stage)
            if self._is_last(action):
                self.done.add(action.stage)

    def on_host(self) -> dict[str, float]:
        """Return the bytes in host memory between actions."""
        return {
            "states": sum(s.static.host for s in self.stages.values()),
            "activations": sum(n * self.stages[s].offloaded for s, n in self.flying.items()),
        }

    def updating(self, device: Device) -> dict[str, float]:
        """Return the parts of memory during the optimizer step.

        On GPUs AdamW needs another copy of all parameters at once (`foreach` is torch's default
        there), on CPUs two copies of one tensor after the other.
        """
        if device.kind == "cuda":
            copies = sum(s.static.updated for s in self.stages.values())
        else:
            copies = 2 * max((s.static.largest for s in self.stages.values()), default=0.0)
        return {
            **self.always,
            "gradients": sum(s.static.reduced for s in self.stages.values()),
            "activations": 0.0,
            "temporary": copies + self.between,
        }


def peak_of(uses: Sequence[MemoryUse]) -> MemoryUse:
    """Return the memory of the group that is fullest."""
    return max(uses, key=lambda use: use.fullness)
