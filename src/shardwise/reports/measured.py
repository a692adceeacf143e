"""Compare a recorded step with the predicted one, and explain where they disagree most."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from shardwise.api.parallelize import trace_labels
from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import TraceError
from shardwise.formatting import digits, short_seconds
from shardwise.plans import Plan
from shardwise.plans.search_result import CAUSES as PREDICTED
from shardwise.reports.recorded import Recording, read_trace
from shardwise.reports.steps import (
    COMMUNICATING,
    COMPUTING,
    PASSES,
    RECORDED_PLAN,
    RankStep,
    RecordedStep,
    Spans,
    recorded_step,
)
from shardwise.reports.timeline import named_events, ranks_label
from shardwise.simulation import Estimate

MAX_DISAGREEMENTS = 8
MIN_SHARE = 0.02  # of the step, for differences to be reported
SLOW = 1.1  # times the work of the other ranks of a group
LATE_SHARE = 0.05
PROFILE = "shardwise profile measures this machine as a cluster file"
SUBJECTS = {
    "forward": "forward passes take",
    "backward": "backward passes take",
    "weight": "weight gradients take",
    "recompute": "recomputing activations takes",
    "collectives": "waits for collectives take",
    "parameters": "waits for gathered parameters take",
    "bubble": "waits for other stages take",
    "gradients": "waits for reduced gradients take",
    "optimizer": "the optimizer step takes",
    "update": "gathering new parameters takes",
    "other": "work that the simulation does not include takes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A cause whose predicted and measured times differ on some ranks."""

    cause: str
    where: str
    predicted_s: float
    measured_s: float
    share: float  # of the measured step
    text: str
    advice: str

    @property
    def difference_s(self) -> float:
        """The measured time minus the predicted one."""
        return self.measured_s - self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """Return the disagreement as data."""
        return {**asdict(self), "difference_s": self.difference_s}


def disagreements(
    step: RecordedStep,
    groups: Sequence[Sequence[int]],
    predicted: Sequence[Mapping[str, float]],
    estimate: Estimate,
) -> tuple[Disagreement, ...]:
    """Return the largest disagreement of each cause, and ranks slower than their group."""
    slow = [item for ranks in groups for item in _slow(step, ranks)]
    largest: dict[str, Disagreement] = {}
    for number, ranks in enumerate(groups):
        for item in _of_group(step, number, ranks, predicted[number], estimate, bool(slow)):
            other = largest.setdefault(item.cause, item)
            if abs(item.difference_s) > abs(other.difference_s):
                largest[item.cause] = item
    items = [*slow[:MAX_DISAGREEMENTS], *_late(step), *largest.values()]
    items.sort(key=lambda item: -abs(item.difference_s))
    return tuple(items[:MAX_DISAGREEMENTS])


def _of_group(
    step: RecordedStep,
    group: int,
    ranks: Sequence[int],
    predicted: Mapping[str, float],
    estimate: Estimate,
    some_are_slow: bool,
) -> Iterator[Disagreement]:
    median_rank = step.median(ranks)
    measured, expected = _comparable(median_rank, predicted)
    for cause, seconds in measured.items():
        before = expected.get(cause, 0.0)
        if abs(seconds - before) < MIN_SHARE * step.seconds:
            continue
        stage = _stage(cause, median_rank, group, estimate)
        yield Disagreement(
            cause=cause,
            where=ranks_label(tuple(ranks)) + ("" if stage is None else f", stage {stage}"),
            predicted_s=before,
            measured_s=seconds,
            share=abs(seconds - before) / step.seconds,
            text=f"{SUBJECTS[cause]} {_compared(before, seconds)}",
            advice=_advice(cause, before, seconds, step, some_are_slow),
        )


