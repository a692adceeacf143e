"""Where a prediction and a recorded step disagree most, in words.

Enters: a `RecordedStep`, and the predicted seconds of every group of ranks by cause. Leaves:
`Disagreement`s, the largest first: cause, ranks and stage, both figures, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwise.formatting import digits, short_seconds
from shardwise.messages.ranks import format_ranks
from shardwise.reporting.classes import ranks_label
from shardwise.reporting.expected import predicted_passes
from shardwise.reporting.steps import RankStep, RecordedStep
from shardwise.simulation import Estimate

__all__ = ["Disagreement", "disagreements"]

MOST = 8
LEAST_SHARE = 0.02  # of the step: less is no disagreement
SLOW = 1.1  # times the work of the others of its group
LATE_SHARE = 0.05
PROFILE = "shardwise profile measures this machine as a cluster file"
SUBJECTS = {
    "forward": "forwards take",
    "backward": "backwards take",
    "weight": "weight gradients take",
    "recompute": "computing activations again takes",
    "collectives": "waits for collectives take",
    "parameters": "waits for gathered parameters take",
    "bubble": "waits for other stages take",
    "gradients": "waits for sums of gradients take",
    "optimizer": "the optimizer's step takes",
    "update": "gathering new parameters takes",
    "other": "what is not simulated takes",
}
COMPUTING = ("forward", "backward", "weight", "recompute", "optimizer")
TALKING = ("collectives", "parameters", "gradients", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One cause at one place, predicted and measured."""

    cause: str
    where: str
    predicted_s: float
    measured_s: float
    share: float  # of the measured step
    text: str
    advice: str

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "where": self.where,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "difference_s": self.difference_s,
            "share": self.share,
            "text": self.text,
            "advice": self.advice,
        }


def disagreements(
    step: RecordedStep,
    groups: Sequence[Sequence[int]],
    predicted: Sequence[Mapping[str, float]],
    estimate: Estimate,
) -> tuple[Disagreement, ...]:
    """Return the largest, at most one for each cause, and ranks that are slower than their like."""
    slow = [found for ranks in groups for found in _slow(step, ranks)]
    late = _late(step)
    largest: dict[str, Disagreement] = {}
    for number, ranks in enumerate(groups):
        for found in _of_group(step, number, ranks, predicted[number], estimate, bool(slow)):
            known = largest.get(found.cause)
            if known is None or abs(found.difference_s) > abs(known.difference_s):
                largest[found.cause] = found
    every = sorted(
        [*slow[:MOST], *late, *largest.values()], key=lambda found: -abs(found.difference_s)
    )
    return tuple(every[:MOST])


def _of_group(
    step: RecordedStep,
    group: int,
    ranks: Sequence[int],
    predicted: Mapping[str, float],
    estimate: Estimate,
    some_are_slow: bool,
) -> list[Disagreement]:
    shown = step.median(ranks)
    measured, wanted = dict(shown.causes), dict(predicted)
    if wanted.get("recompute") and not measured["recompute"]:
        wanted["backward"] += wanted.pop("recompute")
    found = []
    for cause, seconds in measured.items():
        before = wanted.get(cause, 0.0)
        if abs(seconds - before) < LEAST_SHARE * step.seconds:
            continue
        found.append(
            Disagreement(
                cause=cause,
                where=_place(ranks, _stage(cause, shown, group, estimate)),
                predicted_s=before,
                measured_s=seconds,
                share=abs(seconds - before) / step.seconds,
                text=_text(cause, before, seconds),
                advice=_advice(cause, before, seconds, step, some_are_slow),
            )
        )
    return found


def _stage(cause: str, shown: RankStep, group: int, estimate: Estimate) -> int | None:
    """Return the stage of a pass that differs most; of a group of one stage that one."""
    placement = estimate.timeline.schedule.placement
    mine = [stage for stage, of in enumerate(placement) if of == group]
    if len(placement) == 1:
        return None
    if len(mine) == 1:
        return mine[0]
    if cause not in ("forward", "backward", "weight"):
        return None
    before, now = predicted_passes(estimate, group), shown.by_stage(cause)
    return max(mine, key=lambda s: abs(now.get(s, 0.0) - before.get((cause, s), 0.0)))


