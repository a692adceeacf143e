"""Figures over all steps in bounded memory.

Enters: rows, as they come. Leaves: at most `MOST` buckets of neighbouring rows with mean, least and
most of every figure. When there are too many, neighbours are joined two by two: so a run of any
length has the same number of points, and what is new is always at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["MOST", "History"]

MOST = 240  # about as many as can be told apart on a chart
LARGEST = 1e100  # sums and squares of smaller ones are finite


class _Bucket:
    """Some neighbouring rows."""

    __slots__ = ("figures", "rows", "step")

    def __init__(self, step: int) -> None:
        self.step, self.rows = step, 0
        self.figures: dict[str, list[float]] = {}  # sum, count, least, most

    def add(self, step: int, row: Mapping[str, float]) -> None:
        self.step, self.rows = step, self.rows + 1
        for name, value in row.items():
            found = self.figures.get(name)
            if found is None:
                self.figures[name] = [value, 1, value, value]
            else:
                found[0] += value
                found[1] += 1
                if value < found[2]:
                    found[2] = value
                elif value > found[3]:
                    found[3] = value

    def join(self, other: _Bucket) -> None:
        self.step, self.rows = other.step, self.rows + other.rows
        for name, (total, count, least, most) in other.figures.items():
            mine = self.figures.setdefault(name, [0.0, 0, math.inf, -math.inf])
            mine[0] += total
            mine[1] += count
            mine[2], mine[3] = min(mine[2], least), max(mine[3], most)


class History:
    """The course of some figures.

    >>> history = History(("loss",))
    >>> for step in range(1, 4):
    ...     history.add(step, {"loss": 4.0 - step})
    >>> history.means("loss")
    [3.0, 2.0, 1.0]
    """

    def __init__(self, names: tuple[str, ...], most: int = MOST) -> None:
        self.names, self._most = names, most
        self._buckets: list[_Bucket] = []
        self.width = 1  # rows of a bucket
        self.rows = 0

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """One row; what is no finite number is left out."""
        if not self._buckets or self._buckets[-1].rows >= self.width:
            if len(self._buckets) >= self._most:
                self._halve()
            if not self._buckets or self._buckets[-1].rows >= self.width:
                self._buckets.append(_Bucket(step))
        figures = {n: float(row[n]) for n in self.names if n in row and is_number(row[n])}
        self._buckets[-1].add(step, figures)
        self.rows += 1

    def _halve(self) -> None:
        old, self._buckets = self._buckets, []
        for place in range(0, len(old), 2):
            kept = old[place]
            if place + 1 < len(old):
                kept.join(old[place + 1])
            self._buckets.append(kept)
        self.width *= 2

    def __len__(self) -> int:
        return len(self._buckets)

    def means(self, name: str) -> list[float | None]:
        """Return the mean of each bucket."""
        return [_mean(bucket, name) for bucket in self._buckets]

    def to_json(self, first: int = 0) -> dict[str, Any]:
        """Columns from a bucket on; figures that never came are left out."""
        buckets = self._buckets[first:]
        columns = {
            name: {
                "mean": [_short(_mean(b, name)) for b in buckets],
                "min": [_short(_extreme(b, name, 2)) for b in buckets],
                "max": [_short(_extreme(b, name, 3)) for b in buckets],
            }
            for name in self.names
            if any(name in b.figures for b in self._buckets)
        }
        return {"from": first, "width": self.width, "step": [b.step for b in buckets], **columns}


def _mean(bucket: _Bucket, name: str) -> float | None:
    found = bucket.figures.get(name)
    return None if found is None else found[0] / found[1]


def _extreme(bucket: _Bucket, name: str, place: int) -> float | None:
    found = bucket.figures.get(name)
    return None if found is None else found[place]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def is_number(value: Any) -> bool:
    """Whether it is a number that can be added up and drawn.

    >>> is_number(1.5), is_number(None), is_number(float("nan")), is_number(True), is_number(1e300)
    (True, False, False, False, False)
    """
    return type(value) in (int, float) and -LARGEST < value < LARGEST
