"""Measured times of local calls, completed by computed ones.

A table is JSON: seconds of forward and backward by the text of the call (operator, shapes, dtypes,
gradients) and the name of the device. Lookups that fail are counted.

Calls take longer in a program than each by itself: a table also has the ratios of the time of
programs to the sum of their calls, and scales all its times by the median of these.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

from shardwise.cluster import Curve, Device
from shardwise.cost.kernels import kernels_seconds
from shardwise.cost.meta_run import cost_of
from shardwise.cost.signature import Signature
from shardwise.errors import ShardwiseError
from shardwise.files import parse_json, read_text, write_text
from shardwise.schema import Range, Reader, Stored, Writer

FORMAT_VERSION = 1
UPDATE = "optim.AdamW(float32[{}])"  # call of the optimizer's step for one parameter
SHOWN_MISSES = 8


class CallTime(NamedTuple):
    """Seconds of one call; `weight_s` is the part of backward that only parameters need."""

    forward_s: float
    backward_s: float
    weight_s: float
    source: str  # "measured" or "computed"


class OpTable:
    """Measured seconds by call and device; counts hits and misses.

    >>> table = OpTable()
    >>> table.add("aten.relu.default(float32[4])", "cpu", 1e-6, 2e-6)
    >>> table.lookup("aten.relu.default(float32[4])", "cpu")
    (1e-06, 2e-06)
    """

    def __init__(
        self, entries: Mapping[tuple[str, str], tuple[float, float]] | None = None
    ) -> None:
        self.entries: dict[tuple[str, str], tuple[float, float]] = dict(entries or {})
        self.computed: dict[tuple[str, str], tuple[float, float]] = {}  # for the same calls
        self._factors: dict[tuple[str, str], tuple[float, float]] = {}
        # Device, and the time of training and of the optimizer over the sum of a program's calls.
        self.programs: list[tuple[str, float, float]] = []
        self.notes: list[str] = []  # calls that could not be measured, and why
        self.hits = 0
        self.missed: Counter[tuple[str, str]] = Counter()

    @property
    def misses(self) -> int:
        return self.missed.total()

    def add(self, call: str, device: str, forward_s: float, backward_s: float) -> None:
        """Add a measurement, or replace an earlier one."""
        self.entries[call, device] = (forward_s, backward_s)

    def compare(self, call: str, device: str, forward_s: float, backward_s: float) -> None:
        """Add the computed time of a call that was measured."""
        if (call, device) in self.entries:
            self.computed[call, device] = (forward_s, backward_s)
            self._factors.clear()

    def factors(self, op: str, device: str) -> tuple[float, float]:
        """Return measured over computed seconds of an operator's calls, 1 if none was measured."""
        if (op, device) not in self._factors:
            keys = [
                (call, name)
                for call, name in self.computed
                if name == device and call.partition("(")[0] == op
            ]
            measured = [sum(self.entries[key][i] for key in keys) for i in (0, 1)]
            computed = [sum(self.computed[key][i] for key in keys) for i in (0, 1)]
            forward = measured[0] / computed[0] if measured[0] and computed[0] else 1.0
            backward = measured[1] / computed[1] if measured[1] and computed[1] else forward
            self._factors[op, device] = forward, backward
        return self._factors[op, device]

    def program(self, device: str) -> tuple[float, float]:
        """Return programs' time over the sum of their calls, for training and the optimizer."""
        ratios = [factors for name, *factors in self.programs if name == device]
        if not ratios:
            return 1.0, 1.0
        return median(training for training, _ in ratios), median(update for _, update in ratios)

    def with_programs(self, programs: Iterable[tuple[str, float, float]]) -> OpTable:
        """Return the same calls with other programs."""
        table = OpTable(self.entries)
        table.computed, table.notes = dict(self.computed), list(self.notes)
        table.programs = list(programs)
        return table

    def update_seconds(self, device: str, numel: float, piece: float) -> float | None:
        """Return the optimizer's time for `numel` elements in parameters of about `piece` each."""
        points = []
        for (call, name), (seconds, _) in self.entries.items():
            if name == device and call.startswith(UPDATE.partition("{")[0]) and seconds:
                size = float(call.partition("[")[2].partition("]")[0])
                points.append((size, size / seconds))
        if not points:
            return None
        return self.program(device)[1] * numel / Curve(tuple(sorted(points))).at(max(piece, 1.0))

    def lookup(self, call: str, device: str) -> tuple[float, float] | None:
        """Return the seconds of forward and backward, or None, which counts as a miss."""
        seconds = self.entries.get((call, device))
        if seconds is None:
            self.missed[call, device] += 1
        else:
            self.hits += 1
        return seconds

    def merge(self, other: OpTable) -> None:
        """Add the measurements of another table."""
        self.entries |= other.entries
        self.computed |= other.computed
        self.programs += [p for p in other.programs if p not in self.programs]
        self._factors.clear()
        self.notes += [note for note in other.notes if note not in self.notes]

    def to_json(self) -> str:
        document = _TableFile(
            version=FORMAT_VERSION,
            entries=tuple(
                _Entry(call, device, *seconds, self.computed.get((call, device)))
                for (call, device), seconds in sorted(self.entries.items())
            ),
            programs=tuple(_Program(*program) for program in self.programs),
            notes=tuple(self.notes),
        )
        return json.dumps(Writer().fields(document), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "op table") -> OpTable:
        """Read a table from JSON text."""
        document = parse_json(text, where=where)
        reader = Reader(ShardwiseError, where, hint="measure again: shardwise profile")
        version = document.get("version") if isinstance(document, dict) else None
        if version != FORMAT_VERSION:
            reader.fail(
                f"format version {version!r} of measured times, must be {FORMAT_VERSION}", ()
            )
        file: _TableFile = reader.read(_TableFile, document)
        table = cls()
        for entry in file.entries:
            table.add(entry.call, entry.device, entry.forward_s, entry.backward_s)
            if entry.computed_s is not None:
                table.compare(entry.call, entry.device, *entry.computed_s)
        table.programs += [(p.device, p.training, p.optimizer) for p in file.programs]
        table.notes += file.notes
        return table

    @classmethod
    def load(cls, path: str | Path) -> OpTable:
        """Read a table from a file."""
        return cls.from_json(read_text(path, what="table of measured times"), str(path))

    def save(self, path: str | Path) -> None:
        """Add these measurements to the file at `path`, which is created if necessary."""
        path, merged = Path(path), OpTable()
        if path.exists():
            merged.merge(OpTable.load(path))
        merged.merge(self)
        write_text(path, merged.to_json())

    def __str__(self) -> str:
        """`120 measured calls; 80 hits, 3 misses: 2x aten.relu.default(float32[4]) on cpu, …`."""
        text = f"{len(self.entries)} measured calls; {self.hits} hits, {self.misses} misses"
        if not self.missed:
            return text
        shown = [
            f"{count}x {call} on {device}"
            for (call, device), count in self.missed.most_common(SHOWN_MISSES)
        ]
        more = len(self.missed) - len(shown)
        return f"{text}: " + ", ".join(shown) + (f", and {more} more" if more > 0 else "")


