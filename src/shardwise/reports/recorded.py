"""Read a recorded trace as columns of the events of all ranks.

The file is decoded event by event and only the numbers of each event are stored, which takes much
less memory than the text.
"""

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import TraceError
from shardwise.runtime.tracing import FORMAT, VERSION

LANES = ("step", "compute", "waiting", "communication", "groups")
COLUMNS = {"rank": "i", "lane": "i", "name": "i", "start": "d", "end": "d", "step": "q"}
MAX_BYTES = 4 << 30
MAX_EVENTS = 5_000_000
MAX_NAMES = 100_000
MAX_VALUE = 16 << 20  # characters of one value
CHUNK = 1 << 20
MAX_NAME = 200
PHASES = ("X", "M", "s", "f")  # spans, labels, and the ends of arrows
HINT = 'pm = sw.parallelize(…, record=True); pm.trace("run.json"), or in a config trace: {steps: …}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The events of all ranks as columns, in seconds of one clock.

    Events are sorted by rank, lane and start.
    """

    file: str
    about: Mapping[str, str]
    num_ranks: int
    names: tuple[str, ...] = field(repr=False)
    rank: NDArray[np.int32] = field(repr=False)
    lane: NDArray[np.int32] = field(repr=False)  # of `LANES`
    name: NDArray[np.int32] = field(repr=False)  # of `names`
    start: NDArray[np.float64] = field(repr=False)
    end: NDArray[np.float64] = field(repr=False)
    step: NDArray[np.int64] = field(repr=False)  # number of an event of the lane "step", or -1

    def of(self, rank: int, lane: str) -> slice:
        """Return the events of a rank's lane."""
        own = slice(*np.searchsorted(self.rank, (rank, rank + 1)))
        ends = np.searchsorted(self.lane[own], (LANES.index(lane), LANES.index(lane) + 1))
        return slice(own.start + int(ends[0]), own.start + int(ends[1]))


