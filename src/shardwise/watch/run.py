"""A run as it is now: what it is, how far it is, its figures, and who is slow.

Enters: a run's folder: `metrics.jsonl`, and where they are `run.json` and `ranks.jsonl`. Leaves:
`Run`, brought up to date by `poll`, and its JSON for the page.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.errors import WatchError
from shardwise.files import read_json
from shardwise.watch.history import History, is_number
from shardwise.watch.tail import Tail

__all__ = ["ENDED", "Run", "find_run"]

FIGURES = (
    "loss", "gradient_norm", "learning_rate", "step_s", "samples_per_s", "tokens_per_s", "mfu",
    "memory_bytes",
)  # fmt: skip
ENDED = {
    "finished": "finished",
    "callback": "stopped early",
    "signal": "stopped by a signal; the same command continues it",
    "failed": "failed",
    "gone": "ended without saying so: its process is gone",
}
RECENT = 50  # steps by which the time left is guessed
SLOW = 1.1  # times the median: a rank worth a word
LARGEST_FILE = 1 << 20  # of run.json
LONGEST_TEXT = 500
FILES = ("metrics.jsonl", "ranks.jsonl", "run.json", "plan.json", "config.json", "trace.json")
HINT = "the folder of a run: shardwise train CONFIG.yaml writes runs/CONFIG"


def find_run(folder: Path) -> Path | None:
    """Return the folder, if a run is there; nothing if it may still come; else an error.

    One of a run's files stands for its folder.
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
        raise WatchError("is no folder", where=str(folder), hint=HINT)
    if (folder / "metrics.jsonl").is_file():
        return folder
    if (folder / "run.json").is_file():
        return None  # it has just started
    inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    if inside:
        shown = ", ".join(printable(name) for name in inside[:8]) + (", …" if inside[8:] else "")
        raise WatchError(
            f"is no run but has {len(inside)}: {shown}",
            where=str(folder),
            hint=f"shardwise watch {folder / inside[0]}",
        )
    return None


class Run:
    """One run, followed."""

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
        """Read what is new; whether there was anything."""
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
        found = read_json(path, WatchError, what="file of a run", hint=HINT, max_bytes=LARGEST_FILE)
        if not isinstance(found, dict) or found.get("format") != "shardwise-run":
            raise WatchError("is no file of a run", where=str(path), hint=HINT)
        self.about = found
        state = str(found.get("state"))
        self.state = "gone" if state == "running" and _is_gone(found) else state

    # --- what follows from it ------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def total(self) -> int | None:
        found = self.about.get("total_steps")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def step_s(self) -> float | None:
        """The usual time of a step now."""
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
        """Those that work longer than their like, the slowest first."""
        rows = self.ranks["slowest"] if self.ranks is not None else []
        return [row for row in rows if row["ratio"] >= SLOW]

    @property
    def title(self) -> str:
        model, plan = (printable(self.about.get(key, "")) for key in ("model", "plan"))
        ranks = self.about.get("ranks")
        many = f"{ranks:,} rank{'s' * (ranks != 1)}" if isinstance(ranks, int) else ""
        parts = [model, f"plan {plan}" if plan else "", many]
        return ", ".join(p for p in parts if p) or printable(self.folder.name)

    @property
    def status(self) -> str:
        """The state in words."""
        if self.state in ENDED:
            error = printable(self.about.get("error", ""))
            return ENDED[self.state] + (f": {error}" if self.state == "failed" and error else "")
        if not self.history.rows:
            return "waiting for the first step"
        quiet = time.monotonic() - self.changed_at
        usual = 10 * (self.step_s or 1.0) + 30
        return f"running, but nothing new for {quiet:.0f} s" if quiet > usual else "running"

    def to_json(self, generation: int = -1, width: int = 0, first: int = 0) -> dict[str, Any]:
        """All that a page shows; of the history what is new since the one it names."""
        known = generation == self.generation and width == self.history.width
        since = min(max(0, first), len(self.history)) if known else 0
        return {
            "title": self.title,
            "folder": printable(str(self.folder)),
            "state": self.state,
            "status": self.status,
            "ended": self.ended,
            "step": self.step,
            "total": self.total,
            "epoch": self.epoch,
            "skipped": self.skipped,
            "seconds_left": self.seconds_left,
            "step_s": self.step_s,
            "predicted_step_s": self.predicted_step_s,
            "guess": self.about.get("known_machines") is False,
            "latest": self.latest,
            "generation": self.generation,
            "history": self.history.to_json(since),
            "evaluations": self.evaluations.to_json(),
            "ranks": self.ranks,
            "damaged": self._metrics.damaged,
        }


def printable(value: object) -> str:
    """Text without characters that would move a cursor or turn lines around.

    >>> printable("a" + chr(27) + "[2J")
    'a�[2J'
    """
    text = str(value)
    text = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _ranks_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is shown of a line of `ranks.jsonl`; nothing where it is not one."""
    spread = {name: row.get(name) for name in ("own_s", "step_s", "memory_bytes")}
    slowest, count = row.get("slowest"), row.get("ranks")
    if not is_number(count) or not isinstance(slowest, list):
        return None
    if not all(_has(each, "min", "median", "max") for each in spread.values()):
        return None
    if not all(_has(each, "rank", "own_s", "ratio", "memory_bytes") for each in slowest):
        return None
    each = row.get("each") if isinstance(row.get("each"), dict) else {}
    lists = {name: values for name, values in (each or {}).items() if _are_numbers(values)}
    names = ("rank", "group", "own_s", "ratio", "memory_bytes")
    return {
        "step": row["step"],
        "ranks": count,
        **{
            name: {k: found[k] for k in ("min", "median", "max")}
            for name, found in spread.items()
            if found
        },
        "slowest": [{k: s[k] for k in names if is_number(s.get(k))} for s in slowest],
        "each": lists if all(name in lists for name in ("own_s", "memory_bytes")) else None,
    }


def _has(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(is_number(value.get(name)) for name in names)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(is_number(value) for value in values)


def _is_gone(about: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this, on this machine, is no longer there."""
    pid = about.get("pid")
    if about.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
