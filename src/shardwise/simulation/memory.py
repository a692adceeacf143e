"""How much memory a rank of every group needs, by liveness over a step.

Enters: what every position keeps and needs, the stages, and the order of actions. Leaves:
`MemoryUse`: the most bytes at any action, of what they are made, and when.

A micro-batch's forward leaves what its backward needs; the backward frees it node by node while
gradients of values come and go. Recomputation keeps less and has one block's activations for the
time of its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cluster import Device
from shardwise.schedules import Action, Schedule
from shardwise.simulation.fold import Fold
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import Layers
from shardwise.simulation.times import Group
from shardwise.simulation.work import Floats

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
IN_FLIGHT_BYTES = 256 << 20  # sums of gradients that are under way at once (runtime.reducer)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The bytes of one rank of a group at their highest, and the limit of its device."""

    group: int
    peak_bytes: float
    limit_bytes: float
    parts: Mapping[str, float]
    when: str  # an action, or "optimizer"
    over_time: tuple[tuple[str, float], ...] = ()

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def headroom_bytes(self) -> float:
        return self.limit_bytes - self.peak_bytes

    def to_json(self) -> dict[str, object]:
        return {
            "group": self.group,
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "parts": dict(self.parts),
            "when": self.when,
        }


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one stage: what a micro-batch keeps, and the most it needs in a pass."""

    kept: float  # from forward to backward
    forward: float  # at most during forward, with what it keeps
    backward: float  # at most during backward, with what was kept
    static: Mapping[str, float]
    gathered: float  # parameters that are whole for the time of their use (zero 3)
    last: float  # copies of gradients on their way, in the last backward
    progressive: bool  # gradients appear during the only backward


def stage_memory(
    first: int, end: int, layers: Layers, group: Group, setting: Setting
) -> StageMemory:
    """The memory of the stage of positions `first:end` on a rank."""
    progressive = setting.microbatches == 1
    key = (first, end, setting.zero if progressive else None)
    if key not in layers.passes:
        layers.passes[key] = _passes(first, end, layers, setting)
    kept, forward, backward = layers.passes[key]
    static = dict.fromkeys(PARTS, 0.0)
    gathered, last = 0.0, 0.0
    for (axes, zero), share in layers.parameters(setting).items():
        numel = float(share.numel[end] - share.numel[first])
        ranks = group.along(axes).shape[-1]
        for part, size in _static(numel, share.itemsize, zero, ranks, setting).items():
            static[part] += size
        spans = layers.fold.runs(first, end)
        units = [float(share.numel[b] - share.numel[a]) for _, a, b in spans]
        if ranks > 1:
            most = max(units, default=0.0)
            wire = SIZES.get(setting.precision.reduce, _gradient(share.itemsize, setting))
            last += min(most * wire, IN_FLIGHT_BYTES)
        if zero == 3 and ranks > 1:
            root = sum(u for u, (name, _, _) in zip(units, spans, strict=True) if not name)
            inner = sorted(u for u, (name, _, _) in zip(units, spans, strict=True) if name)
            gathered += (root + sum(inner[-2:])) * share.itemsize
    if "activations" in setting.offload:
        kept = 0.1 * kept
    return StageMemory(kept, forward, backward, static, gathered, last, progressive)


def _gradient(itemsize: int, setting: Setting) -> int:
    precision = setting.precision
    return SIZES.get(precision.gradients or precision.master, itemsize)


def _static(
    numel: float, itemsize: int, zero: int, ranks: int, setting: Setting
) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state, between the first and last backward."""
    master = SIZES.get(setting.precision.master, itemsize)
    shard = numel / (ranks if zero else 1)
    parameters = shard * master if zero == 3 else numel * itemsize
    if zero < 3 and master != itemsize:
        parameters += shard * master
    state = 2.0 * shard * master
    if "parameters" in setting.offload:
        parameters, state = (0.0 if zero == 3 else numel * itemsize), 0.0
    elif "optimizer" in setting.offload:
        state = 0.0
        parameters -= shard * master if master != itemsize else 0.0
    gradient = numel * _gradient(itemsize, setting)
    if zero >= 2 and setting.microbatches == 1 and ranks > 1:
        gradient = gradient / ranks
    return {"parameters": parameters, "gradients": gradient, "optimizer": state}


