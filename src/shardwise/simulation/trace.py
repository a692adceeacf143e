"""A timeline as events that chrome://tracing and Perfetto read.

Every group is a process with lanes for compute, for communication after it, for communication that
actions wait for, and for messages between stages, and with a counter of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.schedules import Action
    from shardwise.simulation.memory import MemoryUse
    from shardwise.simulation.step import Timeline

LANES = ("compute", "communication", "communication in actions", "messages")
COMPUTE, AFTER, INSIDE, MESSAGES = range(len(LANES))
MICRO = 1e6  # the format's unit is a microsecond

Event = dict[str, Any]


def trace_events(timeline: Timeline, memory: Sequence[MemoryUse] = ()) -> list[Event]:
    """All events; names first, then what takes time, then memory."""
    groups = range(len(timeline.busy))
    return [
        *(event for group in groups for event in _names(group)),
        *(
            _span(s.name, s.kind, s.group, lanes[s.lane], s.start, s.end, s.detail)
            for lanes in ({"compute": COMPUTE, "communication": AFTER},)
            for s in timeline.spans
        ),
        *_collectives(timeline),
        *(event for use in memory for event in _memory(timeline, use)),
    ]


def _names(group: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": group, "args": {"name": f"group {group}"}}
    for lane, name in enumerate(LANES):
        about = {"ph": "M", "name": "thread_name", "pid": group, "tid": lane}
        yield {**about, "args": {"name": name}}


def _span(
    name: str, kind: str, group: int, lane: int, start: float, end: float, detail: Any = None
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": group,
        "tid": lane,
        "ts": start * MICRO,
        "dur": (end - start) * MICRO,
        "args": dict(detail or {}),
    }


def _collectives(timeline: Timeline) -> Iterator[Event]:
    """What every action waits for, in one piece where it begins, and the message it sends."""
    at = 0
    for group, actions in enumerate(timeline.schedule.actions):
        for action in actions:
            start, end = float(timeline.starts[at]), float(timeline.ends[at])
            wait, talk = float(timeline.waits[at]), float(timeline.collectives[at])
            if wait > 0:
                name = f"parameters of {action}"
                yield _span(name, "gather", group, INSIDE, start, start + wait)
            if talk > 0:
                name, first = f"collectives of {action}", start + wait
                yield _span(name, "collectives", group, INSIDE, first, first + talk)
            there, seconds = _message(timeline, action, group)
            if seconds > 0:
                name = f"{action} to stage {there}"
                yield _span(name, "send", group, MESSAGES, end, end + seconds)
            at += 1


def _message(timeline: Timeline, action: Action, group: int) -> tuple[int, float]:
    """The stage that waits for an action's result on another group, and the message's seconds."""
    placement = timeline.schedule.placement
    there = action.stage + (1 if action.kind == "F" else -1)
    if action.kind == "W" or not 0 <= there < len(placement) or placement[there] == group:
        return there, 0.0
    return there, timeline.times.stages[min(action.stage, there)].send_s


def _memory(timeline: Timeline, use: MemoryUse) -> Iterator[Event]:
    """The bytes of a group's rank at every action, or the most of several."""
    before = sum(len(actions) for actions in timeline.schedule.actions[: use.group])
    count = len(timeline.schedule.actions[use.group])
    moments = [size for _, size in use.over_time]
    about = {"ph": "C", "name": "memory", "pid": use.group}
    for index, size in enumerate(moments):
        start = float(timeline.starts[before + index * count // len(moments)])
        yield {**about, "ts": start * MICRO, "args": {"bytes": size}}
    if use.when == "optimizer":
        ends = [s.start for s in timeline.after if s.group == use.group and s.kind == "optimizer"]
        for start in ends:
            yield {**about, "ts": start * MICRO, "args": {"bytes": use.peak_bytes}}
