"""How far predictions are from what was published.

Enters: `Outcome`s. Leaves: `Summary`: errors of step time over all rows and by device, errors of
memory, and the rank correlation within each model's sweep. Runs of one configuration count once
there, with the mean of their times: nothing that knows only the configuration can order them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.calibration.rows import Row

MIN_SWEEP = 4  # rows; the order of fewer says little


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was predicted for a row, and what was published; None where there is nothing."""

    row_id: str
    model: str
    device: str
    status: str
    row: Row | None = None
    step_time_s: float | None = None
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    published_step_time_s: float | None = None
    published_memory_bytes: int | None = None
    ran_out: bool = False  # as published
    note: str = ""  # what was not taken as the row says it

    @property
    def is_out_of_memory(self) -> bool:
        """As predicted."""
        return self.status.startswith("out of memory")

    @property
    def sweep(self) -> str:
        """The rows that it is compared with: of one model on one kind of device."""
        return f"{self.model} on {self.device}"

    @property
    def configuration(self) -> Row | None:
        """All that the prediction is made of: equal for runs that were repeated."""
        return None if self.row is None else replace(self.row, row_id="")

    @property
    def error(self) -> float | None:
        """Relative error of the step time."""
        return _relative(self.step_time_s, self.published_step_time_s)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory."""
        return _relative(self.memory_bytes, self.published_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of `count` rows: the median of errors with their sign, and of their sizes."""

    count: int
    bias: float
    median: float
    p90: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Rows of one model on one kind of device, and how well their order is predicted.

    `correlation` is Spearman's, of the time per step of each configuration; `of_runs` is that of
    single runs, which is lower the more alike configurations and the less alike repeated runs are.
    """

    name: str
    count: int
    configurations: int
    correlation: float
    of_runs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of a file; `ran_out` are runs that are published as out of memory."""

    rows: int
    predicted: int
    out_of_memory: int
    ran_out: int
    ran_out_as_predicted: int
    step_time: Errors | None
    memory: Errors | None
    by_device: tuple[tuple[str, Errors], ...]
    sweeps: tuple[Sweep, ...]

    @property
    def median_correlation(self) -> float | None:
        found = [sweep.correlation for sweep in self.sweeps]
        return float(np.median(found)) if found else None

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rows": self.rows,
            "predicted": self.predicted,
            "out_of_memory": self.out_of_memory,
            "published_out_of_memory": self.ran_out,
            "out_of_memory_as_published": self.ran_out_as_predicted,
            "step_time": None if self.step_time is None else asdict(self.step_time),
            "memory": None if self.memory is None else asdict(self.memory),
            "by_device": {name: asdict(errors) for name, errors in self.by_device},
            "rank_correlation": {
                "median": self.median_correlation,
                "lowest": min((s.correlation for s in self.sweeps), default=None),
                "sweeps": [asdict(sweep) for sweep in self.sweeps],
            },
        }


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Return the errors of all outcomes."""
    devices = sorted({o.device for o in outcomes if o.error is not None})
    by_device = [(d, errors_of([o.error for o in outcomes if o.device == d])) for d in devices]
    return Summary(
        rows=len(outcomes),
        predicted=sum(o.step_time_s is not None for o in outcomes),
        out_of_memory=sum(o.is_out_of_memory for o in outcomes),
        ran_out=sum(o.ran_out for o in outcomes),
        ran_out_as_predicted=sum(o.ran_out and o.is_out_of_memory for o in outcomes),
        step_time=errors_of(o.error for o in outcomes),
        memory=errors_of(o.memory_error for o in outcomes),
        by_device=tuple((name, errors) for name, errors in by_device if errors is not None),
        sweeps=tuple(_sweeps(outcomes)),
    )


def errors_of(errors: Iterable[float | None]) -> Errors | None:
    """Figures of those errors that there are."""
    found = np.array([e for e in errors if e is not None])
    if not found.size:
        return None
    sizes = np.abs(found)
    return Errors(
        count=int(found.size),
        bias=float(np.median(found)),
        median=float(np.median(sizes)),
        p90=float(np.quantile(sizes, 0.9)),
        largest=float(sizes.max()),
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; nan where either does not vary.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    first, second = _ranks(a), _ranks(b)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    first, second = first - first.mean(), second - second.mean()
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return round(float(first @ second) / scale, 12)


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """1 for the smallest; equal values share the mean of their ranks."""
    array = np.asarray(values, dtype=float)
    below = (array[:, None] > array[None, :]).sum(axis=1)
    equal = (array[:, None] == array[None, :]).sum(axis=1)
    ranks: NDArray[np.float64] = below + (equal + 1) / 2.0
    return ranks


def _sweeps(outcomes: Sequence[Outcome]) -> Iterable[Sweep]:
    for name in dict.fromkeys(o.sweep for o in outcomes):
        runs = [o for o in outcomes if o.sweep == name and o.error is not None]
        if len(runs) < MIN_SWEEP:
            continue
        alike: dict[object, list[Outcome]] = {}
        for index, run in enumerate(runs):
            alike.setdefault(run.configuration or index, []).append(run)
        correlation = _correlation(alike.values())
        if not math.isnan(correlation):
            yield Sweep(
                name=name,
                count=len(runs),
                configurations=len(alike),
                correlation=correlation,
                of_runs=_correlation([run] for run in runs),
            )


def _correlation(groups: Iterable[Sequence[Outcome]]) -> float:
    """Of the mean times of groups of runs."""
    means = [
        (_mean(o.step_time_s for o in group), _mean(o.published_step_time_s for o in group))
        for group in groups
    ]
    return rank_correlation([p for p, _ in means], [q for _, q in means])


def _mean(values: Iterable[float | None]) -> float:
    return float(np.mean([value or 0.0 for value in values]))


def _relative(predicted: float | None, published: float | None) -> float | None:
    return None if predicted is None or not published else predicted / published - 1
