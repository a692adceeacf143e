"""Summarize predictions next to published values, as tables, JSON or CSV.

A summary has the errors of step time over all rows and by device, the errors of memory, and the
rank correlation within each model's sweep. Repeated runs of one configuration count once, with the
mean of their times, since a prediction that depends only on the configuration cannot order them.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from shardwise.formatting import GIB, Column, digits, table, wrapped
from shardwise.published.rows import Entry, Row

MIN_SWEEP = 4  # rows; the order of fewer means little


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The prediction for a row with published values; numbers are None if unknown."""

    published: Entry
    status: str
    step_time_s: float | None = None
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    note: str = ""  # where the prediction deviates from the row

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the prediction exceeds the device's memory."""
        return self.status.startswith("out of memory")

    @property
    def sweep(self) -> str:
        """The name of the rows to compare with: one model on one kind of device."""
        return f"{self.published.model} on {self.published.device}"

    @property
    def configuration(self) -> Row | None:
        """Everything that the prediction depends on; equal for repeated runs."""
        row = self.published.row
        return None if row is None else replace(row, row_id="")

    @property
    def error(self) -> float | None:
        """The relative error of the step time."""
        return _relative(self.step_time_s, self.published.step_time_s)

    @property
    def memory_error(self) -> float | None:
        """The relative error of the memory."""
        return _relative(self.memory_bytes, self.published.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The median of signed and of absolute errors over `count` rows."""

    count: int
    bias: float
    median: float
    p90: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Rows of one model on one kind of device, and the correlation of their predicted order.

    `correlation` is Spearman's over the mean step time of each configuration; `of_runs` is over
    single runs, which is lower if configurations are similar and repeated runs are not.
    """

    name: str
    count: int
    configurations: int
    correlation: float
    of_runs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of a file."""

    rows: int
    predicted: int
    out_of_memory: int
    published_out_of_memory: int
    out_of_memory_as_published: int
    step_time: Errors | None
    memory: Errors | None
    by_device: tuple[tuple[str, Errors], ...]
    sweeps: tuple[Sweep, ...]

    @property
    def median_correlation(self) -> float | None:
        correlations = [sweep.correlation for sweep in self.sweeps]
        return float(np.median(correlations)) if correlations else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        figures = asdict(self)
        figures["by_device"] = dict(figures["by_device"])
        figures["rank_correlation"] = {
            "median": self.median_correlation,
            "lowest": min((s.correlation for s in self.sweeps), default=None),
            "sweeps": list(figures.pop("sweeps")),
        }
        return figures


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Return the errors of all outcomes."""
    devices = sorted({o.published.device for o in outcomes if o.error is not None})
    by_device = [
        (d, errors_of([o.error for o in outcomes if o.published.device == d])) for d in devices
    ]
    return Summary(
        rows=len(outcomes),
        predicted=sum(o.step_time_s is not None for o in outcomes),
        out_of_memory=sum(o.is_out_of_memory for o in outcomes),
        published_out_of_memory=sum(o.published.out_of_memory for o in outcomes),
        out_of_memory_as_published=sum(
            o.published.out_of_memory and o.is_out_of_memory for o in outcomes
        ),
        step_time=errors_of(o.error for o in outcomes),
        memory=errors_of(o.memory_error for o in outcomes),
        by_device=tuple((name, errors) for name, errors in by_device if errors is not None),
        sweeps=tuple(_sweeps(outcomes)),
    )


def errors_of(errors: Iterable[float | None]) -> Errors | None:
    """Return statistics of the errors that are not None, or None if there are none."""
    signed = np.array([error for error in errors if error is not None])
    if not signed.size:
        return None
    absolute = np.abs(signed)
    return Errors(
        count=int(signed.size),
        bias=float(np.median(signed)),
        median=float(np.median(absolute)),
        p90=float(np.quantile(absolute, 0.9)),
        largest=float(absolute.max()),
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, NaN if either side does not vary.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    if len(set(a)) == 1 or len(set(b)) == 1:  # SciPy would warn
        return math.nan
    return round(float(spearmanr(a, b).statistic), 12)


def _sweeps(outcomes: Sequence[Outcome]) -> Iterable[Sweep]:
    for name in dict.fromkeys(o.sweep for o in outcomes):
        runs = [o for o in outcomes if o.sweep == name and o.error is not None]
        if len(runs) < MIN_SWEEP:
            continue
        repeated: dict[object, list[Outcome]] = {}
        for index, run in enumerate(runs):
            repeated.setdefault(run.configuration or index, []).append(run)
        correlation = _correlation(repeated.values())
        if not math.isnan(correlation):
            yield Sweep(
                name=name,
                count=len(runs),
                configurations=len(repeated),
                correlation=correlation,
                of_runs=_correlation([run] for run in runs),
            )


def _correlation(groups: Iterable[Sequence[Outcome]]) -> float:
    """Return the correlation of the mean times of groups of runs."""
    means = [
        (_mean(o.step_time_s for o in group), _mean(o.published.step_time_s for o in group))
        for group in groups
    ]
    return rank_correlation([p for p, _ in means], [q for _, q in means])


def _mean(values: Iterable[float | None]) -> float:
    return float(np.mean([value or 0.0 for value in values]))


def _relative(predicted: float | None, published: float | None) -> float | None:
    return None if predicted is None or not published else predicted / published - 1


# ------------------------------------------------------------ tables
_MAX_ROWS = 400  # in a printed table; -o writes all
_COLUMNS = {  # names in files, and attributes of an outcome
    "row_id": "published.row_id",
    "model": "published.model",
    "gpu": "published.device",
    "status": "status",
    "note": "note",
    "predicted_step_time_s": "step_time_s",
    "published_step_time_s": "published.step_time_s",
    "step_time_error": "error",
    "predicted_memory_bytes": "memory_bytes",
    "published_memory_bytes": "published.memory_bytes",
    "memory_error": "memory_error",
    "device_memory_bytes": "device_memory_bytes",
}


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {name: attrgetter(path)(outcome) for name, path in _COLUMNS.items()}


def to_dict(outcomes: Sequence[Outcome], summary: Summary) -> dict[str, Any]:
    """Return the data for `--json`."""
    return {"rows": [_fields(o) for o in outcomes], "summary": summary.to_dict()}


def to_csv(outcomes: Iterable[Outcome]) -> str:
    """Return predicted and published values of all rows as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(_COLUMNS))
    writer.writeheader()
    writer.writerows(_fields(outcome) for outcome in outcomes)
    return text.getvalue()


def text(outcomes: Sequence[Outcome], summary: Summary, width: int) -> str:
    """Return the rows, the errors and the correlations as tables of the given width."""
    columns = [Column("predicted"), Column("published", 1), Column("error"), Column("GiB", 2)]
    lines = table(columns, "row", [_cells(o) for o in outcomes[:_MAX_ROWS]], width)
    if len(outcomes) > _MAX_ROWS:
        lines.append(f"… and {len(outcomes) - _MAX_ROWS} more: -o predictions.csv")
    title = f"{summary.predicted} of {summary.rows} rows predicted, "
    title += f"{summary.out_of_memory} out of memory"
    if summary.published_out_of_memory:
        title += f" ({summary.out_of_memory_as_published} of the "
        title += f"{summary.published_out_of_memory} published as out of memory)"
    errors = [("all", summary.step_time), *summary.by_device]
    errors += [("memory", summary.memory)] if summary.memory is not None else []
    columns = [Column(name) for name in ("rows", "bias", "median", "p90", "largest")]
    rows = [(*_figures(figures), label) for label, figures in errors]
    lines += ["", *wrapped(title, width), *table(columns, "step time", rows, width)]
    if summary.sweeps:
        title = f"rank correlation within sweeps: median {summary.median_correlation:.3f}"
        columns = [Column(n) for n in ("runs", "configurations", "correlation", "of runs")]
        rows = [
            (
                str(s.count),
                str(s.configurations),
                f"{s.correlation:.3f}",
                f"{s.of_runs:.3f}",
                s.name,
            )
            for s in summary.sweeps
        ]
        lines += ["", *wrapped(title, width), *table(columns, "sweep", rows, width)]
    return "\n".join(lines)


def _cells(outcome: Outcome) -> list[str]:
    error = "" if outcome.error is None else f"{outcome.error:+.1%}"
    memory = "" if outcome.memory_bytes is None else f"{outcome.memory_bytes / GIB:.1f}"
    times = [_seconds(outcome.step_time_s), _seconds(outcome.published.step_time_s)]
    row, note = outcome.published, f"; note: {outcome.note}" if outcome.note else ""
    model = f" ({row.model})" if row.model else ""
    return [*times, error, memory, f"{row.row_id}{model}: {outcome.status}{note}"]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{digits(value, 3)} s"


def _figures(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", "", "", "", ""]
    absolute = (errors.median, errors.p90, errors.largest)
    return [str(errors.count), f"{errors.bias:+.1%}", *(f"{error:.1%}" for error in absolute)]
