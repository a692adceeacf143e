"""Follow the state of a run: its progress, its metrics and its slow ranks.

A `Run` reads `metrics.jsonl` and, if present, `run.json` and `ranks.jsonl`; `poll` updates it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.errors import WatchError
from shardwise.files import read_json
from shardwise.formatting import counted
from shardwise.processes import runs_here

# ------------------------------------------------------------ metrics in bounded memory
#
# Rows are collected in at most `MAX_BUCKETS` buckets of adjacent rows, with the mean, minimum and
# maximum of every metric. When the buckets are full, adjacent ones are merged pairwise, so that a
# run of any length has about the same number of points and new ones are always at the end.


MAX_BUCKETS = 240  # about as many as a chart can resolve
LARGEST = 1e100  # sums and squares of smaller values are finite


class _Bucket:
    """Adjacent rows."""

    __slots__ = ("figures", "rows", "step")

    def __init__(self, step: int, row: Mapping[str, float]) -> None:
        self.step, self.rows = step, 1
        # The sum, count, minimum and maximum of each metric.
        self.figures = {name: [value, 1, value, value] for name, value in row.items()}

    def summary(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return the mean, minimum and maximum of a metric, or None for each."""
        if name not in self.figures:
            return None, None, None
        total, count, low, high = self.figures[name]
        return total / count, low, high

    def join(self, other: _Bucket) -> None:
        self.step, self.rows = other.step, self.rows + other.rows
        for name, (total, count, low, high) in other.figures.items():
            merged = self.figures.setdefault(name, [0.0, 0, math.inf, -math.inf])
            merged[0] += total
            merged[1] += count
            merged[2], merged[3] = min(merged[2], low), max(merged[3], high)


