"""Recorded steps of a training: those of a trace, and now and then one for the times of all ranks.

Enters: the steps of a session, as they begin and end. Leaves: `trace.json`, and lines of
`ranks.jsonl`: how long ranks work without waiting for each other, and their highest memory.

In a synchronous training all steps take as long as the slowest rank's; who is slow shows only in
the time that the others wait. So a step is recorded as cheaply as that goes, at most every few
seconds, and each rank reduces its own recording to a few numbers, which all gather.
"""

from __future__ import annotations

import resource
import time
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.errors import TraceError
from shardwise.runtime import ParallelModule
from shardwise.runtime.tracing import own_seconds
from shardwise.training.config import TrainConfig
from shardwise.training.logs.files import JsonlLog

__all__ = ["Records", "peak_memory_bytes", "ranks_row"]

FIRST_SAMPLE = 3  # steps before it are not like the others
SHOWN = 8  # slowest ranks, by number
EACH = 64  # ranks of which every one is written
FIGURES = ("own_s", "waiting_s", "step_s", "memory_bytes")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has had, on its device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Records:
    """Starts and stops the recorder around steps; all ranks do the same."""

    def __init__(self, config: TrainConfig, module: ParallelModule, log: JsonlLog | None) -> None:
        self._module, self._log = module, log
        self._folder = Path(config.folder) if config.folder is not None else None
        self._steps = config.trace.range if config.trace is not None else range(0)
        self._file = config.trace.file if config.trace is not None else ""
        self._every_s = config.logs.ranks_every_s
        self._sampled_at = time.monotonic()
        self._sampling = self._tracing = False
        self._next = False
        self._had = range(0)  # the steps of this run
        self.trace: Path | None = None
        if module.recorder is not None:  # a run before this one may have failed in a recorded step
            module.recorder.pause()
            module.recorder.take()

    def wants_sample(self, step: int) -> bool:
        """Whether this rank, the one that writes, would have the step after this one recorded."""
        if self._log is None or self._every_s is None or step + 1 < FIRST_SAMPLE:
            return False
        first = step + 1 == FIRST_SAMPLE
        return first or time.monotonic() - self._sampled_at >= self._every_s

    def plan(self, sample: bool) -> None:
        """What all ranks agreed on for the next step."""
        self._next = sample

    def begin(self, step: int) -> None:
        """A step begins."""
        self._had = range(self._had.start or step, step + 1)
        recorder = self._module.recorder
        if recorder is None:
            return
        if step in self._steps:
            recorder.start()
            self._tracing = True
        elif self._next and not self._tracing:
            recorder.start(blocks=False)
            self._sampling = True
        self._next = False

    def end(self, step: int, seconds: float) -> bool:
        """A step has ended, with the optimizer's; whether the trace was written."""
        recorder = self._module.recorder
        if recorder is not None and self._sampling:
            recorder.pause()
            self._sampling = False
            self._sample(step, seconds)
        done = self._tracing and step + 1 not in self._steps
        if done:
            self.finish()
        return done

    def finish(self) -> None:
        """Write the trace, if one was begun; all ranks call it."""
        recorder = self._module.recorder
        if recorder is None or not self._tracing:
            return
        recorder.pause()
        self._tracing = False
        assert self._folder is not None
        path = self._folder / self._file
        try:
            self._module.trace(path)
            self.trace = path
        except TraceError as error:  # the trace is lost, the training is not
            warnings.warn(f"{error.message} ({error.hint})", RuntimeWarning, stacklevel=2)

    def missed(self) -> str | None:
        """Which steps of the trace the run did not have, in words: it was resumed, or ended."""
        missing = [step for step in self._steps if step not in self._had]
        if not missing:
            return None
        had = f"steps {_first_to_last(self._had)}" if self._had else "no steps"
        return f"trace: steps {_first_to_last(missing)} were not recorded: this run had {had}"

    def _sample(self, step: int, seconds: float) -> None:
        module, recorder = self._module, self._module.recorder
        assert recorder is not None
        own, waiting = own_seconds(recorder.take())
        device = module.store.device
        mine = [own, waiting, seconds, float(peak_memory_bytes(device))]
        everyone = module.mesh.everyone
        flat = torch.tensor(mine, dtype=torch.float64, device=device)
        found = everyone.all_gather(flat, [len(mine)] * everyone.size).wait()
        self._sampled_at = time.monotonic()
        if self._log is not None:
            groups: list[tuple[int, ...]] = list(module.mesh.groups)
            groups = groups or [tuple(range(everyone.size))]
            self._log.write_row(ranks_row(step, found.view(-1, len(mine)).tolist(), groups))


def _first_to_last(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}"


def ranks_row(
    step: int, rows: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The figures of all ranks as one line: least, median, most; and the slowest by number.

    A rank's `ratio` is its own time to the median of the others that do the same; of a rank that
    nobody is like, to the median of all.
    """
    columns = dict(zip(FIGURES, zip(*rows, strict=True), strict=True))
    own = columns["own_s"]
    usual = [median(own)] * len(rows)
    group_of = [0] * len(rows)
    for number, ranks in enumerate(groups):
        ordered = sorted(own[rank] for rank in ranks)
        for rank in ranks:
            group_of[rank] = number
            if len(ranks) > 1:
                usual[rank] = _median_without(ordered, own[rank])
    ratios = [mine / of if of > 0 else 1.0 for mine, of in zip(own, usual, strict=True)]
    slowest = sorted(range(len(rows)), key=lambda rank: (-ratios[rank], rank))[:SHOWN]
    found: dict[str, Any] = {"step": step, "ranks": len(rows)}
    for name, values in columns.items():
        found[name] = {"min": min(values), "median": median(values), "max": max(values)}
    found["slowest"] = [
        {
            "rank": rank,
            "group": group_of[rank],
            "own_s": own[rank],
            "ratio": ratios[rank],
            "memory_bytes": columns["memory_bytes"][rank],
        }
        for rank in slowest
    ]
    if len(rows) <= EACH:
        found["each"] = {name: list(columns[name]) for name in ("own_s", "memory_bytes")}
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all of them but this one.

    >>> _median_without([1.0, 2.0, 6.0], 6.0), _median_without([3.0, 6.0], 6.0)
    (1.5, 3.0)
    """
    mine, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[at + (at >= mine)] for at in (last // 2, (last + 1) // 2))
    return (low + high) / 2