def _place(ranks: Sequence[int], stage: int | None) -> str:
    who = ranks_label(tuple(ranks))
    return who if stage is None else f"{who}, stage {stage}"


def _times(before: float, now: float) -> str:
    """How the two compare, as people say it."""
    if before <= 0:
        return f"{short_seconds(now)}, none was predicted"
    if now < before / 20:
        return f"{short_seconds(now)}, {short_seconds(before)} were predicted"
    ratio = digits(now / before, 2)
    return f"{ratio} times as long as predicted: {short_seconds(now)}, not {short_seconds(before)}"


def _text(cause: str, before: float, now: float) -> str:
    return f"{SUBJECTS[cause]} {_times(before, now)}"


def _advice(cause: str, before: float, now: float, step: RecordedStep, some_are_slow: bool) -> str:
    if cause == "optimizer" and not step.has_optimizer:
        return "the optimizer's step was not recorded: sw.optimizer(pm, …).step() before pm.trace()"
    slower = now > before
    if cause in COMPUTING:
        if slower:
            return (
                "this machine is slower than its cluster file says, or busy with something else: "
                f"{PROFILE}; shardwise tune measures operators"
            )
        return f"this machine is faster than its cluster file says: {PROFILE}"
    if cause in TALKING:
        if slower and some_are_slow:
            return "part of it is waiting for the slow ranks that are named here"
        if slower:
            return f"links are slower than the cluster file says, or ranks arrive late: {PROFILE}"
        return f"links are faster than the cluster file says: {PROFILE}"
    if cause == "bubble":
        if slower:
            return "stages are not as equal as was predicted: plan again with measured times"
        return "other stages answered sooner than was predicted"
    return "larger batches or fewer micro-batches, compile: true, clipping and logs less often"


def _slow(step: RecordedStep, ranks: Sequence[int]) -> list[Disagreement]:
    """Ranks that work longer than the others that do the same."""
    if len(ranks) < 2:
        return []
    found = []
    by_work = sorted(ranks, key=lambda rank: -step.ranks[rank].work)
    for rank in by_work[: max(1, min(3, len(ranks) // 2))]:
        usual = median(step.ranks[other].work for other in ranks if other != rank)
        mine = step.ranks[rank].work
        share = (mine - usual) / step.seconds if step.seconds else 0.0
        if usual <= 0 or mine < SLOW * usual or share < LEAST_SHARE:
            continue
        others = f"rank {next(r for r in ranks if r != rank)}" if len(ranks) == 2 else "the others"
        found.append(
            Disagreement(
                cause="slow rank",
                where=f"rank {rank}",
                predicted_s=usual,
                measured_s=mine,
                share=share,
                text=f"rank {rank} works {digits(mine / usual, 2)} times as long as {others} of "
                f"ranks {format_ranks(tuple(ranks))}: {short_seconds(mine)}, "
                f"not {short_seconds(usual)}",
                advice=f"what else runs there? {PROFILE}; a plan for unequal devices gives it less",
            )
        )
    return found


def _late(step: RecordedStep) -> list[Disagreement]:
    """Return a rank that enters the step after the first one."""
    rank = max(step.ranks, key=lambda mine: mine.start)
    if rank.start < LATE_SHARE * step.seconds:
        return []
    return [
        Disagreement(
            cause="late",
            where=f"rank {rank.rank}",
            predicted_s=0.0,
            measured_s=rank.start,
            share=rank.start / step.seconds,
            text=f"rank {rank.rank} enters the step {short_seconds(rank.start)} after the first",
            advice="its batches come late: data.workers, data.prefetch; or its clock is wrong",
        )
    ]