class History:
    """The history of some metrics.

    >>> history = History(("loss",))
    >>> for step in range(1, 4):
    ...     history.add(step, {"loss": 4.0 - step})
    >>> history.means("loss")
    [3.0, 2.0, 1.0]
    """

    def __init__(self, names: tuple[str, ...], max_buckets: int = MAX_BUCKETS) -> None:
        self.names, self._max_buckets = names, max_buckets
        self._buckets: list[_Bucket] = []
        self.width = 1  # rows per bucket
        self.rows = 0

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row without the values that are not finite numbers."""
        figures = {n: float(row[n]) for n in self.names if n in row and is_number(row[n])}
        bucket = _Bucket(step, figures)
        if len(self._buckets) >= self._max_buckets and self._buckets[-1].rows >= self.width:
            self._halve()
        if self._buckets and self._buckets[-1].rows < self.width:
            self._buckets[-1].join(bucket)
        else:
            self._buckets.append(bucket)
        self.rows += 1

    def _halve(self) -> None:
        for bucket, following in zip(self._buckets[::2], self._buckets[1::2], strict=False):
            bucket.join(following)
        self._buckets = self._buckets[::2]
        self.width *= 2

    def __len__(self) -> int:
        return len(self._buckets)

    def means(self, name: str) -> list[float | None]:
        """Return the mean of each bucket."""
        return [bucket.summary(name)[0] for bucket in self._buckets]

    def to_json(self, first: int = 0) -> dict[str, Any]:
        """Return columns from a bucket on, without metrics that never occurred."""
        buckets = self._buckets[first:]
        columns = {
            name: {
                key: [v if v is None else float(f"{v:.6g}") for v in (s[at] for s in summaries)]
                for at, key in enumerate(("mean", "min", "max"))
            }
            for name in self.names
            if any(name in b.figures for b in self._buckets)
            for summaries in [[b.summary(name) for b in buckets]]
        }
        return {"from": first, "width": self.width, "step": [b.step for b in buckets], **columns}


def is_number(value: Any) -> bool:
    """Return whether a value is a number that can be summed and drawn.

    >>> is_number(1.5), is_number(None), is_number(float("nan")), is_number(True), is_number(1e300)
    (True, False, False, False, False)
    """
    return type(value) in (int, float) and -LARGEST < value < LARGEST


# ------------------------------------------------------------ growing files
CHUNK = 1 << 20
MAX_LINE = 1 << 20
HEAD = 256  # bytes that identify a file


class Tail:
    """Follow a growing file of JSON lines.

    An incomplete last line is read later. A file that became shorter or was replaced (a resumed run
    drops the steps that it repeats) is read from the beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # lines that are not rows
        self._identity: tuple[int, bytes] | None = None
        self._offset = self._lines = 0

    def restarted(self) -> bool:
        """Return whether the file was replaced or truncated, which invalidates earlier rows."""
        if self._identity is None:
            return False
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            inode, head = self._identity
            same = status.st_ino == inode and status.st_size >= self._offset
            if same and file.read(len(head)) == head:
                return False
        self._identity, self._offset, self._lines, self.damaged = None, 0, 0, 0
        return True

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the new rows with complete lines."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise WatchError(f"cannot be read: {error.strerror}", where=str(self.path)) from None
        with file:
            head = file.read(HEAD)
            if self._identity is None or len(self._identity[1]) < HEAD:
                self._identity = (os.fstat(file.fileno()).st_ino, head)
            file.seek(self._offset)
            for line in self._complete(file):
                row = self._row(line)
                if row is not None:
                    yield row

    def _complete(self, file: Any) -> Iterator[bytes]:
        unfinished = b""
        while piece := file.read(CHUNK):
            *lines, unfinished = (unfinished + piece).split(b"\n")
            if len(unfinished) > MAX_LINE:
                raise self._foreign(f"line {self._lines + len(lines) + 1} does not end")
            for line in lines:
                self._offset += len(line) + 1
                self._lines += 1
                if line.strip():
                    yield line

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """Return a row, or None for a line truncated by a crash; raise if no line is a row."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is int and 0 <= step < 1 << 53:
            return row  # type: ignore[no-any-return]
        if self._lines == self.damaged + 1:
            raise self._foreign(f"line {self._lines} is not a JSON object with a step")
        self.damaged += 1
        return None

    def _foreign(self, reason: str) -> WatchError:
        message = f"contains no training metrics: {reason}"
        return WatchError(message, where=str(self.path), hint=HINT)


# ------------------------------------------------------------ runs
FIGURES = (
    "loss", "gradient_norm", "learning_rate", "step_s", "samples_per_s", "tokens_per_s", "mfu",
    "memory_bytes", "staleness", "compression_error",
)  # fmt: skip
ENDED = {
    "finished": "finished",
    "callback": "stopped early",
    "signal": "stopped by a signal; run the same command to continue",
    "failed": "failed",
    "gone": "ended unexpectedly: its process no longer exists",
}
SHOWN = (  # on the page
    "title", "state", "status", "ended", "step", "total", "epoch", "skipped", "seconds_left",
    "step_s", "predicted_step_s", "latest", "generation", "ranks",
)  # fmt: skip
RECENT = 50  # steps for the estimate of the remaining time
SLOW = 1.1  # times the median of all ranks
MAX_FILE = 1 << 20  # bytes of run.json
MAX_TEXT = 500
FILES = ("metrics.jsonl", "ranks.jsonl", "run.json", "plan.json", "config.json", "trace.json")
HINT = "the folder of a run: shardwise train CONFIG.yaml writes runs/CONFIG"


def find_run(folder: Path) -> Path | None:
    """Return the folder if it contains a run, None if a run may still appear, else raise.

    A file of a run may be given instead of its folder.
    """
    try:
        return _find_run(folder)
    except OSError as error:
        raise WatchError(f"cannot be read: {error.strerror}", where=str(folder)) from None


def _find_run(folder: Path) -> Path | None:
    if not folder.exists():
        return None
    if folder.is_file() and folder.name in FILES:
        return _find_run(folder.parent)
    if not folder.is_dir():
        raise WatchError("is not a folder", where=str(folder), hint=HINT)
    if (folder / "metrics.jsonl").is_file():
        return folder
    if (folder / "run.json").is_file():
        return None  # the run has just started
    inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    if inside:
        shown = ", ".join(printable(name) for name in inside[:8]) + (", …" if inside[8:] else "")
        message = f"is not a run but contains {len(inside)}: {shown}"
        hint = f"shardwise watch {folder / inside[0]}"
        raise WatchError(message, where=str(folder), hint=hint)
    return None


class Run:
    """A run that is being followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._ranks = Tail(folder / "metrics.jsonl"), Tail(folder / "ranks.jsonl")
        self.generation = 0
        self._begin()
        self.about: dict[str, Any] = {}
        self.state = "unknown"

    def _begin(self) -> None:
        self.history = History(FIGURES)
        self.evaluations = History(("evaluation_loss",))
        self.latest: dict[str, float | None] = {}
        self.step, self.epoch = 0, 0
        self.skipped = 0
        self.changed_at = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.ranks: dict[str, Any] | None = None

    def poll(self) -> bool:
        """Read new data; return whether there was any."""
        before = (self.generation, self.history.rows, self.evaluations.rows, self.state)
        if self._metrics.restarted():
            self.generation += 1
            self._begin()
        for row in self._metrics.rows():
            self._take(row)
        if self._ranks.restarted():
            self.ranks = None
        for row in self._ranks.rows():
            self.ranks = _ranks_row(row) or self.ranks
        self._read_about()
        after = (self.generation, self.history.rows, self.evaluations.rows, self.state)
        if after != before:
            self.changed_at = time.monotonic()
        return after != before

    def _take(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        self.step = max(self.step, step)
        if "evaluation_loss" in row and "loss" not in row:
            self.evaluations.add(step, row)
            self.latest["evaluation_loss"] = _number(row["evaluation_loss"])
            return
        self.history.add(step, row)
        self.latest |= {name: _number(row[name]) for name in FIGURES if name in row}
        if is_number(row.get("epoch")):
            self.epoch = int(row["epoch"])
        if is_number(row.get("step_s")):
            self._recent.append(float(row["step_s"]))
        self.skipped += 1 if row.get("skipped") else 0

    def _read_about(self) -> None:
        path = self.folder / "run.json"
        if not path.is_file():
            return
        about = read_json(path, WatchError, what="file of a run", hint=HINT, max_bytes=MAX_FILE)
        if not isinstance(about, dict) or about.get("format") != "shardwise-run":
            raise WatchError("does not describe a run", where=str(path), hint=HINT)
        self.about = about
        state = str(about.get("state"))
        self.state = "gone" if state == "running" and runs_here(about) is False else state

    # ------------------------------------------------------------ derived figures
    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def total(self) -> int | None:
        total_steps = self.about.get("total_steps")
        return total_steps if isinstance(total_steps, int) and total_steps > 0 else None

    @property
    def step_s(self) -> float | None:
        """The median time of recent steps."""
        return median(self._recent) if self._recent else None

    @property
    def predicted_step_s(self) -> float | None:
        return _number(self.about.get("predicted_step_s"))

    @property
    def seconds_left(self) -> float | None:
        if self.total is None or self.step_s is None or self.ended or self.step >= self.total:
            return None
        return (self.total - self.step) * self.step_s

    @property
    def slow_ranks(self) -> list[dict[str, Any]]:
        """Ranks that work longer than the others, the slowest first."""
        rows = self.ranks["slowest"] if self.ranks is not None else []
        return [row for row in rows if row["ratio"] >= SLOW]

    @property
    def title(self) -> str:
        model, plan = (printable(self.about.get(key, "")) for key in ("model", "plan"))
        ranks = self.about.get("ranks")
        count = counted(ranks, "rank") if isinstance(ranks, int) else ""
        parts = [model, f"plan {plan}" if plan else "", count]
        return ", ".join(p for p in parts if p) or printable(self.folder.name)

    @property
    def status(self) -> str:
        """The state as text."""
        if self.state in ENDED:
            error = printable(self.about.get("error", ""))
            return ENDED[self.state] + (f": {error}" if self.state == "failed" and error else "")
        if not self.history.rows:
            return "waiting for the first step"
        quiet = time.monotonic() - self.changed_at
        limit = 10 * (self.step_s or 1.0) + 30
        return f"running, but no new data for {quiet:.0f} s" if quiet > limit else "running"

    def to_json(self, generation: int = -1, width: int = 0, first: int = 0) -> dict[str, Any]:
        """Return the data of a page; of the history, only what it does not have yet."""
        is_current = generation == self.generation and width == self.history.width
        since = min(max(0, first), len(self.history)) if is_current else 0
        return {
            **{name: getattr(self, name) for name in SHOWN},
            "folder": printable(str(self.folder)),
            "guess": self.about.get("known_machines") is False,
            "history": self.history.to_json(since),
            "evaluations": self.evaluations.to_json(),
            "damaged": self._metrics.damaged,
        }


def printable(value: object) -> str:
    """Return text without characters that control the terminal or reverse text.

    >>> printable("a" + chr(27) + "[2J")
    'a�[2J'
    """
    text = str(value)
    text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _ranks_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the displayed figures of a line of `ranks.jsonl`, or None if it is malformed."""
    spread = {name: row.get(name) for name in ("own_s", "step_s", "memory_bytes")}
    slowest, count = row.get("slowest"), row.get("ranks")
    if not is_number(count) or not isinstance(slowest, list):
        return None
    if not all(_has(figure, "min", "median", "max") for figure in spread.values()):
        return None
    if _has(row.get("expert_load"), "min", "median", "max"):
        spread["expert_load"] = row["expert_load"]
    if not all(_has(rank, "rank", "own_s", "ratio", "memory_bytes") for rank in slowest):
        return None
    by_rank = row.get("each") if isinstance(row.get("each"), dict) else {}
    lists = {
        name: values
        for name, values in (by_rank or {}).items()
        if isinstance(values, list) and all(map(is_number, values))
    }
    names = ("rank", "group", "own_s", "ratio", "memory_bytes")
    return {
        "step": row["step"],
        "ranks": count,
        **{
            name: {k: figure[k] for k in ("min", "median", "max")}
            for name, figure in spread.items()
            if figure
        },
        "slowest": [{k: s[k] for k in names if is_number(s.get(k))} for s in slowest],
        "each": lists if all(name in lists for name in ("own_s", "memory_bytes")) else None,
    }


def _has(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(is_number(value.get(name)) for name in names)
