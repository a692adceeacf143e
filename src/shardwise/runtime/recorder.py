"""What happened when on one rank: a `Recorder` collects events on lanes.

Times are `time.perf_counter_ns()`. On CUDA, where the host runs ahead, a span is measured by
events on the stream that is current at its beginning and end; `take` waits for the device.

Lanes: "step" (a whole `train_step`, with its number), "compute" (actions of the schedule, clipping,
the optimizer), "groups" (blocks inside of actions), "communication" (what travels, from its start
until it was waited for) and "waiting" (what of it held this rank up, named after its cause).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

__all__ = ["Event", "Recorder", "called_submodules"]


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
        self._timed: list[_CudaSpan] = []
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None
        self._origin: tuple[torch.cuda.Event, int] | None = None

    def start(self, *, blocks: bool = True) -> None:
        """Record from now on, or go on after `pause`; without `blocks`, as cheaply as possible."""
        self.enabled = True
        for watch in self._watched if blocks else ():
            watch.attach()

    def pause(self) -> None:
        """Record nothing until `start`; what was recorded stays."""
        self.enabled = False
        for watch in self._watched:
            watch.detach()

    def span(
        self, lane: str, name: str, **details: Any
    ) -> contextlib.AbstractContextManager[object]:
        """Record the time that the body takes."""
        if not self.enabled:
            return _NOTHING
        return self._new_span(lane, name, details)

    def add(self, lane: str, name: str, start: int, end: int, **details: Any) -> None:
        """Record something that was timed elsewhere, in nanoseconds of `time.perf_counter_ns`."""
        if self.enabled:
            self._events.append(
                Event(lane=lane, name=name, start_ns=start, end_ns=end, details=details)
            )

    def take(self) -> list[Event]:
        """The events since the last time, in the order of their starts. All spans have ended."""
        events, self._events = self._events, []
        timed, self._timed = self._timed, []
        if timed and self._origin is not None:  # a span may end after the recording it began in
            torch.cuda.synchronize(self._cuda)
            events += [span.event(*self._origin) for span in timed]
            self._origin = None
        return sorted(events, key=lambda e: (e.start_ns, -e.end_ns))

    def watch(self, module: nn.Module, paths: Iterable[str]) -> Callable[[], None]:
        """Record forward and backward of these submodules on the lane "groups".

        Recomputed forwards are recorded within their backward. A backward ends when the inputs'
        gradients are there; it has no length where no input needs one. Call the result to stop.
        """
        watch = _Watch([(module.get_submodule(path), path) for path in paths], self._open)
        self._watched.append(watch)
        if self.enabled:
            watch.attach()

        def stop() -> None:
            watch.detach()
            if watch in self._watched:
                self._watched.remove(watch)

        return stop

    def _open(self, name: str) -> _Hooks:
        return _Hooks(lambda: self._new_span("groups", name, {}))

    def _new_span(self, lane: str, name: str, details: Mapping[str, Any]) -> _Span | _CudaSpan:
        if self._cuda is None:
            return _Span(self._events, lane, name, details)
        if self._origin is None:
            torch.cuda.synchronize(self._cuda)
            event = _cuda_event()
            event.synchronize()
            self._origin = event, time.perf_counter_ns()
        return _CudaSpan(self._timed, lane, name, details)


_NOTHING = contextlib.nullcontext()


def called_submodules(module: nn.Module) -> list[str]:
    """Return the paths of the submodules that are called; containers such as lists are not."""
    return [
        path
        for path, child in module.named_modules()
        if path and type(child).forward is not nn.Module.forward
    ]


class _Span:
    """A span timed by the host's clock."""

    __slots__ = ("_details", "_events", "_lane", "_name", "_start")

    def __init__(
        self, events: list[Event], lane: str, name: str, details: Mapping[str, Any]
    ) -> None:
        self._events, self._lane, self._name, self._details = events, lane, name, details

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.perf_counter_ns()
        self._events.append(
            Event(
                lane=self._lane,
                name=self._name,
                start_ns=self._start,
                end_ns=end,
                details=self._details,
            )
        )


class _CudaSpan:
    """A span timed by the device."""

    __slots__ = ("_details", "_end", "_lane", "_name", "_spans", "_start")

    def __init__(
        self, spans: list[_CudaSpan], lane: str, name: str, details: Mapping[str, Any]
    ) -> None:
        self._spans, self._lane, self._name, self._details = spans, lane, name, details

    def __enter__(self) -> None:
        self._start = _cuda_event()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end = _cuda_event()
        self._spans.append(self)

    def event(self, origin: torch.cuda.Event, origin_ns: int) -> Event:
        """The span in the host's time, once the device is done."""
        return Event(
            lane=self._lane,
            name=self._name,
            start_ns=origin_ns + int(origin.elapsed_time(self._start) * 1e6),
            end_ns=origin_ns + int(origin.elapsed_time(self._end) * 1e6),
            details=self._details,
        )


def _cuda_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class _Hooks:
    """Hooks that begin and end spans of one name; the last one begun ends first."""

    def __init__(self, new_span: Callable[[], _Span | _CudaSpan]) -> None:
        self._open: list[_Span | _CudaSpan] = []

        def begin(*_: Any) -> None:
            span = new_span()
            self._open.append(span)
            span.__enter__()

        def end(*_: Any) -> None:
            if self._open:
                self._open.pop().__exit__(None, None, None)

        # A compiled program calls them as they are.
        self.begin = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
        self.end = torch.compiler.disable(end)  # type: ignore[no-untyped-call]


class _Watch:
    """Submodules whose forward and backward are recorded, while hooks are attached to them."""

    def __init__(
        self, modules: Sequence[tuple[nn.Module, str]], spans: Callable[[str], _Hooks]
    ) -> None:
        self._modules, self._spans = modules, spans
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Add the hooks, unless they are there."""
        for module, path in self._modules if not self._handles else ():
            forward, backward = self._spans(f"forward {path}"), self._spans(f"backward {path}")
            self._handles += [
                module.register_forward_pre_hook(forward.begin),
                module.register_forward_hook(forward.end, always_call=True),
                module.register_full_backward_pre_hook(backward.begin),
                module.register_full_backward_hook(backward.end),
            ]

    def detach(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
