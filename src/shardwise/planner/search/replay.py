"""A simulated step as data, and that data as a step again.

Enters: an `Estimate`. Leaves: a few mappings for a plan's `search`: equal units once, seconds of
messages and of the optimizer. `replay` plays them again, without the model and the cluster, and
gives back the same `Timeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import numpy as np

from shardwise.cluster import Device
from shardwise.cluster.device import Curve
from shardwise.cost import adamw
from shardwise.errors import PlanError
from shardwise.messages.ranks import format_ranks
from shardwise.plans import Plan
from shardwise.plans.plan import decisions
from shardwise.program.pipeline import plan_schedule
from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.play import play_forward
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import StageCost, UnitCost
from shardwise.simulation.step import Messages, Timeline, play_step
from shardwise.simulation.times import Group

TIMES = (
    "forward",
    "backward",
    "weight",
    "forward_talk",
    "backward_talk",
    "again",
    "gather",
    "reduce",
)
SAME = 1e-10  # relative difference up to which two units are one
DIGITS = 12
PLAYED = 1e-6  # relative difference up to which a step that is played again is the same
MOMENTS = 64  # of memory over time, at most


# ------------------------------------------------------------ to data


def step_json(estimate: Estimate, setting: Setting, evaluator: Evaluator) -> dict[str, Any]:
    """`units`, `stages` and `groups` of a plan's `search`; `tied` where groups share parameters."""
    units: list[dict[str, float]] = []
    messages = estimate.timeline.messages
    stages = [
        {
            "group": stage.group,
            "units": _runs([_known(units, unit) for unit in stage.units]),
            "forward_s": _short(stage.forward),
            "backward_s": _short(stage.backward),
            "send_s": _short(float(messages.seconds[stage.index])),
            "send_wire_s": _short(float(messages.occupied[stage.index])),
            "send_bytes": stage.send_bytes,
            "numel": stage.numel,
            "tensors": stage.tensors,
            "update_gather_s": _short(stage.update_gather),
            "root_gather_s": _short(stage.root_gather),
        }
        for stage in estimate.stages
    ]
    groups = [
        {
            "ranks": format_ranks(group.ranks),
            "optimizer_s": _short(_optimizer(estimate, number)),
            **_slowest(number, estimate, setting, evaluator),
            "memory": memory_json(estimate.memory[number]),
        }
        for number, group in enumerate(setting.groups)
    ]
    tied = [
        {"home": home, "other": other, "send_s": _short(seconds)}
        for (home, other), seconds in messages.tied.items()
    ]
    return {"units": units, "stages": stages, "groups": groups, **({"tied": tied} if tied else {})}


def memory_json(use: MemoryUse) -> dict[str, Any]:
    """A group's memory, with the most of every part of its time."""
    sizes = [size for _, size in use.over_time]
    text = " ".join(f"{size / 2**30:.4g}" for size in _sampled(sizes))
    return {**use.to_json(), "over_time_gib": text}


def moments(use: MemoryUse) -> list[float]:
    """Bytes over time: each action's, or the most of several; last the optimizer's, if highest."""
    sizes = [size for _, size in use.over_time]
    return [*_sampled(sizes), *([use.peak_bytes] if use.when == "optimizer" else [])]


