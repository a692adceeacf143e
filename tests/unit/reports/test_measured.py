"""Recorded traces are read or refused, and compared with their plan by cause."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import shardwise as sw
from shardwise.api.parallelize import trace_labels
from shardwise.cluster import Cluster
from shardwise.errors import TraceError
from shardwise.reports import recorded
from shardwise.reports.measured import MAX_ROWS, Measured, both_traces, compare, predicted_causes
from shardwise.reports.recorded import read_trace
from shardwise.runtime.tracing import Event, merge, write_trace
from shardwise.simulation import Estimate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


@dataclass(frozen=True)
class Case:
    plan: sw.Plan
    estimate: Estimate


@cache
def case(strategy: str, ranks: int) -> Case:
    graph = sw.capture(Net(), {"x": torch.randn(32 if ranks < 64 else ranks, 64)})
    cluster = Cluster.local(ranks)
    options = {"pp": 2, "num_microbatches": 4} if strategy == "pipeline" else {}
    plan = getattr(sw.strategies, strategy)(graph, cluster, **options)
    return Case(plan, sw.simulate(graph, plan, cluster))


def as_predicted(
    subject: Case,
    steps: int = 3,
    slow: Callable[[int], float] = lambda rank: 1.0,
    sums: float = 1.0,
    optimizer: bool = True,
) -> list[list[Event]]:
    """Return the events of a run as predicted, or slower by the given factors."""
    timeline = subject.estimate.timeline
    by_rank: list[list[Event]] = []
    for group, ranks in enumerate(subject.plan.groups):
        spans = [s for s in timeline.spans if s.group == group]
        stages = subject.estimate.stages
        collectives = {"F": stages[0].forward_comm, "B": stages[0].backward_comm}
        for rank in ranks:
            by_rank.append([])
            for step in range(steps):
                begin = step * 2 * timeline.step_time_s
                by_rank[-1] += _one_step(
                    spans, collectives, step, begin, slow(rank), sums, optimizer
                )
    order = [rank for ranks in subject.plan.groups for rank in ranks]
    pairs = zip(order, by_rank, strict=True)
    return [events for _, events in sorted(pairs, key=lambda pair: pair[0])]


def _one_step(
    spans: list[Any],
    collectives: dict[str, float],
    step: int,
    begin: float,
    slow: float,
    sums: float,
    optimizer: bool,
) -> list[Event]:
    events, late = [], 0.0

    def add(lane: str, name: str, start: float, end: float, **details: Any) -> None:
        times = {"start_ns": round((begin + start) * 1e9), "end_ns": round((begin + end) * 1e9)}
        events.append(Event(lane=lane, name=name, **times, details=details))

    for span in spans:
        seconds = span.end - span.start
        start = span.start + late
        if span.kind in ("forward", "backward", "weight"):
            waits = span.detail.get("waiting_s", 0.0)
            late += (slow - 1) * (seconds - waits)
            add("compute", span.name, start, span.end + late)
            seconds = next((collectives[k] for k in collectives if k in span.name), 0.0)
            if seconds:
                add("waiting", "collectives", start, start + seconds)
        elif span.kind == "sync":
            late += (sums - 1) * seconds
            add("waiting", "gradients", start, span.end + late)
            add("communication", "gradients", start, span.end + late)
    end = max(e.end_ns for e in events) / 1e9 - begin
    add("step", "step", 0.0, end, step=step)
    if optimizer:
        seconds = sum(s.end - s.start for s in spans if s.kind == "optimizer")
        add("compute", "optimizer", end, end + seconds)
        update = sum(s.end - s.start for s in spans if s.kind == "gather")
        add("waiting", "update", end + seconds, end + seconds + update)
    return events


def write(path: Path, subject: Case, events: list[list[Event]], **about: str) -> Path:
    write_trace(path, merge(events, None, {**trace_labels(subject.plan), **about}))
    return path


def measured(path: Path, subject: Case, **options: Any) -> Measured:
    return compare(
        write(path, subject, as_predicted(subject, **options)), subject.plan, subject.estimate
    )


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 4), ("pipeline", 2), ("zero1", 2)])
def test_a_run_as_predicted_has_no_disagreements(tmp_path: Path, strategy: str, ranks: int) -> None:
    subject = case(strategy, ranks)
    comparison = measured(tmp_path / "run.json", subject)
    assert comparison.step.steps == 3
    assert comparison.step_time_s == pytest.approx(subject.estimate.step_time_s, rel=1e-3)
    for cause in comparison.causes:
        slack = 2e-3 * comparison.step_time_s
        assert cause.measured_s == pytest.approx(cause.predicted_s, abs=slack), cause
    assert comparison.disagreements == ()


def test_causes_of_every_group_sum_to_its_step() -> None:
    subject = case("pipeline", 2)
    timeline = subject.estimate.timeline
    for group, causes in enumerate(timeline.by_group):
        assert sum(predicted_causes(subject.estimate, group).values()) == pytest.approx(
            sum(causes.values())
        )
    assert max(sum(c.values()) for c in timeline.by_group) == pytest.approx(timeline.step_time_s)


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    subject = case("ddp", 4)
    comparison = measured(
        tmp_path / "run.json", subject, slow=lambda rank: 2.0 if rank == 2 else 1.0
    )
    assert comparison.slowest == 2
    slow = next(d for d in comparison.disagreements if d.cause == "slow rank")
    assert slow.where == "rank 2"
    assert "times as long as the others of ranks 0-3" in slow.text
    assert "shardwise profile" in slow.advice
    assert any(label == "rank 2 (slowest of 4)" for _, _, label in comparison.rows)


def test_slow_gradient_reductions_are_named(tmp_path: Path) -> None:
    subject = case("ddp", 4)
    comparison = measured(tmp_path / "run.json", subject, sums=3.0)
    largest = comparison.disagreements[0]
    assert largest.cause == "gradients"
    assert "3 times as long as predicted" in largest.text
    assert "cluster file" in largest.advice
    assert largest.difference_s > 0


def test_a_missing_optimizer_step_is_noted(tmp_path: Path) -> None:
    comparison = measured(tmp_path / "run.json", case("ddp", 4), optimizer=False)
    assert "the optimizer step was not recorded" in comparison.notes


def test_incomplete_steps_are_ignored(tmp_path: Path) -> None:
    subject = case("pipeline", 2)
    events = as_predicted(subject, steps=2)
    events[1] = [e for e in events[1] if not (e.name == "1B3" and e.start_ns > 1e9 * 1e-12)][:-1]
    last = max(e.start_ns for e in events[0] if e.name == "step")
    events[0] = [e for e in events[0] if e.start_ns < last or e.name != "0F0"]
    path = write(tmp_path / "run.json", subject, events)
    with pytest.raises(TraceError, match="no step"):
        compare(path, subject.plan, subject.estimate)


def test_many_ranks_are_aggregated_but_include_the_slowest(tmp_path: Path) -> None:
    subject = case("ddp", 1024)
    comparison = measured(
        tmp_path / "run.json", subject, steps=1, slow=lambda rank: 2.0 if rank == 777 else 1.0
    )
    data = comparison.to_json()
    assert len(data["timeline"]["rows"]) <= MAX_ROWS
    assert data["slowest"] == 777
    assert "rank 777 (slowest of 1,024)" in [r["label"] for r in data["timeline"]["rows"]]
    assert "1,024 ranks" in data["aggregated"]
    assert len(json.dumps(data)) < 1_000_000


def test_both_timelines_start_at_zero(tmp_path: Path) -> None:
    subject = case("pipeline", 2)
    both = both_traces(subject.plan, subject.estimate, measured(tmp_path / "run.json", subject))
    spans = [e for e in both["traceEvents"] if e["ph"] == "X"]
    for pids in ((0, 1), (2, 3)):
        assert min(e["ts"] for e in spans if e["pid"] in pids) == pytest.approx(0.0, abs=1.0)
    json.dumps(both, allow_nan=False)
    assert both_traces(subject.plan, subject.estimate, None)["traceEvents"]


# ------------------------------------------------------------ invalid recordings


def test_recordings_of_other_plans_are_refused(tmp_path: Path) -> None:
    subject, other = case("ddp", 4), case("zero1", 2)
    path = write(tmp_path / "run.json", subject, as_predicted(subject))
    with pytest.raises(TraceError, match="recorded on 4 ranks, but the plan 'zero1' is for 2"):
        compare(path, other.plan, other.estimate)
    wrong = write(
        tmp_path / "wrong.json", subject, as_predicted(subject), fingerprint="x", model="BERT"
    )
    with pytest.raises(TraceError, match="recorded with BERT"):
        compare(wrong, subject.plan, subject.estimate)
    wrong = write(tmp_path / "wrong.json", subject, as_predicted(subject), plan="x")
    with pytest.raises(TraceError, match="another plan of Net"):
        compare(wrong, subject.plan, subject.estimate)
    silent = as_predicted(subject)[:3]
    with pytest.raises(TraceError, match="rank 3 of 4 recorded nothing"):
        compare(write(tmp_path / "s.json", subject, [*silent, []]), subject.plan, subject.estimate)


def test_files_other_than_recordings_are_refused(tmp_path: Path) -> None:
    with torch.profiler.profile() as profile:
        torch.ones(2) + 1
    path = tmp_path / "profile.json"
    profile.export_chrome_trace(str(path))
    with pytest.raises(TraceError, match=r"a trace of torch\.profiler"):
        read_trace(path)
    path.write_text(json.dumps(case("ddp", 4).estimate.timeline.trace()))
    with pytest.raises(TraceError, match="a trace of another program"):
        read_trace(path)
    for text in ("", "[]", "null", "{}", "hello", '{"otherData": {}}', "[" * 100_000, "{" * 9):
        path.write_text(text)
        with pytest.raises(TraceError, match=r"profile\.json"):
            read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.json")


@pytest.mark.parametrize(
    "change",
    [
        {"ts": "0"}, {"ts": float("nan")}, {"dur": -1}, {"pid": 9}, {"pid": "a"}, {"name": 3},
        {"ph": "B"}, {"dur": 10**400}, {"ts": True},
    ],
)  # fmt: skip
def test_malformed_events_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    subject = case("pipeline", 2)
    trace = merge(as_predicted(subject), None, trace_labels(subject.plan))
    place = next(i for i, e in enumerate(trace["traceEvents"]) if e["ph"] == "X")
    trace["traceEvents"][place] |= change
    path = tmp_path / "run.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(TraceError, match=f"event {place}"):
        read_trace(path)


@cache
def good_text() -> str:
    subject = case("pipeline", 2)
    return json.dumps(merge(as_predicted(subject, steps=1), None, trace_labels(subject.plan)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_truncated_files_are_refused_and_changed_files_never_crash(
    tmp_path: Path, data: st.DataObject
) -> None:
    subject, text, path = case("pipeline", 2), good_text(), tmp_path / "run.json"
    cut = data.draw(st.integers(0, len(text) - 1))
    path.write_text(text[:cut])
    with pytest.raises(TraceError):
        read_trace(path)
    changed = data.draw(st.sampled_from(list('{}[]",:0-eN \\x')))
    path.write_text(text[:cut] + changed + text[cut + 1 :])
    with contextlib.suppress(TraceError):
        compare(path, subject.plan, subject.estimate)


def test_large_recordings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(good_text())
    monkeypatch.setattr(recorded, "MAX_EVENTS", 5)
    with pytest.raises(TraceError, match="more than 5 events"):
        read_trace(path)
    monkeypatch.setattr(recorded, "MAX_BYTES", 100)
    with pytest.raises(TraceError, match="record fewer steps"):
        read_trace(path)


def test_the_size_of_chunks_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text(good_text())
    recording = read_trace(path)
    monkeypatch.setattr(recorded, "CHUNK", 7)
    in_chunks = read_trace(path)
    assert recording.names == in_chunks.names
    assert (recording.start == in_chunks.start).all()
