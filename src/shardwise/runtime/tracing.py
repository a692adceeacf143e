"""Record what happens when on each rank, and merge the events of all ranks into a trace.

A `Recorder` collects events on lanes. Times are `time.perf_counter_ns()`. On CUDA, where the host
runs ahead, a span is measured by events on the stream that is current at its beginning and end;
`take` waits for the device.

Lanes: "step" (an entire `train_step`, with its number), "compute" (actions of the schedule,
clipping, the optimizer), "groups" (blocks within actions), "communication" (from the start of a
collective until it was waited for) and "waiting" (the part of it that delayed this rank, named
after its cause).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import TraceError
from shardwise.files import write_text
from shardwise.runtime.devices import has_streams, module_of, synchronize

if TYPE_CHECKING:
    from shardwise.runtime.mesh import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that took from `start_ns` to `end_ns` on a lane ("compute", "communication", …)."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    details: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """One rank's events. Disabled, it does nothing and costs next to nothing.

    >>> recorder = Recorder(0)
    >>> with recorder.span("compute", "F", stage=0):
    ...     pass
    >>> [event.name for event in recorder.take()]
    ['F']
    """

    def __init__(self, rank: int, enabled: bool = True, device: torch.device | str = "cpu") -> None:
        self.rank, self.enabled = rank, enabled
        self._watched: list[_Watch] = []
        self._events: list[Event] = []
        self._spans: list[_Span] = []
        device = torch.device(device)
        self._device = device if has_streams(device) else None
        self._origin: tuple[Any, int] | None = None  # one moment, by both clocks

    def start(self, *, blocks: bool = True) -> None:
        """Record from now on, or continue after `pause`; `blocks=False` leaves modules alone."""
        self.enabled = True
        for watch in self._watched if blocks else ():
            watch.attach()

    def pause(self) -> None:
        """Record nothing until `start`; events recorded so far remain."""
        self.enabled = False
        for watch in self._watched:
            watch.detach()

    def span(
        self, lane: str, name: str, **details: Any
    ) -> contextlib.AbstractContextManager[object]:
        """Record the time that the body takes."""
        return self._new_span(lane, name, details) if self.enabled else _NO_SPAN

    def add(self, lane: str, name: str, start: int, end: int, **details: Any) -> None:
        """Record an event that was timed elsewhere, in nanoseconds of `time.perf_counter_ns`."""
        if self.enabled:
            self._events.append(
                Event(lane=lane, name=name, start_ns=start, end_ns=end, details=details)
            )

    def take(self) -> list[Event]:
        """Return the events since the last call, by start. All spans must have ended."""
        events, self._events = self._events, []
        spans, self._spans = self._spans, []
        if self._device is None:
            events += [span.event(int) for span in spans]
        elif spans and self._origin is not None:  # a span may end after the recording it began in
            synchronize(self._device)
            origin, origin_ns = self._origin
            events += [
                span.event(lambda mark: origin_ns + int(origin.elapsed_time(mark) * 1e6))
                for span in spans
            ]
            self._origin = None
        return _ordered(events)

    def watch(self, module: nn.Module, paths: Iterable[str]) -> Callable[[], None]:
        """Record forward and backward of these submodules on the lane "groups".

        Recomputed forwards are recorded within their backward. A backward ends when the gradients
        of the inputs exist; it has no length where no input needs one. Call the result to stop.
        """
        modules = [(module.get_submodule(path), path) for path in paths]
        watch = _Watch(modules, lambda name: self._new_span("groups", name, {}))
        self._watched.append(watch)
        if self.enabled:
            watch.attach()

        def stop() -> None:
            watch.detach()
            if watch in self._watched:
                self._watched.remove(watch)

        return stop

    def _new_span(self, lane: str, name: str, details: Mapping[str, Any]) -> _Span:
        if self._device is not None and self._origin is None:
            synchronize(self._device)
            event = _event(self._device)
            event.synchronize()
            self._origin = event, time.perf_counter_ns()
        clock: Callable[[], Any] = time.perf_counter_ns
        if self._device is not None:
            clock = functools.partial(_event, self._device)
        return _Span(self._spans, clock, lane, name, details)


_NO_SPAN = contextlib.nullcontext()


def called_submodules(module: nn.Module) -> list[str]:
    """Return the paths of the submodules that are called; containers such as lists are not."""
    return [
        path
        for path, child in module.named_modules()
        if path and type(child).forward is not nn.Module.forward
    ]


@dataclass(slots=True, eq=False)
class _Span:
    """The time between two marks of a clock: nanoseconds of the host, or events of the device."""

    spans: list[_Span]
    clock: Callable[[], Any]
    lane: str
    name: str
    details: Mapping[str, Any]
    start: Any = None
    end: Any = None

    def __enter__(self) -> None:
        self.start = self.clock()

    def __exit__(self, *error: object) -> None:
        self.end = self.clock()
        self.spans.append(self)

    def event(self, to_ns: Callable[[Any], int]) -> Event:
        """Return the span in host time."""
        start_ns, end_ns = to_ns(self.start), to_ns(self.end)
        return Event(
            lane=self.lane, name=self.name, start_ns=start_ns, end_ns=end_ns, details=self.details
        )


def _event(device: torch.device) -> Any:
    event = module_of(device).Event(enable_timing=True)
    event.record()
    return event


class _Watch:
    """Submodules whose forward and backward are recorded, while hooks are attached to them."""

    def __init__(
        self, modules: Sequence[tuple[nn.Module, str]], new_span: Callable[[str], _Span]
    ) -> None:
        self._modules, self._new_span = modules, new_span
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Add the hooks, unless they are already attached."""
        for module, path in self._modules if not self._handles else ():
            begin_forward, end_forward = self._hooks(f"forward {path}")
            begin_backward, end_backward = self._hooks(f"backward {path}")
            self._handles += [
                module.register_forward_pre_hook(begin_forward),
                module.register_forward_hook(end_forward, always_call=True),
                module.register_full_backward_pre_hook(begin_backward),
                module.register_full_backward_hook(end_backward),
            ]

    def _hooks(self, name: str) -> tuple[Callable[..., None], ...]:
        """Return hooks that begin and end spans; the last one begun ends first."""
        open_spans: list[_Span] = []

        def begin(*_: Any) -> None:
            span = self._new_span(name)
            open_spans.append(span)
            span.__enter__()

        def end(*_: Any) -> None:
            if open_spans:
                open_spans.pop().__exit__(None, None, None)

        # A compiled program calls them without tracing into them.
        return torch.compiler.disable(begin), torch.compiler.disable(end)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