def read_trace(path: str | os.PathLike[str]) -> Recording:
    """Read the recording in a file."""
    where = Path(path)
    try:
        size = where.stat().st_size
        if size > MAX_BYTES:
            raise TraceError(
                f"{size / 2**30:.1f} GiB exceed the limit of {MAX_BYTES >> 30} GiB",
                where=str(where),
                hint="record fewer steps: two or three are enough",
            )
        with where.open(encoding="utf-8") as file:
            return read_events(file, str(where))
    except OSError as error:
        raise TraceError(
            f"cannot be read: {error.strerror or error}", where=str(where), hint=HINT
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(f"is not text: {error.reason}", where=str(where), hint=HINT) from None


def read_events(file: TextIO, where: str) -> Recording:
    """Read a recording; errors name the place `where` it comes from."""
    text = _Text(file, where)
    if text.peek() != "{":
        raise TraceError("is not a trace: expected a JSON object", where=where, hint=HINT)
    about: dict[str, Any] = {}
    columns: _Columns | None = None
    for key in text.names():
        if key != "traceEvents":
            value = text.value()
            about = value if key == "otherData" and isinstance(value, dict) else about
            continue
        num_ranks = _checked(about, text.keys, where)
        columns = _Columns(num_ranks, where)
        for number, event in enumerate(text.items()):
            columns.add(event, number)
    if text.peek():
        raise text.error("data after the end of the trace")
    if columns is None:
        raise TraceError("has no events", where=where, hint=HINT)
    return columns.recording(where, about)


def _checked(about: Mapping[str, Any], keys: list[str], where: str) -> int:
    """Check that Shardwise recorded the trace, and return its number of ranks."""
    if about.get("format") != FORMAT:
        is_profile = {"schemaVersion", "deviceProperties"} & set(keys)
        origin = "torch.profiler" if is_profile else "another program"
        raise TraceError(
            f"is a trace of {origin}, not a recording of Shardwise", where=where, hint=HINT
        )
    if about.get("version") != VERSION:
        raise TraceError(
            f"is a recording of version {about.get('version')!r}, expected {VERSION}", where=where
        )
    ranks = about.get("num_ranks")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= 1_000_000:
        raise TraceError(
            f"invalid number of ranks {ranks!r}", where=f"{where}: otherData.num_ranks"
        )
    return ranks


class _Text:
    """Decode JSON value by value while reading it."""

    def __init__(self, file: TextIO, where: str) -> None:
        self._file, self._where = file, where
        self._text, self._at, self._before = "", 0, 0
        self._ended = False
        self._decoder = json.JSONDecoder()
        self.keys: list[str] = []

    def peek(self) -> str:
        """Return the next character that is not a space, or "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def names(self) -> Iterator[str]:
        """Yield the keys of an object; the caller must read each value."""
        for _ in self._between("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise self.error(f"{key!r} is not a key")
            self._take(":")
            self.keys.append(key)
            yield key

    def items(self) -> Iterator[Any]:
        """Yield the values of a list."""
        for _ in self._between("[", "]"):
            yield self.value()

    def _between(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            yield
            if self.peek() == closing:
                self._at += 1
                return
            self._take(",")

    def value(self) -> Any:
        """Return the next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                raise self.error(error.msg) from None
            except (ValueError, RecursionError) as error:
                raise self.error(str(error).partition("(")[0].strip()) from None
            if end == len(self._text) and self._more():
                continue  # more digits of a number may follow
            self._at = end
            return value

    def _take(self, expected: str) -> None:
        character = self.peek()
        if character != expected:
            raise self.error(
                f"expected {expected!r}" + (f", got {character!r}" if character else "")
            )
        self._at += 1

    def _more(self) -> bool:
        """Read more text; return whether there was any."""
        if self._ended:
            return False
        if len(self._text) - self._at > MAX_VALUE:
            raise self.error(f"a value of more than {MAX_VALUE >> 20} MiB")
        piece = self._file.read(CHUNK)
        self._ended = not piece
        self._before += self._at
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def error(self, reason: str) -> TraceError:
        """Return an error about the current position."""
        at = self._before + self._at
        if self._ended and self._at >= len(self._text.rstrip()):
            reason = f"unexpected end of file ({reason})"
        return TraceError(f"is corrupt at character {at:,}: {reason}", where=self._where, hint=HINT)


class _Columns:
    """Check and collect events."""

    def __init__(self, num_ranks: int, where: str) -> None:
        self._num_ranks, self._where = num_ranks, where
        self._names: dict[str, int] = {}
        self._lanes = {lane: number for number, lane in enumerate(LANES)}
        self._columns: dict[str, Any] = {name: array(code) for name, code in COLUMNS.items()}

    def add(self, event: Any, number: int) -> None:
        """Add an event; store only spans of known lanes."""
        if not isinstance(event, dict) or event.get("ph") not in PHASES:
            raise self._wrong(number, "is not an event of a recording")
        if event["ph"] != "X":
            return
        lane = self._lanes.get(str(event.get("cat", "")))
        start, length = (_number(event.get(key)) for key in ("ts", "dur"))
        rank, name = event.get("pid"), event.get("name")
        if start is None or length is None or length < 0:
            raise self._wrong(
                number, f"starts at {event.get('ts')!r} and lasts {event.get('dur')!r} us"
            )
        if not isinstance(rank, int) or not 0 <= rank < self._num_ranks:
            raise self._wrong(number, f"is of rank {rank!r} of {self._num_ranks}")
        if not isinstance(name, str):
            raise self._wrong(number, f"has the name {name!r}")
        if lane is None:
            return
        if len(self._columns["rank"]) >= MAX_EVENTS:
            raise TraceError(
                f"more than {MAX_EVENTS:,} events",
                where=self._where,
                hint="record fewer steps: two or three are enough",
            )
        step = self._step_of(event, number) if lane == 0 else -1
        place = self._number_of(name, number)
        row = (rank, lane, place, start * 1e-6, (start + length) * 1e-6, step)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def _number_of(self, name: str, number: int) -> int:
        short = name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
        place = self._names.setdefault(short, len(self._names))
        if place >= MAX_NAMES:
            raise self._wrong(number, f"exceeds the limit of {MAX_NAMES:,} names")
        return place

    def _step_of(self, event: Mapping[str, Any], number: int) -> int:
        details = event.get("args")
        step = details.get("step") if isinstance(details, dict) else None
        if not isinstance(step, int) or not 0 <= step < 1 << 62:
            raise self._wrong(number, f"is a step with the number {step!r}")
        return step

    def _wrong(self, number: int, problem: str) -> TraceError:
        return TraceError(
            f"event {number:,} {problem}", where=f"{self._where}: traceEvents", hint=HINT
        )

    def recording(self, where: str, about: Mapping[str, Any]) -> Recording:
        """Return the collected events; every rank must have recorded some."""
        columns = {name: np.asarray(column) for name, column in self._columns.items()}
        ranks = columns["rank"]
        silent = np.flatnonzero(np.bincount(ranks, minlength=self._num_ranks) == 0)
        if silent.size:
            raise TraceError(
                f"rank {silent[0]} of {self._num_ranks} recorded nothing"
                + (f", nor did {silent.size - 1} others" if silent.size > 1 else ""),
                where=where,
                hint=HINT,
            )
        order = np.lexsort((columns["start"], columns["lane"], ranks))
        return Recording(
            file=Path(where).name,
            about={k: str(about.get(k, "")) for k in ("model", "fingerprint", "plan")},
            num_ranks=self._num_ranks,
            names=tuple(self._names),
            **{name: column[order] for name, column in columns.items()},
        )


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
