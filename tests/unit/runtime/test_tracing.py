"""Spans are recorded, gathered, aligned, and merged to a trace that Perfetto opens."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise.runtime as rt
from benchmarks.bubbles import bubble_fraction
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.tracing import (
    Clocks,
    Event,
    Recorder,
    align,
    gather_events,
    merge,
    write_trace,
)
from shardwise.runtime.tracing import recording as probe_recording
from shardwise.runtime.transport.threads import ThreadTransport, run_threads


def event(start: int, end: int, lane: str = "compute", name: str = "F", **details: Any) -> Event:
    return Event(lane=lane, name=name, start_ns=start, end_ns=end, details=details)


def test_recording_of_probes_and_recorder_are_exported() -> None:
    assert rt.recording is probe_recording
    assert rt.Recorder is Recorder


def test_spans_and_added_events_are_ordered_by_start() -> None:
    recorder = Recorder(0)
    with recorder.span("compute", "outer", stage=1), recorder.span("compute", "inner"):
        time.sleep(0.001)
    recorder.add("communication", "send", 5, 7, transfer="a")
    send, outer, inner = recorder.take()
    assert (send.name, send.start_ns, send.end_ns, send.details) == (
        "send",
        5,
        7,
        {"transfer": "a"},
    )
    assert (outer.name, inner.name, outer.details) == ("outer", "inner", {"stage": 1})
    assert outer.start_ns <= inner.start_ns < inner.end_ns <= outer.end_ns
    assert inner.end_ns - inner.start_ns >= 1_000_000
    assert recorder.take() == []


def test_a_span_that_fails_is_recorded() -> None:
    recorder = Recorder(0)
    with pytest.raises(ValueError, match="x"), recorder.span("compute", "F"):
        raise ValueError("x")
    assert [e.name for e in recorder.take()] == ["F"]


def test_a_disabled_recorder_records_nothing_and_shares_one_context() -> None:
    recorder = Recorder(0, enabled=False)
    assert recorder.span("compute", "F", stage=1) is recorder.span("groups", "B")
    with recorder.span("compute", "F"):
        pass
    recorder.add("compute", "F", 0, 1)
    module = nn.Sequential(nn.Linear(2, 2))
    recorder.watch(module, ["0"])()
    assert not module[0]._forward_hooks
    assert recorder.take() == []


class Blocks(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_watched_modules_record_forward_and_backward(recompute: bool) -> None:
    recorder, model = Recorder(0), Blocks(recompute)
    stop = recorder.watch(model, ["blocks.0", "blocks.1"])
    outputs = [model(torch.ones(1, 4, requires_grad=True)) for _ in range(2)]
    for output in outputs:
        output.sum().backward()
    events = recorder.take()
    names = [e.name for e in events if not (recompute and e.name.startswith("forward"))]
    backwards = ["backward blocks.1", "backward blocks.0"] * 2
    if recompute:
        assert names == backwards
        assert sum(e.name.startswith("forward") for e in events) == 8
    else:
        assert names == ["forward blocks.0", "forward blocks.1"] * 2 + backwards
    assert {e.lane for e in events} == {"groups"}
    assert all(e.end_ns >= e.start_ns for e in events)
    stop()
    model(torch.ones(1, 4)).sum().backward()
    assert recorder.take() == []


def test_events_of_all_ranks_are_gathered_on_the_first() -> None:
    def work(rank: int, transport: ThreadTransport) -> Any:
        axis = ProcessMesh({"dp": 3}, rank, transport).world
        events = [event(rank, 10 * i, name=f"é{rank}", part=[rank]) for i in range(rank)]
        return events, gather_events(axis, events)

    results = run_threads(3, work)
    assert results[0][1] == [events for events, _ in results]
    assert results[1][1] is None
    events_of_one = [event(1, 2)]
    assert gather_events(ProcessMesh({"dp": 1}).world, events_of_one) == [events_of_one]


def test_clocks_that_differ_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = {"rank0": 0, "rank1": 0, "rank2": 3_000_000_000, "rank3": -5_000_000_000}
    real = time.perf_counter_ns

    def skewed() -> int:
        return real() + ahead.get(threading.current_thread().name, 0)

    def work(rank: int, transport: ThreadTransport) -> Clocks:
        return align(ProcessMesh({"dp": 4}, rank, transport).world)

    monkeypatch.setattr(time, "perf_counter_ns", skewed)
    clocks = run_threads(4, work)
    assert len(set(clocks)) == 1
    assert clocks[0].offsets_ns[:2] == (0, 0)
    for offset, want, error in zip(
        clocks[0].offsets_ns, ahead.values(), clocks[0].uncertainties_ns, strict=True
    ):
        assert abs(offset - want) <= error < 1_000_000_000


def test_a_trace_has_processes_lanes_slices_and_arrows() -> None:
    first = [event(1000, 3000), event(2000, 6000, "communication", "send x", transfer=7)]
    second = [
        event(1500, 9500, "communication", "receive x", transfer=7),
        event(9500, 9900, note="é"),
        event(9600, 9700, "communication", "send y", transfer=8),
    ]
    trace = merge([first, second], Clocks(offsets_ns=(0, 500), uncertainties_ns=(0, 0)))
    by_kind: dict[str, list[Any]] = {}
    for each in trace["traceEvents"]:
        by_kind.setdefault(each["ph"], []).append(each)
    labels = [(e["name"], e["pid"], e["args"].get("name")) for e in by_kind["M"]]
    assert ("process_name", 1, "rank 1") in labels
    assert ("thread_name", 1, "communication") in labels
    slices = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in by_kind["X"]]
    assert slices == [
        ("F", 0, 0.0, 2.0),
        ("send x", 0, 1.0, 4.0),
        ("receive x", 1, 0.0, 8.0),
        ("F", 1, 8.0, 0.4),
        ("send y", 1, 8.1, 0.1),
    ]
    assert by_kind["X"][3]["args"] == {"note": "é"}
    (start,), (finish,) = by_kind["s"], by_kind["f"]
    assert start["id"] == finish["id"]
    assert (start["pid"], start["ts"]) == (0, 1.0)
    assert finish["pid"] == 1
    assert start["ts"] < finish["ts"] < 8.0


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: event(p[0], p[0] + p[1])),
    max_size=12,
)


@given(st.lists(spans, min_size=1, max_size=3))
def test_slices_of_a_thread_only_nest(per_rank: list[list[Event]]) -> None:
    slices = [e for e in merge(per_rank)["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == sum(map(len, per_rank))
    for i, a in enumerate(slices):
        for b in slices[i + 1 :]:
            if (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
                (_, a1), (b0, b1) = sorted(
                    [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in (a, b)],
                    key=lambda s: (s[0], -s[1]),
                )
                assert b0 >= a1 or b1 <= a1


@given(st.lists(spans, min_size=1, max_size=3))
def test_bubbles_are_the_idle_fraction_of_the_step(per_rank: list[list[Event]]) -> None:
    bubbles, of_trace = bubble_fraction(per_rank), bubble_fraction(merge(per_rank))
    assert of_trace.per_rank == pytest.approx(bubbles.per_rank, abs=1e-9)
    every = [e for events in per_rank for e in events]
    times = range(
        min((e.start_ns for e in every), default=0), max([e.end_ns for e in every] or [0])
    )
    for events, idle in zip(per_rank, bubbles.per_rank, strict=True):
        busy = sum(any(e.start_ns <= t < e.end_ns for e in events) for t in times)
        assert idle == pytest.approx(1 - busy / len(times) if times else 0)
    assert bubbles.overall == pytest.approx(sum(bubbles.per_rank) / len(per_rank))


def test_bubbles_consider_one_lane() -> None:
    events = [event(0, 10), event(0, 100, "communication"), event(15, 20)]
    assert bubble_fraction([events]).overall == pytest.approx(0.25)
    assert bubble_fraction([events], "communication").overall == 0
    assert bubble_fraction([events], "groups").overall == 0


def test_a_trace_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "step.json"
    write_trace(path, merge([[event(0, 1)]]))
    first = path.read_text()
    assert json.loads(first)["traceEvents"]
    with pytest.raises(RecursionError):
        write_trace(path, {"traceEvents": _endless()})
    assert path.read_text() == first
    assert list(path.parent.iterdir()) == [path]


def _endless() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep
