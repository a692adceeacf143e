"""Predicted and measured together: a recorded step laid over the simulated one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from shardwise.api.parallelize import trace_labels
from shardwise.errors import TraceError
from shardwise.formatting import digits, short_seconds
from shardwise.messages.program import format_ranks
from shardwise.plans import Plan
from shardwise.plans.search_result import CAUSES as PREDICTED
from shardwise.reports.build import predicted_causes, predicted_passes
from shardwise.reports.recorded import Recording, read_trace
from shardwise.reports.steps import PASSES, RankStep, RecordedStep, Spans, recorded_step
from shardwise.reports.timeline import ranks_label
from shardwise.simulation import Estimate

__all__ = ["CAUSES", "Cause", "Disagreement", "Measured", "both_traces", "compare", "disagreements"]


# Where a prediction and a recorded step disagree most, in words.
#
# Enters: a `RecordedStep`, and the predicted seconds of every group of ranks by cause. Leaves:
# `Disagreement`s, the largest first: cause, ranks and stage, both figures, and what to do.


MOST = 8
MIN_SHARE = 0.02  # of the step: less is no disagreement
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
        if abs(seconds - before) < MIN_SHARE * step.seconds:
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
        if usual <= 0 or mine < SLOW * usual or share < MIN_SHARE:
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


MOST_ROWS = 32
LEAST_SHARE = 1e-6  # of a step: less is rounding
MOST_SPANS = 2000  # of a lane; the longest
CAUSES = {
    "forward": "computing forward",
    "backward": "computing backward",
    "weight": "computing weight gradients",
    **{name: text for name, text in PREDICTED.items() if name != "compute"},
    "other": "what is not simulated: the host between actions, clipping",
}
KINDS = (
    "forward", "backward", "weight", "optimizer", "clipping", "reduce", "gather", "collective",
    "send", "receive",
)  # fmt: skip
TRAVELS = {"gradients": "reduce", "parameters": "gather", "update": "gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Seconds of a cause, predicted and measured, of the same ranks."""

    name: str
    predicted_s: float
    measured_s: float

    def to_json(self, step_s: float) -> dict[str, Any]:
        difference = self.measured_s - self.predicted_s
        return {
            "name": self.name,
            "text": CAUSES[self.name],
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "difference_s": difference,
            "share_of_step": difference / step_s if step_s else 0.0,
        }


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A recorded run beside its prediction."""

    file: str
    step: RecordedStep = field(repr=False)
    predicted_step_time_s: float
    causes: tuple[Cause, ...]  # of the median rank of the group that was to end last
    where: str  # of which rank that is
    disagreements: tuple[Disagreement, ...]
    rows: tuple[tuple[int, int, str], ...] = field(repr=False)  # group, rank, label
    aggregated: str | None
    slowest: int
    notes: tuple[str, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.step.seconds

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        predicted = self.predicted_step_time_s
        return self.step.seconds / predicted if predicted else 0.0

    def to_json(self, class_of: Mapping[int, int] | None = None) -> dict[str, Any]:
        """`measured` of a report; `class_of` are the report's classes of the plan's groups."""
        return {
            "file": self.file,
            "steps": self.step.steps,
            "step": self.step.number,
            "chosen": self.step.chosen,
            "step_time_s": self.step_time_s,
            "predicted_step_time_s": self.predicted_step_time_s,
            "ratio": self.ratio,
            "ranks": len(self.step.ranks),
            "aggregated": self.aggregated,
            "slowest": self.slowest,
            "where": self.where,
            "timeline": self._timeline(class_of or {}),
            "causes": [cause.to_json(self.step_time_s) for cause in self.causes],
            "disagreements": [found.to_json() for found in self.disagreements],
            "notes": list(self.notes),
        }

    def _timeline(self, class_of: Mapping[int, int]) -> dict[str, Any]:
        names: dict[str, int] = {}
        rows, left_out = [], 0
        for group, rank, label in self.rows:
            mine = self.step.ranks[rank]
            lanes = {}
            for lane, spans, kinds in _lanes(mine):
                kept = _longest(spans)
                left_out += len(spans.names) - len(kept)
                lanes[lane] = _columns(spans, kinds, kept, names)
            rows.append(
                {
                    "class": class_of.get(group, group),
                    "group": group,
                    "rank": rank,
                    "label": label,
                    "lanes": lanes,
                    "busy_s": mine.work,
                    "idle_s": max(0.0, self.step_time_s - mine.work),
                    "exposed_s": mine.exposed,
                }
            )
        slow = self.step.ranks[self.slowest]
        waits = max(0.0, self.step_time_s - slow.work - slow.exposed)
        return {
            "step_time_s": self.step_time_s,
            "kinds": list(KINDS),
            "names": list(names),
            "rows": rows,
            "critical": {
                "text": f"rank {self.slowest} works longest: {slow.work * 1e3:.2f} ms of "
                f"{self.step_time_s * 1e3:.2f} ms",
                "seconds": {"compute": slow.work, "communication": slow.exposed, "waiting": waits},
            },
            "folded": f"{left_out:,} short spans are left out" if left_out else None,
        }


def compare(trace: Recording | str | os.PathLike[str], plan: Plan, estimate: Estimate) -> Measured:
    """Return a recorded run, as a file or read, over the prediction of the plan that it ran."""
    recording = trace if isinstance(trace, Recording) else read_trace(trace)
    _check(recording, plan)
    schedule, groups = estimate.timeline.schedule, plan.groups
    group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    actions = [[str(a) for a in mine] for mine in schedule.actions]
    step = recorded_step(
        recording,
        [actions[group_of[rank]] for rank in range(recording.num_ranks)],
        in_stages=len(groups) > 1,
    )
    slowest = max(step.ranks, key=lambda rank: rank.work).rank
    predicted = [predicted_causes(estimate, number) for number in range(len(groups))]
    last = max(range(len(groups)), key=lambda g: sum(predicted[g].values()))
    shown, notes = step.median(groups[last]), []
    measured, wanted = dict(shown.causes), dict(predicted[last])
    if wanted["recompute"] and not measured["recompute"]:
        notes.append("activations that are computed again are part of backward: no block tells")
        wanted["backward"] += wanted.pop("recompute")
        wanted["recompute"] = 0.0
    if not step.has_optimizer:
        notes.append("the optimizer's step was not recorded")
    rows, aggregated = _rows(step, groups, slowest)
    return Measured(
        file=recording.file,
        step=step,
        predicted_step_time_s=estimate.step_time_s,
        causes=tuple(
            Cause(name=name, predicted_s=wanted.get(name, 0.0), measured_s=measured[name])
            for name in CAUSES
            if max(wanted.get(name, 0.0), measured[name]) > LEAST_SHARE * step.seconds
        ),
        where=f"rank {shown.rank}"
        + (f", the median of ranks {format_ranks(groups[last])}" if len(groups[last]) > 1 else ""),
        disagreements=disagreements(step, groups, predicted, estimate),
        rows=rows,
        aggregated=aggregated,
        slowest=slowest,
        notes=tuple(notes),
    )


def _check(recording: Recording, plan: Plan) -> None:
    """Refuse a recording of another model, plan or number of ranks."""
    mine = trace_labels(plan)
    if recording.num_ranks != plan.num_ranks:
        raise TraceError(
            f"was recorded on {recording.num_ranks} ranks, the plan {plan.name!r} is for "
            f"{plan.num_ranks}",
            where=recording.file,
        )
    if recording.about["fingerprint"] != mine["fingerprint"]:
        model = recording.about["model"][:80] or "another model"
        raise TraceError(
            f"was recorded with {model}, the plan {plan.name!r} is for {plan.model}"
            + (" with other parameters" if model == plan.model else ""),
            where=recording.file,
            hint="the plan that was recorded: of a trainer it is plan.json in its folder",
        )
    if recording.about["plan"] != mine["plan"]:
        raise TraceError(
            f"was recorded with another plan of {plan.model} than {plan.name!r}",
            where=recording.file,
            hint="the plan that was recorded: of a trainer it is plan.json in its folder",
        )


def _rows(
    step: RecordedStep, groups: Sequence[Sequence[int]], slowest: int
) -> tuple[tuple[tuple[int, int, str], ...], str | None]:
    """Return the ranks that are shown: all, or the slowest and some that stand for the others."""
    group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    count = len(step.ranks)
    by_work = sorted(range(count), key=lambda rank: (-step.ranks[rank].work, rank))
    if count <= MOST_ROWS:
        chosen = {rank: f"rank {rank}" for rank in range(count)}
        aggregated = None
    else:
        half = MOST_ROWS // 2
        rest = by_work[half:]
        spread = [rest[round(i * (len(rest) - 1) / (half - 1))] for i in range(half)]
        chosen = {rank: f"rank {rank}" for rank in sorted({*by_work[:half], *spread})}
        aggregated = (
            f"of {count:,} ranks, the {half} slowest and {len(chosen) - half} that stand for "
            "the others, from the next slowest to the fastest"
        )
    if count > 1:
        chosen[slowest] = f"rank {slowest} (slowest of {count:,})"
    return tuple((group_of[rank], rank, label) for rank, label in chosen.items()), aggregated


def _lanes(mine: RankStep) -> list[tuple[str, Spans, list[str]]]:
    """Lanes of a row with the kinds of their spans."""
    actions, tail = mine.actions, mine.tail
    kinds = [_pass_of(name) for name in actions.names]
    travels = mine.communication
    return [
        ("compute", _joined(actions, tail), [*kinds, *tail.names]),
        ("communication", travels, [_travel(name) for name in travels.names]),
    ]


def _pass_of(name: str) -> str:
    return next(PASSES[letter] for letter in "FBIW" if letter in name)


def _travel(name: str) -> str:
    word = name.partition(" ")[0]
    return word if word in ("send", "receive") else TRAVELS.get(name, "collective")


def _joined(first: Spans, second: Spans) -> Spans:
    return Spans(
        names=first.names + second.names,
        start=np.concatenate([first.start, second.start]),
        end=np.concatenate([first.end, second.end]),
    )


def _longest(spans: Spans) -> list[int]:
    """Which spans are shown."""
    every = range(len(spans.names))
    if len(every) <= MOST_SPANS:
        return list(every)
    seconds = spans.seconds
    return sorted(sorted(every, key=lambda i: -seconds[i])[:MOST_SPANS])


def _columns(
    spans: Spans, kinds: Sequence[str], kept: Sequence[int], names: dict[str, int]
) -> dict[str, list[Any]]:
    return {
        "start": [float(spans.start[i]) for i in kept],
        "end": [float(spans.end[i]) for i in kept],
        "kind": [KINDS.index(kinds[i]) for i in kept],
        "name": [names.setdefault(spans.names[i], len(names)) for i in kept],
        "critical": [0] * len(kept),
    }


# Both timelines in one file for Perfetto: predicted and measured, from the same beginning.


FORMAT = "shardwise-timelines"


def both_traces(plan: Plan, estimate: Estimate, measured: Measured | None) -> dict[str, Any]:
    """One trace of the predicted step and of the recorded one, which both begin at zero."""
    events = list(_predicted(plan, estimate))
    first = len(plan.groups)
    for place, (_, rank, label) in enumerate(measured.rows if measured is not None else ()):
        assert measured is not None
        name = f"measured, {label}"
        events += _process(first + place, name, first + place)
        events += _recorded(first + place, measured.step.ranks[rank])
    about: dict[str, Any] = {"format": FORMAT, "version": 1, "plan": plan.name, "model": plan.model}
    if measured is not None:
        about |= {"file": measured.file, "step": measured.step.number}
    return {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}


def _predicted(plan: Plan, estimate: Estimate) -> Iterator[dict[str, Any]]:
    for event in estimate.timeline.trace()["traceEvents"]:  # type: ignore[attr-defined]
        if event["name"] == "process_name":
            ranks = ranks_label(plan.groups[event["pid"]])
            yield from _process(event["pid"], f"predicted, {ranks}", event["pid"])
        else:
            yield event


def _recorded(pid: int, rank: RankStep) -> Iterator[dict[str, Any]]:
    lanes = [
        ("compute", rank.actions),
        ("compute", rank.tail),
        ("waiting", rank.waiting),
        ("communication", rank.communication),
    ]
    threads: dict[tuple[str, int], int] = {}
    for lane, spans in lanes:
        for row, name, start, end in _overlay_rows(spans):
            tid = threads.setdefault((lane, row), len(threads))
            yield {
                "ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid,
                "ts": start * 1e6, "dur": (end - start) * 1e6,
            }  # fmt: skip
    for (lane, row), tid in threads.items():
        name = lane if not row else f"{lane} {row + 1}"
        yield _label("thread_name", pid, tid, "name", name)


def _overlay_rows(spans: Spans) -> Iterator[tuple[int, str, float, float]]:
    """Spans with the first row in which they do not overlap another."""
    ends: list[float] = []
    order = np.argsort(spans.start, kind="stable")
    for at in order.tolist():
        start, end = float(spans.start[at]), float(spans.end[at])
        row = next((r for r, reached in enumerate(ends) if reached <= start), len(ends))
        ends[row : row + 1] = [end]
        yield row, spans.names[at], start, end


def _process(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        _label("process_name", pid, 0, "name", name),
        _label("process_sort_index", pid, 0, "sort_index", order),
    ]


def _label(what: str, pid: int, tid: int, key: str, value: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}}
