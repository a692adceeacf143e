"""Predicted and measured together: a recorded step laid over the simulated one.

Enters: a `Recording`, the plan that ran, and its `Estimate`. Leaves: `Measured`: both by cause,
where they disagree most, and the recorded timeline, in which at most `MOST_ROWS` ranks stand for
all, the slowest among them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.api.parallel import trace_labels
from shardwise.errors import TraceError
from shardwise.messages.ranks import format_ranks
from shardwise.plans import Plan
from shardwise.plans.search_result import CAUSES as PREDICTED
from shardwise.reporting.disagreements import Disagreement, disagreements
from shardwise.reporting.expected import predicted_causes
from shardwise.reporting.recorded import Recording, read_trace
from shardwise.reporting.steps import PASSES, RankStep, RecordedStep, Spans, recorded_step
from shardwise.simulation import Estimate

__all__ = ["CAUSES", "Cause", "Measured", "compare"]

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