Seconds = Annotated[float, Range(0)]
Ratio = Annotated[float, Range(0, above=True)]


@dataclass(frozen=True, slots=True)
class _Entry:
    call: str
    device: str
    forward_s: Seconds
    backward_s: Seconds
    computed_s: tuple[Seconds, Seconds] | None = None


@dataclass(frozen=True, slots=True)
class _Program:
    device: str
    training: Ratio
    optimizer: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableFile:
    version: int
    entries: Annotated[tuple[_Entry, ...], Stored(always=True)] = ()
    programs: Annotated[tuple[_Program, ...], Stored(always=True)] = ()
    notes: Annotated[tuple[str, ...], Stored(always=True)] = ()


def call_seconds(call: Signature, device: Device, table: OpTable | None = None) -> CallTime:
    """Return the time of a call on a device: measured if the table has it, else from its kernels.

    A measured backward is divided in the proportions of the computed one. A call that was not
    measured is corrected by the other calls of its operator. Calls that launch nothing are not
    looked up.
    """
    cost = cost_of(call)
    forward, backward, weight = (
        kernels_seconds(kernels, device) for kernels in (cost.forward, cost.backward, cost.weight)
    )
    if table is None or not (cost.forward or cost.backward):
        return CallTime(forward, backward, weight, "computed")
    measured, scale = table.lookup(str(call), device.name), table.program(device.name)[0]
    if measured is None:
        first, second = (scale * factor for factor in table.factors(call.op, device.name))
        return CallTime(forward * first, backward * second, weight * second, "computed")
    share = weight / backward if backward else 0.0
    forward, backward = (scale * seconds / device.speed for seconds in measured)
    return CallTime(forward, backward, backward * share, "measured")


def missing(calls: Iterable[Signature], device: Device, table: OpTable) -> tuple[Signature, ...]:
    """Return the calls to measure: those that launch kernels and are not in the table."""
    return tuple(
        call
        for call in dict.fromkeys(calls)
        if (str(call), device.name) not in table.entries
        and (cost_of(call).forward or cost_of(call).backward)
    )