def _passes(first: int, end: int, layers: Layers, setting: Setting) -> tuple[float, float, float]:
    """Kept by a micro-batch; the most during its forward, and during its backward."""
    work, fold = layers.work, layers.fold

    def cut(values: Floats) -> Floats:
        return fold.spread(values)[first:end]

    received = float(fold.spread(work.crossing)[first]) if first else 0.0
    saved = cut(work.saved)
    before = np.cumsum(saved) - saved
    mode = setting.recompute
    if mode == "none":
        kept, inside = np.cumsum(saved), np.zeros(end - first)
    else:
        name = "saved_selective" if mode == "selective" else "saved_full"
        kept = np.cumsum(cut(getattr(work, name)))
        starts = _block_starts(fold, first, end)
        inside = np.where(starts >= 0, before + saved - before[np.maximum(starts, 0)], 0.0)
    total = float(kept[-1]) if len(kept) else 0.0
    forward = kept + cut(work.unsaved) + cut(work.forward_extra)
    backward = kept + inside + cut(work.gradients) + cut(work.backward_extra)
    if setting.microbatches == 1:
        backward = backward + _gradients_after(first, end, layers, setting)
    return (
        received + total,
        received + float(forward.max(initial=0.0)),
        received + float(backward.max(initial=0.0)),
    )


def _gradients_after(first: int, end: int, layers: Layers, setting: Setting) -> Floats:
    """Gradients of parameters that exist when each position's backward runs."""
    found = np.zeros(end - first)
    for (_, zero), share in layers.parameters(setting).items():
        if zero < 2:
            left = share.numel[end] - share.numel[first:end]
            found += left * _gradient(share.itemsize, setting)
    return found


def _block_starts(fold: Fold, first: int, end: int) -> np.ndarray:
    """For each position the first one of its block in this stage; -1 outside of blocks."""
    found = np.full(end - first, -1)
    for name, a, b in fold.runs(first, end):
        if name:
            found[a - first : b - first] = a - first
    return found


def group_memory(
    number: int,
    stages: Mapping[int, StageMemory],
    schedule: Schedule,
    setting: Setting,
    device: Device,
) -> MemoryUse:
    """The peak of a group's rank over its list of actions, then over the optimizer's step."""
    static = {part: sum(s.static[part] for s in stages.values()) for part in PARTS}
    gathered = sum(s.gathered for s in stages.values())
    live = dict.fromkeys(stages, 0)
    last = {a.stage: a for a in schedule.actions[number] if a.kind in "BW"}
    peak, parts, when = 0.0, dict(static), ""
    over_time: list[tuple[str, float]] = []
    for action in schedule.actions[number]:
        stage = stages[action.stage]
        own = live[action.stage] - (action.kind != "F")
        kept = sum(n * stages[s].kept for s, n in live.items() if s != action.stage)
        kept += max(own, 0) * stage.kept
        need = _need(action, stage)
        need += gathered + (stage.last if last.get(action.stage) == action else 0.0)
        fixed = sum(static.values())
        if stage.progressive:
            fixed -= static["gradients"]
        at = fixed + kept + need
        over_time.append((str(action), at))
        if at > peak:
            mine = stage.kept if action.kind != "F" else min(stage.kept, need)
            peak, when = at, str(action)
            parts = static | {"activations": kept + mine, "temporary": need - mine}
        if action.kind == "F":
            live[action.stage] += 1
        elif action.kind in "BW":
            live[action.stage] -= 1
    temp = _optimizer_temporary(static, device)
    if sum(static.values()) + temp > peak:
        peak, when = sum(static.values()) + temp, "optimizer"
        parts = static | {"temporary": temp}
    return MemoryUse(
        group=number,
        peak_bytes=peak,
        limit_bytes=float(device.usable_bytes),
        parts=parts,
        when=when,
        over_time=tuple(over_time),
    )


def _need(action: Action, stage: StageMemory) -> float:
    if action.kind == "F":
        return stage.forward
    return stage.backward


def _optimizer_temporary(static: Mapping[str, float], device: Device) -> float:
    """What an AdamW step needs: on GPUs it works on all parameters at once, with one copy."""
    return static["optimizer"] / 2 if device.kind == "cuda" else 0.02 * static["optimizer"]


def peak_of(uses: Sequence[MemoryUse]) -> MemoryUse:
    """The group that is nearest to its limit, or the farthest beyond."""
    return max(uses, key=lambda use: use.peak_bytes / use.limit_bytes)