def _sampled(sizes: Sequence[float]) -> list[float]:
    step = -(-len(sizes) // MOMENTS) or 1
    return [max(sizes[at : at + step]) for at in range(0, len(sizes), step)]


def _known(units: list[dict[str, float]], unit: UnitCost) -> int:
    """The number of a unit among those with other figures; a new one is added."""
    mine = {f"{name}_s": value for name in TIMES if (value := _short(getattr(unit, name)))}
    for number, known in enumerate(units):
        if known.keys() == mine.keys() and all(
            isclose(known[k], mine[k], rel_tol=SAME) for k in mine
        ):
            return number
    units.append(mine)
    return len(units) - 1


def _runs(numbers: Sequence[int]) -> str:
    """Numbers with counts.

    >>> _runs([0, 1, 1, 1, 2])
    '0 1x3 2'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][0] == number:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return " ".join(str(n) if count == 1 else f"{n}x{count}" for n, count in found)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _optimizer(estimate: Estimate, group: int) -> float:
    spans = estimate.timeline.spans
    return sum(s.end - s.start for s in spans if s.group == group and s.kind == "optimizer")


def _slowest(
    number: int, estimate: Estimate, setting: Setting, evaluator: Evaluator
) -> dict[str, Any]:
    """Of the device that was played: whether its ranks share cores with messages, and its loss."""
    kinds = {int(evaluator.kind[rank]) for rank in setting.groups[number].ranks}
    known = sorted({(d.kind, d.overlap_loss) for d in (evaluator.devices[k] for k in kinds)})
    span = next(
        (s for s in estimate.timeline.spans if s.group == number and s.kind == "forward"), None
    )
    stage = next((s for s in estimate.stages if s.group == number), None)

    def error(device: tuple[str, float]) -> float:
        if span is None or stage is None:
            return 0.0
        played = play_forward(stage.units, device[1], shared=device[0] == "cpu")
        return abs(played.seconds - (span.end - span.start))

    kind, loss = min(known, key=error) if len(known) > 1 else known[0]
    return {"kind": kind, "overlap_loss": loss}


# ------------------------------------------------------------ and back


def sealed(plan: Plan) -> Plan:
    """The plan with a digest of its decisions, by which an edited one is recognized."""
    return plan.with_(search={**plan.search, "decisions": decisions(plan)})


def replay(plan: Plan) -> Estimate:
    """The step that was simulated when the plan was made."""
    if not plan.search:
        raise PlanError(
            f"the plan {plan.name!r} was not searched for, so it holds no figures",
            hint="shardwise simulate plan.json model.py:build --cluster c.yaml",
        )
    if plan.search.get("decisions", decisions(plan)) != decisions(plan):
        raise PlanError(
            f"the plan {plan.name!r} was changed after it was made: its figures are another plan's",
            hint="shardwise simulate plan.json model.py:build --cluster c.yaml",
        )
    try:
        return _replay(plan, plan.search)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PlanError(
            f"the figures of the plan {plan.name!r} are damaged: {type(error).__name__}: {error}",
            where="search",
            hint="shardwise plan makes them again",
        ) from None


def _replay(plan: Plan, search: Mapping[str, Any]) -> Estimate:
    units = [
        UnitCost(name="", first=0, end=0, **{n: row.get(f"{n}_s", 0.0) for n in TIMES})
        for row in search["units"]
    ]
    stages = [_stage(index, row, units) for index, row in enumerate(search["stages"])]
    groups = search["groups"]
    if len(groups) != len(plan.groups) or len(stages) != len(plan.all_stages):
        raise ValueError(f"{len(stages)} stages of {len(groups)} groups")
    meshes = {stage.ranks: stage.mesh for stage in plan.all_stages}
    setting = Setting(
        groups=tuple(Group(mesh=meshes[ranks], ranks=ranks) for ranks in plan.groups),
        cuts=(0,) * len(stages),
        placement=tuple(stage.group for stage in stages),
        schedule=plan_schedule(plan),
        num_microbatches=plan.num_microbatches,
    )
    timeline = play_step(
        _in_seconds(stages, search),
        setting,
        _messages(search),
        [_device(row["kind"], row["overlap_loss"]) for row in groups],
    )
    return Estimate(
        timeline=_as_found(timeline, search["best"]),
        memory=tuple(read_memory(row["memory"]) for row in groups),
        stages=tuple(stages),
        rows=search["best"]["rows"],
        num_ranks=plan.num_ranks,
    )


def _as_found(timeline: Timeline, best: Mapping[str, Any]) -> Timeline:
    """The timeline with the very figures of the search, of which the file's have fewer digits."""
    found = {name: best[name] for name in ("step_time_s", "causes", "bubble_fraction")}
    same = isclose(found["step_time_s"], timeline.step_time_s, rel_tol=PLAYED)
    return replace(timeline, **found) if same else timeline


def read_memory(data: Mapping[str, Any]) -> MemoryUse:
    """What `memory_json` wrote."""
    over_time = tuple(("", float(size) * 2**30) for size in data["over_time_gib"].split())
    return MemoryUse(
        group=data["group"],
        peak_bytes=float(data["peak_bytes"]),
        limit_bytes=float(data["limit_bytes"]),
        parts={name: float(size) for name, size in data["parts"].items()},
        when=data["when"],
        over_time=over_time,
        others={name: float(size) for name, size in data.get("others", {}).items()},
        host_bytes=float(data.get("host_bytes", 0.0)),
    )


def _stage(index: int, row: Mapping[str, Any], units: Sequence[UnitCost]) -> StageCost:
    mine: list[UnitCost] = []
    for run in row["units"].split():
        number, _, count = run.partition("x")
        mine += [units[int(number)]] * int(count or 1)
    return StageCost(
        index=index,
        group=int(row["group"]),
        units=tuple(mine),
        send_bytes=float(row["send_bytes"]),
        numel=float(row["numel"]),
        tensors=int(row["tensors"]),
        update_gather=float(row["update_gather_s"]),
        root_gather=float(row.get("root_gather_s", 0.0)),
    )


def _in_seconds(stages: Sequence[StageCost], search: Mapping[str, Any]) -> list[StageCost]:
    """Stages for devices that move a byte in a second: the optimizer's bytes.

    The first stage of a group has the optimizer of all of them.
    """
    found, done = [], set()
    for stage in stages:
        seconds = 0.0 if stage.group in done else search["groups"][stage.group]["optimizer_s"]
        done.add(stage.group)
        found.append(replace(stage, numel=seconds / adamw.FUSED_BYTES))
    return found


def _messages(search: Mapping[str, Any]) -> Messages:
    rows = search["stages"]
    return Messages(
        seconds=np.array([row["send_s"] for row in rows]),
        occupied=np.array([row.get("send_wire_s", 0.0) for row in rows]),
        tied={(t["home"], t["other"]): float(t["send_s"]) for t in search.get("tied", ())},
    )


def _device(kind: str, overlap_loss: float) -> Device:
    """A device whose memory moves a byte in a second."""
    return Device(
        name="seconds",
        kind=kind,
        memory_bytes=1,
        matmul_flops_per_s=(("float32", Curve.constant(1.0)),),
        memory_bytes_per_s=Curve.constant(1.0),
        overlap_loss=overlap_loss,
    )
