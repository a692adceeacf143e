"""The data of a report: everything that its page shows, without what the page computes itself.

Texts are plain text; seconds and bytes are numbers. Tables with many rows are stored by column.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError
from shardwise.files import write_text
from shardwise.plans.search_result import LinkTraffic, SearchGap, WhatIf

FORMAT = "shardwise-report"
VERSION = 1
NUMERIC = ("_s", "_bytes", ".count", ".ratio", "share")  # suffixes of the names of numbers
TOLERANCE = 1e-6  # relative, of sums

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The most important figures."""

    model: str
    plan_name: str
    plan: str
    cluster: str
    num_ranks: int
    step_time_s: float
    rows_per_s: float
    tokens_per_s: float | None
    fits: bool
    memory: Mapping[str, float]  # of the rank that is closest to its limit
    limit: Mapping[str, str]
    price: Mapping[str, float] | None
    notes: tuple[str, ...]
    measured: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The time of a cause on the slowest ranks."""

    name: str
    text: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The module tree in preorder, with its parameters, nodes and lines of the user's code."""

    rows: tuple[Mapping[str, Any], ...]
    parameters: tuple[Mapping[str, Any], ...]
    nodes: Columns
    sources: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that run the same stages."""

    id: int
    ranks: str
    num_ranks: int
    stages: tuple[int, ...]
    mesh: str
    class_: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Rank groups displayed as one row; `more` counts the groups merged into it."""

    id: int
    label: str
    groups: tuple[int, ...]
    num_ranks: int
    shown: int  # the group whose figures represent all
    more: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The cluster with the ranks of its devices and the traffic of its links."""

    name: str
    nodes: tuple[Mapping[str, Any], ...]
    links: tuple[LinkTraffic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """The memory of a class of ranks: its parts, its limit and its course over the step."""

    class_: int
    group: int
    ranks: str
    peak_bytes: float
    limit_bytes: float
    when: str
    parts: Mapping[str, float]
    others: Mapping[str, float]
    host_bytes: float
    over_time: tuple[float, ...]
    times: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """The actions of a class of ranks over the step, as columns of spans by lane."""

    class_: int
    group: int
    label: str
    lanes: Mapping[str, Columns]
    busy_s: float
    idle_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """The timeline of the step; spans refer to `kinds` and `names` by number."""

    step_time_s: float
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[TimelineRow, ...]
    critical: Mapping[str, Any]
    folded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleGrid:
    """The actions of the pipeline by group."""

    name: str
    stages: int
    num_microbatches: int
    bubble_fraction: float
    rows: tuple[Mapping[str, Any], ...]
    folded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A simulated plan compared with the chosen one."""

    what: str
    chosen: bool
    step_time_s: float
    ratio: float
    causes: Mapping[str, float]
    peak_bytes: float
    limit_bytes: float
    changed: Mapping[str, Any]
    words: Mapping[str, tuple[str, ...]]  # texts of `changed`, of the chosen plan and of this one
    differences_s: Mapping[str, float]
    memory_difference_bytes: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """A collective with another implementation than the library's, and its predicted times."""

    operation: str
    groups: str
    num_groups: int
    group_ranks: int
    uses: str
    implementation: str
    min_bytes: int
    reference_bytes: int
    predicted_s: Mapping[str, float]  # by implementation, for data of the reference size
    saved_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """A generated file, with the index of the user's line behind each of its lines, or -1."""

    name: str
    ranks: str
    lines: tuple[str, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The generated files and the lines of the user's code behind them."""

    files: tuple[CodeFile, ...]
    sources: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a plan; `missing` explains why a section is None, and how to add it."""

    title: str
    verdict: Verdict
    missing: Mapping[str, str]
    causes: tuple[Cause, ...]
    modules: Modules | None
    groups: tuple[RankGroup, ...]
    classes: tuple[RankClass, ...]
    cluster: Machines | None
    memory: tuple[MemoryBar, ...]
    timeline: TimelineChart
    schedule: ScheduleGrid | None
    plans: tuple[Compared, ...] | None
    gap: SearchGap | None
    what_if: tuple[WhatIf, ...] | None
    code: Code | None
    collectives: tuple[CollectiveRow, ...] | None
    measured: Mapping[str, Any] | None = None
    format: str = field(default=FORMAT, init=False)
    version: int = field(default=VERSION, init=False)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; the field `class_` becomes `class`."""
        data: dict[str, Any] = _plain(self)
        return {"format": data.pop("format"), "version": data.pop("version"), **data}

    def verify(self) -> None:
        """Check that every number is finite, every reference exists and all sums agree."""
        for problem in (*_numbers(self.to_json(), "report"), *_references(self), *_sums(self)):
            raise PlanError(
                f"the figures are inconsistent: {problem}",
                where="search",
                hint="run shardwise plan again",
            )

    @property
    def html(self) -> str:
        """The page: a single self-contained file."""
        from shardwise.reports.render import render

        return render(self.to_json())

    def save(self, path: str | Path) -> None:
        """Write the page atomically."""
        write_text(path, self.html)

    def _repr_html_(self) -> str:
        from shardwise.reports.render import frame

        return frame(self.html)


def source_row(source: str, text: str) -> dict[str, Any]:
    """Split `model.py:41` into file and line, and add the text of the line."""
    file, _, line = source.rpartition(":")
    has_line = bool(file) and line.isdigit()
    number = int(line) if has_line else 0
    return {"file": file if has_line else source, "line": number, "text": text}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name.rstrip("_"): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _numbers(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{value} at {where}"
    elif where.endswith(NUMERIC) and not isinstance(value, int | float | None | list | dict):
        yield f"{value!r} at {where} is not a number"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, where)


def _references(report: Report) -> Iterator[str]:
    groups, classes = len(report.groups), len(report.classes)
    for group in report.groups:
        if not 0 <= group.class_ < classes:
            yield f"group {group.id} is of class {group.class_} of {classes}"
    for bar in report.memory:
        if not 0 <= bar.group < groups or len(bar.times) != len(bar.over_time):
            yield f"invalid memory of group {bar.group}"
    for row in report.timeline.rows:
        for lane, columns in row.lanes.items():
            if len({len(column) for column in columns.values()}) > 1:
                yield f"columns of {lane} of {row.label} differ in length"
            if any(not 0 <= kind < len(report.timeline.kinds) for kind in columns["kind"]):
                yield f"invalid kind of span of {row.label}"
    if report.modules is not None:
        count = len(report.modules.rows)
        sources = len(report.modules.sources)
        if len({len(column) for column in report.modules.nodes.values()}) > 1:
            yield "columns of nodes differ in length"
        if not all(isinstance(row["name"], str) for row in report.modules.rows):
            yield "the name of a module is not text"
        if any(not 0 <= module < count for module in report.modules.nodes["module"]):
            yield "a node without a module"
        if any(not -1 <= source < sources for source in report.modules.nodes["source"]):
            yield "invalid source of a node"
        if any(not 0 <= p["module"] < count for p in report.modules.parameters):
            yield "a parameter without a module"
    if report.code is not None:
        num_sources = len(report.code.sources)
        for file in report.code.files:
            if len(file.lines) != len(file.sources) or max(file.sources, default=-1) >= num_sources:
                yield f"invalid sources of {file.name}"


def _sums(report: Report) -> Iterator[str]:
    step = report.verdict.step_time_s
    total = sum(cause.seconds for cause in report.causes)
    if abs(total - step) > TOLERANCE * max(step, 1e-12):
        yield f"causes sum to {total} s, the step takes {step} s"
    for bar in report.memory:
        total = sum(bar.parts.values())
        if abs(total - bar.peak_bytes) > TOLERANCE * max(bar.peak_bytes, 1.0):
            yield f"parts of group {bar.group} sum to {total}, its peak is {bar.peak_bytes}"