def _comparable(
    rank: RankStep, predicted: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return measured and predicted seconds by cause.

    Recomputation that was not recorded separately counts as backward in both.
    """
    measured, expected = dict(rank.causes), dict(predicted)
    if expected.get("recompute") and not measured["recompute"]:
        expected["backward"] += expected["recompute"]
        expected["recompute"] = 0.0
    return measured, expected


def _stage(cause: str, rank: RankStep, group: int, estimate: Estimate) -> int | None:
    """Return the group's only stage, or the stage whose passes differ most."""
    placement = estimate.timeline.schedule.placement
    stages = [stage for stage, of in enumerate(placement) if of == group]
    if len(placement) == 1:
        return None
    if len(stages) == 1:
        return stages[0]
    if cause not in ("forward", "backward", "weight"):
        return None
    before, now = predicted_passes(estimate, group), rank.by_stage(cause)
    return max(stages, key=lambda s: abs(now.get(s, 0.0) - before.get((cause, s), 0.0)))


def _compared(before: float, now: float) -> str:
    """Describe a measured time compared with the predicted one."""
    if before <= 0:
        return f"{short_seconds(now)}, nothing was predicted"
    if now < before / 20:
        return f"{short_seconds(now)}, {short_seconds(before)} were predicted"
    ratio = digits(now / before, 2)
    return f"{ratio} times as long as predicted: {short_seconds(now)}, not {short_seconds(before)}"


def _advice(cause: str, before: float, now: float, step: RecordedStep, some_are_slow: bool) -> str:
    if cause == "optimizer" and not step.has_optimizer:
        return (
            "the optimizer step was not recorded: call sw.optimizer(pm, …).step() before pm.trace()"
        )
    slower = now > before
    if cause in COMPUTING:
        if slower:
            return (
                "this machine is slower than its cluster file says, or busy with other work: "
                f"{PROFILE}; shardwise tune measures operators"
            )
        return f"this machine is faster than its cluster file says: {PROFILE}"
    if cause in COMMUNICATING:
        if slower and some_are_slow:
            return "part of it is waiting for the slow ranks listed here"
        if slower:
            return f"links are slower than the cluster file says, or ranks arrive late: {PROFILE}"
        return f"links are faster than the cluster file says: {PROFILE}"
    if cause == "bubble":
        if slower:
            return "stages are less balanced than predicted: plan again with measured times"
        return "other stages finished earlier than predicted"
    return "try larger batches or fewer micro-batches, compile: true, or less frequent logging"


def _slow(step: RecordedStep, ranks: Sequence[int]) -> Iterator[Disagreement]:
    """Yield ranks that take longer than others for the same work."""
    if len(ranks) < 2:
        return
    by_work = sorted(ranks, key=lambda rank: -step.ranks[rank].work)
    for rank in by_work[: max(1, min(3, len(ranks) // 2))]:
        usual = median(step.ranks[other].work for other in ranks if other != rank)
        work = step.ranks[rank].work
        share = (work - usual) / step.seconds if step.seconds else 0.0
        if usual <= 0 or work < SLOW * usual or share < MIN_SHARE:
            continue
        others = f"rank {next(r for r in ranks if r != rank)}" if len(ranks) == 2 else "the others"
        yield Disagreement(
            cause="slow rank",
            where=f"rank {rank}",
            predicted_s=usual,
            measured_s=work,
            share=share,
            text=f"rank {rank} works {digits(work / usual, 2)} times as long as {others} of "
            f"ranks {format_ranks(tuple(ranks))}: {short_seconds(work)}, "
            f"not {short_seconds(usual)}",
            advice=f"check for other processes; {PROFILE}, and a plan for it balances the work",
        )


def _late(step: RecordedStep) -> Iterator[Disagreement]:
    """Yield the last rank to enter the step if it is much later than the first."""
    rank = max(step.ranks, key=lambda rank: rank.start)
    if rank.start >= LATE_SHARE * step.seconds:
        yield Disagreement(
            cause="late",
            where=f"rank {rank.rank}",
            predicted_s=0.0,
            measured_s=rank.start,
            share=rank.start / step.seconds,
            text=f"rank {rank.rank} enters the step {short_seconds(rank.start)} after the first",
            advice="its data is late (see data.workers, data.prefetch), or its clock is wrong",
        )


# ------------------------------------------------------------ predicted
def predicted_causes(estimate: Estimate, group: int) -> dict[str, float]:
    """Return the predicted seconds of a group by cause, with computing split by pass."""
    causes = dict(estimate.timeline.by_group[group])
    passes = dict.fromkeys(("forward", "backward", "weight"), 0.0)
    for (kind, _), seconds in predicted_passes(estimate, group).items():
        passes[kind] += seconds
    total, computed = sum(passes.values()), causes.pop("compute")
    scale = computed / total if total else 0.0
    return {**{kind: seconds * scale for kind, seconds in passes.items()}, **causes}


def predicted_passes(estimate: Estimate, group: int) -> dict[tuple[str, int], float]:
    """Return the predicted seconds of computing by pass and stage."""
    passes: dict[tuple[str, int], float] = {}
    timeline = estimate.timeline
    computing = timeline.ends - timeline.starts - timeline.waits
    computing = np.maximum(0.0, computing - timeline.collectives - timeline.recompute)
    begin = sum(map(len, timeline.schedule.actions[:group]))
    for at, action in enumerate(timeline.schedule.actions[group], start=begin):
        key = (PASSES[action.kind], action.stage)
        passes[key] = passes.get(key, 0.0) + float(computing[at])
    return passes


# ------------------------------------------------------------ measured
MAX_ROWS = 32
ROUNDING = 1e-6  # of a step
MAX_SPANS = 2000  # the longest of a lane
CAUSES = {
    "forward": "computing forward",
    "backward": "computing backward",
    "weight": "computing weight gradients",
    **{name: text for name, text in PREDICTED.items() if name != "compute"},
    "other": "not simulated: host time between actions, clipping",
}
KINDS = (
    "forward", "backward", "weight", "optimizer", "clipping", "reduce", "gather", "collective",
    "send", "receive",
)  # fmt: skip
COMMUNICATION = {"gradients": "reduce", "parameters": "gather", "update": "gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The predicted and measured seconds of a cause on the same ranks."""

    name: str
    predicted_s: float
    measured_s: float

    def to_json(self, step_s: float) -> dict[str, Any]:
        """Return the cause as data, for a step of this length."""
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
    """A recorded run compared with its prediction."""

    file: str
    step: RecordedStep = field(repr=False)
    predicted_step_time_s: float
    causes: tuple[Cause, ...]  # of the median rank of the group with the longest predicted step
    where: str  # the rank of `causes`
    disagreements: tuple[Disagreement, ...]
    rows: tuple[tuple[int, int, str], ...] = field(repr=False)  # group, rank, label
    aggregated: str | None
    slowest: int
    notes: tuple[str, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Measured seconds of the step."""
        return self.step.seconds

    @property
    def ratio(self) -> float:
        """The measured step time divided by the predicted one."""
        predicted = self.predicted_step_time_s
        return self.step.seconds / predicted if predicted else 0.0

    def to_json(self, class_of: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return the data for a report; `class_of` maps groups to the report's classes."""
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
            "disagreements": [item.to_json() for item in self.disagreements],
            "notes": list(self.notes),
        }

    def _timeline(self, class_of: Mapping[int, int]) -> dict[str, Any]:
        names: dict[str, int] = {}
        rows, num_omitted = [], 0
        for group, rank, label in self.rows:
            done = self.step.ranks[rank]
            lanes = {}
            for lane, spans, kinds in _lanes(done):
                seconds = spans.seconds
                longest = sorted(range(len(seconds)), key=lambda i: -seconds[i])[:MAX_SPANS]
                shown = sorted(longest)
                num_omitted += len(spans.names) - len(shown)
                lanes[lane] = _columns(spans, kinds, shown, names)
            rows.append(
                {
                    "class": class_of.get(group, group),
                    "group": group,
                    "rank": rank,
                    "label": label,
                    "lanes": lanes,
                    "busy_s": done.work,
                    "idle_s": max(0.0, self.step_time_s - done.work),
                    "exposed_s": done.exposed,
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
            "folded": f"{num_omitted:,} short spans are omitted" if num_omitted else None,
        }


def compare(trace: Recording | str | os.PathLike[str], plan: Plan, estimate: Estimate) -> Measured:
    """Compare a recorded run (a file or a recording) with the prediction of its plan."""
    recording = trace if isinstance(trace, Recording) else read_trace(trace)
    _check(recording, plan)
    schedule, groups = estimate.timeline.schedule, plan.groups
    group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    actions = [list(map(str, row)) for row in schedule.actions]
    step = recorded_step(
        recording,
        [actions[group_of[rank]] for rank in range(recording.num_ranks)],
        in_stages=len(groups) > 1,
    )
    slowest = max(step.ranks, key=lambda rank: rank.work).rank
    predicted = [predicted_causes(estimate, number) for number in range(len(groups))]
    last = max(range(len(groups)), key=lambda g: sum(predicted[g].values()))
    shown, notes = step.median(groups[last]), []
    if predicted[last]["recompute"] and not shown.causes["recompute"]:
        notes.append("recomputation counts as backward: the recording does not show its blocks")
    if not step.has_optimizer:
        notes.append("the optimizer step was not recorded")
    rows, aggregated = _rows(step, groups, slowest)
    return Measured(
        file=recording.file,
        step=step,
        predicted_step_time_s=estimate.step_time_s,
        causes=compared_causes(shown, predicted[last]),
        where=f"rank {shown.rank}"
        + (f", the median of ranks {format_ranks(groups[last])}" if len(groups[last]) > 1 else ""),
        disagreements=disagreements(step, groups, predicted, estimate),
        rows=rows,
        aggregated=aggregated,
        slowest=slowest,
        notes=tuple(notes),
    )


def compared_causes(rank: RankStep, predicted: Mapping[str, float]) -> tuple[Cause, ...]:
    """Return the measured causes of a rank's step next to the predicted ones of its group."""
    measured, expected = _comparable(rank, predicted)
    return tuple(
        Cause(name=name, predicted_s=expected.get(name, 0.0), measured_s=measured[name])
        for name in CAUSES
        if max(expected.get(name, 0.0), measured[name]) > ROUNDING * rank.end
    )


def _check(recording: Recording, plan: Plan) -> None:
    """Refuse a recording of another model, plan or number of ranks."""
    labels, problem = trace_labels(plan), ""
    if recording.num_ranks != plan.num_ranks:
        problem = f"on {recording.num_ranks} ranks, but the plan {plan.name!r} is for "
        problem += str(plan.num_ranks)
    elif recording.about["fingerprint"] != labels["fingerprint"]:
        model = recording.about["model"][:80] or "another model"
        problem = f"with {model}, but the plan {plan.name!r} is for {plan.model}"
        problem += " with other parameters" if model == plan.model else ""
    elif recording.about["plan"] != labels["plan"]:
        problem = f"with another plan of {plan.model} than {plan.name!r}"
    if problem:
        raise TraceError(f"was recorded {problem}", where=recording.file, hint=RECORDED_PLAN)


def _rows(
    step: RecordedStep, groups: Sequence[Sequence[int]], slowest: int
) -> tuple[tuple[tuple[int, int, str], ...], str | None]:
    """Return the displayed ranks: all of them, or the slowest and a sample of the others."""
    group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    count = len(step.ranks)
    by_work = sorted(range(count), key=lambda rank: (-step.ranks[rank].work, rank))
    if count <= MAX_ROWS:
        chosen = {rank: f"rank {rank}" for rank in range(count)}
        aggregated = None
    else:
        half = MAX_ROWS // 2
        faster = by_work[half:]
        sample = [faster[round(i * (len(faster) - 1) / (half - 1))] for i in range(half)]
        chosen = {rank: f"rank {rank}" for rank in sorted({*by_work[:half], *sample})}
        aggregated = (
            f"the {half} slowest of {count:,} ranks and a sample of {len(chosen) - half} of the "
            "others"
        )
    if count > 1:
        chosen[slowest] = f"rank {slowest} (slowest of {count:,})"
    return tuple((group_of[rank], rank, label) for rank, label in chosen.items()), aggregated


def _lanes(rank: RankStep) -> list[tuple[str, Spans, list[str]]]:
    """Return the lanes of a row with the kinds of their spans."""
    actions, tail = rank.actions, rank.tail
    compute = Spans(
        names=actions.names + tail.names,
        start=np.concatenate([actions.start, tail.start]),
        end=np.concatenate([actions.end, tail.end]),
    )
    passes = [next(PASSES[c] for c in "FBIW" if c in name) for name in actions.names]
    kinds = [_communication_kind(name) for name in rank.communication.names]
    return [
        ("compute", compute, [*passes, *tail.names]),
        ("communication", rank.communication, kinds),
    ]


def _communication_kind(name: str) -> str:
    word = name.partition(" ")[0]
    return word if word in ("send", "receive") else COMMUNICATION.get(name, "collective")


def _columns(
    spans: Spans, kinds: Sequence[str], shown: Sequence[int], names: dict[str, int]
) -> dict[str, list[Any]]:
    return {
        "start": [float(spans.start[i]) for i in shown],
        "end": [float(spans.end[i]) for i in shown],
        "kind": [KINDS.index(kinds[i]) for i in shown],
        "name": [names.setdefault(spans.names[i], len(names)) for i in shown],
        "critical": [0] * len(shown),
    }


# ------------------------------------------------------------ timelines for Perfetto
FORMAT = "shardwise-timelines"


def both_traces(plan: Plan, estimate: Estimate, measured: Measured | None) -> dict[str, Any]:
    """Return a trace with the predicted and the recorded step, both starting at zero."""
    events = list(_predicted(plan, estimate))
    first = len(plan.groups)
    about: dict[str, Any] = {"format": FORMAT, "version": 1, "plan": plan.name, "model": plan.model}
    if measured is not None:
        for pid, (_, rank, label) in enumerate(measured.rows, start=first):
            events += _process(pid, f"measured, {label}")
            events += _recorded(pid, measured.step.ranks[rank])
        about |= {"file": measured.file, "step": measured.step.number}
    return {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}


def _predicted(plan: Plan, estimate: Estimate) -> Iterator[dict[str, Any]]:
    for event in named_events(plan, estimate, "predicted, "):
        yield event
        if event["name"] == "process_name":
            yield _label("process_sort_index", event["pid"], 0, "sort_index", event["pid"])


def _recorded(pid: int, rank: RankStep) -> Iterator[dict[str, Any]]:
    lanes = [
        ("compute", rank.actions),
        ("compute", rank.tail),
        ("waiting", rank.waiting),
        ("communication", rank.communication),
    ]
    threads: dict[tuple[str, int], int] = {}
    for lane, spans in lanes:
        for row, name, start, end in _without_overlap(spans):
            tid = threads.setdefault((lane, row), len(threads))
            yield {
                "ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid,
                "ts": start * 1e6, "dur": (end - start) * 1e6,
            }  # fmt: skip
    for (lane, row), tid in threads.items():
        name = lane if not row else f"{lane} {row + 1}"
        yield _label("thread_name", pid, tid, "name", name)


def _without_overlap(spans: Spans) -> Iterator[tuple[int, str, float, float]]:
    """Yield spans with the first row in which they overlap no other."""
    ends: list[float] = []
    for at in np.argsort(spans.start, kind="stable").tolist():
        start, end = float(spans.start[at]), float(spans.end[at])
        row = next((r for r, reached in enumerate(ends) if reached <= start), len(ends))
        ends[row : row + 1] = [end]
        yield row, spans.names[at], start, end


def _process(pid: int, name: str) -> list[dict[str, Any]]:
    return [
        _label("process_name", pid, 0, "name", name),
        _label("process_sort_index", pid, 0, "sort_index", pid),
    ]


def _label(name: str, pid: int, tid: int, key: str, value: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}}
