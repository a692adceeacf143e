"""The idle fraction of a recorded step."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.runtime.tracing import Event, Trace, busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """The fraction of a step in which a rank's lane was idle, per rank and on average."""

    per_rank: tuple[float, ...]
    overall: float


def bubble_fraction(recorded: Trace | Sequence[Sequence[Event]], lane: str = "compute") -> Bubbles:
    """Return the idle fraction of a step, from the first start to the last end of any rank.

    `recorded` is a trace, or the events of every rank, timed by one clock.
    """
    spans: list[list[tuple[float, float]]]
    if isinstance(recorded, dict):
        spans = [[] for _ in {event["pid"] for event in recorded["traceEvents"]}]
        for event in recorded["traceEvents"]:
            if event["ph"] == "X" and event["cat"] == lane:
                spans[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    else:
        spans = [[(e.start_ns, e.end_ns) for e in rank if e.lane == lane] for rank in recorded]
    ends = [end for rank in spans for span in rank for end in span]
    duration = max(ends) - min(ends) if ends else 0.0
    idle = tuple(1 - busy(rank) / duration if duration else 0.0 for rank in spans)
    return Bubbles(per_rank=idle, overall=sum(idle) / max(len(idle), 1))