# `gather_events` sends all ranks' events to the first, `align` measures the offsets of their
# clocks, and `merge` makes a trace in the Chrome trace event format, which Perfetto
# (https://ui.perfetto.dev) and chrome://tracing open.


Trace = dict[str, Any]
FORMAT, VERSION = "shardwise-trace", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """How far each rank's clock is ahead of the first rank's, and how uncertain that is."""

    offsets_ns: tuple[int, ...]
    uncertainties_ns: tuple[int, ...]


def align(axis: Axis, rounds: int = 8, device: torch.device | str = "cpu") -> Clocks:
    """Measure the ranks' clocks against each other; all ranks of the axis call it.

    No rank leaves an all-gather before all have entered it. So rank r's clock is ahead of the
    first's by at least its entry less the first's exit, and at most its exit less the first's
    entry. Several rounds narrow this down; a shared clock (one host) is recognized as such.
    """
    entries: list[int] = []
    exits: list[int] = []
    for _ in range(rounds):
        entries.append(time.perf_counter_ns())
        axis.gather_integers(entries[-1:], device)  # results in host memory: the device is done
        exits.append(time.perf_counter_ns())
    first, *others = axis.gather_integers(entries + exits, device)
    offsets, uncertainties = [0], [0]
    for times in others:
        low = max(a - b for a, b in zip(times[:rounds], first[rounds:], strict=True))
        high = min(a - b for a, b in zip(times[rounds:], first[:rounds], strict=True))
        offsets.append(0 if low <= 0 <= high else (low + high) // 2)
        uncertainties.append((high - low + 1) // 2)
    return Clocks(offsets_ns=tuple(offsets), uncertainties_ns=tuple(uncertainties))


def gather_events(
    axis: Axis, events: Iterable[Event], device: torch.device | str = "cpu"
) -> list[list[Event]] | None:
    """Return all ranks' events by rank on the axis's first rank; None on the others."""
    rows = axis.gather_objects([asdict(event) for event in events], device)
    return [[Event(**fields) for fields in row] for row in rows] if axis.index == 0 else None


def merge(
    per_rank: Sequence[Sequence[Event]],
    clocks: Clocks | None = None,
    about: Mapping[str, str] | None = None,
) -> Trace:
    """Merge events into one trace: a process per rank, a thread per lane, arrows for transfers.

    Its `otherData` identifies the trace: format, number of ranks, and the metadata `about`.

    An arrow connects an event named "send…" to the other one with the same `transfer` detail.
    Events of a lane that overlap without being nested are shown in separate rows.
    """
    offsets = clocks.offsets_ns if clocks is not None else (0,) * len(per_rank)
    shifted = list(zip(per_rank, offsets, strict=True))
    begin = min((e.start_ns - offset for events, offset in shifted for e in events), default=0)
    labels: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    for rank, (events, offset) in enumerate(shifted):
        own_labels, own_slices = process_events(rank, f"rank {rank}", events, offset + begin)
        labels += own_labels
        slices += own_slices
    metadata = {"format": FORMAT, "version": VERSION, "num_ranks": len(per_rank), **(about or {})}
    trace_events = labels + slices + _arrows(slices)
    return {"otherData": metadata, "displayTimeUnit": "ms", "traceEvents": trace_events}


def process_events(
    pid: int, title: str, events: Iterable[Event], begin_ns: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a trace's labels and slices for the events of one process."""
    rows = _rows(events)
    tids = {row: tid for tid, row in enumerate(dict.fromkeys(rows))}
    labels = [label_event("process_name", pid, 0, name=title)]
    labels.append(label_event("process_sort_index", pid, 0, sort_index=pid))
    for (lane, number), tid in tids.items():
        name = lane if number == 1 else f"{lane} {number}"
        labels.append(label_event("thread_name", pid, tid, name=name))
    return labels, [
        _slice(event, pid, tids[row], begin_ns)
        for event, row in zip(_ordered(events), rows, strict=True)
    ]


def _slice(event: Event, rank: int, tid: int, begin_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane,
        "pid": rank,
        "tid": tid,
        "ts": (event.start_ns - begin_ns) / 1e3,
        "dur": (event.end_ns - event.start_ns) / 1e3,
        "args": dict(event.details),
    }


def label_event(name: str, pid: int, tid: int, /, **args: str | int) -> dict[str, Any]:
    """Return the event that labels a process or thread of a trace."""
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _ordered(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda e: (e.start_ns, -e.end_ns))


def _rows(events: Iterable[Event]) -> list[tuple[str, int]]:
    """Return lane and row of every event in order: the first row in which it overlaps no other
    event, except ones that contain it.
    """
    open_ends: dict[tuple[str, int], list[int]] = {}
    rows = []
    for event in _ordered(events):
        for number in itertools.count(1):
            ends = open_ends.setdefault((event.lane, number), [])
            while ends and ends[-1] <= event.start_ns:
                ends.pop()
            if not ends or event.end_ns <= ends[-1]:
                ends.append(event.end_ns)
                rows.append((event.lane, number))
                break
    return rows


def _arrows(slices: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return flows from the beginning of a send to just before the end of its receive."""
    ends: dict[str, dict[bool, Mapping[str, Any]]] = {}
    for event in slices:
        if "transfer" in event["args"]:
            pair = ends.setdefault(str(event["args"]["transfer"]), {})
            pair[event["name"].startswith("send")] = event
    result: list[dict[str, Any]] = []
    for number, (transfer, pair) in enumerate(ends.items()):
        if len(pair) == 2:
            send, receive = pair[True], pair[False]
            shared = {"name": f"transfer {transfer}", "cat": "transfer", "id": number}
            end = max(receive["ts"], receive["ts"] + receive["dur"] - 1e-3)
            threads = [{"pid": event["pid"], "tid": event["tid"]} for event in (send, receive)]
            result.append({"ph": "s", **shared, **threads[0], "ts": send["ts"]})
            result.append({"ph": "f", "bp": "e", **shared, **threads[1], "ts": end})
    return result


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace as JSON atomically: a reader sees the old file or the complete new one."""
    write_text(os.fspath(path), json.dumps(trace, default=str), TraceError)


def own_seconds(events: Sequence[Event]) -> tuple[float, float]:
    """Return the seconds in which a rank computed without waiting, and in which it waited."""
    waits = [(e.start_ns, e.end_ns) for e in events if e.lane == "waiting"]
    computes = [(e.start_ns, e.end_ns) for e in events if e.lane == "compute"]
    waiting = busy(waits)
    return (busy([*computes, *waits]) - waiting) / 1e9, waiting / 1e9


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# Probes of values inside a running program, with which the verifier finds the first difference.


_local = threading.local()


@dataclass(slots=True)
class Records:
    """The values that one rank probed, and their gradients, by name.

    An operator may return its operand, such as `contiguous` of a rank's single head. The gradient
    of such an alias arrives from all uses of the operand.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    _probed: dict[int, Tensor] = field(default_factory=dict)  # stored so that ids stay unique


def probe(name: str, value: Tensor) -> None:
    """Record a value and its gradient, inside of `recording` in this thread."""
    records: Records | None = getattr(_local, "records", None)
    if records is None or not isinstance(value, Tensor):
        return
    name = getattr(_local, "prefix", "") + name
    first, calls = name, 1
    while name in records.values:  # the statement runs once per block
        calls += 1
        name = f"{first} (call {calls})"
    records.values[name] = value.detach().clone()
    if id(value) in records._probed:
        records.aliases.add(name)
    records._probed[id(value)] = value
    if value.requires_grad:

        def record(gradient: Tensor | None) -> None:
            if gradient is not None:  # of an unused result of a custom function
                records.gradients[name] = gradient.detach().clone()

        value.register_hook(record)  # type: ignore[no-untyped-call]


def probing(prefix: str) -> None:
    """Set the prefix of this thread's probes: a stage and a micro-batch."""
    if getattr(_local, "records", None) is not None:
        _local.prefix = prefix


@contextlib.contextmanager
def recording(records: Records | None = None) -> Iterator[Records]:
    """Collect the probes of this thread."""
    _local.records = records = Records() if records is None else records
    try:
        yield records
    finally:
        _local.records, _local.prefix = None, ""
