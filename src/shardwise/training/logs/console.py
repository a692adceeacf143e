"""Progress for people: a bar on a terminal, a line now and then elsewhere; rank 0 alone, on stderr.

Enters: figures of a step by name. Leaves: text with loss, tokens/s, step time, MFU and memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.training.evaluation import FIGURES

__all__ = ["Bar", "Lines", "Silence", "Terminal", "make_console", "summary"]

LINE_S = 10.0  # between lines


class Terminal(Protocol):
    """Shows how far a training is."""

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """A step ended."""
        ...

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def close(self) -> None:
        """Nothing comes any more."""
        ...


def make_console(kind: str, total: int | None, first: int) -> Terminal:
    """What `logs.console` asks for."""
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "lines"
    if kind == "bar":
        return Bar(total, first)
    return Lines(total) if kind == "lines" else Silence()


def summary(figures: Mapping[str, float]) -> str:
    """The figures in one line.

    >>> summary({"loss": 2.5, "tokens_per_s": 12345.0, "step_s": 0.25, "mfu": 0.4})
    'loss 2.5000  12,345 tokens/s  250 ms  MFU 40.0%'
    """
    found = [f"loss {figures['loss']:.4f}"] if "loss" in figures else []
    if "evaluation_loss" in figures:
        found.append(f"evaluation loss {figures['evaluation_loss']:.4f}")
    found += [f"{n.replace('_', ' ')} {v:.4f}" for n, v in figures.items() if n not in FIGURES]
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if name in figures:
            found.append(f"{figures[name]:,.0f} {unit}")
            break
    if "step_s" in figures:
        seconds = figures["step_s"]
        found.append(f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms")
    if "mfu" in figures:
        found.append(f"MFU {figures['mfu']:.1%}")
    if "memory_bytes" in figures:
        found.append(f"{figures['memory_bytes'] / 2**30:.1f} GiB")
    return "  ".join(found)


class Bar:
    """A progress bar with the newest figures."""

    def __init__(self, total: int | None, first: int) -> None:
        self._progress = Progress(
            TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "")),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = self._progress.add_task("", total=total, completed=first, figures="")
        self._progress.start()

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, figures=summary(figures))

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Lines:
    """A line at the first step, then at most every ten seconds."""

    def __init__(self, total: int | None) -> None:
        self._total, self._said = total, -LINE_S

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """A line, if the last one is old enough."""
        now = time.monotonic()
        if now - self._said < LINE_S and step != self._total:
            return
        self._said = now
        of = f"/{self._total}" if self._total else ""
        self.say(f"step {step}{of}  {summary(figures)}")

    def say(self, text: str) -> None:
        """One line."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing is open."""


class Silence:
    """Says nothing."""

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
